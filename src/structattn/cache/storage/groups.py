"""The quantized tokens of one level: codes in groups of consecutive positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from structattn.cache.storage.quantize import packed, quantized, scale_dtype, unpacked
from structattn.errors import CheckpointError

_NAMES = ("codes", "scale", "zero")


class GroupStore:
    """One level's numbers for the positions that have left the residual, of those of a block, or of the last
    ones of a window.

    Group m has the positions m g to (m + 1) g - 1 and is in slot m - s, with s the first group of its block,
    or in slot m modulo the slots of a ring.

    Args:
        dim: numbers per position and head.
        bits: 8 or 4.
        group_size: g.
        per_token: whether scale and zero belong to a token and ``group_size`` dimensions, as of values; else
            to a dimension and the tokens of a group, as of keys.
        ring: slots, where a window forgets groups; ``None`` where a block does, or nothing.
        longest: the most slots; ``None`` for no limit.
        page_size: slots that are allocated at a time.

    Attributes:
        end: per row (or one for all), the position after the last that is quantized.
        first: likewise, positions before this one are held no longer.
        pages: (codes, scale, zero) of each page. Codes are (B, heads, slots, dim, bytes of a group). Scales
            and zeros of keys are (B, heads, slots, dim, 1), those of values (B, heads, slots, parts, g).
    """

    def __init__(
        self,
        dim: int,
        *,
        bits: int,
        group_size: int,
        per_token: bool,
        ring: int | None,
        longest: int | None,
        page_size: int,
    ) -> None:
        self.dim, self.bits, self.group_size, self.per_token = dim, bits, group_size, per_token
        self.ring, self.longest, self.page_size = ring, longest, page_size
        self.end, self.first = [0], [0]
        self.pages: list[tuple[Tensor, Tensor, Tensor]] = []

    names = _NAMES

    @property
    def parts(self) -> int:
        """Groups of dimensions, of values."""
        return -(-self.dim // self.group_size)

    @property
    def capacity(self) -> int:
        """Slots that are allocated."""
        return sum(page[0].shape[2] for page in self.pages)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return sum(x.numel() * x.element_size() for page in self.pages for x in page)

    def slot(self, group: int, start: int) -> int:
        """The slot of a group, of a block that starts at position ``start``."""
        return group - start // self.group_size if self.ring is None else group % self.ring

    def grow(self, slots: int, batch: int, like: Tensor) -> None:
        """Allocates pages until there are ``slots``, for ``batch`` rows and the heads, dtype and device of
        ``like`` (rows, heads, ...).
        """
        with torch.inference_mode(False):  # else they could not be written to outside of that mode
            while (capacity := self.capacity) < slots:
                size = self.page_size if self.longest is None else min(self.page_size, self.longest - capacity)
                shape, dtype = (batch, like.shape[1], size), scale_dtype(like.dtype)
                of_group = (self.parts, self.group_size) if self.per_token else (self.dim, 1)
                self.pages.append(
                    (
                        like.new_zeros((*shape, self.dim, self.group_size * self.bits // 8), dtype=torch.uint8),
                        like.new_zeros((*shape, *of_group), dtype=dtype),
                        like.new_zeros((*shape, *of_group), dtype=dtype),
                    )
                )

    def place(self, slot: int) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        """The page of a slot, and which of its slots it is."""
        for page in self.pages:
            if slot < page[0].shape[2]:
                return page, slot
            slot -= page[0].shape[2]
        raise AssertionError(f"slot {slot} is beyond the pages")

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
        self, x: Tensor, rows: slice, group: int, start: int, overwritten: list[Callable[[], object]] | None
    ) -> Tensor:
        """Quantizes n groups that follow each other in one block.

        Args:
            x: (rows, heads, n, dim, g).
            rows: of the batch.
            group: the number of the first one.
            start: of their block.
            overwritten: gets functions that write back what was there.

        Returns:
            The numbers as they are read, as x.
        """
        codes, scale, zero = self._quantized(x)
        stored = packed(codes, self.bits), scale, zero
        for first, size, page, slot in self._spans(group, x.shape[2], start):
            for held, new in zip(page, stored, strict=True):
                there = held[rows, :, slot : slot + size]
                if overwritten is not None:
                    overwritten.append(partial(there.copy_, there.clone()))
                there.copy_(new[:, :, first : first + size])
        return self._numbers(codes, scale, zero, x.dtype)

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.per_token:
            return quantized(x, self.bits, -1)
        missing = self.parts * self.group_size - self.dim
        if missing and self.parts > 1:
            parts = [quantized(part, self.bits, -2) for part in x.split(self.group_size, dim=-2)]
            codes, scale, zero = (torch.cat(of_parts, dim=-2) for of_parts in zip(*parts, strict=True))
            return codes, scale, zero
        parted = x.unflatten(-2, (self.parts, -1))
        codes, scale, zero = quantized(parted, self.bits, -2)
        return codes.flatten(-3, -2), scale.squeeze(-2), zero.squeeze(-2)

    def _numbers(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of codes (..., dim, g)."""
        wide = torch.promote_types(dtype, torch.float32)
        if self.per_token:
            scale, zero = (x.repeat_interleave(self.group_size, dim=-2)[..., : self.dim, :] for x in (scale, zero))
        return torch.addcmul(zero.to(wide), scale.to(wide), codes.to(wide)).to(dtype)

    def read(self, rows: slice, first: int, end: int, start: int, dtype: torch.dtype) -> Tensor:
        """The numbers of groups first ... end - 1, (rows, heads, n g, dim)."""
        numbers = []
        for _, size, page, slot in self._spans(first, end - first, start):
            codes, scale, zero = (x[rows, :, slot : slot + size] for x in page)
            numbers.append(self._numbers(unpacked(codes, self.bits), scale, zero, dtype))
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
        of_group = (self.parts, self.group_size) if self.per_token else (self.dim, 1)
        of_codes = (self.dim, self.group_size * self.bits // 8)
        expected = ((of_codes, torch.uint8), (of_group, scale_dtype(dtype)), (of_group, scale_dtype(dtype)))
        for name, (shape, kind) in zip(_NAMES, expected, strict=True):
            x = pages[name]
            if x.shape != (*rows, slots, *shape) or x.dtype != kind:
                raise CheckpointError(
                    f"{name} of quantized tokens must be {kind} of shape {(*rows, slots, *shape)}, got {x.dtype} "
                    f"{tuple(x.shape)}"
                )
        self.pages = [(pages["codes"], pages["scale"], pages["zero"])]

    def state(self) -> dict[str, Tensor]:
        """All pages, as files have them."""
        return {name: torch.cat([page[n] for page in self.pages], dim=2) for n, name in enumerate(_NAMES) if self.pages}
