"""Dense and low-rank matrices: the two structures that everybody knows."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from structattn.matrices.base import FactoredMatrix, StructuredMatrix, check_dims


def heads_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x W for every matrix of a batch, as one product when all of them share x.

    Args:
        x: (1 or P, R, A).
        weight: (P, A, C).

    Returns:
        (P, R, C).
    """
    num, size, width = weight.shape
    if x.shape[0] == 1 and num > 1:
        joined = x[0] @ weight.permute(1, 0, 2).reshape(size, num * width)
        return joined.reshape(-1, num, width).transpose(0, 1)
    return x @ weight


class Dense(StructuredMatrix):
    """A dense matrix, the yardstick of the others: E^2 parameters, full rank.

    Args:
        num_rows, num_cols, batch_shape: see ``StructuredMatrix``.

    Cost: num_rows * num_cols parameters, 2 * num_rows * num_cols FLOPs per vector.
    """

    def __init__(self, num_rows: int, num_cols: int, *, batch_shape: tuple[int, ...] = ()) -> None:
        super().__init__(num_rows, num_cols, batch_shape=batch_shape)
        self.weight = nn.Parameter(torch.empty(*self.batch_shape, num_rows, num_cols))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 1/sqrt(num_cols)."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.num_cols))

    def _matmul(self, x: Tensor) -> Tensor:
        return heads_matmul(x, self.weight.reshape(-1, self.num_rows, self.num_cols).transpose(1, 2))

    def _rmatmul(self, x: Tensor) -> Tensor:
        return heads_matmul(x, self.weight.reshape(-1, self.num_rows, self.num_cols))

    @property
    def flops(self) -> int:
        """2 * num_rows * num_cols."""
        return 2 * self.num_rows * self.num_cols

    @property
    def rank_bound(self) -> int:
        """min(num_rows, num_cols)."""
        return min(self.num_rows, self.num_cols)


class LowRank(FactoredMatrix):
    """M = L R^T with L (num_rows x rank) and R (num_cols x rank): the score of standard attention, W_Q W_K^T.

    Args:
        num_rows, num_cols: shape of one matrix.
        rank: columns of each factor; more than min(num_rows, num_cols) is allowed and adds no rank.
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.

    Attributes:
        left: (*batch_shape, num_rows, rank).
        right: (*right_batch_shape, num_cols, rank).

    Cost: (num_rows + num_cols) * rank parameters, twice that in FLOPs per vector.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        rank: int,
        *,
        batch_shape: tuple[int, ...] = (),
        right_batch_shape: tuple[int, ...] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(
            num_rows, num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        check_dims("LowRank rank", rank)
        self.rank = rank
        self.left = nn.Parameter(torch.empty(*self.batch_shape, num_rows, rank))
        self.right = nn.Parameter(torch.empty(*self.right_batch_shape, num_cols, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal; both factors are applied to inputs, so the fan-in is the long side of each."""
        nn.init.normal_(self.left, std=1 / math.sqrt(self.num_rows))
        nn.init.normal_(self.right, std=1 / math.sqrt(self.num_cols))

    def _left(self) -> Tensor:
        weight = self.left.reshape(-1, self.num_rows, self.rank)
        return self._capped(weight, weight.shape[0], self.num_rows, self.rank)

    def _right(self) -> Tensor:
        weight = self.right.reshape(-1, self.num_cols, self.rank)
        return self._capped(weight, weight.shape[0], self.num_cols, self.rank)

    def _left_features(self, x: Tensor) -> Tensor:
        return heads_matmul(x, self._left())

    def _left_expand(self, u: Tensor) -> Tensor:
        return heads_matmul(u, self._left().transpose(1, 2))

    def _right_features(self, y: Tensor) -> Tensor:
        return heads_matmul(y, self._right())

    def _right_expand(self, w: Tensor) -> Tensor:
        return heads_matmul(w, self._spread_right(self._right()).transpose(1, 2))

    @property
    def inner_dim(self) -> int:
        """The rank."""
        return self.rank

    @property
    def left_flops(self) -> int:
        """2 * num_rows * rank."""
        return 2 * self.num_rows * self.rank

    @property
    def right_flops(self) -> int:
        """2 * num_cols * rank."""
        return 2 * self.num_cols * self.rank

    @property
    def rank_bound(self) -> int:
        """min(num_rows, num_cols, rank)."""
        return min(self.num_rows, self.num_cols, self.rank)
