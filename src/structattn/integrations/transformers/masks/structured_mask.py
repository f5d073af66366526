"""Replaces an attention mask: the 2-dimensional padding mask of transformers, which is never expanded to T x
S.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from structattn.checks import is_exporting
from structattn.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequence boundaries, as ``structured_attention`` takes them: at most one of the two is given.

    Attributes:
        left_padding: (B,) int64.
        cu_seqlens: (N + 1,) int64.
    """

    left_padding: Tensor | None = None
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Padding:
    """What a padding mask hides.

    Attributes:
        left: leading padding of each row, (B,) int64.
        ints: the same as ints of the host, ``None`` in code that torch.compile traces.
        hidden: (B, S) bool, keys after the first real one that are hidden; ``None`` where there are none.
        is_unseen: whether all of those are behind the last real token of their row; bool () in code that
            torch.compile traces.
    """

    left: Tensor
    ints: tuple[int, ...] | None
    hidden: Tensor | None
    is_unseen: bool | Tensor


_HIDDEN = -1e3  # a number that is added to a score hides the pair from here on: exp of it is 0

_EMPTY = "the attention mask is zero everywhere, which hides every token: it is 1 where a token is real"

_COMPILED_HOLES = (
    "the attention mask hides tokens between real ones, which a compiled model does not take in training: leave this "
    "batch uncompiled"
)


def read_padding(attention_mask: Tensor | None, num_keys: int) -> Padding | None:
    """What a padding mask hides: on the left, on the right or between.

    Args:
        attention_mask: (B, S) bool or int, nonzero where a token is real; it covers the cached tokens too.
        num_keys: S.

    Returns:
        ``None`` when nothing has to be hidden.

    Raises:
        ConfigError: the mask is not 2-dimensional, does not cover all tokens, or hides all.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ConfigError(f"structured attention takes a padding mask of shape (batch, tokens), got {shape}")
    if attention_mask.shape[1] != num_keys:
        raise ConfigError(
            f"the attention mask must cover the cached tokens and the new ones: expected {num_keys} columns, got "
            f"{attention_mask.shape[1]}"
        )
    real = attention_mask != 0
    is_empty = ~real.any()
    left = (real.cumsum(dim=1) == 0).sum(dim=1)
    hidden = ~real & (torch.arange(num_keys, device=real.device) >= left[:, None])
    is_unseen = (hidden.cumsum(dim=1).masked_fill(~real, 0) == 0).all()
    if torch.compiler.is_compiling():
        torch._assert_async(~is_empty, _EMPTY)
        return Padding(left=left, ints=None, hidden=hidden, is_unseen=is_unseen)
    *counts, empty, has_hidden, unseen = torch.cat(
        [left, torch.stack([is_empty, hidden.any(), is_unseen]).long()]
    ).tolist()
    if empty:
        raise ConfigError(_EMPTY)
    if not any(counts) and not has_hidden:
        return None
    return Padding(left=left, ints=tuple(counts), hidden=hidden if has_hidden else None, is_unseen=bool(unseen))


def jumps(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where positions (B, T) do not rise by 1, bool (B, T), the first one aside; and the index (T,) of the
    token before each.

    All tensors have T numbers. Of those with T - 1, such as ``diff`` makes, a compiler takes for granted that
    T - 1 > 1, and a program that it exports refuses 1 and 2 tokens.
    """
    steps = torch.arange(position_ids.shape[1], device=position_ids.device)
    previous = (steps - 1).clamp(min=0)
    return (position_ids != position_ids[:, previous] + 1) & (steps > 0), previous


