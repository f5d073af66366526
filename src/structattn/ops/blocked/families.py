"""Blocks of pairs as families: equal spans of queries against equal spans of keys, a strided view each,
computed as one batch.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.ops.blocked.tiles import Tile

# From this number of scores of one sequence on, a loop over the sequences costs less than copies of what is
# no view in a batch of them.
_MANY_SCORES = 2**17

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

    def is_even(self, positions: int) -> bool:
        """Whether the members in several sequences of ``positions`` positions each lie at equal distances, so
        that all are one view.
        """
        return not self.dims or (len(self.dims) == 1 and self.dims[0][0] * self.dims[0][1] == positions)


@dataclass(frozen=True)
class Block:
    """A family of query spans and one of key spans, member by member.

    Attributes:
        rows: query positions.
        cols: key positions, with the ``dims`` of the rows.
        level: the fewest levels that a visible pair shares.
        deeper: the other numbers of levels that visible pairs share, rising. Which pair shares how many is
            the same in all members, and if both counted positions from the start of their keys.
    """

    rows: SpanFamily
    cols: SpanFamily
    level: int
    deeper: tuple[int, ...] = ()

    @functools.cached_property
    def shift(self) -> int:
        """Query position minus key position at the corner of a member."""
        return self.rows.start - self.cols.start


@dataclass(frozen=True, kw_only=True)
class Geometry(ABC):
    """Which pairs of a call are visible, for one sequence without padding.

    Attributes:
        layout: with block sizes or windows.
        num_queries: T; the queries are the last T of the S positions.
        num_keys: S.
        is_causal: whether later keys are hidden.
        window: as in ``structured_attention``.
        tile: the longest span whose pairs may be hidden in part.
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

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """All blocks; every visible pair is in exactly one of them."""

    def hides(self, block: Block, rows: slice, cols: slice) -> bool | None:
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
        return None if nearest < lowest or farthest >= reach else False

    def hidden(self, distance: Tensor) -> Tensor:
        """Which pairs are hidden, from query position minus key position."""
        hidden = distance < 0 if self.is_causal else torch.zeros_like(distance, dtype=torch.bool)
        return hidden if self.window is None else hidden | (distance.abs() >= self.window)


