"""What changes all layers of a cache changes all of them or none: layers of ours, of transformers, with
states, and in mixtures.
"""

import copy
import pickle

import pytest
import torch
import transformers
from hf_models import llama, tokens, trained
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
)

from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.integrations.transformers import LevelCacheLayer, LevelCaches, level_cache, structurize
from structattn.integrations.transformers.caches.hybrid_cache import HybridCacheLayer
from structattn.integrations.transformers.caches.model_cache import CACHE, guarded
from structattn.integrations.transformers.variant import Variant
from structattn.layout.levels import LevelLayout
from structattn.testing.tolerances import SIX_DIGITS, assert_close, relative_error


def fail(*_):
    raise KeyboardInterrupt


VARIANT = Variant(layout=LevelLayout((4, 4), (64, 16)))
ROW_ERRORS = (CacheError, ConfigError, ShapeError)


def mixed_model():
    """The second layer has blocks of 16: from 20 tokens it goes back to 16."""
    model = structurize(trained(llama, hidden_size=64, head_dim=16), ["mlr:16", "mlr:8|8@64|16"])
    return model.requires_grad_(False)


def caches(model):
    """Caches that a program may have: ours, and those of transformers, which the model fills with our
    layers.
    """
    yield level_cache(model)
    yield DynamicCache()
    yield DynamicCache(config=model.config)
    yield Cache(layers=[LevelCacheLayer(), DynamicLayer()])
    yield None


def call(model, ids, cache):
    return model(ids, **{CACHE: cache}, use_cache=True)


def test_no_layer_is_cropped_where_one_cannot_be() -> None:
    model, ids = mixed_model(), tokens(2, 24)
    expected = model(ids, use_cache=False).logits
    for cache in caches(model):
        cache = getattr(call(model, ids[:, :20], cache), CACHE)
        for _ in range(2):
            with pytest.raises(CacheError, match="layer 1 of the cache: cannot crop from 20 to 14 tokens.*at least 16"):
                cache.crop(-6)
            assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]
        assert_close(call(model, ids[:, 20:22], cache).logits, expected[:, 20:22])
        cache.crop(-6)
        assert [layer.get_seq_length() for layer in cache.layers] == [16, 16]
        assert_close(call(model, ids[:, 16:], cache).logits, expected[:, 16:])


def test_an_encoder_decoder_cache_is_cropped_as_its_first() -> None:
    model, ids = mixed_model(), tokens(2, 24)
    expected = model(ids, use_cache=False).logits
    for own in caches(model):
        if own is None:
            continue
        call(model, ids[:, :20], own)
        cache = EncoderDecoderCache(own, DynamicCache())
        with pytest.raises(CacheError, match="cannot crop"):
            cache.crop(-6)
        with pytest.raises(ShapeError, match="indices must lie in"):
            cache.batch_select_indices(torch.tensor([5]))
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([True, False, True, False]))
        assert_close(call(model, ids[[1, 0], 18:], own).logits, expected[[1, 0], 18:])


@pytest.mark.parametrize("removed", [1, 4, 5, 9, 12])
def test_what_was_recorded_is_replayed_in_the_layers_that_need_it(removed) -> None:
    model, ids = mixed_model(), tokens(2, 30)
    expected = model(ids, use_cache=False).logits
    cache = level_cache(model)
    call(model, ids[:, :12], cache)
    cache.activate_past_recording()
    assert all(layer.is_recording for layer in cache.layers)
    call(model, ids[:, 12:15], cache)
    call(model, ids[:, 15:24], cache)
    for wrong, error in (
        (3, CacheError),
        (-25, CacheError),
        (1.5, ConfigError),
        (True, ConfigError),
        (None, ConfigError),
    ):
        with pytest.raises(error):
            cache.crop(wrong)
    with pytest.raises(CacheError, match="cannot crop"):
        cache.crop(-13)  # 11 tokens were before the recording; then nothing is forgotten
    cache.crop(-removed)
    rest = 24 - removed
    assert [layer.get_seq_length() for layer in cache.layers] == [rest, rest]
    assert_close(call(model, ids[:, rest:], cache).logits, expected[:, rest:])
    cache.crop(0)
    with pytest.raises(CacheError, match="cannot crop"):
        cache.crop(-20)


