"""The pairs of any layout as gathered pairs of tiles: for free segments, biases, and padding with T != S.

Each sequence is cut at the borders of a level and into tiles of at most ``TILE`` positions. A pair of tiles whose pairs of
positions share one number of levels is computed with that prefix and no mask; the others once per number of levels, masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from structattn.layout import LevelLayout
from structattn.ops.regroup import Gathered

TILE = 64


@dataclass(frozen=True)
class Sequence:
    """One sequence of a batch.

    Attributes:
        row: which segments of a free partition it has.
        queries, keys: index of its first query and key among the B * T and B * S positions.
        num_queries, num_keys: how many it has.
        first_query: the position of its first query, counted from its first key.
    """

    row: int
    queries: int
    keys: int
    num_queries: int
    num_keys: int
    first_query: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Tiles of all sequences, on one side of the score matrix; tensors (tiles,) int64 unless said.

    Attributes:
        sequence: which sequence a tile belongs to.
        first, last: its first and last position.
        rows: how to gather the tiles.
        places: (tiles, C) positions; where there is none, the first of the tile.
        blocks: (L - 1, tiles, C), the block of each position at levels 2 to L.
    """

    sequence: Tensor
    first: Tensor
    last: Tensor
    rows: Gathered
    places: Tensor
    blocks: Tensor