@dataclass(kw_only=True)
class FamilyTile(Tile):
    """A block for N sequences of one geometry.

    Attributes:
        level, deeper: of the block.
        geometry, block: which pairs.
        sequences: which of the batch of the tensors that it reads.
        repeats: rows per query position (query heads that share a key head).
        device: of the tensors.
        lengths: (N,) the keys of each of these sequences; ``None`` when all have all.
        masks: masks already made, shared by the tiles of a pass.
    """

    level: int
    deeper: tuple[int, ...]
    geometry: Geometry
    block: Block
    sequences: range
    repeats: int
    device: torch.device
    lengths: Tensor | None
    masks: dict[_MaskKey, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, cols = self.block.rows, self.block.cols
        return len(self.sequences) * rows.count, rows.length * self.repeats, cols.length

    def _rows(self, x: Tensor) -> Tensor:
        sequences = x[self.sequences.start : self.sequences.stop]
        return self.block.rows.strided(sequences, self.geometry.first_query, self.repeats)

    def _cols(self, x: Tensor) -> Tensor:
        return self.block.cols.strided(x[self.sequences.start : self.sequences.stop], 0, 1)

    def rows_of(self, x: Tensor) -> Tensor:
        return self._rows(x).reshape(*self.shape[:2], x.shape[2])

    def cols_of(self, x: Tensor) -> Tensor:
        return self._cols(x).reshape(self.shape[0], self.shape[2], x.shape[2])

    def write_rows(self, x: Tensor, changed: Tensor) -> None:
        _copy_back(self._rows(x), changed)

    def write_cols(self, x: Tensor, changed: Tensor) -> None:
        _copy_back(self._cols(x), changed)

    def max_rows(self, x: Tensor, value: Tensor) -> None:
        target = self._rows(x)
        torch.maximum(target, value.view(target.shape), out=target)

    def hides(self, batch: slice, rows: slice, cols: slice) -> Tensor | bool:
        # Rows of one position are neighbours: the positions that a slice of rows touches.
        positions = slice(rows.start // self.repeats, -(-rows.stop // self.repeats))
        hidden: Tensor | bool | None = self.geometry.hides(self.block, positions, cols)
        if hidden is True:
            return True
        if hidden is None:
            hidden = self._repeated(self._hidden(positions, cols), rows)
        if self.lengths is not None:
            keys = self.block.cols.strided(self._beyond(), 0, 1).reshape(-1, 1, self.block.cols.length)
            past = keys[batch, :, cols]
            hidden = past if hidden is False else past | hidden
        return hidden

    def distances(self, rows: slice, cols: slice, dtype: torch.dtype) -> Tensor:
        i = torch.arange(rows.start, rows.stop, device=self.device) // self.repeats + self.block.shift
        j = torch.arange(cols.start, cols.stop, device=self.device)
        return (i.to(dtype)[:, None] - j.to(dtype)).abs_()

    @property
    def pattern(self) -> object:
        return self.block

    def shared(self, rows: slice, cols: slice) -> Tensor:
        positions = slice(rows.start // self.repeats, -(-rows.stop // self.repeats))
        shift, ranges = self.block.shift, (positions.start, positions.stop, cols.start, cols.stop)
        return self._repeated(_shared(self.geometry.layout, shift, ranges, self.device), rows)

    def _repeated(self, table: Tensor, rows: slice) -> Tensor:
        """A table with a row per position as one with the ``rows`` of its queries."""
        if self.repeats == 1:
            return table
        first = rows.start % self.repeats
        return table.repeat_interleave(self.repeats, dim=0)[first : first + rows.stop - rows.start]

    def _hidden(self, rows: slice, cols: slice) -> Tensor:
        key = (self.block.shift + rows.start - cols.start, rows.stop - rows.start, cols.stop - cols.start)
        if max(key[1:]) <= self.geometry.tile:
            return _small_mask(self.geometry, *key, self.device)
        if key not in self.masks:  # only the distance matters
            self.masks[key] = _mask(self.geometry, *key, self.device)
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
def _blocks(geometry: Geometry) -> tuple[Block, ...]:
    return tuple(geometry.blocks())


def _mask(geometry: Geometry, distance: int, rows: int, cols: int, device: torch.device) -> Tensor:
    """The pairs that are hidden, bool (rows, cols); ``distance`` is that of the first query and key."""
    steps = torch.arange(rows, device=device)[:, None] - torch.arange(cols, device=device)
    return geometry.hidden(steps + distance)


_small_mask = functools.lru_cache(maxsize=1024)(_mask)  # of at most 1 KiB each


@functools.lru_cache(maxsize=256)  # of at most 32 KiB each, where tiles are not wider than those of the geometries
def _shared(layout: LevelLayout, shift: int, ranges: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """The number of levels that positions of a member share, int16 (rows, cols), from the ranges of both."""
    i = torch.arange(ranges[0], ranges[1], device=device)[:, None] + shift
    return layout.shared_levels(i, torch.arange(ranges[2], ranges[3], device=device)).to(torch.int16)


def tiles(
    geometry: Geometry, num_sequences: int, repeats: int, device: torch.device, lengths: Tensor | None = None
) -> Iterator[FamilyTile]:
    """All tiles of a pass over N sequences; each pass makes them again, in the same order."""
    masks: dict[_MaskKey, Tensor] = {}
    for block in _blocks(geometry):
        rows, cols, step = block.rows, block.cols, num_sequences
        is_view = rows.is_even(geometry.num_queries) and cols.is_even(geometry.num_keys)
        if not is_view and len(rows.dims) == 1 and rows.count * rows.length * repeats * cols.length >= _MANY_SCORES:
            step = 1
        for start in range(0, num_sequences, step):
            yield FamilyTile(
                level=block.level,
                deeper=block.deeper,
                geometry=geometry,
                block=block,
                sequences=range(start, start + step),
                repeats=repeats,
                device=device,
                lengths=None if lengths is None else lengths[start : start + step],
                masks=masks,
            )
