"""Layers with chunks, layers that score the keys of others, and layers with a state beside their keys,
through a cache.
"""

import copy

import pytest
import torch
import transformers
from hf_models import drafting, generate
from test_hf_families import IDS, LEVELS, MASK, REAL, VOCAB, logits, make

from structattn.errors import ConfigError
from structattn.integrations.transformers import LevelCacheLayer, level_cache, load_structurized, structurize
from structattn.integrations.transformers.caches.hybrid_cache import HybridCacheLayer
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS, relative_error

POSITIONS = (MASK.cumsum(-1) - 1).clamp(min=0)
# Chunks, shared keys twice, a recurrence.
KINDS = (
    "llama4_text",
    "gemma3n_text",
    pytest.param("gemma4_text", marks=pytest.mark.full),
    pytest.param("falcon_h1", marks=pytest.mark.full),
)


def structured(family, **options):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {family}")
    model, tolerance = make(family)
    return structurize(model, **LEVELS | options), tolerance


def in_pieces(model, ends, cache):
    parts, first = [], 0
    for end in ends:
        with torch.no_grad():
            out = model(
                IDS[:, first:end],
                attention_mask=MASK[:, :end],
                position_ids=POSITIONS[:, first:end],
                past_key_values=cache,
            )
        parts.append(out.logits)
        first = end
    return torch.cat(parts, dim=1)[REAL[:, : ends[-1]]]


@pytest.mark.parametrize("family", KINDS)
def test_pieces_give_the_same_logits(family) -> None:
    model, tolerance = structured(family)
    expected = logits(model)
    for ends in ((6, 7, 13, 14), (9, 14)):
        assert relative_error(in_pieces(model, ends, level_cache(model)), expected) <= max(tolerance, SIX_DIGITS)


@pytest.mark.full
@pytest.mark.parametrize("family", KINDS)
def test_beams_and_drafts(family) -> None:
    model, _ = structured(family)
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = generate(model, IDS, MASK, new=8, use_cache=False, **options)
    assert torch.equal(generate(model, IDS, MASK, new=8, **options), expected)
    if family == "falcon_h1":
        return  # transformers drafts for no model with a recurrence
    expected = generate(model, IDS[1:], new=12, use_cache=False)
    assert torch.equal(generate(model, IDS[1:], new=12, assistant_model=drafting(copy.deepcopy(model))), expected)
    assert torch.equal(generate(model, IDS[1:], new=12, prompt_lookup_num_tokens=3), expected)


def test_layers_that_share_keys_need_one_spec(tmp_path) -> None:
    model, _ = make("gemma3n_text")
    with pytest.raises(
        ConfigError, match="layer 2 scores the keys of layer 0, so that both need one spec: got standard and mlr:8"
    ):
        structurize(model, ["mlr:8|8", "mlr:8|8", "standard", "mlr:8|8"])
    with pytest.raises(ConfigError, match="layer 3 scores the keys of layer 1"):
        structurize(model, "mlr:8|8", layers=[0, 1, 2])
    assert "structattn" not in model.config.to_dict()
    structurize(model, ["mlr:8|8", "mlr:16"] * 2, context_length=16)
    assert model.config.structattn["keys_of"] == [None, None, 0, 1]
    cache = level_cache(model)
    assert torch.equal(
        generate(model, IDS, MASK, new=4, past_key_values=cache), generate(model, IDS, MASK, new=4, use_cache=False)
    )
    assert sum(getattr(layer, "nbytes", 0) > 0 for layer in cache.layers) == 2
    for wrong, message in (
        (3, "for each of 4 layers"),
        ([None, None, 9, 1], "have keys of their own"),
    ):
        config = copy.deepcopy(model.config)
        config.structattn["keys_of"] = wrong
        with pytest.raises(ConfigError, match=message):
            type(model)(config)
    model.save_pretrained(tmp_path)
    again = load_structurized(tmp_path, dtype=torch.float64).eval()
    assert again.config.structattn == model.config.structattn
    assert relative_error(logits(again), logits(model)) <= SIX_DIGITS


def test_the_last_logits_of_gemma_4_need_only_the_last_queries() -> None:
    model, _ = structured("gemma4_text")
    options = {"attention_mask": MASK, "position_ids": POSITIONS}
    with torch.no_grad():
        whole = model(IDS, use_cache=False, **options).logits
        for count in (1, 3):
            for use_cache in (False, True):
                found = model(IDS, logits_to_keep=count, use_cache=use_cache, **options).logits
                assert relative_error(found, whole[:, -count:]) <= SIX_DIGITS
        cache = level_cache(model)
        model(IDS[:, :8], attention_mask=MASK[:, :8], position_ids=POSITIONS[:, :8], past_key_values=cache)
        rest = {"attention_mask": MASK, "position_ids": POSITIONS[:, 8:], "logits_to_keep": 2}
        assert relative_error(model(IDS[:, 8:], past_key_values=cache, **rest).logits, whole[:, -2:]) <= SIX_DIGITS


def test_chunks_of_packed_sequences() -> None:
    model, _ = structured("llama4_text")
    model.config.attn_temperature_tuning = False
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning = False  # it counts tokens of the row
    texts = [IDS[:1, :9], IDS[1:, :4], IDS[1:, 2:]]
    positions = torch.cat([torch.arange(x.shape[1]) for x in texts])[None]
    with torch.no_grad():
        expected = torch.cat([model(x, use_cache=False).logits for x in texts], dim=1)
        found = model(torch.cat(texts, dim=1), position_ids=positions, use_cache=False).logits
    assert relative_error(found, expected) <= SAME_MODEL


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama4_text", "continuous batching.*chunked_attention"),
        ("falcon_h1", "continuous batching.*hybrid"),
        ("bloom", "adds a bias to its scores, which a paged cache does not know"),
    ],
)
def test_continuous_batching_is_refused(family, message) -> None:
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
        pytest.skip("continuous batching needs transformers 5.20")
    model, _ = structured(family)
    with pytest.raises(ConfigError, match=message):
        model.init_continuous_batching()


def test_states_follow_their_rows() -> None:
    model, _ = structured("falcon_h1")
    cache, rows = level_cache(model), torch.tensor([1, 0, 1])
    in_pieces(model, (13,), cache)
    assert all(isinstance(layer, HybridCacheLayer) for layer in cache.layers)
    one, two = copy.deepcopy(cache), copy.deepcopy(cache)
    one.batch_select_indices(rows)
    two.batch_repeat_interleave(2)
    step = {"position_ids": POSITIONS[:, 13:]}
    expected = logits(model)[-1], logits(model)[8]
    for found, order in ((one, rows), (two, torch.tensor([0, 0, 1, 1]))):
        with torch.no_grad():
            out = model(
                IDS[order, 13:],
                attention_mask=MASK[order],
                position_ids=step["position_ids"][order],
                past_key_values=found,
            ).logits[:, 0]
        for row, number in enumerate(order.tolist()):
            assert relative_error(out[row], expected[1 - number]) <= SIX_DIGITS
    cache.reset()
    assert cache.nbytes == 0
    assert in_pieces(model, (14,), cache).shape == (int(REAL.sum()), VOCAB)
    assert relative_error(in_pieces(model, (14,), level_cache(model)), logits(model)) <= SIX_DIGITS


def test_shared_keys_follow_a_layer_to_its_device() -> None:
    keys, _ = LevelCacheLayer().update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    assert keys.to("cpu") is keys
    keys.is_appended = True
    moved = keys.to("meta", non_blocking=True)
    assert (moved.states.is_meta, moved.is_appended, moved.layer) == (True, True, keys.layer)
