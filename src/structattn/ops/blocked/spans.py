"""The pairs of any layout as spans of queries against ranges of keys: for free segments, biases, masks, sink
tokens, and sequences with T != S.

Every sequence is cut into spans of at most ``SPAN`` queries, at the boundaries of its longer segments. Around
a span that lies in one block of a level, the keys of that level are two ranges, one before and one after the
next deeper block: they share one number of levels with all its queries. Only inside the deepest such block
pairs share different numbers of them. Where levels slide, the ranges end where the window of a level ends for
the first or last query of the span. Sink tokens are a range of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.ops.blocked.bands import bands_of
from structattn.ops.blocked.tiles import Tile
from structattn.ops.sequences import SequenceSpan

SPAN = 128

_Range = tuple[
    int, tuple[int, ...], int, int
]  # keys: ``level`` and ``deeper`` of a tile, the first position, the one after the last


@dataclass(frozen=True, kw_only=True)
class SpanTiles:
    """All tiles of a call.

    Attributes:
        layout: any.
        sequences: of the batch.
        is_causal, window: as in ``structured_attention``.
        num_groups: G, the key heads.
        repeats: query heads per key head.
        device: of the tensors.
    """

    layout: LevelLayout
    sequences: tuple[SequenceSpan, ...]
    is_causal: bool
    window: int | None
    num_groups: int
    repeats: int
    device: torch.device

    def tiles(self) -> Iterator[SpanTile]:
        """Every visible pair in exactly one tile."""
        for sequence in self.sequences:
            end = sequence.first_query + sequence.num_queries
            boundaries = self._boundaries(sequence, end)
            for low, high in zip(boundaries, [*boundaries[1:], end], strict=True):
                for first in range(low, high, SPAN):
                    last = min(first + SPAN, high) - 1
                    ranges = self._ranges if self.layout.windows is None else self._sliding_ranges
                    sinks = max(sequence.first_key, min(self.layout.sink_tokens, sequence.end_key))
                    start, stop = sequence.first_key, min(sinks, last + 1) if self.is_causal else sinks
                    if start < stop:
                        yield SpanTile(self, sequence, self.layout.num_levels, (), None, first, last + 1, start, stop)
                    for level, deeper, start, stop in ranges(sequence, first, last):
                        start = max(start, sinks)
                        if self.is_causal:
                            stop = min(stop, last + 1)
                        if self.window is not None:
                            start, stop = max(start, first - self.window + 1), min(stop, last + self.window)
                        if start < stop:
                            yield SpanTile(self, sequence, level, deeper, self.window, first, last + 1, start, stop)

    def _block(self, sequence: SequenceSpan, level: int, position: int) -> tuple[int, int]:
        """The first position of the block of a level from 2 on that holds a position, and the first one after
        it.
        """
        if self.layout.boundaries is None:
            size = self.layout.block_sizes[level - 1]
            start = position // size * size
            return start, start + size
        starts = self._starts(sequence, level)
        index = bisect_right(starts, position)
        return starts[index - 1] if index else position, starts[index] if index < len(starts) else sequence.end_key

    def _starts(self, sequence: SequenceSpan, level: int) -> tuple[int, ...]:
        """Where the segments of a free partition start."""
        assert self.layout.boundaries is not None
        return self.layout.boundaries[sequence.row if self.layout.num_rows else 0][level - 1]

    def _boundaries(self, sequence: SequenceSpan, end: int) -> list[int]:
        """Where spans must end: at 0, and at the blocks of the deepest level whose blocks are long enough on
        average.
        """
        low = sequence.first_query
        if self.layout.windows is not None:
            return [low]
        cuts = {low, 0} if low < 0 < end else {low}
        ends = cuts
        for level in range(2, self.layout.num_levels + 1):
            if self.layout.boundaries is None:
                size = self.layout.block_sizes[level - 1]
                if size < SPAN // 2:
                    break
                starts = set(range(-(-max(low, 0) // size) * size, end, size))
            else:
                starts = {start for start in self._starts(sequence, level) if low < start < end}
                if starts and (end - low) / len(starts) < SPAN // 2:
                    break
            ends = cuts | starts
        return sorted(ends)

    def _ranges(self, sequence: SequenceSpan, first: int, last: int) -> Iterator[_Range]:
        """The keys of one sequence around its queries first ... last."""
        low, high = sequence.first_key, sequence.end_key  # keys that share ``level`` levels or more with all of them
        for level in range(1, self.layout.num_levels):
            block, block_of_last = (self._block(sequence, level + 1, position) for position in (first, last))
            start, stop = max(low, block[0]), min(high, block_of_last[1])
            if start >= stop:
                break
            yield level, (), low, start
            yield level, (), stop, high
            if block != block_of_last:
                yield level, tuple(range(level + 1, self.layout.num_levels + 1)), start, stop
                return
            low, high = start, stop
        else:
            level = self.layout.num_levels
        yield level, (), low, high

    def _sliding_ranges(self, sequence: SequenceSpan, first: int, last: int) -> Iterator[_Range]:
        """As ``_ranges``, without what is hidden from all queries."""
        bands = bands_of(replace(self.layout, sink_tokens=0), self.is_causal, self.window)
        low, high = sequence.first_key, sequence.end_key
        cuts = {low, high}
        for edge in bands.edges(first - high, last - low):
            # A query i meets the edge between the keys i - edge and i - edge + 1.
            cuts |= {min(max(query - edge + 1, low), high) for query in (first, last)}
        for start, stop in pairwise(sorted(cuts)):
            if levels := sorted(bands.levels(first - stop + 1, last - start) - {0}):
                yield levels[0], tuple(levels[1:]), start, stop


@dataclass
class SpanTile(Tile):
    """Queries against a range of keys, of all heads of one sequence. Tensors are (B * G, rows, d).

    Attributes:
        tiles, sequence: the tiles that it is one of, and its sequence.
        level, deeper: see ``Tile``.
        window: of its pairs; ``None`` for those of sink tokens, which none hides.
        first, stop: positions of its queries.
        first_key, stop_key: positions of its keys.
    """

    tiles: SpanTiles
    sequence: SequenceSpan
    level: int
    deeper: tuple[int, ...]
    window: int | None
    first: int
    stop: int
    first_key: int
    stop_key: int

    @property
    def shape(self) -> tuple[int, int, int]:
        tiles = self.tiles
        return tiles.num_groups, (self.stop - self.first) * tiles.repeats, self.stop_key - self.first_key

    def _heads(self) -> slice:
        groups = self.tiles.num_groups
        return slice(self.sequence.batch * groups, (self.sequence.batch + 1) * groups)

    @property
    def _queries(self) -> slice:
        start = self.sequence.queries - self.sequence.first_query
        return slice(start + self.first, start + self.stop)

    @property
    def _keys(self) -> slice:
        start = self.sequence.keys - self.sequence.first_key
        return slice(start + self.first_key, start + self.stop_key)

    def rows_of(self, x: Tensor) -> Tensor:
        repeats = self.tiles.repeats
        return x[self._heads(), self._queries.start * repeats : self._queries.stop * repeats]

    def cols_of(self, x: Tensor) -> Tensor:
        return x[self._heads(), self._keys]

    def max_rows(self, x: Tensor, value: Tensor) -> None:
        target = self.rows_of(x)
        target.copy_(torch.maximum(target, value))

    def hides(self, batch: slice, rows: slice, cols: slice) -> Tensor | bool:
        tiles = self.tiles
        # Rows of one position are neighbours.
        first, stop = self.first + rows.start // tiles.repeats, self.first + -(-rows.stop // tiles.repeats)
        first_key, last_key = self.first_key + cols.start, self.first_key + cols.stop - 1
        nearest, farthest = first - last_key, stop - 1 - first_key
        if (tiles.is_causal and farthest < 0) or (
            self.window is not None and (nearest >= self.window or farthest <= -self.window)
        ):
            return True
        is_cut = (tiles.is_causal and nearest < 0) or (
            self.window is not None and (farthest >= self.window or nearest <= -self.window)
        )
        if not is_cut:
            return False
        i, j = self._positions(rows, cols)
        hidden = torch.zeros(i.shape[0], j.shape[1], dtype=torch.bool, device=tiles.device)
        if tiles.is_causal:
            hidden |= i < j
        if self.window is not None:
            hidden |= (i - j).abs() >= self.window
        return hidden

    def shared(self, rows: slice, cols: slice) -> Tensor:
        return self.tiles.layout.shared_levels(*self._positions(rows, cols), self.sequence.row)

    def distances(self, rows: slice, cols: slice, dtype: torch.dtype) -> Tensor:
        i, j = self._positions(rows, cols)
        return (i.to(dtype) - j.to(dtype)).abs_()

    def _positions(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """Of queries (rows, 1) and keys (1, columns)."""
        i = torch.arange(rows.start, rows.stop, device=self.tiles.device) // self.tiles.repeats + self.first
        j = torch.arange(cols.start, cols.stop, device=self.tiles.device) + self.first_key
        return i[:, None], j[None, :]

    def _view(self, bias: Tensor, batch: slice, rows: slice, cols: slice) -> tuple[Tensor, slice]:
        """The bias of a view as a view, (1 or groups, 1 or repeats, 1 or positions, 1 or columns), and its
        rows among them.
        """
        tiles = self.tiles
        first, stop = rows.start // tiles.repeats, -(-rows.stop // tiles.repeats)
        keys, queries = self._keys.start, self._queries.start
        if bias.shape[0] > 1:
            bias = bias[self.sequence.batch : self.sequence.batch + 1]
        if bias.shape[2] > 1:
            bias = bias[:, :, queries + first : queries + stop]
        if bias.shape[3] > 1:
            bias = bias[..., keys + cols.start : keys + cols.stop]
        if bias.shape[1] > 1:
            bias = bias[0].unflatten(0, (tiles.num_groups, tiles.repeats))[batch]
        offset = first * tiles.repeats
        return bias, slice(rows.start - offset, rows.stop - offset)

    def bias_of(self, bias: Tensor, batch: slice, rows: slice, cols: slice) -> Tensor:
        """As ``Tile``; the bias has 4 dimensions, each 1 or that of (B, H, T, S)."""
        view, view_rows = self._view(bias, batch, rows, cols)
        shape = (batch.stop - batch.start, self.tiles.repeats, -(-view_rows.stop // self.tiles.repeats))
        view = view.expand(*shape, cols.stop - cols.start)
        return view.transpose(1, 2).flatten(1, 2)[:, view_rows]

    def add_bias(self, bias: Tensor, batch: slice, rows: slice, cols: slice, value: Tensor) -> None:
        view, view_rows = self._view(bias, batch, rows, cols)
        repeats = self.tiles.repeats
        count = -(-view_rows.stop // repeats)
        padded = value.new_zeros((value.shape[0], count * repeats, value.shape[2]))
        padded[:, view_rows] = value
        view.add_(padded.unflatten(1, (count, repeats)).transpose(1, 2).sum_to_size(view.shape))
