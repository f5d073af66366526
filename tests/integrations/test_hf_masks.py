"""Attention masks of transformers: padding on the right, holes and 4 dimensions, with a cache and without;
attention weights after cached tokens.
"""

import copy
import functools

import pytest
import torch
import transformers
from hf_models import CONTEXT, by_definition, drafting, generate, llama, padded, qwen2, tokens, trained

from structattn.errors import CacheError, ConfigError
from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    level_cache,
    register_attention,
    structurize,
)
from structattn.layout.levels import LevelLayout
from structattn.testing.tolerances import assert_close

PROMPTS = [tokens(1, 9)[0], tokens(1, 17, seed=2)[0]]
IDS, LEFT = padded(PROMPTS)
LENGTH = 17
RIGHT = padded(PROMPTS, "right")[1]
HOLES = torch.ones_like(LEFT)
HOLES[0, [0, 1, 5, 6, 16]] = 0  # on the left, between, and at the end
HOLES[1, [3, 9, 10]] = 0
MASKS = {"right": RIGHT, "holes": HOLES}
PLAIN = register_attention("standard", name="test_masks_plain")
LEVELS = register_attention("mlr:4|2|2", name="test_masks_levels", context_length=16)


def on(model, name):
    model = copy.deepcopy(model)
    model.set_attn_implementation(name)
    return model


@functools.cache
def plain():
    return trained(llama)


def config(**options):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    return StructAttnConfig(attention="[mlr:4|2|2,bilinear-btt:1]", **sizes, max_position_embeddings=CONTEXT, **options)


@functools.cache
def own():
    return trained(lambda: StructAttnForCausalLM(config()))


@torch.no_grad()
def logits(model, mask, ids=IDS, **options):
    return model(ids, attention_mask=mask, **options).logits


@torch.no_grad()
def in_chunks(model, mask, sizes, ids=IDS):
    """The logits of chunks with a cache; a mask of 2 dimensions or of 4."""
    cache, outs, first = level_cache(model), [], 0
    for size in sizes:
        end = first + size
        own_mask = mask[:, :end] if mask.dim() == 2 else mask[:, :, first:end, :end]
        outs.append(model(ids[:, first:end], attention_mask=own_mask, past_key_values=cache).logits)
        first = end
    return torch.cat(outs, dim=1)


