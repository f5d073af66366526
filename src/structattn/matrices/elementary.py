"""Dense, low-rank and Kronecker matrices: the well-known structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from structattn.checks import check_size
from structattn.grammar import positive
from structattn.matrices.base import StructuredMatrix
from structattn.matrices.block_term import TermFactors, one_block
from structattn.matrices.btt import pair_of_dims, stride_term
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.family import Family, TextValue
from structattn.matrices.feature_major import contiguous_features
from structattn.matrices.nearest import split_svd
from structattn.matrices.solver import Solver, Tick


def heads_matmul(weight: Tensor, x: Tensor) -> Tensor:
    """W x for every matrix of a batch, as one product when all of them share x.

    Args:
        weight: (P, C, A).
        x: feature-major vectors, (1 or P, A, R).

    Returns:
        (P, C, R); of shared vectors, a token-major view, as linear layers have it.
    """
    num, height, size = weight.shape
    if x.shape[0] == 1:
        rows = x[0].t() @ weight.reshape(num * height, size).t()
        return rows.t().unflatten(0, (num, height))
    return weight @ x


class Dense(StructuredMatrix):
    """A dense matrix, the reference for the others: E² parameters, full rank.

    Args:
        num_rows, num_cols, batch_shape: see ``StructuredMatrix``.

    Attributes:
        weight: (*batch_shape, num_rows, num_cols).

    Cost: num_rows * num_cols parameters, 2 * num_rows * num_cols FLOPs per vector.
    """

    def __init__(self, num_rows: int, num_cols: int, *, batch_shape: Sequence[int] = ()) -> None:
        super().__init__(num_rows, num_cols, batch_shape=batch_shape)
        self.weight = self._empty(*self.batch_shape, num_rows, num_cols)
        self.reset_parameters()

    def _matmul(self, x: Tensor) -> Tensor:
        return heads_matmul(self.weight.reshape(-1, self.num_rows, self.num_cols), x)

    def _rmatmul(self, x: Tensor) -> Tensor:
        return heads_matmul(self.weight.reshape(-1, self.num_rows, self.num_cols).transpose(1, 2), x)

    def _is_written_out(self, x: Tensor, size: int) -> bool:
        return False  # it is already

    @property
    def options(self) -> dict[str, Any]:
        return {}

    @property
    def factor_groups(self) -> list[list[nn.Parameter]]:
        return [[self.weight]]

    @property
    def product_fan_ins(self) -> dict[str, int]:
        """num_cols."""
        return {"weight": self.num_cols}

    @property
    def flops(self) -> int:
        return 2 * self.num_rows * self.num_cols

    @property
    def rank_bound(self) -> int:
        return min(self.num_rows, self.num_cols)

    def solver(self) -> Solver:
        return Solver(lambda target, tick: self.weight.copy_(target), "copy", is_optimal=True)

    @torch.no_grad()
    def block_terms(self) -> list[TermFactors]:
        """W I or I Wᵀ, the identity on the shorter side."""
        inner = min(self.num_rows, self.num_cols)
        eye = torch.eye(inner, dtype=self.weight.dtype, device=self.weight.device)
        eye = eye.expand(*self.batch_shape, inner, inner)
        is_tall = self.num_cols <= self.num_rows
        return one_block(self.weight, eye) if is_tall else one_block(eye, self.weight.transpose(-2, -1))


class LowRank(FactoredMatrix):
    """M = L Rᵀ with L (num_rows x rank) and R (num_cols x rank): the score of standard attention, W_Q W_Kᵀ.

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
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(
            num_rows, num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        check_size("LowRank rank", rank)
        self.rank = rank
        self.left = self._empty(*self.batch_shape, num_rows, rank)
        self.right = self._empty(*self.right_batch_shape, num_cols, rank)
        self.reset_parameters()

    @property
    def options(self) -> dict[str, Any]:
        return {"rank": self.rank, **super().options}

    @property
    def factor_groups(self) -> list[list[nn.Parameter]]:
        return [[self.left], [self.right]]

    @property
    def product_fan_ins(self) -> dict[str, int]:
        """The rank for the left factor, num_cols for the right one."""
        return {"left": self.rank, "right": self.num_cols}

    @property
    def feature_fan_ins(self) -> dict[str, int]:
        """Both factors read inputs: num_rows and num_cols."""
        return {"left": self.num_rows, "right": self.num_cols}

    @property
    def initial_fan_ins(self) -> dict[str, int]:
        """Those of the features: the structure is a score first of all."""
        return self.feature_fan_ins

    def used_factors(self) -> tuple[Tensor, Tensor]:
        """The factors as they are used, (P, num_rows, rank) and (P', num_cols, rank), capped."""
        return self._used(self.left, -2), self._used(self.right, -2)

    def _left_features(self, x: Tensor) -> Tensor:
        return heads_matmul(self.used_factors()[0].transpose(1, 2), x)

    def _left_expand(self, u: Tensor) -> Tensor:
        return heads_matmul(self.used_factors()[0], u)

    def _right_features(self, y: Tensor) -> Tensor:
        return heads_matmul(self.used_factors()[1].transpose(1, 2), y)

    def _right_expand(self, w: Tensor) -> Tensor:
        return heads_matmul(self._spread_right(self.used_factors()[1]), w)

    @property
    def inner_dim(self) -> int:
        return self.rank

    @property
    def left_flops(self) -> int:
        return 2 * self.num_rows * self.rank

    @property
    def right_flops(self) -> int:
        return 2 * self.num_cols * self.rank

    @property
    def rank_bound(self) -> int:
        return min(self.num_rows, self.num_cols, self.rank)

    def solver(self) -> Solver:
        return Solver(self._truncate, "truncated SVD", is_optimal=True)

    def _truncate(self, target: Tensor, tick: Tick) -> None:
        left, right = split_svd(target, self.rank)
        self.left.copy_(left)
        self.right.copy_(right)

    @torch.no_grad()
    def block_terms(self) -> list[TermFactors]:
        left, right = self.used_factors()
        return one_block(
            left.reshape(*self.batch_shape, self.num_rows, self.rank),
            right.reshape(*self.right_batch_shape, self.num_cols, self.rank),
        )


class Kronecker(FactoredMatrix):
    """M = A ⊗ B, M[(i_a, i_b), (i_c, i_d)] = A[i_a, i_c] B[i_b, i_d].

    The two factors act in sequence, first the one that makes the whole product cheaper. It is the right
    factor of the bilinear form, and the one that grouped heads share.

    Args:
        num_rows: a * b. Any size works; a prime one leaves (num_rows, 1), and with a prime num_cols a dense
            matrix.
        num_cols: c * d. Likewise.
        row_dims: (a, b). Default: the factor pair closest to the square root, the larger first.
        col_dims: (c, d). Default: likewise.
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.

    Attributes:
        outer: A, (*batch_shape, a, c); with right_batch_shape in front if A acts first.
        inner: B, (*batch_shape, b, d); likewise.
        inner_first: whether B acts first, as it does unless A is cheaper to have first.

    Raises:
        ConfigError: dims do not multiply to the sizes.

    Cost: a c + b d parameters, 2E for square E x E; 2 min(c d b + a c b, a c d + a d b) FLOPs per vector, 4
        E^1.5.

    Source: Kuang et al. 2025, table 1; Van Loan 2000 for the algebra.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        *,
        row_dims: Sequence[int] | None = None,
        col_dims: Sequence[int] | None = None,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(
            num_rows, num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        self.row_dims = pair_of_dims("row_dims", row_dims, num_rows)
        self.col_dims = pair_of_dims("col_dims", col_dims, num_cols)
        (a, b), (c, d) = self.row_dims, self.col_dims
        self.inner_first = num_cols * b + num_rows * c <= num_cols * a + num_rows * d
        first, last = self.right_batch_shape, self.batch_shape
        self.outer = self._empty(*(last if self.inner_first else first), a, c)
        self.inner = self._empty(*(first if self.inner_first else last), b, d)
        self.reset_parameters()

    @property
    def options(self) -> dict[str, Any]:
        return {"row_dims": self.row_dims, "col_dims": self.col_dims, **super().options}

    @property
    def factor_groups(self) -> list[list[nn.Parameter]]:
        return [[self.outer], [self.inner]]

    @property
    def product_fan_ins(self) -> dict[str, int]:
        """c for A, d for B."""
        return {"outer": self.col_dims[0], "inner": self.col_dims[1]}

    @property
    def feature_fan_ins(self) -> dict[str, int]:
        """The factor that acts last reads the other side's inputs: a for A, or b for B."""
        last = {"outer": self.row_dims[0]} if self.inner_first else {"inner": self.row_dims[1]}
        return {**self.product_fan_ins, **last}

    @property
    def factor_uses(self) -> dict[str, int]:
        """The columns of the vector, seen as a matrix, when the factor meets it: b for A and c for B if B
        acts first.
        """
        (a, b), (c, d) = self.row_dims, self.col_dims
        return {"outer": b, "inner": c} if self.inner_first else {"outer": d, "inner": a}

    def used_factors(self) -> tuple[Tensor, Tensor]:
        """A (P or P', a, c) and B (P' or P, b, d) as they are used, capped."""
        return self._used(self.outer, -1), self._used(self.inner, -1)

    def _on_outer(self, weight: Tensor, x: Tensor, size: int) -> Tensor:
        """(W ⊗ I_size) x: weight (P, A, C), x (1 or P, C * size, R) to (P, A * size, R)."""
        num, height, width = weight.shape
        x = contiguous_features(x)
        flat = x.reshape(x.shape[0], width, size * x.shape[2])
        out = weight.reshape(num * height, width) @ flat[0] if x.shape[0] == 1 else weight @ flat
        return out.reshape(num, height * size, x.shape[2])

    def _on_inner(self, weight: Tensor, x: Tensor, size: int) -> Tensor:
        """(I_size ⊗ W) x: weight (P, B, D), x (1 or P, size * D, R) to (P, size * B, R)."""
        num, height, width = weight.shape
        blocks = x.unflatten(1, (size, width))
        if x.shape[0] == 1:
            joined = weight.reshape(num * height, width).expand(size, -1, -1)
            out = torch.bmm(joined, blocks[0]).unflatten(1, (num, height)).transpose(0, 1)
        else:
            out = torch.matmul(weight[:, None], blocks)
        return out.flatten(1, 2)

    def _first(self, weight: Tensor, x: Tensor) -> Tensor:
        """The product with the factor that acts first, B or A, as it is or transposed."""
        c, d = self.col_dims
        return self._on_inner(weight, x, c) if self.inner_first else self._on_outer(weight, x, d)

    def _last(self, weight: Tensor, x: Tensor) -> Tensor:
        """The product with the factor that acts last, A or B, as it is or transposed."""
        a, b = self.row_dims
        return self._on_outer(weight, x, b) if self.inner_first else self._on_inner(weight, x, a)

    def _ordered_factors(self) -> tuple[Tensor, Tensor]:
        """The factor that acts last, which is the left one of the bilinear form, and the one that acts
        first.
        """
        outer, inner = self.used_factors()
        return (outer, inner) if self.inner_first else (inner, outer)

    def _left_features(self, x: Tensor) -> Tensor:
        return self._last(self._ordered_factors()[0].transpose(1, 2), x)

    def _left_expand(self, u: Tensor) -> Tensor:
        return self._last(self._ordered_factors()[0], u)

    def _right_features(self, y: Tensor) -> Tensor:
        return self._first(self._ordered_factors()[1], y)

    def _right_expand(self, w: Tensor) -> Tensor:
        return self._first(self._spread_right(self._ordered_factors()[1]).transpose(1, 2), w)

    @property
    def inner_dim(self) -> int:
        """c b with B first, a d with A first."""
        (a, b), (c, d) = self.row_dims, self.col_dims
        return c * b if self.inner_first else a * d

    @property
    def left_flops(self) -> int:
        """2 a c b with B first, 2 a d b with A first."""
        return 2 * self.num_rows * self.col_dims[0 if self.inner_first else 1]

    @property
    def right_flops(self) -> int:
        """2 c d b with B first, 2 a c d with A first."""
        return 2 * self.num_cols * self.row_dims[1 if self.inner_first else 0]

    @property
    def rank_bound(self) -> int:
        """min(a, c) min(b, d): the product of the ranks of the factors."""
        (a, b), (c, d) = self.row_dims, self.col_dims
        return min(a, c) * min(b, d)

    def solver(self) -> Solver:
        return Solver(self._rearrange, "Van Loan's rearrangement", is_optimal=True)

    def _rearrange(self, target: Tensor, tick: Tick) -> None:
        """With rows (i_a, i_c) and columns (i_b, i_d) a Kronecker product is a matrix of rank 1, so the
        truncated SVD of the rearranged matrix is optimal. Source: Van Loan and Pitsianis 1993.
        """
        (a, b), (c, d) = self.row_dims, self.col_dims
        rearranged = target.reshape(a, b, c, d).permute(0, 2, 1, 3).reshape(a * c, b * d)
        outer, inner = split_svd(rearranged, 1)
        self.outer.copy_(outer.reshape(a, c))
        self.inner.copy_(inner.reshape(b, d))

    @torch.no_grad()
    def block_terms(self) -> list[TermFactors]:
        """BTT of rank 1 in which all left blocks are A and all right blocks Bᵀ."""
        (a, b), (c, d) = self.row_dims, self.col_dims
        outer, inner = self.used_factors()
        # Either factor may be the shared one; a term shares its right factors only, so A is repeated where it
        # is shared.
        outer_shape, inner_shape = self.batch_shape, self.right_batch_shape
        if not self.inner_first:
            outer, inner_shape = self._spread_right(outer), self.batch_shape
        left = outer.reshape(*outer_shape, 1, a, c).expand(*outer_shape, b, a, c)
        right = inner.transpose(1, 2).reshape(*inner_shape, 1, d, b).expand(*inner_shape, c, d, b)
        return [TermFactors(term=stride_term(b, c, 1), left=left, right=right)]


DENSE = Family(Dense, "dense", "dense", "a dense matrix")
LOW_RANK = Family(
    LowRank, "lowrank:R", "lowrank:64", "a low-rank matrix, R columns in each factor", TextValue("rank", positive)
)
KRONECKER = Family(
    Kronecker, "kronecker", "kronecker", "a Kronecker product of two matrices of about the root of the size"
)
