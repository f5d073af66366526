"""Multi-level low rank (MLR): a sum of block-diagonal low-rank matrices with more and more blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from structattn.errors import ConfigError
from structattn.matrices.base import FactoredMatrix, check_dims
from structattn.matrices.elementary import heads_matmul


class MultiLevelLowRank(FactoredMatrix):
    """M = sum over levels l of the block diagonal of L_{l,k} R_{l,k}^T, k = 1 ... p_l.

    The features of level l are p_l groups of r_l numbers: each chunk of the vector, projected by its own block.

    Args:
        num_rows, num_cols: shape of one matrix; every p_l divides both.
        ranks: r_l per level, level 1 first.
        num_blocks: p_l per level. Default: 2^(l-1).
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.

    Attributes:
        left: one parameter per level, (*batch_shape, p_l, num_rows / p_l, r_l).
        right: one per level, (*right_batch_shape, p_l, num_cols / p_l, r_l).

    Raises:
        ConfigError: ranks are not positive, or some p_l does not divide a size; names the level.

    Cost: (num_rows + num_cols) sum r_l parameters, twice that in FLOPs per vector.

    Source: Kuang et al. 2025, section 3.3; Parshakova et al. 2023 for the matrix family.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        ranks: tuple[int, ...],
        *,
        num_blocks: tuple[int, ...] | None = None,
        batch_shape: tuple[int, ...] = (),
        right_batch_shape: tuple[int, ...] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(
            num_rows, num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        if not isinstance(ranks, tuple | list) or not ranks:
            raise ConfigError(
                f"MultiLevelLowRank: ranks must be a tuple with one positive int per level, got {ranks!r}"
            )
        self.ranks = tuple(ranks)
        self.num_blocks = (
            tuple(2**level for level in range(len(self.ranks))) if num_blocks is None else tuple(num_blocks)
        )
        if len(self.num_blocks) != len(self.ranks):
            raise ConfigError(
                f"num_blocks needs one entry per rank: expected {len(self.ranks)}, got {len(self.num_blocks)}"
            )
        for level, (rank, blocks) in enumerate(zip(self.ranks, self.num_blocks, strict=True), start=1):
            check_dims(f"MultiLevelLowRank level {level}", rank, blocks)
            if num_rows % blocks or num_cols % blocks:
                raise ConfigError(
                    f"MultiLevelLowRank level {level}: {blocks} blocks must divide the sizes, got {num_rows} x {num_cols}; "
                    f"use fewer levels or sizes that are multiples of {math.lcm(*self.num_blocks)}"
                )

        def factors(batch: tuple[int, ...], size: int) -> nn.ParameterList:
            return nn.ParameterList(
                nn.Parameter(torch.empty(*batch, p, size // p, r))
                for p, r in zip(self.num_blocks, self.ranks, strict=True)
            )

        self.left = factors(self.batch_shape, num_rows)
        self.right = factors(self.right_batch_shape, num_cols)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal; fan-in of one block: size / p_l."""
        for weight in [*self.left, *self.right]:
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-2]))

    @property
    def feature_sizes(self) -> tuple[int, ...]:
        """The number of features of each level, p_l r_l."""
        return tuple(p * r for p, r in zip(self.num_blocks, self.ranks, strict=True))

    def _factor(self, weight: Tensor) -> Tensor:
        """A factor as (P, p, size / p, r), capped."""
        flat = weight.reshape(-1, *weight.shape[-3:])
        return self._capped(flat, flat.shape[0], flat.shape[-2], flat.shape[-1])

    def _features(self, x: Tensor, weights: nn.ParameterList) -> Tensor:
        """The features of all levels: x (1 or P, R, E) gives (P, R, sum p_l r_l)."""
        parts = []
        for weight in weights:
            factor = self._factor(weight)
            num, p, chunk, rank = factor.shape
            if p == 1:
                parts.append(heads_matmul(x, factor[:, 0]))
                continue
            chunks = x.reshape(x.shape[0], -1, p, chunk)
            if x.shape[0] == 1 and num > 1:
                joined = factor.permute(1, 2, 0, 3).reshape(p, chunk, num * rank)
                out = (chunks[0].transpose(0, 1) @ joined).reshape(p, -1, num, rank).permute(2, 1, 0, 3)
            else:
                out = (chunks.transpose(1, 2) @ factor).transpose(1, 2)
            parts.append(out.reshape(num, -1, p * rank))
        return torch.cat(parts, dim=-1)

    def _expand(self, u: Tensor, factors: list[Tensor]) -> Tensor:
        """The sum over levels of each block times its group of features: (P, R, F) gives (P, R, E)."""
        num, rows = u.shape[:2]
        total = u.new_zeros(())
        for part, factor in zip(u.split(self.feature_sizes, dim=-1), factors, strict=True):
            _, p, chunk, rank = factor.shape
            groups = part.reshape(num, rows, p, rank).transpose(1, 2)
            total = total + (groups @ factor.transpose(2, 3)).transpose(1, 2).reshape(num, rows, p * chunk)
        return total

    def _left_features(self, x: Tensor) -> Tensor:
        return self._features(x, self.left)

    def _right_features(self, y: Tensor) -> Tensor:
        return self._features(y, self.right)

    def _left_expand(self, u: Tensor) -> Tensor:
        return self._expand(u, [self._factor(weight) for weight in self.left])

    def _right_expand(self, w: Tensor) -> Tensor:
        return self._expand(w, [self._spread_right(self._factor(weight)) for weight in self.right])

    @property
    def inner_dim(self) -> int:
        """sum p_l r_l."""
        return sum(self.feature_sizes)

    @property
    def left_flops(self) -> int:
        """2 * num_rows * sum r_l."""
        return 2 * self.num_rows * sum(self.ranks)

    @property
    def right_flops(self) -> int:
        """2 * num_cols * sum r_l."""
        return 2 * self.num_cols * sum(self.ranks)

    @property
    def rank_bound(self) -> int:
        """The largest rank of the sum: min over every level m of p_m * (min of a block side) + the levels above it.

        Levels m and deeper live in p_m diagonal blocks, whose rank together cannot pass the size of the matrix; coarser
        levels add at most r_l p_l each.
        """
        return min(self.num_rows, self.num_cols, self._rank_from(0))

    def _rank_from(self, level: int) -> int:
        """Largest rank of levels >= ``level`` (0-based), never above what p diagonal blocks can hold."""
        if level == len(self.ranks):
            return 0
        p, r = self.num_blocks[level], self.ranks[level]
        side = min(self.num_rows, self.num_cols) // p
        return min(p * side, p * min(r, side) + self._rank_from(level + 1))
