"""The cache of a whole model: a ``transformers.Cache`` whose layers of softmax attention are ours."""

from __future__ import annotations

import copy
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
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from structattn.cache import PAGE_SIZE
from structattn.cache.late_numbers import give_numbers
from structattn.cache.numbers import is_traced
from structattn.cache.paged import PackedCache
from structattn.cache.storage import LayerStorage, ModelStorage, storage_from, storage_of_layers
from structattn.checks import check_size, check_type, describe
from structattn.errors import CacheError, ConfigError
from structattn.integrations.transformers.caches.hybrid_cache import HybridCacheLayer, check_states, states_of
from structattn.integrations.transformers.caches.layer_cache import LevelCacheLayer, RowChange, removed_tokens
from structattn.memory import check_memory

# The argument and the output of transformers' models that is the cache: its name from 5.24 on, and before.
# Our models take both.
CACHE_NAMES = ("cache", "past_key_values")
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})

# Of continuous batching. A variable, as many models do not hand an argument on to their attention; each
# thread has its own.
_packed: ContextVar[PackedCache | None] = ContextVar("packed", default=None)


def take_cache(arguments: dict[str, Any]) -> Any:
    """Removes the cache from the arguments of a call, by either name, and returns it; raises ``ConfigError``
    if there are two.
    """
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
    """The cache of the innermost ``packed_cache``; ``None`` outside, and in a compiled program, which cannot
    read it.
    """
    return None if torch.compiler.is_compiling() else _packed.get()


def of_decoder(cache: Any) -> Any:
    """The cache of a decoder alone: some models make one for cross attention too, even where they have none
    (RoCBert).
    """
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def number_layers(cache: Any) -> None:
    """In a compiled program: ``give_numbers`` to our layers of a cache that need them."""
    cache = of_decoder(cache)
    if isinstance(cache, Cache) and is_traced():
        level_layers = [layer for layer in cache.layers if isinstance(layer, LevelCacheLayer)]
        if layers := [layer for layer in level_layers if layer.number is None and layer.get_seq_length() > 0]:
            give_numbers(layers)


def check_layers(cache: Cache) -> None:
    """Raises ``CacheError`` unless all our layers hold the same number of tokens, and no change broke off
    between two layers.
    """
    lengths = [layer.get_seq_length() for layer in cache.layers if isinstance(layer, LevelCacheLayer)]
    if getattr(cache, "is_torn", False):
        if any(lengths):
            raise CacheError(
                "a call of the model, or a change of this cache, broke off after some layers were written over: "
                "reset() it and give all tokens again"
            )
        cache.is_torn = False
    if any(length != lengths[0] for length in lengths):  # as in LayerCaches.check
        raise CacheError(
            f"the layers of this cache hold different numbers of tokens, {lengths}: a call of the model was "
            "interrupted, or a layer was used without the others; reset() it and give all tokens again"
        )