def read_packing(position_ids: Tensor | None, attention_mask: Tensor | None, num_past: int) -> Tensor | None:
    """The offsets of sequences that ``position_ids`` packs in one row.

    Args:
        position_ids: (1 or B, T); a new sequence starts wherever it does not rise by 1.
        attention_mask: (B, S), as ``read_padding``; jumps of the positions inside padding mean nothing.
        num_past: S - T.

    Returns:
        (N + 1,) int64 offsets; ``None`` when nothing is packed.

    Raises:
        ConfigError: sequences are packed in a batch of several rows, after cached tokens or with a padding
            mask; or the positions are not of shape (B, T).
    """
    if position_ids is None:
        return None
    if position_ids.dim() != 2:
        raise ConfigError(
            f"structured attention knows positions of shape (batch, tokens), got {tuple(position_ids.shape)}: "
            "positions along several axes (images, video) are not supported"
        )
    if position_ids.shape[1] == 1:
        return None
    starts, previous = jumps(position_ids)
    if attention_mask is not None:
        real = attention_mask[:, num_past:] != 0
        starts = starts & real & real[:, previous]
    if torch.compiler.is_compiling():
        torch._assert_async(
            ~starts.any(), "sequences packed by position_ids cannot be compiled: leave this batch uncompiled, or pad it"
        )
        return None
    if not bool(starts.any()):
        return None
    for wrong, what in (
        (starts.shape[0] != 1, f"a batch of {starts.shape[0]} rows"),
        (num_past > 0, "tokens after cached ones"),
        (attention_mask is not None, "a batch with an attention mask"),
    ):
        if wrong:
            raise ConfigError(
                "position_ids start again inside a row (packed sequences), which is supported for one row without a "
                f"cache and without an attention mask, not for {what}"
            )
    inner = starts[0].nonzero()[:, 0]
    return torch.cat([inner.new_zeros(1), inner, inner.new_tensor([position_ids.shape[1]])])


class _ForeignUseError(ConfigError, AttributeError):
    """Another attention function used a structured mask. Also an ``AttributeError``, so that ``hasattr`` is
    false as for any object.
    """


