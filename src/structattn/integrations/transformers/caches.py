"""The cache of a whole model: a ``transformers.Cache`` whose layers of softmax attention are ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from structattn.cache import PAGE_SIZE
from structattn.cache.paged import PackedCache
from structattn.checks import check_type
from structattn.errors import CacheError, ConfigError
from structattn.integrations.transformers.cache import LevelCacheLayer
from structattn.integrations.transformers.hybrid_cache import HybridCacheLayer

# The argument and the output of transformers' models that is the cache: its name from 5.24 on, and before. Our models take both.
CACHE_NAMES = ("cache", "past_key_values")
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})

# Of continuous batching. A variable, as many models do not hand an argument on to their attention; each thread has its own.
_packed: ContextVar[PackedCache | None] = ContextVar("packed", default=None)


def take_cache(arguments: dict[str, Any]) -> Any:
    """Removes the cache from the arguments of a call, by either name, and returns it; raises ``ConfigError`` if there are two."""
    cache, older = (arguments.pop(name, None) for name in CACHE_NAMES)
    if cache is not None and older is not None:
        raise ConfigError("give cache or past_key_values, got both: the second is the older name of the first")
    return older if cache is None else cache


@contextmanager
def packed_cache(cache: PackedCache) -> Iterator[None]:
    """A context in which all attention of our models is that of the requests of this cache."""
    token = _packed.set(cache)
    try:
        yield
    finally:
        _packed.reset(token)


def given_packed_cache() -> PackedCache | None:
    """The cache of the innermost ``packed_cache``; ``None`` outside, and in a compiled program, which cannot read it."""
    return None if torch.compiler.is_compiling() else _packed.get()


def of_decoder(cache: Any) -> Any:
    """The cache of a decoder alone: some models make one for cross attention too, even where they have none (RoCBert)."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def check_layers(cache: Cache) -> None:
    """Raises ``CacheError`` unless all our layers hold the same number of tokens: an interrupted call may have left them different."""
    lengths = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, LevelCacheLayer)]
    if len(set(lengths)) > 1:
        raise CacheError(
            f"the layers of this cache hold different numbers of tokens, {lengths}: a call of the model was interrupted, or a layer was used "
            "without the others; reset() it and give all tokens again"
        )


@contextmanager
def guarded(cache: Any) -> Iterator[None]:
    """A context for a call of a model: all layers of a cache append the next tokens, or (with any error) none.

    Anything else than a ``Cache`` is left alone. Raises ``CacheError`` as ``check_layers``.
    """
    cache = of_decoder(cache)
    if not isinstance(cache, Cache):
        yield
        return
    check_layers(cache)
    lengths = {id(layer): layer.get_seq_length() for layer in cache.layers if isinstance(layer, LevelCacheLayer)}
    try:
        yield
    except BaseException:
        for layer in cache.layers:  # new layers have replaced empty ones
            if isinstance(layer, LevelCacheLayer) and layer.get_seq_length() != lengths.get(id(layer), 0):
                layer.undo()
        raise


class LevelCaches(Cache):  # type: ignore[misc]
    """A ``transformers.Cache`` of ``LevelCacheLayer``s that knows its size."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As ``Cache.update``; raises ``CacheError`` as ``check_layers`` when the first layer is reached."""
        if layer_idx == 0:
            check_layers(self)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, over all attention layers."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, LevelCacheLayer))


def level_cache(model: PreTrainedModel, *, max_length: int | None = None, page_size: int = PAGE_SIZE) -> LevelCaches:
    """An empty cache for a model with structured attention, to be given as ``cache`` (or by its older name ``past_key_values``).

    Args:
        model: only the numbers of its layers with attention are read.
        max_length, page_size: see ``LevelCacheLayer``, which raises ``ConfigError`` for them.
    """
    check_type("model", model, PreTrainedModel, "a model of transformers")
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]
    # transformers 5.17 makes layers of keys for the recurrent layers of Recurrent Gemma too.
    known = model.attention_layers() if hasattr(model, "attention_layers") else range(len(layers))
    for index in set(known) & set(range(len(layers))):
        layers[index] = _own_layer(layers[index], max_length=max_length, page_size=page_size) or layers[index]
    return LevelCaches(layers=layers)


def is_plain(layer: object) -> bool:
    """Whether a cache layer is one that transformers makes for softmax attention alone; hybrid models have others too."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def has_state(layer: object) -> bool:
    """Whether a cache layer is one that transformers makes for softmax attention and a recurrence or convolution."""
    return type(layer) in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


def _own_layer(layer: Any, **options: Any) -> LevelCacheLayer | None:
    """A layer of ours in place of one that transformers made for softmax attention; ``None`` for any other."""
    if is_plain(layer):
        return LevelCacheLayer(**options)
    return HybridCacheLayer(layer.number_of_states, **options) if has_state(layer) else None


def level_cache_layer(cache: Cache, index: int) -> LevelCacheLayer:
    """The layer of a cache as a ``LevelCacheLayer``; an empty layer that transformers made is replaced.

    Raises:
        CacheError: the cache is of a kind that cannot be replaced, or is filled already.
    """
    if not isinstance(cache, Cache):
        raise CacheError(f"cache must be a transformers.Cache, got {type(cache).__name__}: use level_cache(model)")
    if cache.offloading:
        raise CacheError("structured attention cannot offload its cache: leave cache_implementation='offloaded' away")
    if cache.layer_class_to_replicate is DynamicLayer:
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
    layer = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, LevelCacheLayer):
        return layer
    own = _own_layer(layer)
    if layer is None or own is None or layer.get_seq_length() > 0:
        raise CacheError(
            f"layer {index} of the cache is {layer!r}, whose keys structured attention cannot use: give "
            "level_cache(model) (structattn.integrations.transformers), or no cache_implementation and no cache"
        )
    own.record_past = getattr(layer, "record_past", False)
    cache.layers[index] = own
    return own
