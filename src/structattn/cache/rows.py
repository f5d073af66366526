"""What the cache of a layer and those of a model share: positions, moving rows, and all layers or none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from structattn.cache.numbers import is_traced
from structattn.checks import INT_DTYPES, MAX_SIZE, check_int, check_size, check_tensor
from structattn.errors import ShapeError
from structattn.memory import check_memory


class CacheRows(ABC):
    """The rows of a cache; a class says what it keeps of them, and how it takes some of them: every move is a
    selection.
    """

    @property
    @abstractmethod
    def batch_size(self) -> int | None:
        """B; ``None`` while it is not known."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens so far, padding included."""

    @property
    @abstractmethod
    def left_padding(self) -> tuple[int, ...] | None:
        """Leading tokens of each row that are padding; ``None`` without padding."""

    @property
    def padding_tensor(self) -> Tensor | None:
        """``left_padding`` as int64 (B,); ``None`` without padding."""
        return None if self.left_padding is None else torch.tensor(self.left_padding)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are allocated."""

    @abstractmethod
    def _take_rows(self, indices: Tensor) -> None:
        """Row b becomes row ``indices[b]``, which is known to be there."""

    def positions(self, count: int) -> Tensor:
        """The positions of the next tokens in their sequences, counted from the first real token.

        Returns:
            int64 (count,), or (B, count) with left padding, negative in the padding.
        """
        if not is_traced():
            check_int("count", count, minimum=0, maximum=MAX_SIZE)
            check_memory(f"{count} positions", count * (self.batch_size or 1), torch.int64)
        steps, padding = torch.arange(self.length, self.length + count), self.padding_tensor
        return steps if padding is None else steps - padding[:, None]

    @abstractmethod
    def reset(self) -> None:
        """Forgets all tokens; memory, shape and padding stay."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``."""

    def select(self, indices: Tensor) -> None:
        """Keeps rows ``indices``, in that order; a row may be taken several times.

        Args:
            indices: (N,) int, each in [0, B).

        Raises:
            ShapeError: it is not of that shape, or an index is out of range.
        """
        self.check_select(indices)
        if self.batch_size is not None:
            self._take_rows(indices.long())

    def check_select(self, indices: Tensor) -> None:
        """Raises what ``select`` would raise, and changes nothing."""
        check_tensor("indices", indices)
        if indices.dim() != 1 or indices.dtype not in INT_DTYPES or not len(indices) or indices.is_meta:
            raise ShapeError(
                f"indices must be a 1-dimensional int tensor, not on the meta device, got {indices.dtype} "
                f"{tuple(indices.shape)}"
            )
        if self.batch_size is None:
            return
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self.batch_size:
            raise ShapeError(f"indices must lie in [0, {self.batch_size}), got {low} to {high}")

    def reorder(self, indices: Tensor) -> None:
        """Row b becomes row ``indices[b]``: what beam search does with its beams.

        Args:
            indices: (B,) int, each in [0, B).

        Raises:
            ShapeError: it is not of that shape, or an index is out of range.
        """
        self.check_reorder(indices)
        self.select(indices)

    def check_reorder(self, indices: Tensor) -> None:
        """Raises what ``reorder`` would raise, and changes nothing."""
        check_tensor("indices", indices)
        if self.batch_size is not None and tuple(indices.shape) != (self.batch_size,):
            raise ShapeError(f"indices must have shape ({self.batch_size},), one per row, got {tuple(indices.shape)}")
        self.check_select(indices)

    def repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, the copies next to each other."""
        self.check_repeats(repeats)
        if self.batch_size is not None:
            self.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def check_repeats(self, repeats: int) -> None:
        """Raises what ``repeat_interleave`` would raise, and changes nothing."""
        check_size("repeats", repeats)
        if self.batch_size is not None:
            check_memory(f"{repeats} copies of the rows", repeats * (self.nbytes + 64 * self.batch_size), torch.uint8)


class OneLayerCache(CacheRows):
    """The cache of one layer, as ``LayerCaches`` holds it."""

    @abstractmethod
    def check_crop(self, length: int) -> None:
        """Raises what ``crop`` would raise, and changes nothing."""

    @abstractmethod
    def undo(self) -> None:
        """Takes the last new tokens back."""


class Undoable(Protocol):
    """A cache whose last new tokens can be taken back."""

    @property
    def length(self) -> int:
        """Tokens so far."""

    def undo(self) -> None:
        """Takes the last new tokens back."""


@contextmanager
def all_or_nothing(caches: Iterable[Undoable]) -> Iterator[None]:
    """Within it each cache takes new tokens once. If anything fails, Ctrl-C included, those that have taken
    them lose them again.
    """
    lengths = [(cache, cache.length) for cache in caches]
    try:
        yield
    except BaseException:
        for cache, length in lengths:
            if cache.length != length:
                cache.undo()
        raise
