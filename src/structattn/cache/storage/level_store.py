"""The slots of one level: which position is in which slot of which page, so that nothing is ever moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from structattn.cache.storage.full import FullPage
from structattn.cache.storage.page import Page, check_room

PAGE_SIZE = 1024  # slots of a page, one per token
TEXT_PAGE_SIZE = 256  # of a paragraph, line or word, whose lengths are not known

# Slots on a GPU: rows that begin at 16 bytes can be loaded 16 bytes at a time, in any dtype.
_ALIGNMENT = 16


class PageSpan(NamedTuple):
    """Positions of a range that lie side by side in one page.

    Attributes:
        offset: of the first of them in the range.
        size: how many.
        page: the page.
        slot: in the page, of the first of them.
    """

    offset: int
    size: int
    page: Page
    slot: int


class LevelStore:
    """One level's numbers for the last positions: those of one block, or the last ``ring``.

    A position x of a block that starts at s is in slot x - s; in a ring, in slot x mod ``ring``. So the next
    block, or the next round, is written over the one before. Pages hold consecutive slots, in one format: see
    ``Page``.

    Args:
        dim: numbers per position and head.
        ring: positions that a ring holds; ``None`` for the positions of one block.
        longest: the most positions that are ever held; ``None`` for no limit.
        page_size: slots that are allocated at a time.
        reserve: slots that are allocated with the first one; 0 for a page.
        pages: that are there already. Default: none.

    Attributes:
        capacity: slots that are allocated.
        lost: per row (or one for all), positions before this one are held no longer, also where they are of
            the current block.
    """

    page_type: type[Page] = FullPage

    def __init__(
        self,
        dim: int,
        *,
        ring: int | None,
        longest: int | None,
        page_size: int,
        reserve: int = 0,
        pages: tuple[Page, ...] = (),
    ) -> None:
        self.dim = dim
        self.ring = ring
        self.longest = longest
        self.page_size = page_size
        self.reserve = reserve
        self.lost = [0]
        self.set_pages(pages)

    @property
    def pages(self) -> tuple[Page, ...]:
        """The pages, in the order of their slots."""
        return self._pages

    def set_pages(self, pages: tuple[Page, ...]) -> None:
        """Replaces the pages."""
        self._pages = pages
        self.capacity = sum(page.shape[3] for page in pages)

    @property
    def num_pages(self) -> int:
        """How many pages there are."""
        return len(self._pages)

    @property
    def heads(self) -> int:
        """Heads of what is stored."""
        return self._pages[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(page.nbytes for page in self._pages)

    def nbytes_of(self, slots: int, heads: tuple[int, int], like: Tensor) -> int:
        """Bytes that are allocated once there are ``slots``, for (rows, heads) and numbers ``like`` these."""
        if not slots:
            return 0
        step = _ALIGNMENT if like.is_cuda else 1
        first, size = (-(-count // step) * step for count in (self.reserve or self.page_size, self.page_size))
        capacity = first + max(0, -(-(slots - first) // size)) * size
        if self.longest is not None:
            capacity = min(capacity, -(-self.longest // step) * step)
        return self.page_type.nbytes_of((*heads, self.dim, capacity), like.dtype)

    def grow(self, slots: int, like: Tensor) -> None:
        """Allocates pages until there are ``slots`` of them, for the rows, heads, dtype and device of
        ``like`` (B, heads, ...).
        """
        while self.capacity < slots:
            size = self.reserve if self.reserve and not self.capacity else self.page_size
            if self.longest is not None:
                size = min(size, self.longest - self.capacity)
            if like.is_cuda:
                size = -(-size // _ALIGNMENT) * _ALIGNMENT
            shape = (like.shape[0], like.shape[1], self.dim, size)
            check_room(like, self.page_type.nbytes_of(shape, like.dtype))
            self._pages = (*self._pages, self.page_type.empty(shape, like))
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
                yield PageSpan(0, size - rest, self._pages[0], slot)
            if rest:
                yield PageSpan(size - rest, rest, self._pages[0], 0)
            return
        position, low, number = first, 0, 0
        while position < end:
            slot = position - start if self.ring is None else position % self.ring
            if slot < low:  # a ring begins again
                low = number = 0
            page = self._pages[number]
            size = page.shape[3]
            if slot >= low + size:
                low, number = low + size, number + 1
                continue
            count = min(end - position, low + size - slot)
            if self.ring is not None:
                count = min(count, self.ring - slot)
            yield PageSpan(position - first, count, page, slot - low)
            position += count

    def place(self, slot: int) -> tuple[Page, int]:
        """The page of a slot, and which of its slots it is."""
        for page in self._pages:
            size = page.shape[3]
            if slot < size:
                return page, slot
            slot -= size
        raise AssertionError(f"slot {slot} is beyond the pages")

    def write(self, x: Tensor, rows: slice, first: int, start: int) -> None:
        """Stores x (rows, heads, n, dim) as the positions from ``first`` on, of the block that starts at
        ``start``.
        """
        end = first + x.shape[2]
        slots = end - start if self.ring is None else min(end, self.ring)
        if x.shape[2]:
            assert self.capacity >= slots
        for span in self.spans(first, end, start):
            span.page.write(x.narrow(2, span.offset, span.size), rows, span.slot)

    def write_each(self, x: Tensor, slots: list[int | None]) -> None:
        """Stores x (B, heads, 1, dim), one position per row, in slot ``slots[b]``; ``None``: row b has
        none.
        """
        for page, rows, places in self._located(slots):
            page.write_each(x[rows, :, 0], rows, places)

    def kept(self, rows: slice, first: int, end: int, start: int) -> list[Callable[[], object]]:
        """Copies the slots of the positions first ... end - 1, and returns functions that write them back."""
        return [span.page.kept(rows, span.slot, span.size) for span in self.spans(first, end, start)]

    def kept_each(self, slots: list[int | None]) -> list[Callable[[], object]]:
        """As ``kept``, of one slot per row; see ``write_each``."""
        return [page.kept_each(rows, places) for page, rows, places in self._located(slots)]

    def _located(self, slots: list[int | None]) -> Iterator[tuple[Page, Tensor, Tensor]]:
        """Where one slot per row is: pages, with the rows whose slot is there, and these slots."""
        low = 0
        for page in self._pages:
            high = low + page.shape[3]
            rows = [row for row, slot in enumerate(slots) if slot is not None and low <= slot < high]
            if rows:
                places = [slot - low for slot in slots if slot is not None and low <= slot < high]
                both = torch.tensor([rows, places]).to(page.device, non_blocking=True)
                yield page, both[0], both[1]
            low = high

    def read(self, rows: slice, first: int, end: int, start: int) -> Tensor:
        """The positions first ... end - 1, (rows, heads, dim, n): a view where they lie side by side."""
        parts = [span.page.rows(rows, span.slot, span.size) for span in self.spans(first, end, start)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)

    def read_all(self) -> Tensor:
        """A copy of all slots, (B, heads, dim, slots), as files have them."""
        return torch.cat([page.rows(slice(None), 0, page.shape[3]) for page in self._pages], dim=3)

    @classmethod
    def of_page(cls, page: Page, *, ring: int | None, longest: int | None) -> Self:
        """A storage over numbers that are there already, to be read."""
        return cls(page.shape[2], ring=ring, longest=longest, page_size=page.shape[3], pages=(page,))
