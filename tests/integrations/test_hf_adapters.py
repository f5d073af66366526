"""Attention classes of transformers that score by themselves: ALiBi against its definition, masks with holes,
returned weights.
"""

import copy

import pytest
import torch
from hf_models import generate
from test_hf_families import HEAD_DIM, IDS, LEVELS, MASK, _page, known
from transformers import AttentionInterface

from structattn.cache import PAGE_SIZE
from structattn.errors import ConfigError
from structattn.integrations.transformers import export_decoder, level_cache, structurize
from structattn.integrations.transformers.structurize.modules import IMPLEMENTATION
from structattn.ops import reference
from structattn.ops.call import Call
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS, relative_error

# 6 heads: slopes of a number of heads that is no power of 2 have a formula of their own.
SIX = {"hidden_size": 96, "num_attention_heads": 6}
FALCON_ALIBI = {"alibi": True, "bias": True, "num_attention_heads": 4}
ALIBI = {
    "bloom": ("bloom", {"n_layer": 2} | SIX),
    "mpt": ("mpt", {"n_layers": 2, "use_cache": True} | SIX),
    "falcon": ("falcon", FALCON_ALIBI),
}
FALCONS = {
    "one key head": {"multi_query": True, "parallel_attn": True},
    "all key heads": {"multi_query": False, "parallel_attn": False, "bias": True},
    "groups": {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1} | SIX,
    "ALiBi": FALCON_ALIBI,
    "ALiBi, all key heads": FALCON_ALIBI | {"multi_query": False},
    "ALiBi, groups": {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 3} | SIX,
}
HOLES = MASK.clone()
HOLES[1, 4:7] = HOLES[0, 10] = 0
RIGHT = torch.ones_like(IDS)
RIGHT[1, 9:] = 0


def plain_and_one_level(family, options, *, eager=True):
    model = _page["tiny"](family, options)
    if not eager:
        torch.manual_seed(0)
        model = type(model)._from_config(model.config, attn_implementation="sdpa").double().eval()
    return model, structurize(copy.deepcopy(model), f"mlr:{HEAD_DIM}")


def logits(model, mask, ids=IDS):
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]


def slopes(family, heads):
    """Press et al. 2022, section 3, and the supplement for a number of heads that is no power of 2; MPT
    orders the heads differently.
    """

    def powers(count):
        return [2 ** (-8 * (h + 1) / count) for h in range(count)]

    below = 2 ** (heads.bit_length() - 1)
    if below == heads:
        return torch.tensor(powers(heads), dtype=torch.float64)
    if family == "mpt":
        above = powers(2 * below)
        return torch.tensor((above[1::2] + above[::2])[:heads], dtype=torch.float64)
    return torch.tensor((powers(below) + powers(2 * below)[::2])[:heads], dtype=torch.float64)


@pytest.mark.parametrize("case", ALIBI)
def test_alibi_by_its_definition(case, monkeypatch) -> None:
    """Every attention call of a model with levels, in a left-padded batch, against the dense definition with
    slopes.
    """
    family, options = ALIBI[case]
    model = structurize(_page["tiny"](family, options), **LEVELS)
    attention, errors = AttentionInterface()[IMPLEMENTATION], []

    def compared(module, query, key, value, mask, **terms):
        out, weights = attention(module, query, key, value, mask, **terms)
        divisor = HEAD_DIM**0.5 if family == "falcon" else 1.0  # which divides its bias too
        padding = (MASK == 0).sum(dim=1)
        expected, _ = reference.attention(
            query.double() * terms["scaling"] * HEAD_DIM**0.5,
            key.double(),
            value.double(),
            Call(
                layout=module.structure.variant.layout,
                left_padding=padding,
                terms=ScoreTerms(alibi_slopes=slopes(family, query.shape[1])[None] / divisor),
            ),
        )
        errors.append(relative_error(out.transpose(1, 2), expected))
        return out, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, IMPLEMENTATION, compared)
    logits(model, MASK)
    assert len(errors) == 2
    assert max(errors) <= SAME_MODEL


@pytest.mark.quick(case=["bloom"], hidden=["holes"])
@pytest.mark.parametrize("hidden", ["holes", "right"])
@pytest.mark.parametrize("case", ALIBI)
def test_hidden_tokens_are_counted_as_the_model_counts_them(case, hidden) -> None:
    """BLOOM and Falcon count real tokens only, MPT all."""
    mask = HOLES if hidden == "holes" else RIGHT
    model, one = plain_and_one_level(*ALIBI[case], eager=case != "falcon")
    expected = logits(model, mask)
    assert relative_error(logits(one, mask), expected) <= SAME_MODEL
    text = generate(model, IDS, mask, new=6, use_cache=True)
    assert torch.equal(generate(one, IDS, mask, new=6, use_cache=True), text)
    levels = structurize(model, **LEVELS)
    uncached = generate(levels, IDS, mask, new=6, use_cache=False)
    assert torch.equal(generate(levels, IDS, mask, new=6, use_cache=True), uncached)


