"""How the numbers of one level go into the pages of a pool, and how they are read: as the model makes them,
or quantized where they are far back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from structattn.cache.levels import Level, RecentLevel
from structattn.cache.paged.batch import Batch, Chunk, Singles
from structattn.cache.paged.pages import LevelPages
from structattn.cache.storage import FullPage, LevelStore


class PagedLevel(ABC):
    """One level of the keys or values of the heads of a layer that have one layout, in all pages.

    Attributes:
        parts: what pages have of it: exact numbers, and codes, scale and zero where tokens are quantized.
        bits: of the codes; 0 without.
    """

    parts: tuple[LevelPages, ...]
    bits: int

    @abstractmethod
    def put(self, numbers: Tensor, batch: Batch) -> None:
        """Stores those of the new tokens (heads, T, dim) that are kept."""

    @abstractmethod
    def fill(self, dense: Tensor, chunk: Chunk) -> None:
        """Writes what is kept of the tokens before a chunk into (heads, S, dim), as its first token reads
        it.
        """

    @abstractmethod
    def decoded(self, singles: Singles) -> LevelStore:
        """What single tokens read, until this level is read again."""

    def quantize(self, dense: Tensor, chunk: Chunk, done: int, position: int) -> int:
        """Quantizes the groups that a query of a chunk reads as codes.

        Args:
            dense: (1, heads, S, dim) of all tokens, changed to what is read.
            done: groups that are quantized already.
            position: of the query.

        Returns:
            The groups that are quantized now.
        """
        return done


class WholeLevel(PagedLevel):
    """A level whose numbers are kept as the model makes them."""

    def __init__(self, pages: LevelPages) -> None:
        self._pages, self.parts, self.bits = pages, (pages,), 0

    def put(self, numbers: Tensor, batch: Batch) -> None:
        """See ``PagedLevel``."""
        where = batch.writes[self._pages.group]
        assert where is not None
        self._pages.put(where.pages, where.slots, numbers[:, where.tokens])

    def fill(self, dense: Tensor, chunk: Chunk) -> None:
        """See ``PagedLevel``."""
        where, at = chunk.kept[self._pages.group]
        if at:
            dense[:, at.start : at.stop] = self._pages.get(where.pages, where.slots).to(dense.dtype)

    def decoded(self, singles: Singles) -> LevelStore:
        """See ``PagedLevel``."""
        pages = self._pages
        numbers = pages.gathered(singles.pages[pages.group]).transpose(2, 3)
        return LevelStore.of_page(FullPage(numbers), ring=pages.ring, longest=None)


class QuantizedLevel(PagedLevel):
    """A level of which far tokens are quantized.

    Args:
        level: says how.
        parts: exact numbers, codes, scale and zero.
        dtype: of the model.
    """

    def __init__(self, level: RecentLevel, parts: Sequence[LevelPages], dtype: torch.dtype) -> None:
        self._level, self._format = level, level.format
        self.parts, self.bits = tuple(parts), level.format.bits
        self._wide = torch.promote_types(dtype, torch.float32)
        exact, *self._groups = parts
        self._exact, self._pages = WholeLevel(exact), exact
        self._shapes = [shape for shape, _ in self._format.tensors(dtype)]

    @property
    def _sinks(self) -> int:
        return self._level.layout.sink_tokens

    def _of_groups(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scale and zero of n groups, from what pages have of them, (rows, heads, n, numbers) each."""
        codes, scale, zero = (x.unflatten(3, shape) for x, shape in zip(parts, self._shapes, strict=True))
        return codes, scale, zero

    def _quantized(self, tokens: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scale and zero of n groups (1, heads, n g, dim) that start at these positions, and what is
        read of them in their place.
        """
        return self._format.from_tokens(tokens, starts, self._sinks)

    def _put_groups(self, stored: Sequence[Tensor], pages: Tensor, slots: Tensor) -> None:
        for part, x in zip(self._groups, stored, strict=True):
            part.put(pages, slots, x[0].flatten(2))

    def put(self, numbers: Tensor, batch: Batch) -> None:
        """See ``PagedLevel``: with single tokens the groups too that these end."""
        self._exact.put(numbers, batch)
        full = None if batch.singles is None else batch.singles.full.get(self._groups[0].group)
        if full is not None:
            tokens = self._pages.get(full.tokens.pages, full.tokens.slots)[None]
            self._put_groups(self._quantized(tokens, full.starts), full.slots.pages, full.slots.slots)

    def fill(self, dense: Tensor, chunk: Chunk) -> None:
        """See ``PagedLevel``."""
        self._exact.fill(dense, chunk)
        where, at = chunk.kept[self._groups[0].group]
        if at:
            parts = [part.get(where.pages, where.slots)[None] for part in self._groups]
            tokens = slice(at.start * self._format.group_size, at.stop * self._format.group_size)
            numbers = self._format.numbers(*self._of_groups(parts), dense.dtype)
            dense[:, tokens] = numbers[0].transpose(2, 3).flatten(1, 2)

    def quantize(self, dense: Tensor, chunk: Chunk, done: int, position: int) -> int:
        """See ``PagedLevel``: codes go into the pages of the request, where it has one for them."""
        size, end = self._format.group_size, self._level.storage.first_exact(position) // self._format.group_size
        groups = range(max(done, self._level.first_group(position, 0)), end)
        if groups:
            tokens = dense[:, :, groups.start * size : groups.stop * size]
            stored = self._quantized(tokens, [group * size for group in groups])
            places = chunk.places[self._groups[0].group]
            kept = [group for group in groups if group in places]
            if kept:
                at = torch.tensor([(*places[group], group - groups.start) for group in kept], device=dense.device)
                pages, slots, index = at.T
                self._put_groups([x[:, :, index] for x in stored], pages, slots)
        return max(done, end)

    def decoded(self, singles: Singles) -> LevelStore:
        """See ``PagedLevel``."""
        group = self._groups[0].group
        pages, exact = singles.pages[group], singles.exact[group]
        codes, scale, zero = self._of_groups([part.gathered(pages) for part in self._groups])
        rows, heads, count, dim, _ = codes.shape
        size, ring = self._format.group_size, self._groups[0].ring
        of_codes = count * size
        dense = self._pages.room(rows, heads, dim, max(of_codes, exact.count), dtype=self._wide)
        self._format.read(codes, scale, zero, dense[..., :of_codes].unflatten(3, (count, size)).transpose(2, 3))
        dense[..., of_codes:] = 0
        recent = self._pages.get(exact.slots.pages, exact.slots.slots)
        dense[exact.rows, :, :, exact.slots.tokens] = recent.transpose(0, 1).to(self._wide)
        return LevelStore.of_page(FullPage(dense), ring=None if ring is None else ring * size, longest=None)


def paged_levels(levels: Sequence[Level], parts: Iterator[LevelPages], dtype: torch.dtype) -> list[PagedLevel]:
    """The levels of the heads of a layer that have one layout, with the next parts of the layer: see
    ``Group``.
    """
    return [
        QuantizedLevel(level, [next(parts) for _ in range(4)], dtype)
        if isinstance(level, RecentLevel)
        else WholeLevel(next(parts))
        for level in levels
    ]
