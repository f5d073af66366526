"""The pairs of a layout as few, dense rectangles: what `blocked` attention walks over.

Pairs whose deepest shared level is n need the first r_1 + ... + r_n dimensions and no mask of their own. Cutting every
stretch of positions in two, those pairs are the later half against the earlier one: a rectangle. Congruent rectangles are
one family, computed as one batch; what is left are small squares on the diagonal, whose pairs are told apart by a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout


@dataclass(frozen=True)
class Segments:
    """A family of stretches of positions of one length.

    Attributes:
        start: first position of the first member.
        length: positions of a member.
        dims: (count, stride) of each index of the family, outermost first; member (i_1, i_2, ...) starts at
            start + sum of i_k stride_k. Empty: one member.
    """

    start: int
    length: int
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """The number of members."""
        total = 1
        for count, _ in self.dims:
            total *= count
        return total

    def parts(self, offset: int, count: int, stride: int, length: int) -> Segments:
        """In each member ``count`` stretches of ``length``, the first at ``offset``, ``stride`` apart."""
        dims = [*self.dims, (count, stride)] if count > 1 else list(self.dims)
        merged: list[tuple[int, int]] = []
        for n, step in dims:
            if merged and merged[-1][1] == n * step:
                merged[-1] = (merged[-1][0] * n, step)
            else:
                merged.append((n, step))
        return Segments(self.start + offset, length, tuple(merged))

    def strided(self, x: Tensor, origin: int, repeats: int) -> Tensor:
        """A view of all members in x: (N, *counts, length * repeats, d).

        Args:
            x: (N, positions * repeats, d), ``repeats`` rows per position.
            origin: the position of the first rows of x.
            repeats: rows per position.
        """
        batch, row, last = x.stride()
        sizes = (x.shape[0], *(count for count, _ in self.dims), self.length * repeats, x.shape[2])
        strides = (batch, *(stride * repeats * row for _, stride in self.dims), row, last)
        return x.as_strided(sizes, strides, x.storage_offset() + (self.start - origin) * repeats * row)

    def take(self, x: Tensor, origin: int, repeats: int) -> Tensor:
        """All members in x as one batch, (N * count, length * repeats, d): a view where the strides allow, else a copy."""
        return self.strided(x, origin, repeats).reshape(x.shape[0] * self.count, self.length * repeats, x.shape[2])


@dataclass(frozen=True)
class Rectangle:
    """Families of query and key stretches, member by member, whose pairs share exactly ``level`` levels where they count.

    Attributes:
        rows: query positions.
        cols: key positions, with the ``dims`` of the rows.
        level: the number of shared levels of its pairs.
        is_diagonal: whether rows and columns are one stretch that starts where a block of every level below starts or that
            lies in one block; then only its pairs that share exactly ``level`` levels count.
    """

    rows: Segments
    cols: Segments
    level: int
    is_diagonal: bool = False

    @property
    def shift(self) -> int:
        """Query position minus key position at the corner of a member."""
        return self.rows.start - self.cols.start


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Which pairs of a call are visible, for one sequence without padding.

    Attributes:
        layout: with ``block_sizes``.
        num_queries: T; the queries are the last T of the S positions.
        num_keys: S.
        is_causal: whether later keys are hidden.
        window: as in ``structured_attention``.
        tile: the longest stretch that is left as a square on the diagonal.
    """

    layout: LevelLayout
    num_queries: int
    num_keys: int
    is_causal: bool
    window: int | None
    tile: int

    @property
    def first_query(self) -> int:
        """The position of the first query; negative when T > S."""
        return self.num_keys - self.num_queries

    def rectangles(self) -> Iterator[Rectangle]:
        """All rectangles; every visible pair is in exactly one of them (and in its mask)."""
        if self.first_query < 0 and not self.is_causal:  # queries before the first key share level 1 alone
            early = Segments(self.first_query, -self.first_query)
            yield Rectangle(early, Segments(0, self.num_keys), 1)
        yield from self._inside(Segments(0, self.num_keys), 1)

    def _inside(self, part: Segments, level: int) -> Iterator[Rectangle]:
        """The pairs inside the members of a family; each lies in one block of ``level`` and starts where that starts."""
        if part.start + part.length <= self.first_query and not part.dims:
            return
        sizes = self.layout.block_sizes
        while level < len(sizes) and sizes[level] >= part.length:
            level += 1
        if part.length <= self.tile:
            yield from self._diagonal(part, level)
            return
        unit = self.tile if level == len(sizes) else sizes[level]
        unit *= max(1, self.tile // unit)  # several small blocks in one square
        yield from self._between(part, unit, level)
        full, rest = divmod(part.length, unit)
        for family in self._from_first_query(part, full, unit, unit):
            yield from self._inside(family, level)
        if rest:
            yield from self._inside(part.parts(full * unit, 1, 0, rest), level)

    def _from_first_query(self, part: Segments, count: int, stride: int, length: int) -> Iterator[Segments]:
        """``part.parts(0, count, stride, length)`` without what lies before the first query; what holds it stands alone.

        A family of more than one member never holds the first query in its middle: that is what this is for.
        """
        first = 0 if part.dims else min(count, max(0, (self.first_query - part.start) // stride))
        if first < count and part.start + first * stride < self.first_query:
            yield part.parts(first * stride, 1, 0, length)
            first += 1
        if first < count:
            yield part.parts(first * stride, count - first, stride, length)

    def _between(self, part: Segments, unit: int, level: int) -> Iterator[Rectangle]:
        """The pairs of different units of one member: halves against halves, from single units up to the whole."""
        width = unit
        while width < part.length:
            full, rest = divmod(part.length, 2 * width)
            groups = list(self._from_first_query(part, full, 2 * width, 2 * width))
            if rest > width:
                groups.append(part.parts(full * 2 * width, 1, 0, rest))
            for group in groups:
                left = replace(group, length=width)
                right = replace(group, start=group.start + width, length=group.length - width)
                yield from self._rectangle(right, left, level)
                if not self.is_causal:
                    yield from self._rectangle(left, right, level)
            width *= 2

    def _rectangle(self, rows: Segments, cols: Segments, level: int) -> Iterator[Rectangle]:
        """One rectangle, without rows before the first query, and without what no window reaches."""
        cut = self.first_query - rows.start
        if cut > 0 and not rows.dims:
            rows = replace(rows, start=rows.start + cut, length=rows.length - cut)
        if self.window is not None:
            rows, cols = self._within_reach(rows, cols)
        if rows.length > 0 and cols.length > 0:
            yield Rectangle(rows, cols, level)

    def _within_reach(self, rows: Segments, cols: Segments) -> tuple[Segments, Segments]:
        """The stretches of rows and columns that hold a pair less than a window apart."""
        assert self.window is not None
        reach = self.window - 1

        def near(part: Segments, other: Segments) -> Segments:
            low = max(part.start, other.start - reach)
            high = min(part.start + part.length, other.start + other.length + reach)
            return replace(part, start=low, length=high - low)

        near_rows = near(rows, cols)
        return near_rows, near(cols, near_rows) if near_rows.length > 0 else cols

    def _diagonal(self, part: Segments, level: int) -> Iterator[Rectangle]:
        sizes = (*self.layout.block_sizes, 0)
        for n in range(level, len(sizes)):
            # Pairs of exactly n levels lie in different blocks of level n + 1; there are none where it is as large.
            if n == len(sizes) - 1 or sizes[n] < min(part.length, sizes[n - 1] if n > 1 else part.length):
                cut = max(0, self.first_query - part.start) if not part.dims else 0
                rows = replace(part, start=part.start + cut, length=part.length - cut)
                yield Rectangle(rows, part, n, is_diagonal=True)

    def hides(self, rectangle: Rectangle, rows: slice, cols: slice) -> bool | None:
        """Whether all (``True``), none (``False``) or some (``None``) of the pairs of a part are hidden.

        Args:
            rectangle: one of ``rectangles()``.
            rows, cols: positions in a member, with start and stop.
        """
        nearest = rectangle.shift + rows.start - (cols.stop - 1)
        farthest = rectangle.shift + rows.stop - 1 - cols.start
        reach = self.num_keys + self.num_queries if self.window is None else self.window
        lowest = 0 if self.is_causal else 1 - reach
        if farthest < lowest or nearest >= reach:
            return True
        return None if rectangle.is_diagonal or nearest < lowest or farthest >= reach else False

    def mask(self, rectangle: Rectangle, rows: slice, cols: slice, device: torch.device) -> Tensor:
        """The pairs of a part that count, bool (rows, cols). Arguments as ``hides``."""
        i = torch.arange(rows.start, rows.stop, device=device)[:, None] + rectangle.shift
        j = torch.arange(cols.start, cols.stop, device=device)[None, :]
        distance = i - j
        seen = distance >= 0 if self.is_causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        if rectangle.is_diagonal:
            seen = seen & (self._shared(i, j, rectangle) == rectangle.level)
        return seen

    def _shared(self, i: Tensor, j: Tensor, rectangle: Rectangle) -> Tensor:
        # The key stretch starts at a block of every level that is cut inside it, so positions may count from there.
        return self.layout.shared_levels(i, j) if rectangle.cols.length > 1 else torch.full_like(i - j, rectangle.level)