def test_a_replay_that_fails_changes_nothing(monkeypatch) -> None:
    model, ids = (
        structurize(trained(llama, hidden_size=64, head_dim=16), "mlr:8|8@64|16").requires_grad_(False),
        tokens(2, 30),
    )
    expected = model(ids, use_cache=False).logits
    cache = level_cache(model)
    cache.activate_past_recording()
    call(model, ids[:, :20], cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1]._recording, "replay", fail)
        with pytest.raises(KeyboardInterrupt):
            cache.crop(-6)
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]
    cache.crop(-6)
    assert_close(call(model, ids[:, 14:], cache).logits, expected[:, 14:])


def change(name, argument):
    return lambda cache: getattr(cache, name)(argument)


@pytest.mark.parametrize(
    "wrong",
    [
        change("reorder_cache", torch.tensor([0])),
        change("reorder_cache", torch.tensor([0, 2])),
        change("reorder_cache", torch.tensor([-1, 0])),
        change("reorder_cache", torch.tensor([0.0, 1.0])),
        change("reorder_cache", [0, 1]),
        change("reorder_cache", None),
        change("batch_repeat_interleave", 0),
        change("batch_repeat_interleave", -1),
        change("batch_repeat_interleave", 1.5),
        change("batch_repeat_interleave", 10**12),
        change("batch_select_indices", torch.tensor([2])),
        change("batch_select_indices", torch.tensor([], dtype=torch.int64)),
        change("batch_select_indices", torch.tensor([True, False, True])),
        change("batch_select_indices", torch.tensor([[True, False]])),
        change("batch_select_indices", torch.tensor([False, False])),
        change("batch_select_indices", "x"),
        change("crop", -21),
        change("crop", 1),
        change("crop", "x"),
        change("crop", torch.tensor([1, 2])),
    ],
)
def test_wrong_arguments_change_nothing(wrong) -> None:
    model, ids = mixed_model(), tokens(2, 24)
    expected = model(ids, use_cache=False).logits
    for cache in caches(model):
        cache = getattr(call(model, ids[:, :20], cache), CACHE)
        cache.activate_past_recording()
        call(model, ids[:, 20:22], cache)
        with pytest.raises(ROW_ERRORS):
            wrong(cache)
        assert all(layer.get_seq_length() == 22 and layer.batch_size == 2 for layer in cache.layers)
        cache.crop(-1)  # what was recorded is there still
        assert_close(call(model, ids[:, 21:], cache).logits, expected[:, 21:])


def keys(length, seed=0, batch=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 2, length, 8, dtype=torch.float64, generator=generator) for _ in range(3)]


def fill(cache, length, seed=0):
    """Appends tokens to all layers, whatever their kind, and returns what they give."""
    found, batch = [], 2
    for number, layer in enumerate(cache.layers):
        q, k, v = keys(length, seed + number, batch)
        if isinstance(layer, LinearAttentionLayer):
            state = q.flatten(1, 2).transpose(1, 2)  # (B, channels, tokens)
            found.append(layer.update_conv_state(state, conv_kernel_size=3)[..., -3:].clone())
        if isinstance(layer, LevelCacheLayer):
            found.append(layer.attend(q, k, v, VARIANT))
        elif not isinstance(layer, LinearAttentionLayer):
            found += [x.clone() for x in layer.update(k, v)]
    return found