def _borders(layout: LevelLayout, row: int, low: int, high: int) -> list[int]:
    """Where tiles must end: the block borders in [low, high) of the deepest level with blocks of half a tile or more."""
    found = [low]
    for level in range(2, layout.num_levels + 1):
        if layout.boundaries is None:
            size = layout.block_sizes[level - 1]
            starts = list(range(-(-low // size) * size, high, size)) if size >= TILE // 2 else []
        else:
            starts = [
                start for start in layout.boundaries[row if layout.num_rows else 0][level - 1] if low < start < high
            ]
        if not starts or (high - low) / len(starts) < TILE // 2:
            break
        found = sorted({low, *starts})
    return found


def _cut(layout: LevelLayout, sequences: list[Sequence], queries: bool, device: torch.device) -> Cut:
    """The tiles of one side."""
    tiles: list[tuple[int, int, int, int]] = []  # sequence, start among all positions, first position, length
    for number, item in enumerate(sequences):
        low = item.first_query if queries else 0
        count, base = (item.num_queries, item.queries) if queries else (item.num_keys, item.keys)
        borders = _borders(layout, item.row, low, low + count)
        for start, end in zip(borders, [*borders[1:], low + count], strict=True):
            for place in range(start, end, TILE):
                tiles.append((number, base + place - low, place, min(TILE, end - place)))
    sequence, starts, first, lengths = torch.tensor(tiles, device=device).view(-1, 4).unbind(1)
    rows = Gathered.of(starts, lengths, is_flat=False)
    places = first[:, None] + rows.index - starts[:, None]
    row = torch.tensor([item.row for item in sequences], device=device)[sequence][:, None]
    levels = [layout.blocks(level, places, row) for level in range(2, layout.num_levels + 1)]
    blocks = torch.stack(levels) if levels else places.new_empty((0, *places.shape))
    return Cut(sequence=sequence, first=first, last=first + lengths - 1, rows=rows, places=places, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Tiled:
    """All tiles of a call.

    Attributes:
        layout: any.
        queries, keys: the two sides.
        is_causal, window: as in ``structured_attention``.
        num_groups: G, the key heads.
        repeats: query heads per key head.
        num_queries, num_keys: T and S of the whole tensors, for the bias.
    """

    layout: LevelLayout
    queries: Cut
    keys: Cut
    is_causal: bool
    window: int | None
    num_groups: int
    repeats: int
    num_queries: int
    num_keys: int

    @classmethod
    def of(
        cls,
        layout: LevelLayout,
        sequences: list[Sequence],
        q: Tensor,
        k: Tensor,
        *,
        is_causal: bool,
        window: int | None,
    ) -> Tiled:
        """The tiles of some sequences of q (B, H, T, D) and k (B, G, S, D)."""
        return cls(
            layout=layout,
            queries=_cut(layout, sequences, True, q.device),
            keys=_cut(layout, sequences, False, q.device),
            is_causal=is_causal,
            window=window,
            num_groups=k.shape[1],
            repeats=q.shape[1] // k.shape[1],
            num_queries=q.shape[2],
            num_keys=k.shape[2],
        )

    def pieces(self, budget: int) -> Iterator[TilePiece]:
        """All pairs of tiles that hold a visible pair, by number of shared levels, at most ``budget`` scores in one."""
        per_pair = self.num_groups * self.repeats * self.queries.places.shape[1] * self.keys.places.shape[1]
        step, number = max(1, budget // per_pair), 0
        for level, masked, pairs in self._sorted_pairs():
            for start in range(0, pairs.shape[1], step):
                yield TilePiece(self, level, number, pairs[:, start : start + step], masked)
                number += 1

    def _sorted_pairs(self) -> Iterator[tuple[int, bool, Tensor]]:
        """(level, whether a mask is needed, pairs (2, n) of tiles)."""
        q, k = self.queries, self.keys
        nearest = q.first[:, None] - k.last[None, :]
        farthest = q.last[:, None] - k.first[None, :]
        reach = self.num_queries + self.num_keys if self.window is None else self.window
        lowest = 0 if self.is_causal else 1 - reach
        some = (q.sequence[:, None] == k.sequence[None, :]) & (farthest >= lowest) & (nearest < reach)
        pairs = some.nonzero().T
        i, j = pairs
        cut = (nearest[i, j] < lowest) | (farthest[i, j] >= reach)
        cut |= ~(q.rows.there.all(1)[i] & k.rows.there.all(1)[j])
        fewest = torch.ones_like(i)
        most = torch.ones_like(i)
        for a, b in zip(q.blocks, k.blocks, strict=True):
            a_low, a_high, b_low, b_high = a.amin(1)[i], a.amax(1)[i], b.amin(1)[j], b.amax(1)[j]
            fewest += (a_low == a_high) & (b_low == b_high) & (a_low == b_low)
            most += (a_low <= b_high) & (b_low <= a_high)
        for level in range(1, self.layout.num_levels + 1):
            here = (fewest <= level) & (level <= most)
            masked = cut | (fewest < most)
            for is_masked in (False, True):
                yield level, is_masked, pairs[:, here & (masked == is_masked)]


@dataclass(frozen=True)
class TilePiece:
    """Pairs of tiles with one number of shared levels; see ``piece.Piece``. Tensors are (tiles, G, C * repeats, d).

    Attributes:
        tiled: all tiles.
        level, number: see ``piece.Piece``.
        pairs: (2, n), the tiles of queries and of keys.
        is_masked: whether some pairs of positions do not count.
    """

    tiled: Tiled
    level: int
    number: int
    pairs: Tensor
    is_masked: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, rows and columns."""
        tiled = self.tiled
        rows, cols = tiled.queries.places.shape[1] * tiled.repeats, tiled.keys.places.shape[1]
        return self.pairs.shape[1] * tiled.num_groups, rows, cols

    def rows_of(self, x: Tensor) -> Tensor:
        """See ``piece.Piece``."""
        return x.index_select(0, self.pairs[0]).flatten(0, 1)

    def cols_of(self, x: Tensor) -> Tensor:
        """See ``piece.Piece``."""
        return x.index_select(0, self.pairs[1]).flatten(0, 1)

    def open_rows(self, x: Tensor) -> Tensor:
        """See ``piece.Piece``."""
        return x.new_zeros((self.shape[0], *x.shape[2:]))

    def close_rows(self, x: Tensor, opened: Tensor) -> None:
        """See ``piece.Piece``."""
        x.index_add_(0, self.pairs[0], opened.unflatten(0, (-1, x.shape[1])))

    def open_cols(self, x: Tensor) -> Tensor:
        """See ``piece.Piece``."""
        return x.new_zeros((self.shape[0], *x.shape[2:]))

    def close_cols(self, x: Tensor, opened: Tensor) -> None:
        """See ``piece.Piece``."""
        x.index_add_(0, self.pairs[1], opened.unflatten(0, (-1, x.shape[1])))

    def max_rows(self, x: Tensor, value: Tensor) -> None:
        """See ``piece.Piece``."""
        value = value.unflatten(0, (-1, x.shape[1]))
        x.scatter_reduce_(0, self.pairs[0][:, None, None, None].expand_as(value), value, "amax")

    def hides(self, batch: slice, rows: slice, cols: slice) -> Tensor | bool:
        """See ``piece.Piece``."""
        return self._hidden[batch, rows, cols] if self.is_masked else False

    @cached_property
    def _hidden(self) -> Tensor:
        tiled, (i, j) = self.tiled, self.pairs
        q, k = tiled.queries, tiled.keys
        distance = q.places[i][:, :, None] - k.places[j][:, None, :]
        seen = q.rows.there[i][:, :, None] & k.rows.there[j][:, None, :]
        if tiled.is_causal:
            seen &= distance >= 0
        if tiled.window is not None:
            seen &= distance.abs() < tiled.window
        shared = torch.ones_like(distance)
        for a, b in zip(q.blocks, k.blocks, strict=True):
            shared += a[i][:, :, None] == b[j][:, None, :]
        seen &= shared == self.level
        return self._to_rows((~seen)[:, None, None].expand(-1, tiled.num_groups, tiled.repeats, -1, -1))

    def _to_rows(self, x: Tensor) -> Tensor:
        """(n, G, repeats, C, columns) to (n * G, C * repeats, columns)."""
        return x.transpose(2, 3).reshape(self.shape)

    def _bias_index(self, bias: Tensor) -> Tensor:
        """Where each score's bias stands in the flat bias, int64 (batch, rows, columns)."""
        tiled, (i, j) = self.tiled, self.pairs
        rows, cols = tiled.queries.rows.index[i], tiled.keys.rows.index[j]
        heads = torch.arange(tiled.num_groups * tiled.repeats, device=i.device)
        places = (
            rows[:, :1].div(tiled.num_queries, rounding_mode="floor")[:, :, None, None],
            heads[None, :, None, None],
            (rows % tiled.num_queries)[:, None, :, None],
            (cols % tiled.num_keys)[:, None, None, :],
        )
        steps = (stride if size > 1 else 0 for size, stride in zip(bias.shape, bias.stride(), strict=True))
        terms = [place * step for place, step in zip(places, steps, strict=True)]
        index = (terms[0] + terms[1] + terms[2] + terms[3]).expand(
            i.shape[0], heads.shape[0], rows.shape[1], cols.shape[1]
        )
        return self._to_rows(index.unflatten(1, (tiled.num_groups, tiled.repeats)))

    def bias_of(self, bias: Tensor, batch: slice, rows: slice, cols: slice) -> Tensor:
        """See ``piece.Piece``; the bias is contiguous, its 4 dimensions 1 or those of (B, H, T, S)."""
        return bias.view(-1)[self._bias_index(bias)[batch, rows, cols]]

    def add_bias(self, bias: Tensor, batch: slice, rows: slice, cols: slice, value: Tensor) -> None:
        """See ``piece.Piece``."""
        index = self._bias_index(bias)[batch, rows, cols]
        bias.view(-1).index_add_(0, index.flatten(), value.flatten())
