"""``Attention`` and ``LanguageModel`` whose key heads have specs of their own."""

import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError
from structattn.layers import scoring
from structattn.spec import AttentionSpec, parse_spec
from structattn.testing.tolerances import assert_close

SPEC = "heads:standard/window:6,sink_tokens=2/mlr:8|8@32|8*2"


def attention(spec=SPEC, **options):
    torch.manual_seed(0)
    made = sa.Attention.from_spec(spec, embed_dim=64, num_heads=4, context_length=32, **options)
    return made.double().eval()


@torch.no_grad()
@pytest.mark.parametrize("rotary", [None, sa.Rotary(), sa.Rotary(split="interleaved")], ids=str)
def test_cached_is_uncached(rotary) -> None:
    layer = attention(rotary=rotary)
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    whole, cache = layer(x), layer.new_cache()
    parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 7), (7, 19), *((at, at + 1) for at in range(19, 40)))]
    assert_close(torch.cat(parts, dim=1), whole)
    assert layer.weights(x).shape == (2, 4, 40, 40)
    assert (layer.weights(x)[:, 1, 30, 2:25] == 0).all()


BILINEAR = {
    "btt": ("bilinear-btt:1", "standard/window:6,sink_tokens=2/mlr:32|32@32|8*2", 4),
    "btt, mup": ("bilinear-btt:1,scaling=mup", "standard/window:6,sink_tokens=2*2/standard", 4),
    "monarch": ("bilinear-monarch", "window:6/standard*3", 4),
    "mlr": ("bilinear-mlr:8|4", "standard/mlr:8|8@32|8", 2),
    "mlr, mup": ("bilinear-mlr:8|4,scaling=mup", "window:9/standard", 2),
}


@torch.no_grad()
@pytest.mark.parametrize("rotary", [None, sa.Rotary()], ids=str)
@pytest.mark.parametrize("case", BILINEAR)
def test_bilinear_heads(case, rotary) -> None:
    score, heads, groups = BILINEAR[case]
    spec = f"{score}+heads:{heads}"
    layer = attention(spec, num_kv_heads=groups, rotary=rotary)
    for x in layer.parameters():
        torch.nn.init.normal_(x, std=0.5)
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    whole, cache = layer(x), layer.new_cache()
    parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 7), (7, 19), *((at, at + 1) for at in range(19, 40)))]
    assert_close(torch.cat(parts, dim=1), whole)
    # Each head is that of a layer with its layout and the same weights; a plain one is scaled by the scoring.
    q, k, v = layer.project(x)[:3]
    for head, layout in enumerate(layer.layout.layouts):
        if layout is None:
            layer_of_head = attention(score, num_kv_heads=groups, rotary=rotary)
        else:
            options = {"scoring": parse_spec(score).scoring, "layout": layout, "rotary": rotary}
            layer_of_head = sa.Attention(64, 4, groups, **options).double()
        layer_of_head.load_state_dict(layer.state_dict(), strict=False)
        alone = layer_of_head.project(x)
        expected = sa.structured_attention(*alone[:3], layout, scale=alone[3], backend="reference")
        queries = slice(head * 4 // groups, (head + 1) * 4 // groups)
        found = sa.structured_attention(q, k, v, layer.layout, backend="reference")
        assert_close(found[:, queries], expected[:, queries])


@torch.no_grad()
@pytest.mark.parametrize("spec", ["bilinear-btt:1+window:6", "bilinear-monarch,scaling=mup"])
def test_equal_bilinear_heads_are_one_spec(spec) -> None:
    score, _, window = spec.partition("+")
    one, heads = attention(spec), attention(f"{score}+heads:{window or 'standard'}*4")
    for layer in (one, heads):
        torch.manual_seed(1)
        for x in layer.parameters():
            torch.nn.init.normal_(x, std=0.3)
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    assert_close(heads(x), one(x, attn_mask=None))


@torch.no_grad()
def test_plain_heads_of_another_rank_rotate() -> None:
    torch.manual_seed(0)
    options = {"scoring": scoring.Standard(rank=10, scaling="mup"), "rotary": sa.Rotary()}
    one, heads = (
        sa.Attention(64, 4, layout=layout, **options).double() for layout in (None, sa.HeadLayouts([None] * 4))
    )
    heads.load_state_dict(one.state_dict(), strict=False)
    x = torch.randn(2, 20, 64, dtype=torch.float64)
    assert_close(heads(x), one(x))


@torch.no_grad()
def test_a_model_stores_heads_and_layers_in_bits_of_their_own() -> None:
    torch.manual_seed(0)
    model = sa.LanguageModel(50, "[standard,window:20]", embed_dim=32, num_layers=2, num_heads=4, context_length=64)
    model = model.double().eval()
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    bits = sa.Storage(4, 8, group_size=4, residual=5)
    tokens = torch.randint(50, (2, 60))
    caches, again = (model.new_cache(storage=[[None, bits, bits, None], bits]) for _ in range(2))
    assert [cache.storage for cache in caches] == [(None, bits, bits, None), bits]
    whole = model(tokens, caches=caches)
    parts = [model(tokens[:, a:b], caches=again) for a, b in ((0, 21), (21, 58), (58, 59), (59, 60))]
    assert_close(torch.cat(parts, 1), whole)
    assert float((whole - model(tokens)).abs().max()) > 1e-4
    with pytest.raises(ConfigError, match="a list as storage needs 2 entries, one for each layer, got 3"):
        model.new_cache(storage=[None, bits, None])
    with pytest.raises(ConfigError, match="a storage for each of 3 key heads, and the layer has 4"):
        model.new_cache(storage=[[None, bits, bits], None])


@torch.no_grad()
def test_equal_heads_are_one_spec() -> None:
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    for spec in ("window:6,sink_tokens=2", "mlr:8|8@32|8", "standard"):
        one, heads = (attention(each, rotary=sa.Rotary()) for each in (spec, f"heads:{spec}*4"))
        assert torch.equal(one(x), heads(x))
        kept = {"num_queries": 30}
        costs = one.cost(**kept), heads.cost(**kept)
        assert costs[0].score_flops == costs[1].score_flops
        assert costs[0].value_flops == costs[1].value_flops
        assert costs[0].value_cache_numbers == costs[1].value_cache_numbers


@torch.no_grad()
def test_the_cost_of_a_cache_is_what_it_allocates() -> None:
    layer = attention()
    cache = layer.new_cache(max_length=40, page_size=1)
    layer(torch.randn(1, 40, 64, dtype=torch.float64), cache=cache)
    assert cache.nbytes == 8 * layer.cost(40).cache_numbers


def test_mup_scales_every_head() -> None:
    spec = parse_spec("bilinear-btt:1+heads:standard/window:6,sink_tokens=2").with_scaling("mup")
    assert str(spec) == "bilinear-btt:1,scaling=mup+heads:standard/window:6,sink_tokens=2,scaling=mup"
    assert str(parse_spec("heads:standard/window:6").with_scaling("mup")).count("scaling=mup") == 2


@torch.no_grad()
@pytest.mark.parametrize("spec", [SPEC, "bilinear-btt:1+heads:standard/window:6,sink_tokens=2/mlr:32|32@32|8*2"])
def test_a_model_generates_alike_with_and_without_a_cache(spec) -> None:
    torch.manual_seed(0)
    model = sa.LanguageModel(
        50, f"[{spec},standard]", embed_dim=64, num_layers=2, num_heads=4, context_length=64, rotary=sa.Rotary()
    )
    for x in model.parameters():
        x.normal_(std=0.2)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 5]]
    cached = model.generate(prompts, max_new_tokens=12)
    assert cached == model.generate(prompts, max_new_tokens=12, use_cache=False)
    assert len({token for row in cached for token in row}) > 3