MIXTURES = {
    "plain first": lambda: [DynamicLayer(), LevelCacheLayer()],
    "ours first": lambda: [LevelCacheLayer(), DynamicLayer()],
    "window first": lambda: [DynamicSlidingWindowLayer(sliding_window=6), LevelCacheLayer()],
    "window last": lambda: [LevelCacheLayer(), DynamicSlidingWindowLayer(sliding_window=6)],
    "convolution first": lambda: [LinearAttentionLayer(), LevelCacheLayer()],
    "convolution last": lambda: [LevelCacheLayer(), LinearAttentionLayer()],
    "hybrid last": lambda: [LevelCacheLayer(), HybridCacheLayer()],
    "hybrid first": lambda: [HybridCacheLayer(), DynamicLayer()],
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_are_cropped_together_or_not_at_all(kind) -> None:
    for record_from in (None, 0, 9, 20):
        for removed in (1, 4, 6, 9, 12, 20):
            cache, other = LevelCaches(layers=MIXTURES[kind]()), LevelCaches(layers=MIXTURES[kind]())
            for start, end in ((0, 9), (9, 20)):
                if record_from == start:
                    cache.activate_past_recording()
                    other.activate_past_recording()
                fill(cache, end - start, seed=start)
                fill(other, end - start, seed=start)
            if record_from == 20:
                cache.activate_past_recording()
            before = copy.deepcopy(cache)
            try:
                cache.crop(-removed)
            except CacheError:
                assert record_from != 0
                for found, expected in zip(fill(cache, 2, 50), fill(before, 2, 50), strict=True):
                    assert torch.equal(found, expected)
                continue
            # The same tokens without those that were removed.
            expected = LevelCaches(layers=MIXTURES[kind]())
            if record_from is not None:
                expected.activate_past_recording()
            refill(expected, 20 - removed)
            assert cache.get_seq_length() == 20 - removed
            for a, b in zip(fill(cache, 2, 50), fill(expected, 2, 50), strict=True):
                assert_close(a[..., -min(a.shape[-2], b.shape[-2]) :, :], b[..., -min(a.shape[-2], b.shape[-2]) :, :])


def refill(cache, length):
    """The first tokens of ``fill`` with 9 and then 11 tokens."""
    for number, layer in enumerate(cache.layers):
        parts = [
            torch.cat(pair, dim=2)[:, :, :length] for pair in zip(keys(9, number), keys(11, 9 + number), strict=True)
        ]
        q, k, v = parts
        if not length:
            continue
        if isinstance(layer, LinearAttentionLayer):
            layer.update_conv_state(q.flatten(1, 2).transpose(1, 2), conv_kernel_size=3)
        if isinstance(layer, LevelCacheLayer):
            layer.attend(q, k, v, VARIANT)
        elif not isinstance(layer, LinearAttentionLayer):
            layer.update(k, v)


def test_a_recurrence_cannot_go_back() -> None:
    cache = LevelCaches(layers=[LevelCacheLayer(), HybridCacheLayer()])
    cache.activate_past_recording()
    fill(cache, 20)
    cache.layers[1].update_recurrent_state(torch.ones(2, 3))
    with pytest.raises(CacheError, match="layer 1 of the cache: a recurrence keeps its last state alone"):
        cache.crop(-1)
    assert cache.get_seq_length() == 20
    cache.crop(0)
    assert cache.layers[1].conv_states[0].shape[-1] == 3


def test_layers_that_move_no_rows_are_named() -> None:
    for wrong in ([], 5, [5], None):
        with pytest.raises(ConfigError, match="layers must be"):
            LevelCaches(wrong)
    cache = LevelCaches(layers=[LevelCacheLayer(), LinearAttentionLayer()])
    fill(cache, 5)
    with pytest.raises(CacheError, match="layer 1 of the cache is LinearAttentionLayer, which has no batch_repeat"):
        cache.batch_repeat_interleave(2)
    assert cache.layers[0].batch_size == 2
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.layers[0].batch_repeat_interleave(2)
    with pytest.raises(CacheError, match=r"different numbers of rows, \[4, 2\]"):
        cache.reorder_cache(torch.tensor([1, 0, 2, 3]))


@pytest.mark.parametrize("kind", ["hybrid last", "hybrid first"])
def test_rows_of_hybrid_layers_move_together(kind) -> None:
    for name, argument in (
        ("reorder_cache", torch.tensor([0, 2])),
        ("batch_select_indices", torch.tensor([True, True, False])),
        ("batch_repeat_interleave", 0),
    ):
        cache = LevelCaches(layers=MIXTURES[kind]())
        fill(cache, 5)
        before = copy.deepcopy(cache)
        for change_rows in (
            getattr(cache, name),
            *(getattr(layer, name) for layer in cache.layers if hasattr(layer, "attend")),
        ):
            with pytest.raises(ROW_ERRORS):
                change_rows(argument)
        for a, b in zip(fill(cache, 2, 50), fill(before, 2, 50), strict=True):
            assert torch.equal(a, b)


def test_rows_that_were_moved_in_some_layers_only(monkeypatch) -> None:
    model, ids = mixed_model(), tokens(2, 24)
    cache = level_cache(model)
    call(model, ids[:, :20], cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1], "reorder_cache", fail)
        with pytest.raises(KeyboardInterrupt):
            cache.reorder_cache(torch.tensor([1, 0]))
    for use in (
        lambda: call(model, ids[:, 20:], cache),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
    ):
        with pytest.raises(CacheError, match="broke off after some layers were written over: reset"):
            use()
    cache.reset()
    assert_close(call(model, ids, cache).logits, model(ids, use_cache=False).logits)


