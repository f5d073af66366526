"""Block tensor train (BTT): two block-diagonal factors with a permutation between them; full rank at E^1.5 parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from structattn.errors import ConfigError
from structattn.matrices.base import FactoredMatrix, check_dims


def factor_pair(size: int) -> tuple[int, int]:
    """The factors (small, large) of ``size`` that are closest to its square root: 64 -> (8, 8), 128 -> (8, 16)."""
    small = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
    return small, size // small


class BlockTensorTrain(FactoredMatrix):
    """M = P_L (L_1 + ... + L_b) P_R (R_1^T + ... + R_c^T), + the block diagonal; L_k': a x c s, R_k: d x b s.

    M y views y as (c, d), multiplies block k by R_k^T to (c, b, s), permutes to (b, c s), multiplies block k' by L_k' to
    (b, a), permutes to (a, b) and flattens. The features of its bilinear form have b c s numbers.

    Args:
        num_rows: a * b.
        num_cols: c * d.
        rank: s, the rank of the blocks that the two factors exchange.
        row_dims: (a, b). Default: the factor pair closest to the square root, the larger first.
        col_dims: (c, d). Default: likewise. So b c s >= min(num_rows, num_cols) for square matrices, and the rank is full.
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.

    Attributes:
        left: (*batch_shape, b, a, c s).
        right: (*right_batch_shape, c, d, b s).

    Raises:
        ConfigError: dims do not multiply to the sizes.

    Cost: s (num_rows c + num_cols b) parameters, twice that in FLOPs per vector; 2 s E^1.5 for E x E with square dims.

    Source: Kuang et al. 2025, section 3.2; Qiu et al. 2024 for the operation.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        rank: int = 1,
        *,
        row_dims: tuple[int, int] | None = None,
        col_dims: tuple[int, int] | None = None,
        batch_shape: tuple[int, ...] = (),
        right_batch_shape: tuple[int, ...] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(
            num_rows, num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        check_dims("BlockTensorTrain rank", rank)
        self.rank = rank
        # Larger factor first on both sides: then b c = E for a square matrix, so no feature is lost.
        self.row_dims = factor_pair(num_rows)[::-1] if row_dims is None else tuple(row_dims)
        self.col_dims = factor_pair(num_cols)[::-1] if col_dims is None else tuple(col_dims)
        for name, dims, size in (
            ("row_dims", self.row_dims, num_rows),
            ("col_dims", self.col_dims, num_cols),
        ):
            check_dims(f"BlockTensorTrain {name}", *dims)
            if len(dims) != 2 or dims[0] * dims[1] != size:
                raise ConfigError(f"{name} must be two numbers with product {size}, got {dims}")
        (a, b), (c, d) = self.row_dims, self.col_dims
        self.left = nn.Parameter(torch.empty(*self.batch_shape, b, a, c * rank))
        self.right = nn.Parameter(torch.empty(*self.right_batch_shape, c, d, b * rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal; fan-in of one block: c s for the left factor, d for the right one."""
        c, d = self.col_dims
        nn.init.normal_(self.left, std=1 / math.sqrt(c * self.rank))
        nn.init.normal_(self.right, std=1 / math.sqrt(d))

    def _left(self) -> Tensor:
        """(P, b, a, c s)."""
        (a, b), (c, _) = self.row_dims, self.col_dims
        weight = self.left.reshape(-1, b, a, c * self.rank)
        return self._capped(weight, weight.shape[0], c * self.rank, a)

    def _right(self) -> Tensor:
        """(P', c, d, b s)."""
        (_, b), (c, d) = self.row_dims, self.col_dims
        weight = self.right.reshape(-1, c, d, b * self.rank)
        return self._capped(weight, weight.shape[0], d, b * self.rank)

    @staticmethod
    def _blocks(x: Tensor, weight: Tensor) -> Tensor:
        """Block-diagonal product: x (1 or P, R, K, A) with weight (P, K, A, C) gives (P, R, K, C)."""
        num, num_blocks, size, width = weight.shape
        if x.shape[0] == 1 and num > 1:
            # All matrices share x: one product per block with the matrices side by side.
            joined = weight.permute(1, 2, 0, 3).reshape(num_blocks, size, num * width)
            out = x[0].transpose(0, 1) @ joined
            return out.reshape(num_blocks, -1, num, width).permute(2, 1, 0, 3)
        return (x.transpose(1, 2) @ weight).transpose(1, 2)

    def _right_features(self, y: Tensor) -> Tensor:
        (_, b), (c, d), s = self.row_dims, self.col_dims, self.rank
        u = self._blocks(y.reshape(y.shape[0], -1, c, d), self._right())  # (P', R, c, b s)
        num, rows = u.shape[:2]
        return u.reshape(num, rows, c, b, s).transpose(2, 3).reshape(num, rows, b * c * s)

    def _right_expand(self, w: Tensor) -> Tensor:
        (_, b), (c, d), s = self.row_dims, self.col_dims, self.rank
        num, rows = w.shape[:2]
        u = w.reshape(num, rows, b, c, s).transpose(2, 3).reshape(num, rows, c, b * s)
        out = self._blocks(u, self._spread_right(self._right()).transpose(2, 3))  # (P, R, c, d)
        return out.reshape(num, rows, c * d)

    def _left_expand(self, u: Tensor) -> Tensor:
        (a, b), (c, _), s = self.row_dims, self.col_dims, self.rank
        num, rows = u.shape[:2]
        out = self._blocks(u.reshape(num, rows, b, c * s), self._left().transpose(2, 3))  # (P, R, b, a)
        return out.transpose(2, 3).reshape(num, rows, a * b)

    def _left_features(self, x: Tensor) -> Tensor:
        (a, b), (c, _), s = self.row_dims, self.col_dims, self.rank
        blocks = x.reshape(x.shape[0], -1, a, b).transpose(2, 3)
        w = self._blocks(blocks, self._left())  # (P, R, b, c s)
        return w.reshape(w.shape[0], w.shape[1], b * c * s)

    @property
    def inner_dim(self) -> int:
        """b c s."""
        return self.row_dims[1] * self.col_dims[0] * self.rank

    @property
    def left_flops(self) -> int:
        """2 a b c s."""
        return 2 * self.num_rows * self.col_dims[0] * self.rank

    @property
    def right_flops(self) -> int:
        """2 c d b s."""
        return 2 * self.num_cols * self.row_dims[1] * self.rank

    @property
    def rank_bound(self) -> int:
        """min(b min(a, c s), c min(d, b s)): what the block-diagonal factors let through."""
        (a, b), (c, d), s = self.row_dims, self.col_dims, self.rank
        return min(b * min(a, c * s), c * min(d, b * s))
