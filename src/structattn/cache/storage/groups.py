"""The quantized tokens of one level: codes in groups of consecutive positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from structattn.cache.storage.page import check_room, writable
from structattn.cache.storage.quantize import GroupFormat
from structattn.errors import CheckpointError
from structattn.ops.checks import without_autocast

_NAMES = ("codes", "scale", "zero")


class GroupStore:
    """One level's numbers for the positions that have left the residual, of those of a block, or of the last
    ones of a window.

    Group m has the positions m g to (m + 1) g - 1 and is in slot m - s, with s the first group of its block,
    or in slot m modulo the slots of a ring.

    Args:
        format: of its numbers; g is its ``group_size``.
        ring: slots, where a window forgets groups; ``None`` where a block does, or nothing.
        longest: the most slots; ``None`` for no limit.
        page_size: slots are allocated in multiples of this, and no more than ``reserve``, if that is enough.
        reserve: slots that are expected at most; ``None`` where nothing is.

    Attributes:
        end: per row (or one for all), the position after the last that is quantized.
        first: likewise, positions before this one are held no longer.
        pages: (codes, scale, zero) of each page. Codes are (B, heads, slots, dim, bytes of a group). Scales
            and zeros of keys are (B, heads, slots, dim, 1), those of values (B, heads, slots, parts, g).
    """

    def __init__(
        self, format: GroupFormat, *, ring: int | None, longest: int | None, page_size: int, reserve: int | None = None
    ) -> None:
        self.format = format
        self.ring, self.longest, self.page_size, self.reserve = ring, longest, page_size, reserve
        self.end, self.first = [0], [0]
        self.pages: list[tuple[Tensor, Tensor, Tensor]] = []
        self._places: tuple[list[tuple[Tensor, Tensor, Tensor]], int, Tensor] | None = None  # of so many pages

    names = _NAMES

    # A copy gets separate memory: see `FullPage`.

    def __getstate__(self) -> dict[str, Any]:
        pages = [tuple(x.clone() for x in page) for page in self.pages]
        return {**self.__dict__, "pages": pages, "_places": None}  # addresses are those of this memory

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_pages(state["pages"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        copied.__setstate__({**self.__getstate__(), "end": list(self.end), "first": list(self.first)})
        return copied

    def _take_pages(self, pages: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.pages = [(writable(codes), writable(scale), writable(zero)) for codes, scale, zero in pages]

    @property
    def capacity(self) -> int:
        """Slots that are allocated."""
        return sum(page[0].shape[2] for page in self.pages)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(x.numel() * x.element_size() for page in self.pages for x in page)

    def nbytes_of(self, slots: int, heads: tuple[int, int], dtype: torch.dtype) -> int:
        """Bytes that are allocated once there are ``slots``, for (rows, heads) of a model of a dtype."""
        of_slot = sum(math.prod(shape) * kind.itemsize for shape, kind in self.format.tensors(dtype))
        return math.prod(heads) * self._capacity_of(slots) * of_slot

    def _capacity_of(self, slots: int) -> int:
        """Slots that are allocated once there are ``slots``."""
        capacity = -(-slots // self.page_size) * self.page_size
        if self.reserve is not None and slots <= self.reserve:
            capacity = min(capacity, self.reserve)
        return capacity if self.longest is None else min(capacity, self.longest)

    def slot(self, group: int, start: int) -> int:
        """The slot of a group, of a block that starts at position ``start``."""
        return group - start // self.format.group_size if self.ring is None else group % self.ring

    def grow(self, slots: int, batch: int, like: Tensor) -> None:
        """Allocates what is missing until there are ``slots``, for ``batch`` rows and the heads, dtype and
        device of ``like`` (rows, heads, ...): as one page, since a step takes time for each.
        """
        if (capacity := self.capacity) >= slots:
            return
        size = self._capacity_of(slots) - capacity
        of_slot = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.format.tensors(like.dtype))
        check_room(like, batch * like.shape[1] * size * of_slot)
        with torch.inference_mode(False):  # else they could not be written to outside of that mode
            codes, scale, zero = (
                like.new_zeros((batch, like.shape[1], size, *shape), dtype=dtype)
                for shape, dtype in self.format.tensors(like.dtype)
            )
        self.pages.append((codes, scale, zero))

    def place(self, slot: int) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        """The page of a slot, and which of its slots it is."""
        for page in self.pages:
            if slot < page[0].shape[2]:
                return page, slot
            slot -= page[0].shape[2]
        raise AssertionError(f"slot {slot} is beyond the pages")

    def places(self) -> Tensor:
        """Where the slots of all pages are, int64 (4, slots): how many elements after the first of the first
        page the codes, the scale and the zero of the first row and head begin, and the slots of their page.
        """
        if self._places is None or self._places[0] is not self.pages or self._places[1] != len(self.pages):
            columns = []
            for page in self.pages:
                slots = torch.arange(page[0].shape[2])
                starts = [
                    (x.data_ptr() - first.data_ptr()) // x.element_size() + slots * x.stride(2)
                    for x, first in zip(page, self.pages[0], strict=True)
                ]
                columns.append(torch.stack([*starts, torch.full_like(slots, len(slots))]))
            places = torch.cat(columns, dim=1).to(self.pages[0][0].device)
            self._places = self.pages, len(self.pages), places
        return self._places[2]

    def _spans(
        self, group: int, count: int, start: int
    ) -> Iterator[tuple[int, int, tuple[Tensor, Tensor, Tensor], int]]:
        """Groups ``group`` ... as they lie in the pages: which is the first, how many, the page, and its
        slot.
        """
        done = 0
        while done < count:
            slot = self.slot(group + done, start)
            page, at = self.place(slot)
            size = min(count - done, page[0].shape[2] - at)
            if self.ring is not None:
                size = min(size, self.ring - slot)
            yield done, size, page, at
            done += size

    def write(
        self,
        stored: tuple[Tensor, Tensor, Tensor],
        rows: slice,
        group: int,
        start: int,
        overwritten: list[Callable[[], object]] | None,
    ) -> None:
        """Writes groups that follow each other in one block.

        Args:
            stored: codes, scale and zero of n groups, of ``GroupFormat``.
            rows: of the batch.
            group: the number of the first one.
            start: of their block.
            overwritten: gets functions that write back what was there.
        """
        for first, size, page, slot in self._spans(group, stored[0].shape[2], start):
            for held, new in zip(page, stored, strict=True):
                there = held[rows, :, slot : slot + size]
                if overwritten is not None:
                    overwritten.append(partial(there.copy_, there.clone()))
                there.copy_(new[:, :, first : first + size])

    def replace(
        self,
        first: int,
        end: int,
        stored: tuple[Tensor, Tensor, Tensor],
        overwritten: list[Callable[[], object]],
    ) -> None:
        """Puts other groups in the place of groups first ... end - 1, at most as many; those after them move
        up, with their codes. For stores that are no ring, of rows at one position.

        Args:
            stored: codes, scale and zero of n groups, of ``GroupFormat``.
            overwritten: gets functions that make it what it was.
        """
        before, size = self.end, self.format.group_size
        spans = list(self._spans(first, before[0] // size - first, 0))
        parts = [[page[n][:, :, at : at + count] for _, count, page, at in spans] for n in range(len(_NAMES))]
        with without_autocast(stored[0]):
            old = [torch.cat(of_pages, dim=2) for of_pages in parts]
            new = [torch.cat([x, y[:, :, end - first :]], dim=2) for x, y in zip(stored, old, strict=True)]

        def put(numbers: Sequence[Tensor], ends: list[int]) -> None:
            for done, count, page, at in spans:
                for held, x in zip(page, numbers, strict=True):
                    some = x[:, :, done : done + count]
                    held[:, :, at : at + some.shape[2]] = some
            self.end = ends

        overwritten.append(partial(put, old, before))
        put(new, [before[0] - (end - first - stored[0].shape[2]) * size])

    def read(self, rows: slice, first: int, end: int, start: int, dtype: torch.dtype) -> Tensor:
        """The numbers of groups first ... end - 1, (rows, heads, n g, dim)."""
        numbers = []
        for _, size, page, slot in self._spans(first, end - first, start):
            codes, scale, zero = (x[rows, :, slot : slot + size] for x in page)
            numbers.append(self.format.numbers(codes, scale, zero, dtype))
        return torch.cat(numbers, dim=2).transpose(3, 4).flatten(2, 3)

    def selected(self, rows: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Pages of rows ``rows[b]``."""
        with torch.inference_mode(False):
            return [
                (codes.index_select(0, at), scale.index_select(0, at), zero.index_select(0, at))
                for codes, scale, zero in self.pages
                for at in (rows.to(codes.device),)
            ]

    def take(self, pages: list[tuple[Tensor, Tensor, Tensor]], indices: list[int] | None) -> None:
        """Takes pages that ``selected`` returned; ``indices`` are those of ``end`` and ``first``, if there is
        one for each row.
        """
        self.pages = pages
        if indices is not None:
            self.end, self.first = [self.end[n] for n in indices], [self.first[n] for n in indices]

    def restore(
        self, pages: dict[str, Tensor], rows: tuple[int, int], dtype: torch.dtype, end: list[int], first: list[int]
    ) -> None:
        """Takes over what ``state`` returned, and ``end`` and ``first``.

        Args:
            rows: (B, heads).
            dtype: of the model.

        Raises:
            CheckpointError: a tensor is missing or of another shape.
        """
        self.end, self.first, self.pages = end, first, []
        if not pages:
            return
        if missing := [name for name in _NAMES if name not in pages]:
            raise CheckpointError(f"quantized tokens have no {missing[0]}")
        slots = pages["codes"].shape[2] if pages["codes"].dim() == 5 else 0
        for name, (shape, kind) in zip(_NAMES, self.format.tensors(dtype), strict=True):
            x = pages[name]
            if x.shape != (*rows, slots, *shape) or x.dtype != kind:
                raise CheckpointError(
                    f"{name} of quantized tokens must be {kind} of shape {(*rows, slots, *shape)}, got {x.dtype} "
                    f"{tuple(x.shape)}"
                )
        self._take_pages([(pages["codes"], pages["scale"], pages["zero"])])

    def state(self) -> dict[str, Tensor]:
        """All pages, as files have them."""
        if not self.pages:
            return {}
        with without_autocast(self.pages[0][0]):
            return {name: torch.cat([page[n] for page in self.pages], dim=2) for n, name in enumerate(_NAMES)}