def failing_call(cache, length, seed):
    with pytest.raises(KeyboardInterrupt), guarded(cache):
        fail(fill(cache, length, seed))


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_call_that_fails_leaves_other_layers_as_they_were(kind) -> None:
    for cache in (LevelCaches(layers=MIXTURES[kind]()), Cache(layers=MIXTURES[kind]())):
        failing_call(cache, 9, 0)
        twin = LevelCaches(layers=MIXTURES[kind]())
        for length, seed in ((9, 0), (11, 9)):
            with guarded(cache):
                for a, b in zip(fill(cache, length, seed), fill(twin, length, seed), strict=True):
                    assert torch.equal(a, b)
        is_written_over = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
        failing_call(cache, 2, 30)
        if is_written_over:
            with pytest.raises(CacheError, match="reset"), guarded(cache):
                pass
            cache.reset()
            twin.reset()
        with guarded(cache):
            for a, b in zip(fill(cache, 2, 50), fill(twin, 2, 50), strict=True):
                assert torch.equal(a, b)


def test_a_call_that_fails_before_any_layer_tears_nothing() -> None:
    cache = LevelCaches(layers=MIXTURES["hybrid last"]())
    fill(cache, 9)
    with pytest.raises(KeyboardInterrupt), guarded(cache):
        fail()
    with guarded(cache):
        pass


def test_a_cache_of_transformers_becomes_ours_and_can_be_copied() -> None:
    model, ids = mixed_model(), tokens(2, 24)
    expected = model(ids, use_cache=False).logits
    cache = DynamicCache()
    call(model, ids[:, :20], cache)
    assert isinstance(cache, LevelCaches)
    assert isinstance(cache, DynamicCache)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_close(call(model, ids[:, 20:], twin).logits, expected[:, 20:])

    class Own(DynamicCache):
        """Of a program, which may have changed what it does."""

    own = Own()
    call(model, ids[:, :20], own)
    assert type(own) is Own


def test_convolutions_of_a_real_model() -> None:
    """LFM2 has layers of convolutions, whose states transformers keeps, between those of attention."""
    if not hasattr(transformers, "Lfm2Config"):
        pytest.skip("this transformers does not know LFM2")
    config = transformers.Lfm2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = structurize(transformers.Lfm2ForCausalLM(config).double().eval(), "mlr:4|4@64|16").requires_grad_(False)
    ids = tokens(2, 24)
    expected = model(ids, use_cache=False).logits
    cache = level_cache(model)
    call(model, ids[:, :20], cache)
    for removed in (1, 6):
        with pytest.raises(CacheError):
            cache.crop(-removed)
    assert relative_error(call(model, ids[:, 20:22], cache).logits, expected[:, 20:22]) <= SIX_DIGITS
    cache = level_cache(model)
    cache.activate_past_recording()
    call(model, ids[:, :20], cache)
    cache.crop(-6)
    out = torch.cat([call(model, ids[:, at : at + 1], cache).logits for at in range(14, 24)], dim=1)
    assert relative_error(out, expected[:, 14:]) <= SIX_DIGITS
