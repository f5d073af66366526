"""Replaces an attention mask: the 2-dimensional padding mask of transformers, which is never expanded to T x S."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

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
        hidden: (B, S) bool, keys after the first real one that are hidden; only without causality, ``None`` where there are none.
    """

    left: Tensor
    ints: tuple[int, ...] | None
    hidden: Tensor | None = None


_HOLES = (
    "the attention mask hides tokens between real ones (right padding before the new tokens, or a hole): blocks are counted "
    "from the first real token. Pad on the left, tokenizer.padding_side = 'left', and give generate() the attention_mask: without one "
    "it treats every padding token as padding"
)

_EMPTY = "the attention mask is zero everywhere, which hides every token: it is 1 where a token is real"


def read_padding(
    attention_mask: Tensor | None, num_queries: int, num_keys: int, *, is_causal: bool = True
) -> Padding | None:
    """What a padding mask hides.

    Causal attention allows padding on the right where nothing follows it: in a whole batch without cached tokens. No real token
    sees it. Without causality every real token sees it, and so it is hidden.

    Args:
        attention_mask: (B, S) bool or int, nonzero where a token is real; it covers the cached tokens too.
        num_queries, num_keys: T new tokens, the last of S tokens.
        is_causal: whether tokens see only earlier ones.

    Returns:
        ``None`` when nothing has to be hidden.

    Raises:
        ConfigError: the mask is not 2-dimensional, does not cover all tokens, or hides all; or, with causality, it hides a token
            between real ones.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ConfigError(
            f"structured attention takes a padding mask of shape (batch, tokens), got {shape}: a custom 4-dimensional mask cannot "
            "be split into levels. Give the 2-dimensional mask, or pack sequences by position_ids"
        )
    if attention_mask.shape[1] != num_keys:
        raise ConfigError(
            f"the attention mask must cover the cached tokens and the new ones: expected {num_keys} columns, got "
            f"{attention_mask.shape[1]}"
        )
    real = attention_mask != 0
    is_empty = ~real.any()
    left = (real.cumsum(dim=1) == 0).sum(dim=1)
    steps = torch.arange(num_keys, device=real.device)
    hidden = None
    if is_causal:
        end = left + real.sum(dim=1)
        whole = (real == (steps >= left[:, None]) & (steps < end[:, None])).all(dim=1)
        if num_queries != num_keys:
            whole = whole & (end == num_keys)
    else:
        hidden = ~real & (steps >= left[:, None])
        whole = ~hidden.any(dim=1)
    if torch.compiler.is_compiling():
        if is_causal:
            torch._assert_async(whole.all(), _HOLES)
        torch._assert_async(~is_empty, _EMPTY)
        return Padding(left=left, ints=None, hidden=hidden)
    counts, fine, empty = torch.stack([left, whole.long(), is_empty.long().expand_as(left)]).tolist()
    if any(empty):
        raise ConfigError(_EMPTY)
    if all(fine):
        hidden = None
    elif is_causal:
        raise ConfigError(_HOLES)
    return Padding(left=left, ints=tuple(counts), hidden=hidden) if any(counts) or hidden is not None else None


def read_packing(position_ids: Tensor | None, attention_mask: Tensor | None, num_past: int) -> Tensor | None:
    """The offsets of sequences that ``position_ids`` packs in one row.

    Args:
        position_ids: (1 or B, T); a new sequence starts wherever it does not rise by 1.
        attention_mask: (B, S), as ``read_padding``; jumps of the positions inside padding mean nothing.
        num_past: S - T.

    Returns:
        (N + 1,) int64 offsets; ``None`` when nothing is packed.

    Raises:
        ConfigError: sequences are packed in a batch of several rows, after cached tokens or with a padding mask; or the
            positions are not of shape (B, T).
    """
    if position_ids is None:
        return None
    if position_ids.dim() != 2:
        raise ConfigError(
            f"structured attention knows positions of shape (batch, tokens), got {tuple(position_ids.shape)}: positions along "
            "several axes (images, video) are not supported"
        )
    if position_ids.shape[1] == 1:
        return None
    starts = position_ids.diff(dim=1) != 1
    if attention_mask is not None:
        real = attention_mask[:, num_past:] != 0
        starts = starts & real[:, 1:] & real[:, :-1]
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
                f"position_ids start again inside a row (packed sequences), which is supported for one row without a cache and "
                f"without an attention mask, not for {what}"
            )
    inner = starts[0].nonzero()[:, 0] + 1
    return torch.cat([inner.new_zeros(1), inner, inner.new_tensor([position_ids.shape[1]])])


class _ForeignUseError(ConfigError, AttributeError):
    """Another attention function used a structured mask. Also an ``AttributeError``, so that ``hasattr`` is false as for any object."""


class Placeholder:
    """Goes through the code of a model in place of a tensor, and must not be computed with: any use raises an error."""

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

    def __getitem__(self, index: object) -> NoReturn:
        raise self.misused("indexing")


@dataclass(eq=False, kw_only=True)
class StructuredMask(Placeholder):
    """What ``structured_mask`` returns: one for all layers of a forward pass. A model that computes with it gets a ``ConfigError``.

    Attributes:
        num_queries, num_keys: T and S.
        attention_mask: (B, S) bool, as given; ``None`` when all tokens are real.
        is_causal: whether tokens see only earlier ones.
        window: sliding window of these layers, ``None`` for none.
        packed: (B, T) int64, equal numbers are one sequence, where transformers found packed sequences.

    Raises:
        ConfigError: see ``read_padding``.
    """

    num_queries: int
    num_keys: int
    attention_mask: Tensor | None
    is_causal: bool = True
    window: int | None = None
    packed: Tensor | None = None

    def __post_init__(self) -> None:
        self._padding = read_padding(self.attention_mask, self.num_queries, self.num_keys, is_causal=self.is_causal)
        self._sequences: Sequences | None = None

    @classmethod
    def misused(cls, what: str) -> Exception:
        return _ForeignUseError(
            f"this model computes with the attention mask itself ({what}), so structured attention cannot replace its "
            "attention: choose another model, or set its own attn_implementation back"
        )

    @property
    def num_past(self) -> int:
        """S - T."""
        return self.num_keys - self.num_queries

    def sequences(self, position_ids: Tensor | None, cu_seqlens: Tensor | None = None, *, has_cache: bool) -> Sequences:
        """Where sequences begin, with the packing that is given or that positions show. The first layer finds the packing, once.

        Args:
            position_ids: see ``read_packing``.
            cu_seqlens: (N + 1,) int, offsets of packed sequences, as flash attention takes them.
            has_cache: whether the layer has a cache.

        Raises:
            ConfigError: see ``read_packing``; offsets that contradict the positions; or packed sequences with a cache.
        """
        if self._sequences is None:
            if self.packed is not None and not torch.compiler.is_compiling():
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
                "position_ids start again inside a row (packed sequences), which a cache cannot separate: pass use_cache=False"
            )
        return self._sequences

    def _given(self, cu_seqlens: Tensor, shown: Tensor | None) -> Tensor:
        """The given offsets; raises if they contradict the positions."""
        if self.attention_mask is not None or self.num_past > 0:
            raise ConfigError("cu_seq_lens_q is for packed sequences without a cache and without an attention mask")
        given = cu_seqlens.to(torch.int64)
        if shown is not None and not torch.equal(given, shown.to(given.device)):
            raise ConfigError(
                f"cu_seq_lens_q and position_ids show different sequences: {given.tolist()} and {shown.tolist()}"
            )
        return given

    @property
    def padding_counts(self) -> tuple[int, ...] | None:
        """The padding of each row as ints."""
        if self._padding is None:
            return None
        return tuple(self._padding.left.tolist()) if self._padding.ints is None else self._padding.ints

    @property
    def real_keys(self) -> Tensor | None:
        """Keys that are not hidden, (B, 1, 1, S) bool; ``None`` where padding hides none after the first real one."""
        if self._padding is None or self._padding.hidden is None:
            return None
        return ~self._padding.hidden[:, None, None, :]


def _positions(packed: Tensor) -> Tensor:
    """Positions that start again where the number of the sequence changes."""
    steps = torch.arange(packed.shape[1], device=packed.device)
    change = torch.cat([torch.zeros_like(packed[:, :1]), packed.diff(dim=1)], dim=1) != 0
    return steps - torch.where(change, steps, 0).cummax(dim=1).values
