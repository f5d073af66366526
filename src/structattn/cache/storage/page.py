"""The interface of a format: how the numbers of some slots are kept, written and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from structattn.errors import CacheError
from structattn.memory import free_memory


def writable(numbers: Tensor) -> Tensor:
    """The tensor, or a copy of one of inference mode, which cannot be written to outside of it."""
    with torch.inference_mode(False):
        return numbers.clone() if numbers.is_inference() else numbers


def check_room(like: Tensor, nbytes: int) -> None:
    """Raises ``CacheError`` for more memory than this machine has left: taking it would end the process, and
    with it all work.
    """
    if like.device.type == "cpu" and nbytes > 2**28:  # for less it is not worth asking
        free = free_memory()
        if free is not None and nbytes > free:
            raise CacheError(
                f"the cache would take {nbytes:,} bytes for one level of one layer, and this machine has {free:,} "
                "left: give a smaller max_length or page_size, or leave them at their defaults, with which memory "
                "grows with the tokens"
            )


class Page(ABC):
    """The numbers of one level in consecutive slots, one per position, in one format: a subclass is a format.

    Python reads and writes slots by these methods only. Compiled code takes ``buffers``, and has a kernel for
    each format.

    Shapes: (B rows, heads, dim, slots). Slots are the last axis, so that a head's dimension is contiguous
    over positions, which makes the scores of one query a sum of few long rows. New tokens come with positions
    before dimensions, as the model makes them.

    Dtype: numbers go in and out in the model's dtype, whatever a format keeps; only ``numbers`` takes the
    dtype of its reader.

    Cost: reading or writing n slots touches n slots, never the rest of the page. Nothing is moved when pages
    are added.
    """

    @classmethod
    @abstractmethod
    def empty(cls, shape: tuple[int, int, int, int], like: Tensor) -> Self:
        """A page of zeros.

        Args:
            shape: (B, heads, dim, slots).
            like: has the dtype and device of the model.
        """

    @classmethod
    @abstractmethod
    def of(cls, numbers: Tensor) -> Self:
        """A page that holds numbers (B, heads, dim, slots); their memory may become its own."""

    @staticmethod
    @abstractmethod
    def nbytes_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        """Bytes of a page of that shape, for a model of that dtype."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(B, heads, dim, slots)."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it is."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[Tensor, ...]:
        """Its memory, as compiled code takes it; the class says in which shapes."""

    @abstractmethod
    def numbers(self, slot: int, size: int, dtype: torch.dtype) -> Tensor:
        """The numbers of ``size`` slots from ``slot`` on, (B * heads, dim, size); a view where possible."""

    @abstractmethod
    def rows(self, rows: slice, slot: int, size: int) -> Tensor:
        """As ``numbers``, of some rows of the batch and in the model's dtype, (rows, heads, dim, size)."""

    @abstractmethod
    def write(self, x: Tensor, rows: slice, slot: int) -> None:
        """Stores x (rows, heads, n, dim) from ``slot`` on."""

    @abstractmethod
    def write_each(self, x: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Stores x (n, heads, dim): row ``rows[i]`` in slot ``slots[i]``, both (n,)."""

    @staticmethod
    @abstractmethod
    def write_token(places: Sequence[tuple[Page, int]], numbers: Sequence[Tensor]) -> None:
        """Stores one token of all rows, (B * heads, dim) for each (page, slot), all levels in one call."""

    @abstractmethod
    def kept(self, rows: slice, slot: int, size: int) -> Callable[[], object]:
        """Copies slots that are about to be written over; returns a function that writes them back."""

    @abstractmethod
    def kept_each(self, rows: Tensor, slots: Tensor) -> Callable[[], object]:
        """As ``kept``, of one slot for each of some rows; see ``write_each``."""

    @abstractmethod
    def selected(self, rows: Tensor) -> Self:
        """A page in separate memory, with row ``rows[b]`` as row b."""
