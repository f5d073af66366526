"""``attention_function`` in the place of ``scaled_dot_product_attention``, and ``rotary_order`` for code that
rotates itself.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import structattn as sa
from structattn.errors import ConfigError, ShapeError, StructAttnError
from structattn.testing.tolerances import assert_close

LAYOUT = sa.LevelLayout((4, 2, 2), (8, 4, 2))
HEADS = sa.HeadLayouts([sa.LevelLayout.sliding((8,), (3,), sink_tokens=1), LAYOUT])


def tensors(batch=2, heads=4, groups=4, queries=7, keys=7, dim=8):
    shapes = (batch, heads, queries, dim), (batch, groups, keys, dim), (batch, groups, keys, 3)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def assert_same(actual, expected, leaves) -> None:
    assert_close(actual, expected)
    weight = torch.randn_like(expected)
    pairs = (torch.autograd.grad((x * weight).sum(), leaves, retain_graph=True) for x in (actual, expected))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sizes", [(7, 7), (3, 7), (7, 3), (1, 7)], ids=str)
def test_without_a_layout_it_is_pytorchs_function(sizes) -> None:
    attend = sa.attention_function(None)
    T, S = sizes
    leaves = tensors(queries=T, keys=S)
    mask = torch.rand(2, 1, T, S) < 0.7
    mask[0, :, 0] = False  # a query that sees nothing
    bias = torch.randn(T, S, dtype=torch.float64)
    for positional, options in (
        ((), {}),
        ((), {"is_causal": True}),
        ((None, 0.0, True), {"scale": 0.3}),
        ((mask,), {}),
        ((mask[:, :, :1],), {"scale": 0.5}),
        ((bias,), {}),
    ):
        assert_same(
            attend(*leaves, *positional, **options),
            F.scaled_dot_product_attention(*leaves, *positional, **options),
            leaves,
        )
    grouped = tensors(groups=2, queries=T, keys=S)
    expected = F.scaled_dot_product_attention(*grouped, enable_gqa=True)
    assert_same(attend(*grouped, enable_gqa=True), expected, grouped)
    shared = tensors(groups=1, queries=T, keys=S)
    assert_same(attend(*shared), F.scaled_dot_product_attention(*shared), shared)
    q, k, v = (x[:, 0] for x in leaves)  # (B, T, D), with a mask (B, T, S)
    assert_same(attend(q, k, v, mask[:, 0]), F.scaled_dot_product_attention(q, k, v, mask[:, 0]), leaves)


@pytest.mark.parametrize(
    "layout", [None, LAYOUT, sa.GlobalWindowLayout((5, 3), 3), HEADS], ids=["plain", "levels", "global-window", "heads"]
)
def test_every_tensor_layout_is_the_op(layout) -> None:
    leaves = tensors(groups=2)
    mask = torch.rand(2, 1, 1, 7) < 0.7
    q, k, v = leaves
    for options in ({"is_causal": True}, {"attn_mask": mask, "is_causal": False}):
        expected = sa.structured_attention(q, k, v, layout, **options)
        assert_same(sa.attention_function(layout)(q, k, v, enable_gqa=True, **options), expected, leaves)
        length_first = sa.attention_function(layout, tensor_layout="BTHD")
        out = length_first(*(x.transpose(1, 2) for x in leaves), enable_gqa=True, **options)
        assert out.is_contiguous()
        assert_same(out.transpose(1, 2), expected, leaves)
    packed = sa.attention_function(layout, tensor_layout="THD")
    cu_seqlens = torch.tensor([0, 2, 7], dtype=torch.int32)
    expected = sa.structured_attention(q[:1], k[:1], v[:1], layout, cu_seqlens=cu_seqlens)
    out = packed(*(x[0].transpose(0, 1) for x in leaves), is_causal=True, enable_gqa=True, cu_seqlens=cu_seqlens)
    assert out.shape == (7, 4, 3)
    assert_same(out.transpose(0, 1)[None], expected, leaves)


@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_queries_and_keys_apart(is_causal) -> None:
    attend = sa.attention_function(LAYOUT, tensor_layout="THD")
    leaves = [x[0].transpose(0, 1) for x in tensors(batch=1, queries=6, keys=9)]
    of_queries, of_keys = torch.tensor([0, 2, 6]), torch.tensor([0, 7, 9], dtype=torch.int32)
    out = attend(*leaves, is_causal=is_causal, cu_seqlens_q=of_queries, cu_seqlens_k=of_keys)
    alone = []
    for (a, b), (c, d) in (((0, 2), (0, 7)), ((2, 6), (7, 9))):
        q, k, v = (x.transpose(0, 1)[None] for x in (leaves[0][a:b], leaves[1][c:d], leaves[2][c:d]))
        alone.append(sa.structured_attention(q, k, v, LAYOUT, is_causal=is_causal)[0].transpose(0, 1))
    assert_same(out, torch.cat(alone), leaves)
    same = {"is_causal": is_causal, "cu_seqlens_q": of_queries, "cu_seqlens_k": of_queries}
    own = [leaves[0], leaves[1][:6], leaves[2][:6]]
    assert_close(attend(*own, **same), attend(*own, is_causal=is_causal, cu_seqlens=of_queries))
    for wrong in ({"cu_seqlens_q": of_queries}, {"cu_seqlens": of_queries, **same}):
        with pytest.raises(ConfigError, match="both cu_seqlens_q and cu_seqlens_k"):
            attend(*own, **wrong)


def test_queries_of_a_causal_call_start_at_the_first_key() -> None:
    attend = sa.attention_function(LAYOUT)
    for T, S in ((3, 7), (7, 3)):
        q, k, v = leaves = tensors(queries=T, keys=S)
        n = min(T, S)
        first = sa.structured_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], LAYOUT)
        assert_close(attend(q, k, v, is_causal=True)[:, :, :n], first)
        assert all(x.abs().sum() > 0 for x in torch.autograd.grad(attend(*leaves, is_causal=True).sum(), leaves))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"])
def test_it_is_a_value(make) -> None:
    attend = sa.attention_function("mlr:4|4+window:16", context_length=64, rotary="halves", tensor_layout="BTHD")
    again = make(attend)
    assert (again, hash(again), repr(again)) == (attend, hash(attend), repr(attend))
    x = torch.randn(1, 30, 2, 8)
    assert torch.equal(again(x, x, x, is_causal=True), attend(x, x, x, is_causal=True))
    assert attend != sa.attention_function("mlr:4|4+window:16", context_length=64, tensor_layout="BTHD")
    assert attend.window == 16
    assert repr(attend).startswith("AttentionFunction(layout=LevelLayout(ranks=(4, 4), block_sizes=(64, 32)")
    assert "backend" not in repr(attend)  # what is not its default
    assert sa.attention_function((4, 4), context_length=64).layout == attend.layout
    assert sa.attention_function(sa.parse_spec("mlr:4|4"), context_length=64).layout == attend.layout


def test_a_spec_of_heads() -> None:
    q, k, v = (x.detach() for x in tensors(groups=2, queries=20, keys=20))
    near = sa.LevelLayout.sliding((8,), (5,), sink_tokens=2)
    windows = sa.attention_function("heads:standard/window:5,sink_tokens=2")  # of any head dimension
    expected = sa.structured_attention(q, k, v, sa.HeadLayouts([None, near]))
    for attend in (windows, sa.attention_function(sa.parse_spec("heads:standard/window:5,sink_tokens=2"))):
        assert_close(attend(q, k, v, is_causal=True, enable_gqa=True), expected)
    again = pickle.loads(pickle.dumps(windows))
    assert (again, hash(again), repr(again)) == (windows, hash(windows), repr(windows))
    levels = sa.attention_function("heads:window:5,sink_tokens=2/mlr:4|4", context_length=16, rotary="adjacent")
    assert levels.layout == sa.HeadLayouts([near, sa.LevelLayout((4, 4), (16, 8))])
    assert levels != sa.attention_function("heads:window:5,sink_tokens=2/mlr:4|4", context_length=16)
    with pytest.raises(ShapeError, match="keys and values need 2 heads, one for each of the layouts, got 4"):
        windows(*tensors(), is_causal=True)


@pytest.mark.full
@pytest.mark.parametrize("layout", [LAYOUT, HEADS, "heads:standard/window:5,sink_tokens=2"], ids=str)
def test_it_compiles_without_a_graph_break(layout) -> None:
    attend = sa.attention_function(layout, rotary="halves", tensor_layout="BTHD")
    x = torch.randn(1, 40, 2, 8)
    mask = torch.rand(40, 40) < 0.8

    def run(x, mask):
        return attend(x, x, x, is_causal=True) + attend(x, x, x, mask)

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="eager")(x, mask), run(x, mask))


WRONG = [
    ({"attn_mask": torch.ones(7, 7, dtype=torch.bool), "is_causal": True}, ConfigError, "not both"),
    ({"attn_mask": causal_lower_right(7, 7)}, ConfigError, "bool mask"),
    ({"attn_mask": torch.ones(7, 6, dtype=torch.bool)}, ShapeError, "does not broadcast"),
    ({"attn_mask": torch.ones(7, 7, dtype=torch.int64)}, ShapeError, "mask != 0"),
    ({"groups": 2}, ShapeError, "enable_gqa=True"),
    ({"groups": 3, "enable_gqa": True}, ShapeError, "multiple"),
    ({"dim": 9}, ShapeError, "expected 9"),
    ({"dropout_p": 1.5}, ConfigError, "dropout_p"),
    ({"is_causal": 1}, ConfigError, "is_causal"),
    ({"key": torch.zeros(7, 8)}, ShapeError, "BHTD"),
    ({"query": None}, ShapeError, "query must be"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_what_pytorch_refuses_is_refused_in_words(changes, error, message) -> None:
    sizes = {name: changes[name] for name in ("groups", "dim") if name in changes}
    q, k, v = tensors(**sizes)
    arguments = {"query": q, "key": k, "value": v} | {x: y for x, y in changes.items() if x not in sizes}
    with pytest.raises(error, match=message):
        sa.attention_function(LAYOUT)(**arguments)
    if message not in ("expected 9", "bool mask"):  # PyTorch has no layout, and knows its own bias
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            F.scaled_dot_product_attention(**arguments)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("mlr:4|4", {}, "context_length=1024"),
        ((4, 4), {}, "context_length=1024"),
        (LAYOUT, {"context_length": 8}, "has its block sizes"),
        ("bilinear-btt:1", {}, "from_spec"),
        ("standard:1", {}, "from_spec"),
        ("mlr-text:4|4", {}, "from_spec"),
        ("window:5", {"window": 5}, "window=5"),
        ("mlr:4", {"context_length": 0}, "context_length"),
        (sa.GlobalWindowLayout((4, 4), 3), {"window": 3}, "own window"),
        (3, {}, "layout must be"),
        ("heads:standard/mlr:4|4", {}, "context_length=1024"),
        ("heads:bilinear-btt:1", {}, "must be a layout or a window alone"),
        (sa.HeadLayouts([None, sa.GlobalWindowLayout((4, 4), 3)]), {"window": 3}, "own window"),
        (sa.HeadLayouts([None, sa.LevelLayout((5, 3), (8, 4))]), {"rotary": "halves"}, "must be even"),
        (LAYOUT, {"tensor_layout": "BDHT"}, "BHTD"),
        (LAYOUT, {"backend": "fast"}, "backend"),
        (LAYOUT, {"rotary": "half"}, "halves:64"),
        (LAYOUT, {"rotary": "halves:16"}, "16 dimensions are rotated"),
        (LAYOUT, {"rotary": 8}, "rotary"),
        (None, {"rotary": 8}, "rotary"),
        ("window:5", {"rotary": "half"}, "halves:64"),
        ("heads:standard*2/window:4", {"rotary": "half"}, "halves:64"),
        ("standard", {"context_length": -1}, "context_length"),
        (LAYOUT, {"rotary": "halves", "rotary_split": "per_level"}, "low_far"),
        (sa.LevelLayout((5, 3), (8, 4)), {"rotary": "halves"}, "must be even"),
    ],
)
def test_settings_that_do_not_fit_are_named(layout, options, message) -> None:
    with pytest.raises(StructAttnError, match=message):
        sa.attention_function(layout, **options)


def rotated(x, positions, pairing, dims, base=100.0):
    """Rotary positions as other code has them: the pairs of the first dimensions of a head are rotated, the
    rest is not.
    """
    half = dims // 2
    angles = positions[:, None] * base ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = (
        (slice(0, half), slice(half, dims)) if pairing == "halves" else (slice(0, dims, 2), slice(1, dims, 2))
    )
    a, b, out = x[..., first], x[..., second], x.clone()
    out[..., first] = a * angles.cos() - b * angles.sin()
    out[..., second] = a * angles.sin() + b * angles.cos()
    return out


@pytest.mark.parametrize("split", ["low_far", "interleaved"])
@pytest.mark.parametrize("rotary", ["halves", "adjacent", "halves:6", "adjacent:6"])
def test_levels_of_rotated_tensors_know_distances_only(rotary, split) -> None:
    layout = sa.LevelLayout((4, 2, 2), (16, 8, 4))
    q, k, v = (x.detach() for x in tensors(queries=16, keys=16))
    pairing, _, dims = rotary.partition(":")

    def out(attend, shift):
        places = torch.arange(16) + shift
        return attend(*(rotated(x, places, pairing, int(dims or 8)) for x in (q, k)), v, is_causal=True)

    attend = sa.attention_function(layout, rotary=rotary, rotary_split=split)
    assert_close(out(attend, 5), out(attend, 0))
    if pairing == "halves":  # neighbours are in one level in any order
        unordered = sa.attention_function(layout)
        assert float((out(unordered, 5) - out(unordered, 0)).abs().max()) > 1e-3
    by_heads = sa.attention_function(sa.HeadLayouts([None, layout] * 2), rotary=rotary, rotary_split=split)
    assert_close(out(by_heads, 5), out(by_heads, 0))
    plain = sa.attention_function(None)
    for head, whole in enumerate([plain, attend] * 2):
        assert_close(out(by_heads, 0)[:, head], out(whole, 0)[:, head])
    order = sa.rotary_order(layout, rotary, split)
    assert sorted(order) == list(range(8))
    expected = sa.structured_attention(q[..., order], k[..., order], v, layout)
    assert_close(attend(q, k, v, is_causal=True), expected)