def pairs(mask):
    """A mask of (batch, tokens) as one of 4 dimensions, causal."""
    return mask.bool()[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize("kind", MASKS)
def test_one_level_is_the_plain_model_with_any_padding_mask(kind) -> None:
    mask = MASKS[kind]
    real = mask.cumsum(1) > 0  # tokens that see a real one
    expected = logits(on(plain(), "sdpa"), mask)
    for model in (on(plain(), PLAIN), structurize(copy.deepcopy(plain()), "mlr:8")):
        assert_close(logits(model, mask, use_cache=False)[real], expected[real])
        assert_close(in_chunks(model, mask, [5, 4, 1, 1, 6])[real], expected[real])
        tokens_of = generate(on(plain(), "sdpa"), IDS, mask, new=6)
        assert torch.equal(generate(model, IDS, mask, new=6), tokens_of)
        assert torch.equal(generate(model, IDS, mask, new=6, use_cache=False), tokens_of)


@pytest.mark.parametrize("kind", MASKS)
def test_levels_are_the_definition_and_cached_is_uncached(kind) -> None:
    mask, model = MASKS[kind], on(plain(), LEVELS)
    real = mask.cumsum(1) > 0
    layouts = [LevelLayout((4, 2, 2), (16, 8, 4))] * 2
    found = logits(model, mask, use_cache=False)
    assert_close(found[real], logits(by_definition(plain(), layouts, "low_far"), mask)[real])
    assert_close(in_chunks(model, mask, [3, 6, 1, 1, 6])[real], found[real])
    out = generate(model, IDS, mask, new=8)
    assert torch.equal(out, generate(model, IDS, mask, new=8, use_cache=False))
    beams = generate(model, IDS, mask, new=8, num_beams=3)
    assert torch.equal(beams, generate(model, IDS, mask, new=8, num_beams=3, use_cache=False))


def test_a_model_of_ours_takes_any_padding_mask() -> None:
    for mask in MASKS.values():
        real = mask.cumsum(1) > 0
        found = logits(own(), mask, use_cache=False)
        assert_close(in_chunks(own(), mask, [3, 6, 1, 1, 6])[real], found[real])
        other = IDS.masked_fill(mask == 0, 7)
        assert_close(logits(own(), mask, other, use_cache=False)[mask.bool()], found[mask.bool()])
        assert torch.equal(generate(own(), IDS, mask, new=6), generate(own(), IDS, mask, new=6, use_cache=False))
    dense = pairs(RIGHT)
    assert_close(logits(own(), dense, use_cache=False), logits(own(), RIGHT, use_cache=False))
    assert_close(in_chunks(own(), dense, [3, 14]), logits(own(), RIGHT, use_cache=False))
    with pytest.raises(ConfigError, match="what comes after them, and this model is causal"):
        logits(own(), torch.ones_like(dense))
    with pytest.raises(ConfigError, match="counts positions by itself"):
        logits(own(), dense, position_ids=torch.zeros_like(IDS))


def test_training_skips_padding_at_the_end_which_no_real_token_sees() -> None:
    for model in (on(plain(), LEVELS), copy.deepcopy(own())):
        expected = logits(model, RIGHT, use_cache=False)
        holes = logits(model, HOLES, use_cache=False)
        model.train()
        found = logits(model, RIGHT, use_cache=False)
        assert_close(found[RIGHT.bool()], expected[RIGHT.bool()])
        assert not torch.equal(found[RIGHT == 0], expected[RIGHT == 0])
        real = HOLES.cumsum(1) > 0
        assert_close(logits(model, HOLES, use_cache=False)[real], holes[real])


@pytest.mark.parametrize("form", ["bool", "added"])
def test_masks_of_four_dimensions_are_the_plain_model_s(form) -> None:
    prefix = pairs(HOLES)
    prefix[:, :, :6, :6] = True  # a prefix that sees itself whole
    causal = pairs(HOLES)
    if form == "added":
        prefix, causal = (torch.zeros(x.shape, dtype=torch.float64).masked_fill(~x, -1e300) for x in (prefix, causal))
        causal = causal - torch.arange(LENGTH) * 0.1  # any number is added
    real = HOLES.cumsum(1) > 0
    model = on(plain(), PLAIN)
    for mask in (prefix, causal):
        expected = logits(on(plain(), "sdpa"), mask)
        assert_close(logits(model, mask, use_cache=False)[real], expected[real])
        assert_close(in_chunks(model, mask, [6, 1, 5, 5])[real], expected[real])
    levels = on(plain(), LEVELS)
    assert_close(in_chunks(levels, causal, [6, 1, 5, 5])[real], logits(levels, causal, use_cache=False)[real])


def test_texts_that_share_a_beginning() -> None:
    """Three texts of four tokens as one row: their common three tokens, then the last one of each, by a mask
    and positions.
    """
    ids = torch.tensor([[5, 6, 7, 11], [5, 6, 7, 12], [5, 6, 7, 13]])
    row, positions = torch.tensor([[5, 6, 7, 11, 12, 13]]), torch.tensor([[0, 1, 2, 3, 3, 3]])
    mask = torch.ones(6, 6, dtype=torch.bool).tril() & ~(
        torch.eye(6, dtype=torch.bool).logical_not() & (torch.arange(6) >= 3)
    )
    model = on(plain(), PLAIN)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        assert_close(model(row, attention_mask=mask[None, None], position_ids=positions).logits[0, 3:], expected)
        cache = level_cache(model)
        model(row[:, :3], past_key_values=cache)
        rest = model(
            row[:, 3:], attention_mask=mask[None, None, 3:], position_ids=positions[:, 3:], past_key_values=cache
        )
    assert_close(rest.logits[0], expected)


def test_an_encoder_that_makes_masks_of_four_dimensions_by_itself() -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    torch.manual_seed(0)
    model = transformers.LayoutLMModel(transformers.LayoutLMConfig(**sizes)).double().eval()
    with torch.no_grad():
        expected = model(IDS, attention_mask=HOLES).last_hidden_state
        found = on(model, PLAIN)(IDS, attention_mask=HOLES).last_hidden_state
    # Older versions have a softmax of float32.
    torch.testing.assert_close(found[HOLES.bool()], expected[HOLES.bool()], rtol=0, atol=1e-6)


def test_an_assistant_may_meet_the_padding_token() -> None:
    """transformers guesses the assistant's mask from it: the text seems to have holes."""
    model, assistant = (
        structurize(trained(llama, num_hidden_layers=n), "mlr:4|2|2", context_length=16) for n in (2, 1)
    )
    ids = IDS[1:].clone()
    ids[0, [5, 9]] = 0
    options = {"new": 12, "suppress_tokens": None}
    expected = generate(model, ids, **options)
    assert torch.equal(generate(model, ids, assistant_model=drafting(assistant), **options), expected)


def test_four_dimensional_masks_that_are_refused() -> None:
    model, dense = on(plain(), LEVELS), pairs(torch.ones_like(LEFT))
    cache = level_cache(model)
    logits(model, LEFT[:, :9], IDS[:, :9], past_key_values=cache)
    with pytest.raises(CacheError, match="left padding changed"):
        logits(model, dense[:, :, 9:], IDS[:, 9:], past_key_values=cache)
    cache.reset()
    logits(model, None, IDS[:, :9], past_key_values=cache)
    with pytest.raises(ConfigError, match="what comes after them, and those before them are in a cache"):
        logits(model, torch.ones_like(dense)[:, :, 9:], IDS[:, 9:], past_key_values=cache)
    assert cache.get_seq_length() == 9
    for wrong, message in (
        (dense[:, :, 9:, 9:], "a column for each of 17, cached and new, got shape"),
        (dense[:, :, 9:].long(), "is bool, true where a pair may attend, or floating point"),
    ):
        with pytest.raises(ConfigError, match=message):
            logits(model, wrong, IDS[:, 9:], past_key_values=cache)
    with pytest.raises(ConfigError, match="cu_seq_lens_q is for packed sequences without"):
        logits(model, dense[:1], IDS[:1], cu_seq_lens_q=torch.tensor([0, 5, 17]), use_cache=False)
    window = trained(qwen2, use_sliding_window=True, sliding_window=5, max_window_layers=0)
    with pytest.raises(ConfigError, match="sliding window of 5, which a 4-dimensional"):
        logits(on(window, PLAIN), dense)


def test_weights_after_cached_tokens() -> None:
    eager, one = on(plain(), "eager"), structurize(copy.deepcopy(plain()), "mlr:8")
    mask = HOLES.index_fill(1, torch.arange(2), 1)  # transformers' eager rows that see nothing are NaN
    shown = {"output_attentions": True, "return_dict_in_generate": True, "new": 4}
    expected = generate(eager, IDS, mask, **shown).attentions
    found = generate(one, IDS, mask, **shown).attentions
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)  # transformers' softmax is in float32
    for model in (on(plain(), LEVELS), structurize(copy.deepcopy(plain()), "mlr:4|2|2", context_length=16)):
        with torch.no_grad():
            whole = model(IDS, attention_mask=HOLES, output_attentions=True, use_cache=False).attentions
            cache = level_cache(model)
            model(IDS[:, :12], attention_mask=HOLES[:, :12], past_key_values=cache)
            rest = model(IDS[:, 12:], attention_mask=HOLES, past_key_values=cache, output_attentions=True).attentions
        for x, y in zip(rest, whole, strict=True):
            assert_close(x, y[:, :, 12:])