@pytest.mark.parametrize(
    "text",
    [
        SPEC,
        "heads:standard",
        "heads:standard*2/window:252,sink_tokens=4*6",
        "heads:sliding:4|4@-|9,values=6|2/mlr:4|4",
        "bilinear-btt:2,rms_cap=true+heads:window:252,sink_tokens=4*2/standard",
        "bilinear-mlr:4|4+heads:standard/mlr:8|4",
    ],
)
def test_texts(text) -> None:
    spec = parse_spec(text)
    assert str(spec) == text
    assert parse_spec(str(spec)) == spec
    assert all(str(each.with_scaling("mup")) != str(each) for each in (spec.heads or ())[:1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads:", "expected a spec before and after every /"),
        ("heads:standard/", "expected a spec before and after every /"),
        ("heads:standard*0", "expected a positive whole number, got '0'"),
        ("heads:standard*99999999", "at most 65536"),
        ("heads:bilinear-btt:1", "must be a layout or a window alone"),
        ("heads:heads:standard", "must be a layout or a window alone"),
        ("heads:mlr:4|4+window:3", "has both a layout and a window"),
        ("heads:mlr-text:32|32", "text units as levels"),
        ("standard+heads:standard", "leave out the other terms"),
        ("bilinear-btt:1+window:4+heads:standard", "leave out the other terms"),
        ("bilinear-btt:1 + heads:", "expected a spec before and after every /"),
    ],
)
def test_texts_that_are_wrong(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(text)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="a layout for each of 3 key heads, and the layer has 4"):
        attention("heads:standard*3")
    with pytest.raises(ConfigError, match="expected 16, got 4.4 = 8"):
        attention("heads:mlr:4|4*4")
    near = sa.LevelLayout.sliding((64,), (5,))
    with pytest.raises(ConfigError, match="expected as many key heads as the 4 heads, got 2; leave num_kv_heads out"):
        sa.Attention(64, 4, 2, scoring=scoring.BTT(rank=1), layout=sa.HeadLayouts((near,) * 2))
    with pytest.raises(ConfigError, match="heads with layouts of their own keep keys"):
        attention().new_cache(keys="hidden")
    with pytest.raises(ConfigError, match="heads have layouts and windows of their own"):
        AttentionSpec(heads=(AttentionSpec(),), window=4)