@pytest.mark.quick(case=["one key head", "ALiBi, groups"])
@pytest.mark.parametrize("case", FALCONS)
def test_layouts_of_falcon(case) -> None:
    model, one = plain_and_one_level("falcon", FALCONS[case], eager=False)
    expected, text = logits(model, MASK), generate(model, IDS, MASK, new=6)
    assert relative_error(logits(one, MASK), expected) <= SIX_DIGITS
    cache = level_cache(one)
    assert torch.equal(generate(one, IDS, MASK, new=6, past_key_values=cache), text)
    heads = {"one key head": 1, "groups": 3, "ALiBi": 1, "ALiBi, groups": 3}.get(case, 4)  # transformers repeats groups
    assert cache.nbytes == 2 * len(IDS) * heads * PAGE_SIZE * 2 * HEAD_DIM * 8


def test_falcon_rounds_its_bias_as_transformers_does() -> None:
    """To bfloat16, in steps of 1 and more at the end of a text: slopes would differ by that."""
    options = {"alibi": True, "num_attention_heads": 16, "hidden_size": 16 * HEAD_DIM, "num_hidden_layers": 1}
    model, one = plain_and_one_level("falcon", options, eager=False)
    ids = torch.randint(3, 97, (1, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    assert relative_error(logits(one, mask, ids), logits(model, mask, ids)) <= SIX_DIGITS


SELF_WEIGHED = ("bloom", "gptj", "gpt_neo", "jetmoe", "mpt", "rembert", "xglm")


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "mpt" else [*known(f), pytest.mark.full]) for f in SELF_WEIGHED]
)
def test_returned_weights(family) -> None:
    """These models collect weights in their own code, and tell their attention or not; without a cache and
    with one.
    """
    model, one = plain_and_one_level(family, (_page["FAMILIES"] | _page["RARE"])[family])
    with torch.no_grad():
        expected = model(IDS, use_cache=False, output_attentions=True).attentions
        found = one(IDS, use_cache=False, output_attentions=True).attentions
        cache = one(IDS[:, :9], use_cache=True).past_key_values
        last = one(IDS[:, 9:], past_key_values=cache, output_attentions=True).attentions
        assert all(x is None for x in one(IDS, use_cache=False).attentions or ())
    for wanted, whole, part in zip(expected, found, last, strict=True):
        assert relative_error(whole, wanted) <= SAME_MODEL
        assert relative_error(part, wanted[:, :, 9:]) <= SAME_MODEL


@pytest.mark.parametrize(
    "family", [pytest.param("rembert", marks=known("rembert")), pytest.param("roc_bert", marks=pytest.mark.full)]
)
def test_caches_that_a_model_makes_for_cross_attention_too(family) -> None:
    model = structurize(_page["tiny"](family, (_page["RARE"])[family]), **LEVELS)
    with torch.no_grad():
        expected = model(IDS, attention_mask=MASK, use_cache=False).logits[:, 9:]
        cache = model(IDS[:, :9], attention_mask=MASK[:, :9], use_cache=True).past_key_values
        found = model(IDS[:, 9:], attention_mask=MASK, past_key_values=cache).logits
    assert relative_error(found, expected) <= SAME_MODEL


def test_bloom_whose_products_are_sums() -> None:
    """``slow_but_exact`` leaves the bias of a projection out."""
    model, one = plain_and_one_level("bloom", {"n_layer": 2, "n_head": 4, "slow_but_exact": True, "pretraining_tp": 2})
    assert relative_error(logits(one, MASK), logits(model, MASK)) <= SAME_MODEL


@pytest.mark.quick(kind=["added"])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_masks_of_all_pairs_where_a_model_adds_a_window(kind) -> None:
    model, one = plain_and_one_level("gpt_neo", _page["RARE"]["gpt_neo"])
    shown = torch.ones(14, 14, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    shown[0, :, 5:, 3] = False
    added = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(IDS, attention_mask=added, use_cache=False).logits
        found = one(IDS, attention_mask=shown if kind == "bool" else added, use_cache=False).logits
    assert relative_error(found, expected) <= SAME_MODEL


@pytest.mark.full
@pytest.mark.parametrize("case", ALIBI)
def test_programs_that_keep_a_cache_are_refused(case) -> None:
    model = structurize(_page["tiny"](*ALIBI[case]), **LEVELS)
    with pytest.raises(ConfigError, match="adds ALiBi or another bias to its scores, which an exported program cannot"):
        export_decoder(model, max_length=20)


@pytest.mark.full
@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt", "gpt_neo", "inkling_text", "jetmoe"])
def test_gradients_are_those_of_the_model(family) -> None:
    options = _page["RARE"] | dict(ALIBI.values())
    models = plain_and_one_level(family, options[family], eager=family != "falcon")
    labels = IDS.where(MASK.cumsum(-1) > 1, -100)  # the first real token is foretold by padding
    for model in models:
        model.train()
        model(IDS, attention_mask=MASK, labels=labels).loss.backward()
    for (name, expected), (other, found) in zip(*(model.named_parameters() for model in models), strict=True):
        assert name == other
        if expected.grad is not None and expected.grad.abs().max() > 1e-6:
            assert relative_error(found.grad, expected.grad) <= 1e-4, name
