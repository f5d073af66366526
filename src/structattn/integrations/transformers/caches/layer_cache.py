"""``LevelCacheLayer``: a ``LevelCache`` as one layer of a ``transformers.Cache``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from structattn.cache import PAGE_SIZE, LevelCache, Storage
from structattn.cache.numbers import Count, new_number
from structattn.cache.storage import checked_storage, chooses_tokens
from structattn.checks import check_int, check_tensor
from structattn.errors import CacheError, ShapeError
from structattn.integrations.transformers.caches.recording import Append, Recording
from structattn.integrations.transformers.masks.structured_mask import Placeholder
from structattn.integrations.transformers.variant import Variant
from structattn.ops.terms import ScoreTerms

NO_TERMS = ScoreTerms()
# The methods of a cache that move its rows.
RowChange = Literal["reorder_cache", "batch_repeat_interleave", "batch_select_indices"]


class PendingStates(Placeholder):
    """New keys or values, (B, G, T, D), on their way from ``LevelCacheLayer.update`` to structured attention,
    which appends them.

    A level cache has no dense keys: any other attention function that uses this raises ``CacheError``.

    Attributes:
        is_appended: an attention module has appended them; those that score its keys follow.
    """

    def __init__(self, layer: LevelCacheLayer, states: Tensor) -> None:
        self.layer = layer
        self.states = states
        self.is_appended = False

    @property
    def shape(self) -> torch.Size:
        """That of the new tokens: kvpress, once imported, runs every attention function within one that reads
        it.
        """
        return self.states.shape

    def to(self, device: torch.device | str, **options: Any) -> PendingStates:
        """These on a device: layers that share keys ask for them on theirs."""
        if (states := self.states.to(device, **options)) is self.states:
            return self
        moved = PendingStates(self.layer, states)
        moved.is_appended = self.is_appended
        return moved

    @classmethod
    def misused(cls, what: str) -> Exception:
        return CacheError(
            f"a LevelCacheLayer keeps no dense keys, and another attention function asked for them ({what}). Use it "
            "with an attention that register_attention() made, model.set_attn_implementation(name), or generate "
            "without cache"
        )


class LevelCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one attention layer inside ``transformers.Cache(layers=[...])``.

    ``update`` appends nothing: it returns ``PendingStates``, and structured attention gives them to
    ``attend``, with the layout.

    Args:
        max_length: tokens to take memory for at once. Default ``None``: it grows by pages.
        page_size, storage: see ``LevelCache``.

    Attributes:
        level_cache: made for the first tokens, and ``None`` before.
        token_scores: those of the tokens that come next, (B, G, T), for a storage with ``keep``; the
            attention module sets them.

    Raises:
        ConfigError: an option is out of its range.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True
    has_positions = (
        False  # whether it knows the positions of new tokens, so that those of the model show no packed sequences
    )

    def __init__(
        self,
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        storage: Storage | Sequence[Storage | None] | None = None,
    ) -> None:
        LevelCache(max_length=max_length, page_size=page_size)  # checks both
        super().__init__()
        self.storage = checked_storage(storage)
        self.max_length = max_length
        self.page_size = page_size
        self.number = new_number(self)
        self._count = Count()
        self._level_cache: LevelCache | None = None
        self.record_past = False
        self._variant: Variant | None = None
        self._recording: Recording | None = None
        self.last_call: object = None  # what attention remembers of it, if it was simple
        self.token_scores: Tensor | None = None  # of the tokens that come next
        self._last_scores: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The recording and the last call refer to tensors and modules of calls.
        return {
            **self.__dict__,
            "_recording": None,
            "last_call": None,
            "number": None,
            "token_scores": None,
            "_last_scores": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.number = new_number(self)

    def __copy__(self) -> LevelCacheLayer:
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        return f"LevelCacheLayer({self.level_cache})"

    @property
    def level_cache(self) -> LevelCache | None:
        """The cache of the layer; its tokens are counted where a compiled program finds them before there is
        a cache.
        """
        return self._level_cache

    @level_cache.setter
    def level_cache(self, cache: LevelCache | None) -> None:
        if self._level_cache is not None:
            self._level_cache.count_with(Count())
        self._count.tokens = 0
        if cache is not None:
            cache.count_with(self._count)
        self._level_cache = cache

    @property
    def is_recording(self) -> bool:
        """Whether tokens are remembered, to remove more of them than the cache can."""
        return self.record_past or self._recording is not None

    def taken_scores(self) -> Tensor | None:
        """``token_scores``, which new tokens use up."""
        scores = self.token_scores if self.chooses_tokens else None
        self.token_scores, self._last_scores = None, scores
        return scores

    @property
    def chooses_tokens(self) -> bool:
        """Whether key heads keep only some of the far tokens, by ``token_scores``."""
        return chooses_tokens(self.storage)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return 0 if self.level_cache is None else self.level_cache.nbytes

    @property
    def batch_size(self) -> int:
        """B, known from the first tokens on."""
        size = None if self.level_cache is None else self.level_cache.batch_size
        if size is None:
            raise AttributeError("the batch size is known from the first tokens on")
        return size

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: memory is taken for the first tokens, when the layout is known."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """New keys (after rotary embedding) and values, (B, G, T, D), as ``PendingStates``."""
        return PendingStates(self, key_states), PendingStates(self, value_states)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        variant: Variant,
        terms: ScoreTerms = NO_TERMS,
        *,
        module: object = None,
        left_padding: tuple[int, ...] | None = None,
        first: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Appends new tokens and returns the attention of their queries over all tokens so far.

        Args:
            q, k, v: of the new tokens, as ``LevelCache.attend``.
            variant: layout, window and backend; the same at every call, as are ``module`` and
                ``left_padding``.
            terms: of the model; the scale as of ``Variant.scaled``, the mask over all tokens, as in
                ``LevelCache.attend``.
            module: the attention module that calls. Default ``None``: not known.
            left_padding: padding of each row.
            first: computes the attention while the cache is empty, unless a ``storage`` says that far tokens
                are quantized. Default ``None``: the cache computes it.

        Returns:
            (B, H, T, V).

        Raises:
            CacheError: layout, window or padding differ from those that the cache was made for.
            ConfigError: it was filled by another module.
        """
        scores = self.taken_scores()
        cache = self._ready_for(k, v, variant, module, left_padding, scores)
        if first is not None and cache.length == 0 and self.storage is None:
            out = first()
            cache.append(k, v)
            return out
        q, terms = variant.fitted(q, terms)
        count = q.shape[2]
        q, attn_mask = with_left_out(q, terms.attn_mask, k.shape[2] - count)
        out = cache.attend(
            q,
            k,
            v,
            scale=terms.scale,
            backend=variant.backend,
            softcap=terms.softcap,
            sinks=terms.sinks,
            attn_mask=attn_mask,
            alibi_slopes=terms.alibi_slopes,
            token_scores=scores,
        )
        return out[:, :, -count:]

    def append(
        self,
        k: Tensor,
        v: Tensor,
        variant: Variant,
        *,
        module: object = None,
        left_padding: tuple[int, ...] | None = None,
    ) -> None:
        """Appends new tokens; arguments and errors as ``attend``."""
        scores = self.taken_scores()
        self._ready_for(k, v, variant, module, left_padding, scores).append(k, v, token_scores=scores)

    def _ready_for(
        self,
        k: Tensor,
        v: Tensor,
        variant: Variant,
        module: object,
        left_padding: tuple[int, ...] | None,
        scores: Tensor | None,
    ) -> LevelCache:
        """The cache of an attention module for these tokens."""

        def new() -> LevelCache:
            self._variant = variant
            return self._empty(variant, left_padding)

        def append(cache: LevelCache, count: int) -> None:
            of_these = None if scores is None else scores[:, :, :count]
            cache.append(k[:, :, :count], v[:, :, :count], token_scores=of_these)

        cache = self.ready(new, append, left_padding, k.shape[2])
        if self._variant != variant:
            raise CacheError(
                f"this cache layer was filled for {self._variant} and is now used with {variant}: one cache serves one "
                "model; reset() it or make another"
            )
        if module is not None:
            cache.bind(module)
        return cache

    def _empty(self, variant: Variant, left_padding: tuple[int, ...] | None) -> LevelCache:
        return LevelCache(
            variant.layout,
            window=variant.window,
            chunk_size=variant.chunk_size,
            max_length=self.max_length,
            page_size=self.page_size,
            left_padding=_nonzero(left_padding),
            storage=self.storage,
        )

    @contextmanager
    def uncounted(self, num_past: int, *, again: bool = False) -> Iterator[None]:
        """See ``LevelCache.uncounted``."""
        count, cache = self._count, self._level_cache
        counted = count.tokens
        if cache is None and num_past != 0:
            raise CacheError(
                f"this layer of the cache is empty, and the compiled program counts {num_past} tokens in it"
            )
        with nullcontext() if cache is None else cache.uncounted(num_past, again=again):
            if again:
                self.token_scores = self._last_scores
            try:
                yield
            finally:
                count.tokens = counted

    def count_traced(self, tokens: int) -> None:
        """Counts in code that ``torch.compile`` traces what an operator has appended, which a compiler does
        not see.
        """
        self._count.tokens = tokens

    def dense_past(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LevelCache.dense_past``."""
        assert self.level_cache is not None
        return self.level_cache.dense_past(k, v)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        variant: Variant,
        terms: ScoreTerms,
        left_padding: tuple[int, ...] | None = None,
    ) -> Tensor:
        """The attention weights of new tokens after those in the cache, (B, H, T, S); arguments as
        ``attend``.
        """
        cache = self.level_cache
        if cache is None or cache.length == 0:
            cache = self._empty(variant, left_padding)
        q, terms = variant.fitted(q, terms)
        return cache.weights(
            q,
            k,
            v,
            scale=terms.scale,
            softcap=terms.softcap,
            sinks=terms.sinks,
            attn_mask=terms.attn_mask,
            alibi_slopes=terms.alibi_slopes,
        )

    def ready(
        self, new: Callable[[], LevelCache], append: Append, left_padding: tuple[int, ...] | None, count: int
    ) -> LevelCache:
        """The cache, made by ``new`` if there is none, to which the caller appends ``count`` tokens at once.

        Args:
            append: appends the first of those tokens to a cache, in case they must be appended again.

        Raises:
            CacheError: the padding is not that of the tokens so far.
        """
        cache = self.level_cache
        if cache is None or cache.length == 0:  # after a crop to no tokens, another batch may follow
            cache = self.level_cache = new()
            self._recording = None  # of a first call that broke off
            self.is_initialized = True
        if cache.length > 0 and _nonzero(cache.left_padding) != _nonzero(left_padding):
            raise CacheError(
                f"the left padding changed while the cache was filled, from {cache.left_padding} to {left_padding}: "
                "give the attention mask of all tokens, cached and new, at every step, one cache to one batch, and a "
                "first chunk that reaches a real token of every row"
            )
        if not self.record_past:
            self._recording = None
        else:
            if self._recording is None:
                self._recording = Recording(copy.deepcopy(cache))
            self._recording.add(cache.length, count, append)
        return cache

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self._count.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys after the next tokens, 0): what levels have dropped still counts."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its older name

    def reset(self) -> None:
        """Clears everything, including the layout and the padding."""
        self.level_cache = None
        self._variant = None
        self._recording = None
        self.last_call = self.token_scores = self._last_scores = None  # which hold what was cached
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """From now on, what was appended since the last ``crop`` can be removed across a block boundary as
        well.
        """
        self.record_past = True

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last tokens, of this layer only; ``LevelCaches.crop`` removes those of all layers.

        Args:
            tokens_to_remove: minus the number of tokens, an int (up to transformers 5.17 also a tensor of
                one); 0 only drops the recording.

        Raises:
            CacheError: a positive number; or a level would need keys that it has dropped, and nothing was
                recorded. Nothing is changed then.
        """
        self.cropped(removed_tokens(tokens_to_remove))()

    def cropped(self, count: int) -> Callable[[], None]:
        """What removes the last ``count`` tokens, once it is called, and cannot fail: all that can is done
        before.

        Raises:
            CacheError: as ``crop``; nothing is changed.
        """
        cache = self.level_cache
        if cache is None or count == 0:
            return partial(self._go_on, cache)
        length = cache.length - count
        if length < 0:
            raise CacheError(f"cannot remove {count} of {cache.length} tokens")
        try:
            cache.check_crop(length)
        except CacheError:
            if self._recording is None or length < self._recording.cache.length:
                raise
            return partial(self._go_on, self._recording.replay(length))

        def crop() -> None:
            cache.crop(length)
            self._go_on(cache)

        return crop

    def _go_on(self, cache: LevelCache | None) -> None:
        self.level_cache, self._recording = cache, None

    def check_rows(self, change: RowChange, argument: Any) -> None:
        """Raises what this change of the rows would raise, and changes nothing.

        Args:
            change: ``"reorder_cache"``, ``"batch_repeat_interleave"`` or ``"batch_select_indices"``.
            argument: of the method of that name.
        """
        cache = LevelCache() if self.level_cache is None else self.level_cache
        match change:
            case "reorder_cache":
                cache.check_reorder(argument)
            case "batch_repeat_interleave":
                cache.check_repeats(argument)
            case "batch_select_indices":
                cache.check_select(_indices(argument, cache.batch_size))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes row ``beam_idx[b]``; raises ``ShapeError``, and changes nothing, where that cannot
        be.
        """
        self.check_rows("reorder_cache", beam_idx)
        if self.level_cache is not None:
            self.level_cache.reorder(beam_idx)
        self._recording = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times; raises ``ConfigError``, and changes nothing, where that cannot be."""
        self.check_rows("batch_repeat_interleave", repeats)
        if self.level_cache is not None:
            self.level_cache.repeat_interleave(repeats)
        self._recording = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, given as ints or as a bool mask; raises ``ShapeError``, and changes nothing,
        where there are no such rows.
        """
        self.check_rows("batch_select_indices", indices)
        if self.level_cache is not None:
            self.level_cache.select(_indices(indices, self.level_cache.batch_size))
        self._recording = None

    def undo(self) -> None:
        """Removes the last tokens; see ``LevelCache.undo``. Their scores are those of the next ones again."""
        if self.level_cache is not None:
            self.level_cache.undo()
            self.token_scores = self._last_scores

    def offload(self) -> None:
        """Not supported: raises ``CacheError``."""
        raise CacheError("a LevelCacheLayer cannot be offloaded: leave cache_implementation='offloaded' away")

    prefetch = offload


def removed_tokens(tokens_to_remove: int | Tensor) -> int:
    """The number of tokens that ``crop`` is asked to remove; raises ``CacheError`` or ``ConfigError`` where
    it is none.
    """
    is_one = isinstance(tokens_to_remove, Tensor) and tokens_to_remove.numel() == 1
    check_int("tokens_to_remove", int(tokens_to_remove) if is_one else tokens_to_remove)
    if tokens_to_remove > 0:
        raise CacheError(f"crop takes minus the number of tokens to remove, got {int(tokens_to_remove)}")
    return -int(tokens_to_remove)


def _indices(rows: Tensor, batch: int | None) -> Tensor:
    """Rows as ints, from ints or from a bool mask."""
    check_tensor("indices", rows)
    if rows.dtype != torch.bool:
        return rows
    if rows.dim() != 1 or batch not in (None, len(rows)):
        raise ShapeError(f"a mask of rows must have shape ({batch},), one bool per row, got {tuple(rows.shape)}")
    return rows.nonzero()[:, 0]


def _nonzero(padding: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return padding if padding is not None and any(padding) else None


def with_left_out(q: Tensor, attn_mask: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
    """Queries, and a mask of theirs, with zeros in front for those that a layer has left out."""
    if count > 0:
        q = F.pad(q, (0, 0, count, 0))
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            attn_mask = F.pad(attn_mask, (0, 0, count, 0))
    return q, attn_mask
