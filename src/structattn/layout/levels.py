"""Layouts: the structure of the score matrix, that is, which dimensions a pair of positions shares.

A layout is a value: it holds no tensors and computes no attention. ``ops`` computes attention for any of
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from structattn.checks import MAX_LENGTH, check_choice, check_int, check_size, describe
from structattn.errors import ConfigError, ShapeError
from structattn.layout.checks import checked_positions, checked_sharing, checked_value_ranks, positive_ints
from structattn.layout.counts import LevelCounts
from structattn.layout.scaling import SCALINGS, Scaling, score_factors
from structattn.layout.segments import Boundaries, segment_of, segments_of
from structattn.layout.sliding import Windows, num_shared, shorter

MAX_COUNTED = 2**26  # positions whose visible pairs are counted one by one
MAX_SINK_TOKENS = 2**20


def _slices(ranks: tuple[int, ...]) -> tuple[slice, ...]:
    ends = accumulate(ranks)
    return tuple(slice(end - rank, end) for end, rank in zip(ends, ranks, strict=True))


@dataclass(frozen=True)
class LevelLayout(LevelCounts):
    """Multi-level (MLR) attention: level l adds rank ``ranks[l]`` to pairs inside one block of
    ``block_sizes[l]``.

    With R(i, j) the sum of the ranks of the levels that positions i and j share, and l(i, j) the number of
    those levels,

        score(i, j) = scale(i, j) * sum over shared levels l of <q_i[slice l], k_j[slice l]>.

    Level 1 is global: every pair shares it, also beyond ``block_sizes[0]``, the nominal context length.
    Deeper levels are shared when floor(i / block_size) agrees, or, in a free partition (``from_boundaries``),
    when both positions lie in one segment, or, where levels slide (``sliding``), when |i - j| is below the
    window of the level. Blocks are nested and windows do not grow, so the shared levels are always a prefix.

    The first ``sink_tokens`` positions of a sequence share all levels with every query, at any distance: no
    window hides them, and a later query is compared with them in all dimensions.

    With ``value_ranks`` the values are hierarchical too: slice l of the output sums only over the keys that
    share level l with the query, with the weights of the row's one softmax, not renormalised:

        out_i[value slice l] = sum over j sharing level l of softmax_j(score(i, j)) v_j[value slice l].

    Args:
        ranks: dimensions of each level, level 1 (global) first; they sum to the head dimension.
        block_sizes: block size of each level in positions, level 1 first; each divides the one before (equal
            is allowed). Empty in a free partition and where levels slide.
        scaling: ``"variance"`` 1/sqrt(R(i, j)), unit variance at every distance; ``"mup"`` 8/R(i, j);
            ``"paper"`` each level over its rank, and the sum over l(i, j); ``"paper_sum"`` the same without
            the division by l(i, j); ``"standard"`` 1/sqrt(D) at every distance, as standard attention: for
            trained weights, where far pairs then score what is left of their product.
        value_ranks: dimensions of the value in each level, level 1 first; they sum to the value dimension.
            Default ``None``: every key gives its whole value.
        boundaries: the segments of a free partition; see ``from_boundaries``, which makes them.
        windows: those of sliding levels; see ``sliding``, which makes them.
        sink_tokens: how many of the first positions share all levels with every query. Default 0.

    Raises:
        ConfigError: a rank or size is not a positive int, their numbers differ, blocks are not nested, or the
            scaling is unknown. The message names the level.

    Source: Kuang et al. 2025, section 5 (MLR attention). Free sizes and segments, sliding levels, variance
    scaling and hierarchical values are ours. Sink tokens: Xiao et al. 2023 (StreamingLLM).
    """

    ranks: tuple[int, ...]
    block_sizes: tuple[int, ...]
    scaling: Scaling = "variance"
    value_ranks: tuple[int, ...] | None = None
    boundaries: Boundaries | None = None
    windows: Windows | None = None
    sink_tokens: int = 0

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            ranks: Sequence[int],
            block_sizes: Sequence[int],
            scaling: Scaling = "variance",
            value_ranks: Sequence[int] | None = None,
            boundaries: Sequence[object] | None = None,
            windows: Sequence[int | None] | None = None,
            sink_tokens: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        ranks = positive_ints(self.ranks, "ranks")
        checked = {"ranks": ranks, **checked_sharing(ranks, self.block_sizes, self.boundaries, self.windows)}
        if self.value_ranks is not None:
            checked["value_ranks"] = checked_value_ranks(ranks, self.value_ranks)
        check_choice("scaling", self.scaling, SCALINGS)
        check_int("sink_tokens", self.sink_tokens, minimum=0, maximum=MAX_SINK_TOKENS)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_boundaries(
        cls,
        ranks: Sequence[int],
        boundaries: Sequence[object],
        scaling: Scaling = "variance",
        value_ranks: Sequence[int] | None = None,
        *,
        sink_tokens: int = 0,
    ) -> LevelLayout:
        """Free nested segments, such as document > paragraph > sentence, in place of equal blocks.

        Args:
            ranks: dimensions of each level, level 1 first.
            boundaries: for each level, level 1 first, the positions at which its segments start, rising from
                0. Level 1 is global, ``(0,)``, and may be left out. A level repeats the starts of the one
                before and adds its own; its last segment has no end. Or a list of such, one per batch row
                (with ``cu_seqlens``: one per packed sequence, counted from the start of each). A level may be
                a 1-dimensional int tensor.
            scaling, value_ranks, sink_tokens: see the class.

        Raises:
            ConfigError: starts do not rise from 0, a level lacks a start of the level before, or level 1 is
                not ``(0,)``.

        Example:
            >>> layout = LevelLayout.from_boundaries((32, 16, 16), ((0,), (0, 300), (0, 120, 300, 410)))
            >>> layout.shared_rank(130, 299), layout.shared_rank(130, 301)
            (64, 32)

        Cost: the layout is a value of Python ints; under ``torch.compile`` other boundaries mean another
            compilation.
        """
        return cls(ranks, (), scaling, value_ranks, boundaries, sink_tokens=sink_tokens)

    @classmethod
    def sliding(
        cls,
        ranks: Sequence[int],
        windows: Sequence[int | None],
        scaling: Scaling = "variance",
        value_ranks: Sequence[int] | None = None,
        *,
        sink_tokens: int = 0,
    ) -> LevelLayout:
        """Levels without blocks: a pair shares level l where |i - j| < ``windows[l]``, wherever it is.

        Args:
            ranks: dimensions of each level, level 1 first.
            windows: of each level, level 1 first, in positions; none is longer than the one before. ``None``
                reaches every position. A first one that does not hides all pairs beyond it, as the ``window``
                of ``structured_attention`` does; of the two the smaller counts. ``sliding((64,), (252,),
                sink_tokens=4)`` is a window with sink tokens.
            scaling, value_ranks, sink_tokens: see the class.

        Raises:
            ConfigError: not one positive int or ``None`` per rank, or windows that grow.

        Example:
            >>> layout = LevelLayout.sliding((16, 8, 8), (None, 256, 64))
            >>> layout.shared_rank(1000, 940), layout.shared_rank(1000, 900), layout.shared_rank(1000, 0)
            (32, 24, 16)

        Cost: scores as ``score_flops`` says; a cache of T positions keeps the sum of r_l min(T, w_l) numbers
            for each key head, and the sink tokens.

        Source: ours; DAR (arXiv 2606.18587) has two such levels.
        """
        return cls(ranks, (), scaling, value_ranks, None, windows, sink_tokens)

    @classmethod
    def halving(
        cls,
        ranks: Sequence[int],
        context_length: int,
        scaling: Scaling = "variance",
        value_ranks: Sequence[int] | None = None,
        *,
        sink_tokens: int = 0,
    ) -> LevelLayout:
        """The paper's blocks: 2^(l-1) blocks at level l.

        Args:
            ranks: dimensions of each level, level 1 first.
            context_length: length in positions at which level l has 2^(l-1) blocks. If 2^(L-1) does not
                divide it, the finest block is rounded up, so that level 1 spans at least the context.
            scaling, value_ranks, sink_tokens: see the class.

        Raises:
            ConfigError: ``context_length`` is not a positive int, or as the class.
        """
        ranks = positive_ints(ranks, "ranks")
        check_size("context_length", context_length, MAX_LENGTH)
        finest = -(-context_length // 2 ** (len(ranks) - 1))
        sizes = tuple(finest * 2 ** (len(ranks) - level) for level in range(1, len(ranks) + 1))
        return cls(ranks, sizes, scaling, value_ranks, sink_tokens=sink_tokens)

    @property
    def num_levels(self) -> int:
        """L, the number of levels."""
        return len(self.ranks)

    @property
    def head_dim(self) -> int:
        """D, the dimension of queries and keys: the sum of the ranks."""
        return sum(self.ranks)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slice of the head dimension that belongs to each level."""
        return _slices(self.ranks)

    @property
    def value_slices(self) -> tuple[slice, ...] | None:
        """The slice of the value dimension that belongs to each level; ``None`` without hierarchical
        values.
        """
        return None if self.value_ranks is None else _slices(self.value_ranks)

    def score_factors(self, scale: float | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The scaling as factors: a pair that shares n levels scores c_n * sum over l <= n of a_l <q_l, k_l>.

        Args:
            scale: a number that replaces the scaling, as in ``structured_attention``; ``None`` keeps it.

        Returns:
            (a_1 ... a_L) per level and (c_1 ... c_L) per number of shared levels.
        """
        return score_factors(self.ranks, self.scaling, scale)

    def whole_factors(self, scale: float | None = None) -> tuple[float, ...]:
        """The factor of each of the D dimensions in the score of a pair that shares all levels: c_L a_l, see
        ``score_factors``.
        """
        per_level, per_count = self.score_factors(scale)
        return tuple(per_count[-1] * a for a, rank in zip(per_level, self.ranks, strict=True) for _ in range(rank))

    @property
    def num_rows(self) -> int | None:
        """The number of batch rows (packed sequences) with different segments; ``None`` when all have the
        same blocks.
        """
        return None if self.boundaries is None or len(self.boundaries) == 1 else len(self.boundaries)

    def window_of(self, level: int, window: int | None = None) -> int | None:
        """The distance below which a pair shares a level in a call with a ``window``; blocks and segments
        have none of their own.
        """
        check_int("level", level, minimum=1, maximum=self.num_levels)
        if window is not None:
            check_size("window", window, MAX_LENGTH)
        return window if self.windows is None else shorter(self.windows[level - 1], window)

    def blocks(self, level: int, positions: Tensor, rows: Tensor | int = 0) -> Tensor:
        """The block of each position at a level.

        Args:
            level: 1 to L. All positions share level 1, whose one block is 0.
            positions: int tensor; negative ones lie in blocks without keys.
            rows: the batch row (packed sequence) of each position, an int or an int tensor that broadcasts to
                ``positions``. Default 0. It matters only for ``boundaries`` per row.

        Returns:
            int64 tensor of the shape of ``positions``. Two positions of one row are in one block where the
            values are equal.

        Raises:
            ConfigError: no such level or row, or sliding levels, which have no blocks.
            ShapeError: the positions or rows are not ints.
        """
        self._check_level(level)
        positions = checked_positions("positions", positions)
        if isinstance(rows, Tensor):
            rows = checked_positions("rows", rows)
        else:
            self._check_row(rows)
        if level == 1:
            return torch.zeros_like(positions, dtype=torch.int64)
        if self.boundaries is None:
            # The start of the block, not its number: Inductor writes only floor(n / size) * size of the n
            # entries of a tensor that holds arange(n) // size (torch 2.13, loop splitting), and the rest
            # keeps what was in memory.
            return (positions - positions.remainder(self.block_sizes[level - 1])).long()
        return segments_of(self.boundaries, level, positions, rows)

    def block_start(self, level: int, position: int, row: int = 0) -> int:
        """The first position of the block of a level in which ``position`` (at least 0) lies; 0 at level
        1.
        """
        self._check_level(level)
        check_int("position", position, minimum=0)
        self._check_row(row)
        return self._block(level, position, row)[0]

    def _block(self, level: int, position: int, row: int) -> tuple[int, int]:
        """The first position of a block and the one after its last, where it has one."""
        if level == 1:
            return 0, MAX_LENGTH
        if self.boundaries is not None:
            return segment_of(self._segment_starts(level, row), position)
        size = self.block_sizes[level - 1]
        return position // size * size, position // size * size + size

    def shared_interval(
        self, level: int, position: int, num_positions: int, window: int | None = None, row: int = 0
    ) -> tuple[int, int]:
        """The positions among ``num_positions`` that share a level with one of them, ``position``: the first,
        and the one after the last. Sink tokens, which share every level, are not counted in.

        Args:
            window: of the call, as in ``structured_attention``.
            row: the batch row, where rows have different segments.
        """
        check_int("level", level, minimum=1, maximum=self.num_levels)
        self._check_count(num_positions, row)
        check_int("position", position, minimum=0, maximum=num_positions - 1)
        low, high = (0, num_positions) if self.windows is not None else self._block(level, position, row)
        if (reach := self.window_of(level, window)) is not None:
            low, high = max(low, position - reach + 1), min(high, position + reach)
        return low, min(high, num_positions)

    def is_sink(self, positions: Tensor) -> Tensor:
        """Which positions of keys, an int tensor, are sink tokens: a bool tensor of its shape."""
        positions = checked_positions("positions", positions)
        return (positions >= 0) & (positions < self.sink_tokens)

    def select_rows(self, rows: Sequence[int]) -> LevelLayout:
        """The layout of a batch that has row ``rows[b]`` of this one as its row b; itself where all rows have
        the same blocks.
        """
        if not isinstance(rows, Sequence):
            raise ConfigError(f"rows must be a list of the numbers of batch rows, got {describe(rows)}")
        for row in rows:
            self._check_row(row)
        if self.boundaries is None or self.num_rows is None:
            return self
        return replace(self, boundaries=tuple(self.boundaries[row] for row in rows))

    @overload
    def shared_levels(self, i: int, j: int, row: int = 0) -> int: ...
    @overload
    def shared_levels(self, i: Tensor, j: Tensor, row: int = 0) -> Tensor: ...
    def shared_levels(self, i: int | Tensor, j: int | Tensor, row: int = 0) -> int | Tensor:
        """l(i, j), the number of levels that a query at i and a key at j share; at least 1 but beyond the
        first window of sliding levels.

        Args:
            i, j: positions, ints or int tensors that broadcast; negative ones lie in blocks without keys.
            row: the batch row, where rows have different segments.

        Returns:
            An int for ints, else an int64 tensor of the broadcast shape.
        """
        self._check_row(row)
        a, b = checked_positions("i", i), checked_positions("j", j)
        device = b.device if isinstance(j, Tensor) else a.device
        try:
            count = torch.ones(torch.broadcast_shapes(a.shape, b.shape), dtype=torch.int64, device=device)
        except RuntimeError:
            raise ShapeError(f"i and j must broadcast, got {tuple(a.shape)} and {tuple(b.shape)}") from None
        if self.windows is not None:
            count = num_shared(self.windows, a, b)
        else:
            for level in range(2, self.num_levels + 1):
                count = count + (self.blocks(level, a, row) == self.blocks(level, b, row))
        if self.sink_tokens:
            count = count.masked_fill(self.is_sink(b), self.num_levels)
        return count if isinstance(i, Tensor) or isinstance(j, Tensor) else int(count)

    @overload
    def shared_rank(self, i: int, j: int, row: int = 0) -> int: ...
    @overload
    def shared_rank(self, i: Tensor, j: Tensor, row: int = 0) -> Tensor: ...
    def shared_rank(self, i: int | Tensor, j: int | Tensor, row: int = 0) -> int | Tensor:
        """R(i, j), the sum of the ranks of the levels that positions i and j share. Arguments as
        ``shared_levels``.
        """
        if isinstance(i, Tensor) or isinstance(j, Tensor):
            levels = self.shared_levels(checked_positions("i", i), checked_positions("j", j), row)
            return torch.tensor([0, *accumulate(self.ranks)], device=levels.device)[levels]
        return sum(self.ranks[: self.shared_levels(i, j, row)])

    def lengths(self, level: int, num_positions: int, row: int = 0) -> tuple[int, ...]:
        """The lengths of the blocks of a level that ``num_positions`` positions of a row fill, in order."""
        self._check_level(level)
        self._check_count(num_positions, row, MAX_COUNTED)
        if level > 1 and self.boundaries is not None:
            starts = [start for start in self._segment_starts(level, row) if start < num_positions]
            return tuple(b - a for a, b in pairwise([*starts, num_positions]))
        counts = self._length_counts(level, num_positions, row)
        return tuple(length for length, n in counts.items() for _ in range(n))

    def _length_counts(self, level: int, num_positions: int, row: int) -> dict[int, int]:
        """How many blocks have each of the ``lengths``; equal blocks are not listed one by one."""
        if level == 1:
            return {num_positions: 1}
        if self.boundaries is not None:
            return Counter(self.lengths(level, num_positions, row))
        full, rest = divmod(num_positions, self.block_sizes[level - 1])
        return {length: n for length, n in ((self.block_sizes[level - 1], full), (rest, 1)) if length and n}

    def _first_blocks(self, level: int, limit: int, num_positions: int, row: int) -> list[tuple[int, int]]:
        """The first position and the one after the last of each block that begins before ``limit``, among
        ``num_positions``.
        """
        blocks: list[tuple[int, int]] = []
        while (start := blocks[-1][1] if blocks else 0) < limit:
            blocks.append((start, min(self._block(level, start, row)[1], num_positions)))
        return blocks

    def _segment_starts(self, level: int, row: int = 0) -> tuple[int, ...]:
        """Where the segments of a level of a free partition start in a row."""
        assert self.boundaries is not None
        return self.boundaries[row if self.num_rows is not None else 0][level - 1]

    def _check_level(self, level: int) -> None:
        """A level, whose blocks are asked for."""
        check_int("level", level, minimum=1, maximum=self.num_levels)
        if self.windows is not None:
            raise ConfigError(f"sliding levels have no blocks: ask for shared_levels(i, j), or windows, {self.windows}")

    def _check_count(self, num_positions: int, row: int, maximum: int | None = None) -> None:
        check_int("num_positions", num_positions, minimum=0, maximum=maximum)
        self._check_row(row)

    def _check_row(self, row: int) -> None:
        """A batch row; without segments of single rows all are alike."""
        check_int("row", row, minimum=0, maximum=None if self.num_rows is None else self.num_rows - 1)
