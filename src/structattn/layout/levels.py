"""Layouts: the structure of the score matrix, that is, which dimensions a pair of positions shares.

A layout is a value: it holds no tensors and computes no attention. ``ops`` computes attention for any of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from structattn.checks import (
    MAX_LENGTH,
    check_bool,
    check_choice,
    check_int,
    check_scale,
    check_size,
    describe,
)
from structattn.errors import ConfigError, ShapeError
from structattn.layout.checks import Boundaries, check_blocks, checked_boundaries, checked_positions, positive_ints

Scaling = Literal["variance", "mup", "paper", "paper_sum", "standard"]
MAX_COUNTED = 2**26  # positions whose visible pairs are counted one by one
SCALINGS: tuple[Scaling, ...] = ("variance", "mup", "paper", "paper_sum", "standard")


def _slices(ranks: tuple[int, ...]) -> tuple[slice, ...]:
    ends = accumulate(ranks)
    return tuple(slice(end - rank, end) for end, rank in zip(ends, ranks, strict=True))


@dataclass(frozen=True)
class LevelLayout:
    """Multi-level (MLR) attention: level l adds rank ``ranks[l]`` to pairs inside one block of ``block_sizes[l]``.

    With R(i, j) the sum of the ranks of the levels that positions i and j share, and l(i, j) the number of those levels,

        score(i, j) = scale(i, j) * sum over shared levels l of <q_i[slice l], k_j[slice l]>.

    Level 1 is global: every pair shares it, also beyond ``block_sizes[0]``, the nominal context length. Deeper levels
    are shared when floor(i / block_size) agrees, or, in a free partition (``from_boundaries``), when both positions lie in
    one segment. Blocks are nested, so the shared levels are always a prefix.

    With ``value_ranks`` the values are hierarchical too: slice l of the output sums only over the keys that share level l
    with the query, with the weights of the row's one softmax, not renormalised:

        out_i[value slice l] = sum over j sharing level l of softmax_j(score(i, j)) v_j[value slice l].

    Args:
        ranks: dimensions of each level, level 1 (global) first; they sum to the head dimension.
        block_sizes: block size of each level in positions, level 1 first; each divides the one before (equal is allowed).
            Empty in a free partition.
        scaling: ``"variance"`` 1/sqrt(R(i, j)), unit variance at every distance; ``"mup"`` 8/R(i, j); ``"paper"`` each
            level over its rank, and the sum over l(i, j); ``"paper_sum"`` the same without the division by l(i, j); ``"standard"``
            1/sqrt(D) at every distance, as standard attention: for trained weights, where far pairs then score what is left of their product.
        value_ranks: dimensions of the value in each level, level 1 first; they sum to the value dimension. Default
            ``None``: every key gives its whole value.
        boundaries: the segments of a free partition; see ``from_boundaries``, which makes them.

    Raises:
        ConfigError: a rank or size is not a positive int, their numbers differ, blocks are not nested, or the scaling
            is unknown. The message names the level.

    Source: Kuang et al. 2025, section 5 (MLR attention). Free sizes and segments, variance scaling and hierarchical values
    are ours.
    """

    ranks: tuple[int, ...]
    block_sizes: tuple[int, ...]
    scaling: Scaling = "variance"
    value_ranks: tuple[int, ...] | None = None
    boundaries: Boundaries | None = None

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            ranks: Sequence[int],
            block_sizes: Sequence[int],
            scaling: Scaling = "variance",
            value_ranks: Sequence[int] | None = None,
            boundaries: Sequence[object] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", positive_ints(self.ranks, "ranks"))
        if self.boundaries is None:
            object.__setattr__(self, "block_sizes", positive_ints(self.block_sizes, "block_sizes", MAX_LENGTH))
            check_blocks(self.ranks, self.block_sizes)
        elif tuple(self.block_sizes) != ():
            raise ConfigError(
                f"give block_sizes or boundaries, not both: a free partition has block_sizes (), got {self.block_sizes}"
            )
        else:
            object.__setattr__(self, "boundaries", checked_boundaries(self.ranks, self.boundaries))
        if self.value_ranks is not None:
            object.__setattr__(self, "value_ranks", positive_ints(self.value_ranks, "value_ranks"))
            if len(self.value_ranks) != len(self.ranks):
                raise ConfigError(
                    f"value_ranks needs one dimension per level: expected {len(self.ranks)}, got {self.value_ranks}"
                )
        check_choice("scaling", self.scaling, SCALINGS)

    @classmethod
    def from_boundaries(
        cls,
        ranks: Sequence[int],
        boundaries: Sequence[object],
        scaling: Scaling = "variance",
        value_ranks: Sequence[int] | None = None,
    ) -> LevelLayout:
        """Free nested segments, such as document > paragraph > sentence, in place of equal blocks.

        Args:
            ranks: dimensions of each level, level 1 first.
            boundaries: for each level, level 1 first, the positions at which its segments start, rising from 0. Level 1 is
                global, ``(0,)``, and may be left out. A level repeats the starts of the one before and adds its own; its last segment has no
                end. Or a list of such, one per batch row (with ``cu_seqlens``: one per packed sequence, counted from the
                start of each). A level may be a 1-dimensional int tensor.
            scaling, value_ranks: see the class.

        Returns:
            A layout without ``block_sizes``.

        Raises:
            ConfigError: starts do not rise from 0, a level lacks a start of the level before, or level 1 is not ``(0,)``.

        Example:
            >>> layout = LevelLayout.from_boundaries((32, 16, 16), ((0,), (0, 300), (0, 120, 300, 410)))
            >>> layout.shared_rank(130, 299), layout.shared_rank(130, 301)
            (64, 32)

        Cost: the layout is a value of Python ints; under ``torch.compile`` other boundaries mean another compilation.
        """
        return cls(ranks, (), scaling, value_ranks, boundaries)

    @classmethod
    def halving(
        cls,
        ranks: Sequence[int],
        context_length: int,
        scaling: Scaling = "variance",
        value_ranks: Sequence[int] | None = None,
    ) -> LevelLayout:
        """The paper's blocks: 2^(l-1) blocks at level l.

        Args:
            ranks: dimensions of each level, level 1 first.
            context_length: length in positions at which level l has 2^(l-1) blocks. If 2^(L-1) does not divide it, the
                finest block is rounded up, so that level 1 spans at least the context.
            scaling, value_ranks: see the class.

        Raises:
            ConfigError: ``context_length`` is not a positive int, or as the class.
        """
        ranks = positive_ints(ranks, "ranks")
        check_size("context_length", context_length, MAX_LENGTH)
        finest = -(-context_length // 2 ** (len(ranks) - 1))
        sizes = tuple(finest * 2 ** (len(ranks) - level) for level in range(1, len(ranks) + 1))
        return cls(ranks=ranks, block_sizes=sizes, scaling=scaling, value_ranks=value_ranks)

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
        """The slice of the value dimension that belongs to each level; ``None`` without hierarchical values."""
        return None if self.value_ranks is None else _slices(self.value_ranks)

    def score_factors(self, scale: float | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The scaling as factors: a pair that shares n levels scores c_n * sum over l <= n of a_l <q_l, k_l>.

        Args:
            scale: a number that replaces the scaling, as in ``structured_attention``; ``None`` keeps it.

        Returns:
            (a_1 ... a_L) per level and (c_1 ... c_L) per number of shared levels.
        """
        per_rank = tuple(1 / rank for rank in self.ranks)
        ones = (1.0,) * self.num_levels
        if scale is not None:
            check_scale("scale", scale)
            # An int may be larger than any that a tensor takes.
            return ones, (float(scale) if isinstance(scale, int) else scale,) * self.num_levels
        match self.scaling:
            case "variance":
                return ones, tuple(1 / math.sqrt(total) for total in accumulate(self.ranks))
            case "mup":
                return ones, tuple(8 / total for total in accumulate(self.ranks))
            case "paper":
                return per_rank, tuple(1 / n for n in range(1, self.num_levels + 1))
            case "paper_sum":
                return per_rank, ones
            case "standard":
                return ones, (1 / math.sqrt(self.head_dim),) * self.num_levels

    @property
    def num_rows(self) -> int | None:
        """The number of batch rows (packed sequences) with different segments; ``None`` when all have the same blocks."""
        return None if self.boundaries is None or len(self.boundaries) == 1 else len(self.boundaries)

    def blocks(self, level: int, positions: Tensor, rows: Tensor | int = 0) -> Tensor:
        """The block of each position at a level.

        Args:
            level: 2 to L (all positions share level 1).
            positions: int tensor; negative ones lie in blocks without keys.
            rows: the batch row (packed sequence) of each position, broadcastable to it. Default 0. It matters only for
                ``boundaries`` per row.

        Returns:
            int64 tensor of the shape of ``positions``: equal values are one block, within a row.
        """
        self._check_level(level)
        positions = checked_positions("positions", positions)
        if isinstance(rows, Tensor):
            rows = checked_positions("rows", rows)
        else:
            self._check_row(rows)
        if self.boundaries is None:
            # The start of the block, not its number: Inductor writes only floor(n / size) * size of the n entries of a tensor
            # that holds arange(n) // size (torch 2.13, loop splitting), and the rest keeps what was in memory.
            return (positions - positions.remainder(self.block_sizes[level - 1])).long()
        # One sorted list for all rows: a start p of row r is r * 2^40 + p, and so is a position.
        far = 2**40
        starts = [r * far + start for r, segments in enumerate(self.boundaries) for start in segments[level - 1]]
        keys = positions.long().clamp(min=-1)
        if self.num_rows is not None:
            keys = keys + torch.as_tensor(rows, device=positions.device) * far
        return torch.searchsorted(torch.tensor(starts, device=positions.device), keys.contiguous(), right=True)

    def block_start(self, level: int, position: int, row: int = 0) -> int:
        """The first position of the block of a level in which ``position`` (at least 0) lies; 0 at level 1."""
        self._check_level(level)
        check_int("position", position, minimum=0)
        self._check_row(row)
        if level == 1:
            return 0
        if self.boundaries is None:
            size = self.block_sizes[level - 1]
            return position // size * size
        starts = self._segment_starts(level, row)
        return starts[bisect_right(starts, position) - 1]

    def select_rows(self, rows: Sequence[int]) -> LevelLayout:
        """The layout of a batch that has row ``rows[b]`` of this one as its row b; itself where all rows have the same blocks."""
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
        """l(i, j), the number of levels that positions i and j share, at least 1.

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
        for level in range(2, self.num_levels + 1):
            count = count + (self.blocks(level, a, row) == self.blocks(level, b, row))
        return count if isinstance(i, Tensor) or isinstance(j, Tensor) else int(count)

    @overload
    def shared_rank(self, i: int, j: int, row: int = 0) -> int: ...
    @overload
    def shared_rank(self, i: Tensor, j: Tensor, row: int = 0) -> Tensor: ...
    def shared_rank(self, i: int | Tensor, j: int | Tensor, row: int = 0) -> int | Tensor:
        """R(i, j), the sum of the ranks of the levels that positions i and j share. Arguments as ``shared_levels``."""
        if isinstance(i, Tensor) or isinstance(j, Tensor):
            levels = self.shared_levels(checked_positions("i", i), checked_positions("j", j), row)
            return torch.tensor(self.ranks, device=levels.device).cumsum(0)[levels - 1]
        return sum(self.ranks[: self.shared_levels(i, j, row)])

    def lengths(self, level: int, num_positions: int, row: int = 0) -> tuple[int, ...]:
        """The lengths of the blocks of a level that ``num_positions`` positions of a row fill, in order."""
        self._check_level(level)
        check_int("num_positions", num_positions, minimum=0, maximum=MAX_COUNTED)
        self._check_row(row)
        if level > 1 and self.boundaries is not None:
            starts = [start for start in self._segment_starts(level, row) if start < num_positions]
            return tuple(b - a for a, b in pairwise([*starts, num_positions]))
        counts = self._length_counts(level, num_positions, row)
        return tuple(length for length, n in counts.items() for _ in range(n))

    def _length_counts(self, level: int, num_positions: int, row: int) -> dict[int, int]:
        """How many blocks have each of the ``lengths``; equal blocks are not listed one by one."""
        check_int("num_positions", num_positions, minimum=0)
        self._check_row(row)
        if level == 1:
            return {num_positions: 1}
        if self.boundaries is not None:
            return Counter(self.lengths(level, num_positions, row))
        full, rest = divmod(num_positions, self.block_sizes[level - 1])
        return {length: n for length, n in ((self.block_sizes[level - 1], full), (rest, 1)) if length and n}

    def _segment_starts(self, level: int, row: int = 0) -> tuple[int, ...]:
        """Where the segments of a level of a free partition start in a row."""
        assert self.boundaries is not None
        return self.boundaries[row if self.num_rows is not None else 0][level - 1]

    def _check_level(self, level: int) -> None:
        check_int("level", level, minimum=1, maximum=self.num_levels)

    def _check_row(self, row: int) -> None:
        """A batch row; without segments of single rows all are alike."""
        check_int("row", row, minimum=0, maximum=None if self.num_rows is None else self.num_rows - 1)

    def shared_pairs(self, num_positions: int, is_causal: bool = True, row: int = 0) -> tuple[int, ...]:
        """The number of (query, key) pairs among ``num_positions`` that share each level; T*T or T*(T+1)/2 at level 1."""

        def pairs(n: int) -> int:
            return n * (n + 1) // 2 if is_causal else n * n

        check_bool("is_causal", is_causal)
        levels = range(1, self.num_levels + 1)
        return tuple(
            sum(pairs(length) * n for length, n in self._length_counts(level, num_positions, row).items())
            for level in levels
        )

    def score_flops(self, num_positions: int, is_causal: bool = True, row: int = 0) -> int:
        """FLOPs of all the scores of one head over T positions, exactly: 2 * sum over levels of r_l * (pairs sharing l).

        2 FLOPs per multiply-add. At T = ``block_sizes[0]`` with halving, not causal: 2 T^2 * sum r_l / 2^(l-1).
        """
        shared = self.shared_pairs(num_positions, is_causal, row)
        return sum(2 * rank * pairs for rank, pairs in zip(self.ranks, shared, strict=True))

    def value_flops(self, num_positions: int, value_dim: int, is_causal: bool = True, row: int = 0) -> int:
        """FLOPs of the weighted sums of values of one head over T positions: 2 * sum over levels of v_l * (pairs sharing l).

        Without ``value_ranks``: 2 * ``value_dim`` * (all pairs).
        """
        check_size("value_dim", value_dim)
        shared = self.shared_pairs(num_positions, is_causal, row)
        ranks = (value_dim,) if self.value_ranks is None else self.value_ranks
        return sum(2 * rank * pairs for rank, pairs in zip(ranks, shared, strict=False))

    def key_cache_size(self, num_positions: int, row: int = 0) -> int:
        """Numbers per key head that a cache must be able to hold while decoding up to T positions.

        Level 1 keeps all T keys, a deeper level only those of the block that decoding is in, at most its longest block:
        T r_1 + sum over l > 1 of r_l min(T, block_size_l). Standard attention: T * D.
        """
        return self._cache_size(self.ranks, num_positions, row)

    def value_cache_size(self, num_positions: int, value_dim: int, row: int = 0) -> int:
        """Numbers per value head that a cache must be able to hold: as the keys with ``value_ranks``, else T * V."""
        check_size("value_dim", value_dim)
        return self._cache_size(self.value_ranks or (value_dim,), num_positions, row)

    def _cache_size(self, ranks: tuple[int, ...], num_positions: int, row: int) -> int:
        longest = [max(self._length_counts(level, num_positions, row), default=0) for level in range(1, len(ranks) + 1)]
        return sum(rank * length for rank, length in zip(ranks, longest, strict=True))