class _Snapshot:
    """What a layer of transformers was before it changes; of ``HybridCacheLayer`` only its states.

    What it refers to is kept, and not copied. So numbers that are written over in place, as the states of
    recurrences are, are lost.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        is_own, self.length = isinstance(layer, LevelCacheLayer), 0
        attributes = {name: dict(x) if isinstance(x, dict) else x for name, x in vars(layer).items()}
        if is_own:  # all that LinearAttentionLayer changes is in dictionaries
            attributes = {name: x for name, x in attributes.items() if isinstance(x, dict)}
        elif type(layer) is DynamicLayer and layer.get_seq_length():
            # Every token makes new tensors of all tokens; to keep the old ones as well would double the
            # memory.
            self.length = layer.get_seq_length()
            attributes = {name: x for name, x in attributes.items() if not isinstance(x, Tensor)}
        self.attributes = attributes
        every = (x for value in attributes.values() for x in (value.values() if isinstance(value, dict) else [value]))
        self.versions = [(x, None if x.is_inference() else x._version) for x in every if isinstance(x, Tensor)]

    def put_back(self) -> bool:
        """Makes the layer what it was; false where its numbers were (or, in inference mode, may have been)
        written over.
        """
        vars(self.layer).update(self.attributes)
        if self.length:
            self.layer.keys, self.layer.values = (
                x[..., : self.length, :] for x in (self.layer.keys, self.layer.values)
            )
        changed = [x for x, version in self.versions if x.is_inference() or x._version != version]
        if changed and not any(getattr(self.layer, "has_previous_state", {0: True}).values()):
            for state in changed:  # of a cache that was reset
                state.zero_()
            return True
        return not changed


def _put_back(layers: list[_Snapshot]) -> bool:
    """Makes layers what they were; false where one cannot be."""
    return all([snapshot.put_back() for snapshot in layers])  # noqa: C419 - each of them, also after one that cannot


@contextmanager
def guarded(cache: Any) -> Iterator[None]:
    """A context for a call of a model: all layers of a cache append the next tokens, or (with any error)
    none.

    The state of a recurrence, which is written over, cannot be put back: a cache with one has to be ``reset``
    if the call got that far. Anything else than a ``Cache`` is left alone. Raises ``CacheError`` as
    ``check_layers``.
    """
    cache = of_decoder(cache)
    if not isinstance(cache, Cache):
        yield
        return
    check_layers(cache)
    count = len(cache.layers)
    lengths = {id(layer): layer.get_seq_length() for layer in cache.layers if isinstance(layer, LevelCacheLayer)}
    is_traced = torch.compiler.is_compiling()  # a compiler knows no versions of tensors
    others = [_Snapshot(layer) for layer in cache.layers if type(layer) is not LevelCacheLayer and not is_traced]
    try:
        yield
    except BaseException:
        if cache.layer_class_to_replicate is not None:
            del cache.layers[count:]
        for layer in cache.layers:  # new layers have replaced empty ones
            if isinstance(layer, LevelCacheLayer) and layer.get_seq_length() != lengths.get(id(layer), 0):
                layer.undo()
        if not _put_back(others):
            cache.is_torn = True
        raise


class LevelCaches(DynamicCache):  # type: ignore[misc]
    """A ``transformers.Cache`` of ``LevelCacheLayer``s, and where a model has others of those, all of which
    change together or not at all.

    A wrong argument, or a layer that cannot do what is asked, changes nothing. If memory ends or Ctrl-C comes
    while rows are moved, the cache raises ``CacheError`` until it is ``reset``.

    Args:
        layers: of all layers of a model.

    Raises:
        ConfigError: no list, or none of them is a ``LevelCacheLayer``.
    """

    is_torn = False  # some layers were changed and others not, and there is no way back

    def __init__(self, layers: list[Any]) -> None:
        named = "the cache layers of a model, as level_cache(model) makes them"
        check_type("layers", layers, list, named)
        if not any(isinstance(layer, LevelCacheLayer) for layer in layers):
            raise ConfigError(f"layers must be {named}, got {describe(layers)}")
        Cache.__init__(self, layers=layers)

    def __copy__(self) -> LevelCaches:
        return copy.deepcopy(self)  # a copy shares no memory

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As ``Cache.update``; raises ``CacheError`` as ``check_layers`` when the first layer is reached."""
        if layer_idx == 0 and not is_traced():  # there the operator of each layer checks its own
            check_layers(self)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, over all attention layers."""
        return sum(layer.nbytes for layer in self._own_layers)

    @property
    def _own_layers(self) -> list[LevelCacheLayer]:
        return [layer for layer in self.layers if isinstance(layer, LevelCacheLayer)]

    @contextmanager
    def _torn_unless_done(self) -> Iterator[None]:
        self.is_torn = True
        yield
        self.is_torn = False

    def reset(self) -> None:
        """Clears everything."""
        with self._torn_unless_done():
            for layer in sorted(self.layers, key=lambda layer: isinstance(layer, LevelCacheLayer)):
                layer.reset()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last tokens from all layers, or (with an error) from none.

        Args:
            tokens_to_remove: see ``LevelCacheLayer.crop``.

        Raises:
            CacheError: a positive number, more tokens than there are, or a layer that has no way back; see
                ``LevelCacheLayer.crop``.
        """
        count = removed_tokens(tokens_to_remove)
        check_layers(self)
        length, changes, others = self.get_seq_length(), [], []
        for number, layer in enumerate(self.layers):
            try:
                if isinstance(layer, LevelCacheLayer):
                    changes.append(layer.cropped(count))
                elif check_crop(layer, count, length):
                    others.append((layer, _Snapshot(layer)))
            except CacheError as error:
                raise CacheError(f"layer {number} of the cache: {error}") from None
        with self._torn_unless_done():
            try:
                for layer, _ in others:
                    layer.crop(-count)
            except BaseException:
                self.is_torn = not _put_back([snapshot for _, snapshot in others])
                raise
            for change in changes:
                change()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes row ``beam_idx[b]``, in all layers or (with a wrong argument) in none.

        Raises:
            ShapeError: the indices are not one per row, or out of range.
            CacheError: a layer cannot move its rows.
        """
        self._move("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, in all layers or (with a wrong argument) in none; raises
        ``ConfigError`` or ``CacheError``.
        """
        check_size("repeats", repeats)
        check_memory(f"{repeats} copies of the rows", repeats * self.nbytes, torch.uint8)
        self._move("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, ints or a bool mask, in all layers or (with a wrong argument) in none; raises
        ``ShapeError`` or ``CacheError``.
        """
        self._move("batch_select_indices", indices)

    def _move(self, change: RowChange, argument: Any) -> None:
        check_layers(self)
        batches = {number: rows_of(layer) for number, layer in enumerate(self.layers)}
        if len({rows for rows in batches.values() if rows is not None}) > 1:
            raise CacheError(
                f"the layers of this cache hold different numbers of rows, {list(batches.values())}: a layer was used "
                "without the others; reset() it and give all tokens again"
            )
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LevelCacheLayer):
                layer.check_rows(change, argument)
            elif not hasattr(layer, change):
                raise CacheError(f"layer {number} of the cache is {layer!r}, which has no {change}()")
        with self._torn_unless_done():
            for layer in self.layers:
                getattr(layer, change)(argument)


def rows_of(layer: Any) -> int | None:
    """The rows of the batch that a cache layer holds; ``None`` where it holds nothing, or does not say."""
    if isinstance(layer, LevelCacheLayer):
        return None if layer.level_cache is None else layer.level_cache.batch_size
    states = [state for _, _, state in states_of(layer)] if isinstance(layer, LinearAttentionCacheLayerMixin) else []
    keys = getattr(layer, "keys", None)
    held = [x for x in (keys, *states) if isinstance(x, Tensor) and x.numel()]
    return held[0].shape[0] if held else None


def check_crop(layer: Any, count: int, length: int) -> bool:
    """Whether a cache layer of transformers holds anything to crop.

    Args:
        count: tokens to remove; 0 drops what was recorded, and nothing where nothing was.
        length: tokens in the cache.

    Raises:
        CacheError: the layer would lose what the next token needs.
    """
    is_recording, own_length = getattr(layer, "record_past", False), 0
    if isinstance(layer, CacheLayerMixin):
        own_length = layer.get_seq_length()
        is_plain_layer = not isinstance(layer, LinearAttentionCacheLayerMixin)  # whose states are checked below
        if own_length and count and is_plain_layer and not layer.is_croppable:
            raise CacheError(f"a {type(layer).__name__} cannot be cropped: reset() and start again")
        if 0 < own_length < count:
            raise CacheError(f"cannot remove {count} of {own_length} tokens")
    if isinstance(layer, DynamicSlidingWindowLayer) and own_length:
        kept, window = layer.keys.shape[-2], layer.sliding_window
        if count and (
            kept - count < min(window - 1, own_length - count) or (own_length >= window and not is_recording)
        ):
            raise CacheError(
                f"a window of {window} keeps {kept} of {own_length} tokens, too few to remove {count}: call "
                "activate_past_recording() before the tokens that may be removed"
            )
    has_states = isinstance(layer, LinearAttentionCacheLayerMixin) and bool(states_of(layer))
    if has_states:
        check_states(layer, count, length)
        if count and not is_recording:
            raise CacheError(
                "the state of a convolution was not recorded: call activate_past_recording() before the tokens that "
                "may be removed"
            )
    return (own_length > 0 or has_states) and (count > 0 or is_recording)


def level_cache(
    model: PreTrainedModel,
    *,
    max_length: int | None = None,
    page_size: int = PAGE_SIZE,
    storage: ModelStorage = None,
) -> LevelCaches:
    """An empty cache for a model with structured attention, to be given as ``cache`` (or by its older name
    ``past_key_values``).

    Args:
        model: from ``structurize``, with an attention of ``register_attention``, or a
            ``StructAttnForCausalLM``; only its config and the indices of its attention layers are read.
        max_length, page_size: see ``LevelCacheLayer``.
        storage: in which bits numbers are kept. A list has an entry for each layer of the model: a storage,
            ``None``, or a list of these with one for each key head. Default ``None``: that of the model's
            config, which ``structurize`` writes.

    Returns:
        ``LevelCaches`` without tokens. A call of a model with another attention raises ``CacheError``.

    Raises:
        ConfigError: no model of transformers, an option out of its range, or a storage that does not fit.

    Example:
        >>> model = structurize(model, "standard")  # doctest: +SKIP
        >>> cache = level_cache(model, storage=sa.Storage(key_bits=4, value_bits=4))  # doctest: +SKIP
        >>> model.generate(ids, past_key_values=cache, max_new_tokens=100)  # doctest: +SKIP
    """
    check_type("model", model, PreTrainedModel, "a model of transformers")
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]
    # transformers 5.17 makes layers of keys for the recurrent layers of Recurrent Gemma too.
    numbers = model.attention_layers() if hasattr(model, "attention_layers") else range(len(layers))
    storages = storage_of_layers(storage_of(config) if storage is None else storage, config.num_hidden_layers)
    for index in set(numbers) & set(range(len(layers))):
        options = {"max_length": max_length, "page_size": page_size, "storage": storages[index]}
        layers[index] = _own_layer(layers[index], **options) or layers[index]
    return LevelCaches(layers=layers)


def is_plain(layer: object) -> bool:
    """Whether a cache layer is one that transformers makes for softmax attention alone; hybrid models have
    others too.
    """
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def has_state(layer: object) -> bool:
    """Whether a cache layer is one that transformers makes for softmax attention and a recurrence or
    convolution.
    """
    return type(layer) in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


def _own_layer(layer: Any, **options: Any) -> LevelCacheLayer | None:
    """A layer of ours in place of one that transformers made for softmax attention; ``None`` for any
    other.
    """
    if is_plain(layer):
        return LevelCacheLayer(**options)
    return HybridCacheLayer(layer.number_of_states, **options) if has_state(layer) else None


def storage_of(config: Any) -> ModelStorage:
    """How the cache of a model stores numbers, by its config; raises ``ConfigError`` where that is no
    storage.
    """
    entry = getattr(config, "structattn", None)
    try:
        storage: ModelStorage = storage_from(entry.get("storage") if isinstance(entry, dict) else None)
    except ConfigError as error:
        raise ConfigError(f"config.structattn['storage'] is no storage: {error}") from error
    return storage


def storage_of_layer(config: Any, index: int) -> LayerStorage:
    """How the cache of one layer of a model stores numbers, by its config; raises as ``storage_of``."""
    storage = storage_of(config)
    return None if storage is None else storage_of_layers(storage, config.num_hidden_layers)[index]


def level_cache_layer(cache: Cache, index: int, config: Any = None) -> LevelCacheLayer:
    """The layer of a cache as a ``LevelCacheLayer``; an empty layer that transformers made is replaced.

    Args:
        config: of the model, which may say how numbers are stored.

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
    new_layer = _own_layer(layer, storage=storage_of_layer(config, index))
    if layer is None or new_layer is None or layer.get_seq_length() > 0:
        raise CacheError(
            f"layer {index} of the cache is {layer!r}, whose keys structured attention cannot use: give "
            "level_cache(model) (structattn.integrations.transformers), or no cache_implementation and no cache"
        )
    new_layer.record_past = getattr(layer, "record_past", False)
    cache.layers[index] = new_layer
    if type(cache) in (Cache, DynamicCache) and not torch.compiler.is_compiling():
        cache.__class__ = LevelCaches  # whose layers change together; the model may go on with the same object
    return new_layer
