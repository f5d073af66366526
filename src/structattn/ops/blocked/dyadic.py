"""The pairs of a layout with block sizes as dyadic blocks: few, dense, and views of whole tensors.

Pairs whose deepest shared level is n need the first r_1 + ... + r_n dimensions and no mask of their own. When every span of
positions is halved, those pairs are the later half against the earlier one: a dyadic block. Blocks of one shape are a
family, computed as one batch; what is left are small squares on the diagonal, where a mask separates the levels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.ops.blocked.tiles import Tile

_MaskKey = tuple[int, int, int]  # distance of the corner, rows, columns


@dataclass(frozen=True)
class SpanFamily:
    """A family of spans of positions, all of one length.

    Attributes:
        start: first position of the first member.
        length: positions of a member.
        dims: (count, stride) of each index of the family, outermost first; member (i_1, i_2, ...) starts at
            start + sum of i_k stride_k. Empty: one member.
    """

    start: int
    length: int
    dims: tuple[tuple[int, int], ...] = ()

    @functools.cached_property  # blocks are kept from call to call, and every tile asks
    def count(self) -> int:
        """The number of members."""
        return math.prod(count for count, _ in self.dims)

    def inner(self, offset: int, count: int, stride: int, length: int) -> SpanFamily:
        """In each member ``count`` spans of ``length``, the first at ``offset``, ``stride`` apart."""
        dims = [*self.dims, (count, stride)] if count > 1 else list(self.dims)
        merged: list[tuple[int, int]] = []
        for n, step in dims:
            if merged and merged[-1][1] == n * step:
                merged[-1] = (merged[-1][0] * n, step)
            else:
                merged.append((n, step))
        return SpanFamily(self.start + offset, length, tuple(merged))

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
class DyadicBlock:
    """A family of query spans and one of key spans, member by member, whose pairs share exactly ``level`` levels where they count.

    Attributes:
        rows: query positions.
        cols: key positions, with the ``dims`` of the rows.
        level: the number of shared levels of its pairs.
        is_diagonal: whether rows and columns are one span that starts where a block of every level below starts or that
            lies in one block; then only its pairs that share exactly ``level`` levels count.
    """

    rows: SpanFamily
    cols: SpanFamily
    level: int
    is_diagonal: bool = False

    @functools.cached_property
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
        tile: the longest span that is left as a square on the diagonal.
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

    def blocks(self) -> Iterator[DyadicBlock]:
        """All blocks; every visible pair is in exactly one of them (and in its mask)."""
        if self.first_query < 0 and not self.is_causal:  # queries before the first key share only level 1
            early = SpanFamily(self.first_query, -self.first_query)
            yield DyadicBlock(early, SpanFamily(0, self.num_keys), 1)
        yield from self._inside(SpanFamily(0, self.num_keys), 1)

    def _inside(self, spans: SpanFamily, level: int) -> Iterator[DyadicBlock]:
        """The pairs inside the members of a family; each lies in one block of ``level`` and starts where that starts."""
        if spans.start + spans.length <= self.first_query and not spans.dims:
            return
        sizes = self.layout.block_sizes
        while level < len(sizes) and sizes[level] >= spans.length:
            level += 1
        if spans.length <= self.tile:
            yield from self._diagonal(spans, level)
            return
        unit = self.tile if level == len(sizes) else sizes[level]
        unit *= max(1, self.tile // unit)  # several small blocks in one square
        yield from self._between(spans, unit, level)
        full, rest = divmod(spans.length, unit)
        for family in self._from_first_query(spans, full, unit, unit):
            yield from self._inside(family, level)
        if rest:
            yield from self._inside(spans.inner(full * unit, 1, 0, rest), level)

    def _from_first_query(self, spans: SpanFamily, count: int, stride: int, length: int) -> Iterator[SpanFamily]:
        """``spans.inner(0, count, stride, length)`` without what lies before the first query; the span that holds it is separate.

        A family of more than one member never holds the first query in its middle: that is what this is for.
        """
        first = 0 if spans.dims else min(count, max(0, (self.first_query - spans.start) // stride))
        if first < count and spans.start + first * stride < self.first_query:
            yield spans.inner(first * stride, 1, 0, length)
            first += 1
        if first < count:
            yield spans.inner(first * stride, count - first, stride, length)

    def _between(self, spans: SpanFamily, unit: int, level: int) -> Iterator[DyadicBlock]:
        """The pairs of different units of one member: halves against halves, from single units up to the whole."""
        width = unit
        while width < spans.length:
            full, rest = divmod(spans.length, 2 * width)
            groups = list(self._from_first_query(spans, full, 2 * width, 2 * width))
            if rest > width:
                groups.append(spans.inner(full * 2 * width, 1, 0, rest))
            for group in groups:
                left = replace(group, length=width)
                right = replace(group, start=group.start + width, length=group.length - width)
                yield from self._block(right, left, level)
                if not self.is_causal:
                    yield from self._block(left, right, level)
            width *= 2

    def _block(self, rows: SpanFamily, cols: SpanFamily, level: int) -> Iterator[DyadicBlock]:
        """One block, without rows before the first query, and without what no window reaches."""
        cut = self.first_query - rows.start
        if cut > 0 and not rows.dims:
            rows = replace(rows, start=rows.start + cut, length=rows.length - cut)
        if self.window is not None:
            rows, cols = self._within_reach(rows, cols)
        if rows.length > 0 and cols.length > 0:
            yield DyadicBlock(rows, cols, level)

    def _within_reach(self, rows: SpanFamily, cols: SpanFamily) -> tuple[SpanFamily, SpanFamily]:
        """The spans of rows and columns that hold a pair less than a window apart."""
        assert self.window is not None
        reach = self.window - 1

        def near(spans: SpanFamily, other: SpanFamily) -> SpanFamily:
            low = max(spans.start, other.start - reach)
            high = min(spans.start + spans.length, other.start + other.length + reach)
            return replace(spans, start=low, length=high - low)

        near_rows = near(rows, cols)
        return near_rows, near(cols, near_rows) if near_rows.length > 0 else cols

    def _diagonal(self, spans: SpanFamily, level: int) -> Iterator[DyadicBlock]:
        sizes = (*self.layout.block_sizes, 0)
        for n in range(level, len(sizes)):
            # Pairs of exactly n levels lie in different blocks of level n + 1; there are none where it is as large.
            if n == len(sizes) - 1 or sizes[n] < min(spans.length, sizes[n - 1] if n > 1 else spans.length):
                cut = max(0, self.first_query - spans.start) if not spans.dims else 0
                rows = replace(spans, start=spans.start + cut, length=spans.length - cut)
                yield DyadicBlock(rows, spans, n, is_diagonal=True)

    def hides(self, block: DyadicBlock, rows: slice, cols: slice) -> bool | None:
        """Whether all (``True``), none (``False``) or some (``None``) of some pairs are hidden.

        Args:
            block: one of ``blocks()``.
            rows, cols: positions in a member, with start and stop.
        """
        nearest = block.shift + rows.start - (cols.stop - 1)
        farthest = block.shift + rows.stop - 1 - cols.start
        reach = self.num_keys + self.num_queries if self.window is None else self.window
        lowest = 0 if self.is_causal else 1 - reach
        if farthest < lowest or nearest >= reach:
            return True
        return None if block.is_diagonal or nearest < lowest or farthest >= reach else False

    def mask(self, block: DyadicBlock, rows: slice, cols: slice, device: torch.device) -> Tensor:
        """The pairs that count, bool (rows, cols). Arguments as ``hides``."""
        i = torch.arange(rows.start, rows.stop, device=device)[:, None] + block.shift
        j = torch.arange(cols.start, cols.stop, device=device)[None, :]
        distance = i - j
        seen = distance >= 0 if self.is_causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        if block.is_diagonal and block.cols.length > 1:
            # The key span starts at a block of every level that is cut inside it, so positions may count from there.
            seen = seen & (self.layout.shared_levels(i, j) == block.level)
        return seen


@dataclass(kw_only=True)
class DyadicTile(Tile):
    """A block for N sequences of one geometry.

    Attributes:
        level: of the block.
        geometry, block: which pairs.
        num_sequences: N, the batch of the tensors that it reads.
        repeats: rows per query position (query heads that share a key head).
        device: of the tensors.
        lengths: (N,) the keys of each sequence; ``None`` when all have all.
        masks: masks already made, shared by the tiles of a pass.
    """

    level: int
    geometry: Geometry
    block: DyadicBlock
    num_sequences: int
    repeats: int
    device: torch.device
    lengths: Tensor | None
    masks: dict[_MaskKey, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, cols = self.block.rows, self.block.cols
        return self.num_sequences * rows.count, rows.length * self.repeats, cols.length

    def rows_of(self, x: Tensor) -> Tensor:
        return self.block.rows.take(x, self.geometry.first_query, self.repeats)

    def cols_of(self, x: Tensor) -> Tensor:
        return self.block.cols.take(x, 0, 1)

    def write_rows(self, x: Tensor, changed: Tensor) -> None:
        _copy_back(self.block.rows.strided(x, self.geometry.first_query, self.repeats), changed)

    def write_cols(self, x: Tensor, changed: Tensor) -> None:
        _copy_back(self.block.cols.strided(x, 0, 1), changed)

    def max_rows(self, x: Tensor, value: Tensor) -> None:
        target = self.block.rows.strided(x, self.geometry.first_query, self.repeats)
        torch.maximum(target, value.view(target.shape), out=target)

    def hides(self, batch: slice, rows: slice, cols: slice) -> Tensor | bool:
        # Rows of one position are neighbours: the positions that a slice of rows touches.
        positions = slice(rows.start // self.repeats, -(-rows.stop // self.repeats))
        hidden: Tensor | bool | None = self.geometry.hides(self.block, positions, cols)
        if hidden is True:
            return True
        if hidden is None:
            hidden = self._mask(positions, cols)
            if self.repeats > 1:
                first = rows.start - positions.start * self.repeats
                hidden = hidden.repeat_interleave(self.repeats, dim=0)[first : first + rows.stop - rows.start]
        if self.lengths is not None:
            keys = self.block.cols.strided(self._beyond(), 0, 1).reshape(-1, 1, self.block.cols.length)
            past = keys[batch, :, cols]
            hidden = past if hidden is False else past | hidden
        return hidden

    def distances(self, rows: slice, cols: slice, dtype: torch.dtype) -> Tensor:
        i = torch.arange(rows.start, rows.stop, device=self.device) // self.repeats + self.block.shift
        j = torch.arange(cols.start, cols.stop, device=self.device)
        return (i.to(dtype)[:, None] - j.to(dtype)).abs_()

    def _mask(self, rows: slice, cols: slice) -> Tensor:
        if self.block.is_diagonal:
            ranges = range(rows.start, rows.stop), range(cols.start, cols.stop)
            return _diagonal_mask(self.geometry, self.block, *ranges, self.device)
        key = (self.block.shift + rows.start - cols.start, rows.stop - rows.start, cols.stop - cols.start)
        if key not in self.masks:  # only the distance matters
            self.masks[key] = ~self.geometry.mask(self.block, rows, cols, self.device)
        return self.masks[key]

    def _beyond(self) -> Tensor:
        """The keys after the end of each sequence, bool (N, S, 1)."""
        assert self.lengths is not None
        positions = torch.arange(self.geometry.num_keys, device=self.device)
        return (positions[None, :] >= self.lengths[:, None])[..., None]


def _copy_back(target: Tensor, changed: Tensor) -> None:
    """Copies what could not be taken as a view."""
    if changed.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
        target.copy_(changed.view(target.shape))


@functools.lru_cache(maxsize=64)  # a call needs them up to three times, and so does the next call
def _blocks(geometry: Geometry) -> tuple[DyadicBlock, ...]:
    return tuple(geometry.blocks())


@functools.lru_cache(maxsize=1024)  # of at most 1 KiB each
def _diagonal_mask(geometry: Geometry, block: DyadicBlock, rows: range, cols: range, device: torch.device) -> Tensor:
    return ~geometry.mask(block, slice(rows.start, rows.stop), slice(cols.start, cols.stop), device)


def tiles(
    geometry: Geometry, num_sequences: int, repeats: int, device: torch.device, lengths: Tensor | None = None
) -> Iterator[DyadicTile]:
    """All tiles of a pass over N sequences; each pass makes them again, in the same order."""
    masks: dict[_MaskKey, Tensor] = {}
    for block in _blocks(geometry):
        yield DyadicTile(
            level=block.level,
            geometry=geometry,
            block=block,
            num_sequences=num_sequences,
            repeats=repeats,
            device=device,
            lengths=lengths,
            masks=masks,
        )
