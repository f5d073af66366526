"""LevelCacheLayer: the protocol of a transformers cache layer, and keys that no other attention can take."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import llama, tokens, trained
from transformers.cache_utils import Cache

from structattn.errors import CacheError, ConfigError
from structattn.integrations.transformers import (
    LevelCacheLayer,
    StructAttnConfig,
    StructAttnForCausalLM,
    level_cache,
    register_attention,
    structurize,
)
from structattn.integrations.transformers.caches.model_cache import level_cache_layer
from structattn.integrations.transformers.variant import Variant
from structattn.layout.levels import LevelLayout
from structattn.ops import structured_attention
from structattn.testing.tolerances import assert_close

LAYOUT = LevelLayout((4, 2, 2), (16, 8, 4))
VARIANT = Variant(layout=LAYOUT)


def states(length, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, length, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]


def whole(q, k, v, padding=None):
    padding = None if padding is None else torch.tensor(padding)
    return structured_attention(q, k, v, LAYOUT, left_padding=padding, backend="reference")


def filled(length, padding=None, **options):
    """A cache layer after a prompt of ``length`` tokens of ``states``, the rest of which is returned."""
    q, k, v = states(length + 6)
    layer = LevelCacheLayer(**options)
    layer.attend(q[:, :, :length], k[:, :, :length], v[:, :, :length], VARIANT, left_padding=padding)
    return layer, (q, k, v)


def attend(layer, q, k, v, start, end, padding=None):
    return layer.attend(*(x[:, :, start:end] for x in (q, k, v)), VARIANT, left_padding=padding)


def test_a_cache_that_was_cropped_to_nothing_takes_another_batch() -> None:
    layer, (q, k, v) = filled(10, (0, 2, 5))
    layer.crop(-10)
    padding = (3, 0, 1)
    out = torch.cat([attend(layer, q, k, v, 0, 12, padding), attend(layer, q, k, v, 12, 13, padding)], dim=2)
    assert_close(out, whole(*(x[:, :, :13] for x in (q, k, v)), padding))


def test_sizes_and_reset() -> None:
    layer = LevelCacheLayer(page_size=4)
    assert (layer.get_seq_length(), layer.nbytes, layer.is_initialized) == (0, 0, False)
    assert layer.get_mask_sizes(5) == (5, 0)
    assert not hasattr(layer, "batch_size")
    q, k, v = states(13)
    attend(layer, q, k, v, 0, 13)
    assert (layer.get_seq_length(), layer.batch_size, layer.is_initialized) == (13, 3, True)
    assert layer.get_mask_sizes(2) == (15, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
    # 3 rows, 2 key heads, pages of 4: level 1 holds 16, level 2 8, level 3 4 positions; values 16
    assert layer.nbytes == 3 * 2 * 8 * (16 * 4 + 8 * 2 + 4 * 2 + 16 * 8)
    layer.reset()
    assert (layer.get_seq_length(), layer.nbytes) == (0, 0)
    other = [x[:1] for x in (q, k, v)]
    assert_close(attend(layer, *other, 0, 13), whole(*other))
    for option in ({"max_length": 0}, {"page_size": 1.5}):
        with pytest.raises(ConfigError):
            LevelCacheLayer(**option)


def test_rows() -> None:
    padding = (3, 0, 5)
    for change, rows in (
        (lambda layer: layer.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
        (lambda layer: layer.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ):
        layer, (q, k, v) = filled(11, padding)
        change(layer)
        q, k, v = (x[rows] for x in (q, k, v))
        moved = tuple(padding[row] for row in rows)
        expected = whole(q[:, :, :14], k[:, :, :14], v[:, :, :14], moved)
        assert_close(attend(layer, q, k, v, 11, 14, moved), expected[:, :, 11:])
        with pytest.raises(CacheError, match="left padding changed"):
            attend(layer, q, k, v, 14, 15, None)
    for change in (
        lambda layer: layer.reorder_cache(torch.tensor([0])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([0])),
    ):
        change(LevelCacheLayer())  # an empty one has no rows yet


def test_crop_with_and_without_a_recording() -> None:
    layer, (q, k, v) = filled(10)
    attend(layer, q, k, v, 10, 12)
    with pytest.raises(CacheError, match="minus the number of tokens"):
        layer.crop(3)
    layer.crop(0)
    layer.crop(-1)
    assert layer.get_seq_length() == 11
    assert_close(attend(layer, q, k, v, 11, 12), whole(*(x[:, :, :12] for x in (q, k, v)))[:, :, 11:])
    attend(layer, q, k, v, 12, 14)  # a new block of level 3 begins at 12
    with pytest.raises(CacheError, match="cannot crop"):
        layer.crop(-3)
    assert layer.get_seq_length() == 14
    with pytest.raises(CacheError, match="cannot remove 15 of 14"):
        layer.crop(-15)
    LevelCacheLayer().crop(-1)  # nothing is in it

    for removed in (1, 2, 3, 4, 5, 6):
        layer, (q, k, v) = filled(10)
        layer.activate_past_recording()
        for step in (10, 11):
            attend(layer, q, k, v, step, step + 1)
        attend(layer, q, k, v, 12, 16)
        layer.crop(-removed)
        length = 16 - removed
        assert layer.get_seq_length() == length
        expected = whole(q, k, v)
        assert_close(attend(layer, q, k, v, length, 16), expected[:, :, length:])
    layer.crop(0)  # what was recorded is forgotten
    with pytest.raises(CacheError, match="cannot crop"):
        layer.crop(-5)
    layer = LevelCacheLayer()  # recorded from the first token on
    layer.activate_past_recording()
    attend(layer, q, k, v, 0, 16)
    layer.crop(-5)
    assert_close(attend(layer, q, k, v, 11, 16), whole(q, k, v)[:, :, 11:])


def test_no_dense_keys_for_others() -> None:
    q, k, v = states(5)
    layer = LevelCacheLayer()
    key, value = layer.update(k, v)
    for use in (
        lambda: F.scaled_dot_product_attention(q, key, value),
        lambda: torch.matmul(q, key),
        lambda: torch.cat([value, v]),
        lambda: key.transpose(1, 2),
        lambda: key.dtype,
        lambda: key[:, 0],
    ):
        with pytest.raises(CacheError, match="register_attention"):
            use()
    assert key.shape == k.shape  # kvpress, once imported, reads it before every attention function
    assert layer.get_seq_length() == 0
    assert copy.deepcopy(layer).get_seq_length() == 0
    model = trained(llama)
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        with pytest.raises(CacheError, match="model.set_attn_implementation"):
            model(tokens(1, 5), past_key_values=level_cache(model))


def test_one_cache_serves_one_model() -> None:
    layer, (q, k, v) = filled(10)
    with pytest.raises(CacheError, match="one cache serves one model"):
        layer.attend(*(x[:, :, :1] for x in (q, k, v)), Variant(layout=LAYOUT, window=5))
    with pytest.raises(CacheError, match="cannot be offloaded"):
        layer.offload()
    with pytest.raises(CacheError, match="cannot be offloaded"):
        layer.prefetch()


def test_layers_of_transformers_are_replaced_while_empty() -> None:
    model = trained(llama)
    for cache in (transformers.DynamicCache(), transformers.DynamicCache(config=model.config)):
        assert isinstance(level_cache_layer(cache, 1), LevelCacheLayer)
        assert level_cache_layer(cache, 1) is cache.layers[1]
        assert not isinstance(cache.layers[0], LevelCacheLayer)
    with pytest.raises(CacheError, match="must be a transformers.Cache"):
        level_cache_layer([], 0)
    with pytest.raises(CacheError, match="layer 2 of the cache is None"):
        level_cache_layer(level_cache(model), 2)


def test_visible_size() -> None:
    model = trained(llama)
    model.set_attn_implementation(register_attention("mlr:4|2|2", name="test_cache_levels", context_length=16))
    cache = level_cache(model, max_length=64, page_size=16)
    assert isinstance(cache, Cache)
    assert cache.nbytes == 0
    model(tokens(1, 3), past_key_values=cache)
    # 2 layers, 2 key heads, 8 bytes: 64 keys of rank 4, 8 of 2, 4 of 2 and 64 values of 8
    assert cache.nbytes == 2 * 2 * 8 * (64 * 4 + 8 * 2 + 4 * 2 + 64 * 8)
    assert cache.get_seq_length() == 3


def three_kinds():
    """Models with level caches: our own, structurized, and with a registered attention; the layers of
    each.
    """
    config = StructAttnConfig(
        attention="[bilinear-btt:1,mlr:4|2|2]", vocab_size=50, hidden_size=32, num_attention_heads=4,
        num_hidden_layers=2, max_position_embeddings=64,
    )  # fmt: skip
    own = trained(lambda: StructAttnForCausalLM(config))
    yield own, own.model.layers, own.lm_head
    changed = structurize(trained(llama), "mlr:4|2|2", context_length=16)
    yield changed, changed.model.layers, changed.lm_head
    plain = trained(llama)
    plain.set_attn_implementation(register_attention("mlr:4|2|2", name="test_cache_kinds", context_length=16))
    yield plain, plain.model.layers, None


def test_a_call_that_fails_is_taken_back_or_noticed(monkeypatch) -> None:
    ids = tokens(2, 14)

    def fail(*_, **__):
        raise KeyboardInterrupt("no more")

    for model, layers, head in three_kinds():
        model.requires_grad_(False)
        expected = model(ids, use_cache=False).logits
        for start, end in ((7, 8), (0, 5), (8, 11)):
            for broken in (layers[0].mlp, layers[1], layers[1].mlp, head):
                if broken is None:
                    continue
                cache = level_cache(model)
                if start:
                    model(ids[:, :start], past_key_values=cache)
                with monkeypatch.context() as patch:
                    patch.setattr(broken, "forward", fail)
                    with pytest.raises(KeyboardInterrupt):
                        model(ids[:, start:end], past_key_values=cache)
                lengths = {layer.get_seq_length() for layer in cache.layers}
                if head is not None:
                    assert lengths == {start}
                    out = model(ids[:, start:end], past_key_values=cache).logits
                    assert_close(out, expected[:, start:end])
                elif len(lengths) > 1:  # a model that is not ours
                    with pytest.raises(CacheError, match="different numbers of tokens, .*reset"):
                        model(ids[:, start:end], past_key_values=cache)
                    cache.reset()
                    assert_close(model(ids[:, :end], past_key_values=cache).logits, expected[:, :end])


def test_copies_of_a_cache_go_on_alone_and_other_models_are_refused() -> None:
    ids = tokens(2, 14)
    for model, _, _ in three_kinds():
        model.requires_grad_(False)
        expected = model(ids, use_cache=False).logits
        cache = level_cache(model)
        model(ids[:, :7], past_key_values=cache)
        twin = copy.deepcopy(model)
        with pytest.raises(ConfigError, match="of another layer"):
            twin(ids[:, 7:], past_key_values=cache)
        cache.layers[0].activate_past_recording()
        for found in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
            other = copy.copy(found.layers[0])
            model(ids[:, :5], past_key_values=copy.deepcopy(cache))
            out = [twin(ids[:, at : at + 1], past_key_values=found).logits for at in range(7, 14)]
            assert_close(torch.cat(out, dim=1), expected[:, 7:])
            assert (other.get_seq_length(), found.get_seq_length()) == (7, 14)
