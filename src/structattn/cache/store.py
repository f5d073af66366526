"""Where a cache keeps numbers: slots in pages, addressed by position, so that nothing is ever moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from structattn.errors import CacheError
from structattn.memory import free_memory

PAGE_SIZE = 1024  # slots of a page, one per token
TEXT_PAGE_SIZE = 256  # of a paragraph, line or word, whose lengths are not known

# Slots on a GPU: rows that begin at 16 bytes can be loaded 16 bytes at a time, in any dtype.
_ALIGNMENT = 16


class PageSpan(NamedTuple):
    """Positions of a range that lie side by side in one page.

    Attributes:
        offset: of the first of them in the range.
        size: how many.
        page: the page, (B, heads, dim, slots).
        flat: the page as (B * heads, dim, slots).
        slot: in the page, of the first of them.
    """

    offset: int
    size: int
    page: Tensor
    flat: Tensor
    slot: int

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """They, (B * heads, dim, size); a view if the dtype is theirs."""
        found = self.flat if self.size == self.flat.shape[2] else self.flat.narrow(2, self.slot, self.size)
        return found if found.dtype == dtype else found.to(dtype)

    def rows(self, rows: slice) -> Tensor:
        """Theirs of some rows of the batch, (rows, heads, dim, size), a view."""
        return self.page[rows].narrow(3, self.slot, self.size)


class Store:
    """One level's numbers for the last positions: those of one block, or the last ``ring``.

    A position x of a block that starts at s is in slot x - s; in a ring, in slot x mod ``ring``. So the next block, or the
    next round, is written over the one before. Pages hold (B, heads, dim, slots): a head's dimension is contiguous over
    positions, which makes the scores of one query a sum of few long rows.

    Args:
        dim: numbers per position and head.
        ring: positions that a ring holds; ``None`` for the positions of one block.
        longest: the most positions that are ever held; ``None`` for no limit.
        page_size: slots that are allocated at a time.
        reserve: slots that are allocated with the first one; 0 for a page.
    """

    def __init__(self, dim: int, *, ring: int | None, longest: int | None, page_size: int, reserve: int = 0) -> None:
        self.dim = dim
        self.ring = ring
        self.longest = longest
        self.page_size = page_size
        self.reserve = reserve
        self.capacity = 0  # slots that are allocated
        # (B, heads, dim, slots), and the same memory as (B * heads, dim, slots)
        self._pages: list[tuple[Tensor, Tensor]] = []
        # Per row (or one for all): positions before this one are held no longer, also where they are of the current block.
        self.lost = [0]

    @classmethod
    def of_page(cls, page: Tensor, *, ring: int | None, longest: int | None) -> Self:
        """Numbers that are there already, (B, heads, dim, slots), as one page of a level."""
        store = cls(page.shape[2], ring=ring, longest=longest, page_size=page.shape[3])
        store.pages = [page]
        return store

    # A copy gets separate memory, also where tensors would be sent to another process as shared memory. The flat views are made
    # again: copied, they would share no memory with the pages.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pages": [page.clone() for page in self.pages]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.pages = state["_pages"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = self.__class__.__new__(self.__class__)
        copied.__setstate__({**self.__getstate__(), "lost": list(self.lost)})
        return copied

    @property
    def pages(self) -> list[Tensor]:
        """The pages, (B, heads, dim, slots) each."""
        return [page for page, _ in self._pages]

    @pages.setter
    def pages(self, pages: list[Tensor]) -> None:
        with torch.inference_mode(False):  # else they could not be written to outside of that mode
            pages = [page.clone() if page.is_inference() else page for page in pages]
            self._pages = [(page, page.flatten(0, 1)) for page in pages]
        self.capacity = sum(page.shape[3] for page in pages)

    @property
    def flat_pages(self) -> list[Tensor]:
        """The same memory, (B * heads, dim, slots) each."""
        return [flat for _, flat in self._pages]

    @property
    def num_pages(self) -> int:
        """How many pages there are."""
        return len(self._pages)

    @property
    def heads(self) -> int:
        """Heads of what is stored."""
        return self._pages[0][0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(page.numel() * page.element_size() for page in self.pages)

    def grow(self, slots: int, like: Tensor) -> None:
        """Allocates pages until there are ``slots`` of them, for the rows, heads, dtype and device of ``like`` (B, heads, ...)."""
        while self.capacity < slots:
            size = self.reserve if self.reserve and not self.capacity else self.page_size
            if self.longest is not None:
                size = min(size, self.longest - self.capacity)
            if like.is_cuda:
                size = -(-size // _ALIGNMENT) * _ALIGNMENT
            _check_memory(like, like.shape[0] * like.shape[1] * self.dim * size * like.element_size())
            with torch.inference_mode(False):  # as in `pages`
                page = like.new_zeros((like.shape[0], like.shape[1], self.dim, size))
                self._pages.append((page, page.flatten(0, 1)))
            self.capacity += size

    def slot(self, position: int, start: int) -> int:
        """The slot of a position whose block starts at ``start``."""
        return position - start if self.ring is None else position % self.ring

    def spans(self, first: int, end: int, start: int) -> Iterator[PageSpan]:
        """The positions first ... end - 1 of the block that starts at ``start``, as they lie in the pages."""
        if len(self._pages) == 1:  # every step asks this for every level
            size, slot = end - first, first - start if self.ring is None else first % self.ring
            rest = 0 if self.ring is None else max(0, slot + size - self.ring)  # where a ring begins again
            if size > rest:
                yield PageSpan(0, size - rest, *self._pages[0], slot)
            if rest:
                yield PageSpan(size - rest, rest, *self._pages[0], 0)
            return
        position, low, number = first, 0, 0
        while position < end:
            slot = position - start if self.ring is None else position % self.ring
            if slot < low:  # a ring begins again
                low = number = 0
            page, flat = self._pages[number]
            size = page.shape[3]
            if slot >= low + size:
                low, number = low + size, number + 1
                continue
            count = min(end - position, low + size - slot)
            if self.ring is not None:
                count = min(count, self.ring - slot)
            yield PageSpan(position - first, count, page, flat, slot - low)
            position += count

    def write(self, x: Tensor, rows: slice, first: int, start: int) -> None:
        """Stores x (rows, heads, n, dim) as the positions from ``first`` on, of the block that starts at ``start``."""
        end = first + x.shape[2]
        slots = end - start if self.ring is None else min(end, self.ring)
        if x.shape[2]:
            assert self.capacity >= slots
        for span in self.spans(first, end, start):
            span.rows(rows).copy_(x.narrow(2, span.offset, span.size).transpose(2, 3))

    def place(self, slot: int) -> tuple[Tensor, int]:
        """The page of a slot, (B * heads, dim, slots), and which of its slots it is."""
        for _, flat in self._pages:
            if slot < flat.shape[2]:
                return flat, slot
            slot -= flat.shape[2]
        raise AssertionError(f"slot {slot} is beyond the pages")

    def write_each(self, x: Tensor, slots: list[int | None]) -> None:
        """Stores one position per row, x (B, heads, 1, dim), each in a slot of its own; ``None`` leaves a row out."""
        for page, index in self.locate(slots):
            page[index] = x[index[0], :, 0]

    def locate(self, slots: list[int | None]) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
        """Where one slot per row is: pages with an index, which gives (rows, heads, dim)."""
        low = 0
        for page in self.pages:
            high = low + page.shape[3]
            rows = [row for row, slot in enumerate(slots) if slot is not None and low <= slot < high]
            if rows:
                index = torch.tensor(rows, device=page.device)
                where = torch.tensor([slot - low for slot in slots if slot is not None and low <= slot < high])
                yield page, (index, slice(None), slice(None), where.to(page.device))
            low = high

    def read(self, rows: slice, first: int, end: int, start: int) -> Tensor:
        """The positions first ... end - 1, (rows, heads, dim, n): a view where they lie side by side."""
        parts = [span.rows(rows) for span in self.spans(first, end, start)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    def selected(self, rows: Tensor) -> list[Tensor]:
        """The pages with row ``rows[b]`` as row b."""
        with torch.inference_mode(False):  # as in `pages`
            return [page.index_select(0, rows.to(page.device)) for page in self.pages]


def _check_memory(like: Tensor, nbytes: int) -> None:
    """Raises ``CacheError`` for more memory than this machine has left: taking it would end the process, and with it all work."""
    if like.device.type == "cpu" and nbytes > 2**28:  # for less it is not worth asking
        free = free_memory()
        if free is not None and nbytes > free:
            raise CacheError(
                f"the cache would take {nbytes:,} bytes for one level of one layer, and this machine has {free:,} left: give a smaller "
                "max_length or page_size, or leave them at their defaults, with which memory grows with the tokens"
            )
