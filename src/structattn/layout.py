"""Layouts: the structure of the score matrix, that is, which dimensions a pair of positions shares.

A layout is a value: it holds no tensors and computes no attention. ``ops`` computes attention for any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, overload

import torch
from torch import Tensor

from structattn.errors import ConfigError

Scaling = Literal["variance", "mup", "paper", "paper_sum"]
SCALINGS: tuple[Scaling, ...] = ("variance", "mup", "paper", "paper_sum")


def _positive_ints(values: object, name: str) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not values:
        raise ConfigError(f"{name} must be a tuple with one positive int per level, got {values!r}")
    for level, value in enumerate(values, start=1):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: level {level} must be a positive int, got {value!r}")
    return tuple(values)


@dataclass(frozen=True)
class LevelLayout:
    """Multi-level (MLR) attention: level l adds rank ``ranks[l]`` to pairs inside one block of ``block_sizes[l]``.

    With R(i, j) the sum of the ranks of the levels that positions i and j share, and l(i, j) the number of those levels,

        score(i, j) = scale(i, j) * sum over shared levels l of <q_i[slice l], k_j[slice l]>.

    Level 1 is global: every pair shares it, also beyond ``block_sizes[0]``, the nominal context length. Deeper levels
    are shared when floor(i / block_size) agrees. Block sizes are nested, so the shared levels are always a prefix.

    Args:
        ranks: dimensions of each level, level 1 (global) first; they sum to the head dimension.
        block_sizes: block size of each level in positions, level 1 first; each divides the one before (equal is allowed).
        scaling: ``"variance"`` 1/sqrt(R(i, j)), unit variance at every distance; ``"mup"`` 8/R(i, j); ``"paper"`` each
            level over its rank, and the sum over l(i, j); ``"paper_sum"`` the same without the division by l(i, j).

    Raises:
        ConfigError: a rank or size is not a positive int, their numbers differ, sizes are not nested, or the scaling
            is unknown. The message names the level.

    Source: Kuang et al. 2025, section 5 (MLR attention). Free nested sizes and variance scaling are ours.
    """

    ranks: tuple[int, ...]
    block_sizes: tuple[int, ...]
    scaling: Scaling = "variance"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _positive_ints(self.ranks, "ranks"))
        object.__setattr__(self, "block_sizes", _positive_ints(self.block_sizes, "block_sizes"))
        if len(self.ranks) != len(self.block_sizes):
            raise ConfigError(
                f"a layout needs one block size per rank: got {len(self.ranks)} ranks {self.ranks} and "
                f"{len(self.block_sizes)} block_sizes {self.block_sizes}"
            )
        for level, (outer, inner) in enumerate(pairwise(self.block_sizes), start=2):
            if outer % inner:
                raise ConfigError(
                    f"block_sizes: level {level} must divide level {level - 1}: expected a divisor of {outer}, got {inner}"
                )
        if self.scaling not in SCALINGS:
            raise ConfigError(f"scaling must be one of {', '.join(SCALINGS)}; got {self.scaling!r}")

    @classmethod
    def halving(cls, ranks: tuple[int, ...], context_length: int, scaling: Scaling = "variance") -> LevelLayout:
        """The paper's blocks: 2^(l-1) blocks at level l.

        Args:
            ranks: dimensions of each level, level 1 first.
            context_length: length in positions at which level l has 2^(l-1) blocks. If 2^(L-1) does not divide it, the
                finest block is rounded up, so that level 1 spans at least the context.
            scaling: see the class.

        Raises:
            ConfigError: ``context_length`` is not a positive int, or as the class.
        """
        ranks = _positive_ints(ranks, "ranks")
        if isinstance(context_length, bool) or not isinstance(context_length, int) or context_length < 1:
            raise ConfigError(f"context_length must be a positive int, got {context_length!r}")
        finest = math.ceil(context_length / 2 ** (len(ranks) - 1))
        sizes = tuple(finest * 2 ** (len(ranks) - level) for level in range(1, len(ranks) + 1))
        return cls(ranks=ranks, block_sizes=sizes, scaling=scaling)

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
        ends = [sum(self.ranks[: level + 1]) for level in range(self.num_levels)]
        return tuple(slice(end - rank, end) for end, rank in zip(ends, self.ranks, strict=True))

    @overload
    def shared_levels(self, i: int, j: int) -> int: ...
    @overload
    def shared_levels(self, i: Tensor, j: Tensor) -> Tensor: ...
    def shared_levels(self, i: int | Tensor, j: int | Tensor) -> int | Tensor:
        """l(i, j), the number of levels that positions i and j share, at least 1.

        Args:
            i, j: positions, ints or int tensors that broadcast; negative ones lie in blocks of their own.

        Returns:
            An int for ints, else an int64 tensor of the broadcast shape.
        """
        a, b = torch.as_tensor(i), torch.as_tensor(j)
        count = torch.ones(torch.broadcast_shapes(a.shape, b.shape), dtype=torch.int64, device=a.device)
        for size in self.block_sizes[1:]:
            count = count + (a.div(size, rounding_mode="floor") == b.div(size, rounding_mode="floor"))
        return count if isinstance(i, Tensor) or isinstance(j, Tensor) else int(count)

    @overload
    def shared_rank(self, i: int, j: int) -> int: ...
    @overload
    def shared_rank(self, i: Tensor, j: Tensor) -> Tensor: ...
    def shared_rank(self, i: int | Tensor, j: int | Tensor) -> int | Tensor:
        """R(i, j), the sum of the ranks of the levels that positions i and j share. Arguments as ``shared_levels``."""
        if isinstance(i, Tensor) or isinstance(j, Tensor):
            levels = self.shared_levels(torch.as_tensor(i), torch.as_tensor(j))
            return torch.tensor(self.ranks, device=levels.device).cumsum(0)[levels - 1]
        return sum(self.ranks[: self.shared_levels(i, j)])

    def shared_pairs(self, num_positions: int, is_causal: bool = True) -> tuple[int, ...]:
        """The number of (query, key) pairs among ``num_positions`` that share each level; T*T or T*(T+1)/2 at level 1."""

        def pairs(n: int) -> int:
            return n * (n + 1) // 2 if is_causal else n * n

        counts = [pairs(num_positions)]
        for size in self.block_sizes[1:]:
            full, rest = divmod(num_positions, size)
            counts.append(full * pairs(size) + pairs(rest))
        return tuple(counts)

    def score_flops(self, num_positions: int, is_causal: bool = True) -> int:
        """FLOPs of all the scores of one head over T positions, exactly: 2 * sum over levels of r_l * (pairs sharing l).

        2 FLOPs per multiply-add. At T = ``block_sizes[0]`` with halving, not causal: 2 T^2 * sum r_l / 2^(l-1).
        """
        shared = self.shared_pairs(num_positions, is_causal)
        return sum(2 * rank * pairs for rank, pairs in zip(self.ranks, shared, strict=True))

    def key_cache_size(self, num_positions: int) -> int:
        """Numbers per key head that a cache must be able to hold while decoding up to T positions.

        Level 1 keeps all T keys, a deeper level only those of the block that decoding is in, at most its block size:
        T r_1 + sum over l > 1 of r_l min(T, block_size_l). Standard attention: T * D.
        """
        held = [num_positions] + [min(num_positions, size) for size in self.block_sizes[1:]]
        return sum(rank * count for rank, count in zip(self.ranks, held, strict=True))


@dataclass(frozen=True)
class GlobalWindowLayout:
    """Two softmaxes, added: one over all keys on the first dimensions, one over a sliding window on the others.

        out_i = softmax_j(<q_i[:r_1], k_j[:r_1]> / sqrt(r_1)) v_j  +  softmax_{j in window(i)}(<q_i[r_1:], k_j[r_1:]> / sqrt(r_2)) v_j

    A baseline of the paper. Not one softmax, so it has no log-sum-exp and is not a ``LevelLayout``.

    Args:
        ranks: dimensions (r_1, r_2) of the global and of the windowed part; they sum to the head dimension.
        window: visible keys of the windowed part, as the ``window`` of ``structured_attention``.

    Raises:
        ConfigError: not two positive ranks, or a window below 1.

    Source: Kuang et al. 2025, section 5.1 (global + window baseline).
    """

    ranks: tuple[int, int]
    window: int

    def __post_init__(self) -> None:
        ranks = _positive_ints(self.ranks, "ranks")
        if len(ranks) != 2:
            raise ConfigError(f"a global-window layout has 2 ranks (global, windowed), got {len(ranks)}: {ranks}")
        object.__setattr__(self, "ranks", ranks)
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ConfigError(f"window must be an int of at least 1, got {self.window!r}")

    @property
    def head_dim(self) -> int:
        """D, the dimension of queries and keys: the sum of the ranks."""
        return sum(self.ranks)

    def score_flops(self, num_positions: int, is_causal: bool = True) -> int:
        """FLOPs of all the scores of one head over T positions, 2 per multiply-add, counting visible pairs alone."""
        everywhere = visible_pairs(num_positions, num_positions, None, is_causal)
        near = visible_pairs(num_positions, num_positions, self.window, is_causal)
        return 2 * (self.ranks[0] * everywhere + self.ranks[1] * near)

    def key_cache_size(self, num_positions: int) -> int:
        """Numbers per key head that a cache must hold at T positions: T r_1 + min(T, window) r_2."""
        return num_positions * self.ranks[0] + min(num_positions, self.window) * self.ranks[1]


Layout = LevelLayout | GlobalWindowLayout


def visible_pairs(num_queries: int, num_keys: int, window: int | None, is_causal: bool) -> int:
    """The number of (query, key) pairs that a mask leaves visible, the last T of S positions being the queries.

    Args:
        num_queries: T.
        num_keys: S.
        window: as in ``structured_attention``; ``None`` is unlimited.
        is_causal: whether later keys are hidden.

    Returns:
        The count, an int; T * S when not causal and without a window.
    """
    reach = max(num_queries, num_keys) if window is None else window
    positions = torch.arange(num_keys - num_queries, num_keys)
    first = (positions - reach + 1).clamp(0, num_keys)
    last = positions if is_causal else (positions + reach - 1)
    return int(((last + 1).clamp(0, num_keys) - first).clamp(min=0).sum())