class Placeholder:
    """Goes through the code of a model in place of a tensor, and must not be computed with: any use raises an
    error.
    """

    @classmethod
    @abstractmethod
    def misused(cls, what: str) -> Exception:
        """The error for a use, which ``what`` names: a function, an attribute or indexing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise cls.misused(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python looks these names up itself, for example to copy an object
            raise AttributeError(name)
        raise self.misused(name)

    def __getitem__(self, index: object) -> Any:
        raise self.misused("indexing")


@dataclass(eq=False, kw_only=True)
class StructuredMask(Placeholder):
    """What ``structured_mask`` returns: one for all layers of a forward pass. A model that computes with it
    gets a ``ConfigError``.

    Or it is made of a 4-dimensional mask, which says all by itself: what is causal, and which sequences are
    packed.

    Attributes:
        num_queries, num_keys: T and S.
        attention_mask: (B, S) bool, as given; ``None`` when all tokens are real.
        is_causal: whether tokens see only earlier ones.
        window: sliding window of these layers, ``None`` for none.
        chunk_size: tokens only see their own chunk of this many; ``None`` for none.
        packed: (B, T) int64, equal numbers are one sequence, where transformers found packed sequences.
        pairs: (1 or B, 1 or H, T, S), a 4-dimensional mask: bool, true where a pair may attend, or added to
            the scores; ``None`` for none.
        last_of: the mask of all queries, of which this one has the last.
        num_new: new tokens, T or more where queries are left out.

    Raises:
        ConfigError: see ``read_padding``.
    """

    ndim = 2  # a model that adds to masks of all pairs leaves it as it is (Falcon)

    num_queries: int
    num_keys: int
    attention_mask: Tensor | None
    is_causal: bool = True
    window: int | None = None
    chunk_size: int | None = None
    packed: Tensor | None = None
    pairs: Tensor | None = None
    last_of: StructuredMask | None = None
    num_new: int = 0

    def __post_init__(self) -> None:
        self.num_new = self.num_new or self.num_queries
        self.is_next_token = (
            False  # it is causal attention of one token to all before it, with a window or chunks at most
        )
        self._sequences: Sequences | None = None
        if self.last_of is not None:
            self._padding: Padding | None = self.last_of._padding
            return
        self._padding = read_padding(self.attention_mask, self.num_keys)
        is_one = self.num_queries == 1 and self.num_new == 1 and self.is_causal
        self.is_next_token = is_one and self.pairs is None and self.packed is None and self._padding is None

    @classmethod
    def of_pairs(cls, pairs: Tensor, num_queries: int, num_keys: int, num_new: int) -> Self:
        """A 4-dimensional mask.

        Raises:
            ConfigError: it is neither bool nor floating point, or not of shape (B or 1, H or 1, T, S).
        """
        if pairs.dtype != torch.bool and not pairs.is_floating_point():
            raise ConfigError(
                "a 4-dimensional attention mask is bool, true where a pair may attend, or floating point and added to "
                f"the scores, got {pairs.dtype}: a mask of 0 and 1 is mask != 0"
            )
        if pairs.dim() != 4 or pairs.shape[2] not in (1, num_queries) or pairs.shape[3] != num_keys:
            raise ConfigError(
                f"a 4-dimensional attention mask must have a row for each of {num_queries} new tokens and a column for "
                f"each of {num_keys}, cached and new, got shape {tuple(pairs.shape)}"
            )
        return cls(
            num_queries=num_queries,
            num_keys=num_keys,
            num_new=num_new,
            attention_mask=None,
            is_causal=False,
            pairs=pairs,
        )

    def check_later(self, remedy: str) -> None:
        """Raises ``ConfigError`` where a 4-dimensional mask shows a token one that comes after it."""
        if self.pairs is None or self.num_queries == 1:
            return
        new = self.pairs[..., self.num_past :].expand(-1, -1, self.num_queries, -1)
        shown = new if new.dtype == torch.bool else new > _HIDDEN
        shows_later = shown.triu(1).any()
        message = f"the 4-dimensional attention mask shows tokens what comes after them, {remedy}"
        if torch.compiler.is_compiling():
            torch._assert_async(~shows_later, message)
        elif shows_later:
            raise ConfigError(message)

    @classmethod
    def misused(cls, what: str) -> Exception:
        return _ForeignUseError(
            f"this model computes with the attention mask itself ({what}), so structured attention cannot replace its "
            "attention: choose another model, or set its own attn_implementation back"
        )

    def __getitem__(self, index: object) -> StructuredMask:
        """That of the last queries, ``mask[:, :, -count:, :]``: layers that read the keys of others leave out
        the rest of a prompt.
        """
        every = slice(None)
        match index:
            case (a, b, slice(start=int(start), stop=None, step=None), c) if (a, b, c) == (every, every, every):
                count = len(range(self.num_queries)[start:])
                return self if count == self.num_queries else replace(self, num_queries=count, last_of=self)
        raise self.misused("indexing")

    def to(self, *_: Any, **__: Any) -> StructuredMask:
        """Itself: a model may want another dtype or device (MPT), and what is hidden stays hidden."""
        return self

    def within(self, window: int) -> StructuredMask:
        """That of layers that have a window of their own."""
        return replace(self, window=window, last_of=self)

    @property
    def num_past(self) -> int:
        """Tokens before the new ones."""
        return self.num_keys - self.num_new

    def sequences(self, position_ids: Tensor | None, cu_seqlens: Tensor | None = None, *, has_cache: bool) -> Sequences:
        """Where sequences begin, with the packing that is given or that positions show. The first layer finds
        the packing, once.

        Args:
            position_ids: see ``read_packing``.
            cu_seqlens: (N + 1,) int, offsets of packed sequences, as flash attention takes them.
            has_cache: whether the layer has a cache.

        Raises:
            ConfigError: see ``read_packing``; offsets that contradict the positions; or packed sequences with
                a cache.
        """
        if self.last_of is not None:
            whole = self.last_of.sequences(position_ids, cu_seqlens, has_cache=has_cache)
            if whole.cu_seqlens is not None and self.num_queries != self.last_of.num_queries:
                raise ConfigError("packed sequences need all their queries: leave logits_to_keep away")
            return whole
        if self._sequences is None:
            if self.pairs is not None:
                position_ids = None
            elif self.packed is not None and not torch.compiler.is_compiling():
                position_ids = _positions(self.packed)
            elif not self.is_causal:  # transformers separates packed sequences in causal masks only
                position_ids = None
            offsets = read_packing(position_ids, self.attention_mask, self.num_past)
            if cu_seqlens is not None:
                offsets = self._given(cu_seqlens, offsets)
            left = None if self._padding is None or offsets is not None else self._padding.left
            self._sequences = Sequences(left_padding=left, cu_seqlens=offsets)
        if self._sequences.cu_seqlens is not None and has_cache:
            raise ConfigError(
                "position_ids start again inside a row (packed sequences), which a cache cannot separate: pass "
                "use_cache=False"
            )
        return self._sequences

    def _given(self, cu_seqlens: Tensor, shown: Tensor | None) -> Tensor:
        """The given offsets; raises if they contradict the positions."""
        if self.attention_mask is not None or self.pairs is not None or self.num_past > 0:
            raise ConfigError("cu_seq_lens_q is for packed sequences without a cache and without an attention mask")
        offsets = cu_seqlens.to(torch.int64)
        if shown is not None and not torch.equal(offsets, shown.to(offsets.device)):
            raise ConfigError(
                f"cu_seq_lens_q and position_ids show different sequences: {offsets.tolist()} and {shown.tolist()}"
            )
        return offsets

    @property
    def left_padding(self) -> Tensor | None:
        """The padding of each row, (B,) int64."""
        return None if self._padding is None else self._padding.left

    @property
    def padding_counts(self) -> tuple[int, ...] | None:
        """The padding of each row as ints, which a cache needs; raises ``ConfigError`` in a call that is
        exported, where it has no value.
        """
        if self._padding is None:
            return None
        if self._padding.ints is None and is_exporting():
            raise ConfigError(
                "an exported program cannot read the padding that its cache would need from an attention_mask: export "
                "a call with use_cache=False, or generation with "
                "structattn.integrations.transformers.export_decoder(model, max_length=...)"
            )
        return tuple(self._padding.left.tolist()) if self._padding.ints is None else self._padding.ints

    def attn_mask(self, *, is_training: bool, position_bias: Tensor | None = None) -> Tensor | None:
        """What is hidden besides left padding, causality and window, bool or floating point, broadcastable to
        (B, H, T, S).

        Args:
            position_bias: broadcastable to (B, H, T, S), added to the scores; hidden keys stay hidden.
            is_training: causal attention then leaves padding at the end of rows out: no real token sees it,
                and the loss looks at no other. It is a faster call.

        Returns:
            ``None`` where nothing is.
        """
        shown = self._shown(is_training)
        if position_bias is None or shown is None:
            return shown if position_bias is None else position_bias
        return position_bias.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else position_bias + shown

    def _shown(self, is_training: bool) -> Tensor | None:
        if self.pairs is not None or self._padding is None or self._padding.hidden is None:
            return self.pairs
        if is_training and self.is_causal and self.num_past == 0:
            if isinstance(self._padding.is_unseen, Tensor):
                torch._assert_async(self._padding.is_unseen, _COMPILED_HOLES)
                return None
            if self._padding.is_unseen:
                return None
        return ~self._padding.hidden[:, None, None, :]


def _positions(packed: Tensor) -> Tensor:
    """Positions that start again where the number of the sequence changes."""
    steps = torch.arange(packed.shape[1], device=packed.device)
    change = torch.cat([torch.zeros_like(packed[:, :1]), packed.diff(dim=1)], dim=1) != 0
    return steps - torch.where(change, steps, 0).cummax(dim=1).values
