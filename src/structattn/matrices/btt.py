"""Block tensor train (BTT) and Monarch: two block-diagonal factors with a permutation between them; full rank
at E^1.5 cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from structattn.checks import check_size, check_sizes, quoted
from structattn.errors import ConfigError
from structattn.grammar import positive, several
from structattn.matrices.base import check_matrix_size
from structattn.matrices.block_term import BlockTerm
from structattn.matrices.family import Family, TextValue
from structattn.matrices.terms import BlockTermSum


def factor_pair(size: int) -> tuple[int, int]:
    """The factors (small, large) of ``size`` that are closest to its square root: 64 -> (8, 8), 128 -> (8,
    16).
    """
    small = next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)
    return small, size // small


def pair_of_dims(name: str, dims: Sequence[int] | None, size: int) -> tuple[int, int]:
    """The pair, by default ``factor_pair`` with the larger first; raises ``ConfigError`` unless its product
    is the size.
    """
    if dims is None:
        return factor_pair(size)[::-1]
    dims = check_sizes(name, dims)
    if len(dims) != 2 or dims[0] * dims[1] != size:
        raise ConfigError(
            f"{name} must be two numbers with product {size}, got {dims}; for example {factor_pair(size)[::-1]}"
        )
    return dims[0], dims[1]


def stride_term(b: int, c: int, s: int) -> BlockTerm:
    """The term of a block tensor train of rank s with b left and c right blocks."""
    return BlockTerm(
        left_blocks=b, right_blocks=c, inner_dim=b * c * s, left_permutation="stride", right_permutation="stride"
    )


class BlockTensorTrain(BlockTermSum):
    """M = P_L (L_1 ⊕ ... ⊕ L_b) P_R (R_1ᵀ ⊕ ... ⊕ R_cᵀ), L_k': a x c s, R_k: d x b s, and stride
    permutations.

    M y views y as (c, d), multiplies block k by R_kᵀ to (c, b, s), permutes to (b, c s), multiplies block k'
    by L_k' to (b, a), permutes to (a, b) and flattens. The features of its bilinear form have b c s numbers.

    Args:
        num_rows: a * b. Any size works; a prime one leaves (num_rows, 1), at the cost of a dense matrix.
        num_cols: c * d. Likewise.
        rank: s, the rank of the blocks that the two factors exchange.
        row_dims: (a, b). Default: the factor pair closest to the square root, the larger first.
        col_dims: (c, d). Default: likewise. So b c s >= min(num_rows, num_cols) for square matrices, and the
            rank is full.
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.

    Attributes:
        left: (*batch_shape, b, a, c s).
        right: (*right_batch_shape, c, d, b s).

    Raises:
        ConfigError: dims do not multiply to the sizes.

    Cost: s (num_rows c + num_cols b) parameters, twice that in FLOPs per vector; 2 s E^1.5 for E x E with
        square dims.

    Source: Kuang et al. 2025, section 3.2; Qiu et al. 2024 for the operation.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        rank: int = 1,
        *,
        row_dims: Sequence[int] | None = None,
        col_dims: Sequence[int] | None = None,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        check_matrix_size(type(self).__name__, num_rows, num_cols)
        check_size(f"{type(self).__name__} rank", rank)
        # Larger factor first on both sides: then b c = E for a square matrix, so no feature is lost.
        row_dims, col_dims = pair_of_dims("row_dims", row_dims, num_rows), pair_of_dims("col_dims", col_dims, num_cols)
        term = stride_term(row_dims[1], col_dims[0], rank)
        super().__init__(
            num_rows, num_cols, [term], batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        self.rank, self.row_dims, self.col_dims = rank, row_dims, col_dims
        (self.left,), (self.right,) = self._empty_factors()
        self.reset_parameters()

    def factors(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(self.left, self.right)]

    @property
    def options(self) -> dict[str, Any]:
        return {"rank": self.rank, "row_dims": self.row_dims, "col_dims": self.col_dims, **super().options}

    @property
    def product_fan_ins(self) -> dict[str, int]:
        """c s for the left factor, d for the right one."""
        c, d = self.col_dims
        return {"left": c * self.rank, "right": d}


class Monarch(BlockTensorTrain):
    """M = Pᵀ (⊕ L) P (⊕ Rᵀ), P the stride permutation: a block tensor train of rank 1, said in numbers of
    blocks.

    For num_blocks = (m, m) and size m² it is the Monarch matrix of Dao et al. 2022: their order-2 factors are
    blkdiag(R_1ᵀ, ...) and blkdiag(L_1, ...). With s = 1 the order of the exchanged features leaves nothing to
    choose, so both conventions name the same matrices.

    Args:
        num_rows: size of the outputs. Any size works; a prime one leaves one block, at the cost of a dense
            matrix.
        num_cols: size of the inputs. Likewise.
        num_blocks: (b, c), blocks of the left and of the right factor; b divides num_rows and c num_cols.
            Default: those of ``BlockTensorTrain``, about the square roots.
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.

    Attributes:
        left: (*batch_shape, b, num_rows / b, c).
        right: (*right_batch_shape, c, num_cols / c, b).

    Raises:
        ConfigError: the numbers of blocks do not divide the sizes; the nearest sizes that work are named.

    Cost: num_rows c + num_cols b parameters, 2 E^1.5 for E x E; twice that in FLOPs per vector.

    Source: Dao et al. 2022, Monarch: expressive structured matrices for efficient and accurate training.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        *,
        num_blocks: Sequence[int] | None = None,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        check_matrix_size("Monarch", num_rows, num_cols)
        row_dims = col_dims = None
        if num_blocks is not None:
            num_blocks = check_sizes("Monarch num_blocks", num_blocks)
            if len(num_blocks) != 2:
                raise ConfigError(f"Monarch: num_blocks must be two numbers (left, right), got {num_blocks}")
            b, c = num_blocks
            BlockTerm(left_blocks=b, right_blocks=c, inner_dim=b * c).check_sizes(num_rows, num_cols, "Monarch")
            row_dims, col_dims = (num_rows // b, b), (c, num_cols // c)
        super().__init__(
            num_rows,
            num_cols,
            row_dims=row_dims,
            col_dims=col_dims,
            batch_shape=batch_shape,
            right_batch_shape=right_batch_shape,
            rms_cap=rms_cap,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {"num_blocks": self.num_blocks, **({"rms_cap": True} if self.rms_cap else {})}

    @property
    def num_blocks(self) -> tuple[int, int]:
        """(b, c)."""
        return self.row_dims[1], self.col_dims[0]


def _read_blocks(text: str) -> tuple[int, ...]:
    counts = several(positive, "x")(text)
    if len(counts) != 2:
        raise ConfigError(f"expected two numbers of blocks, such as 16x16, got {quoted(text)}")
    return counts


def _write_blocks(counts: tuple[int, int]) -> str:
    return "x".join(map(str, counts))


BTT = Family(BlockTensorTrain, "btt:S", "btt:1", "a block tensor train of rank S", TextValue("rank", positive))
MONARCH = Family(
    Monarch,
    "monarch[:BxC]",
    "monarch",
    "a Monarch matrix with B left and C right blocks, about the root of the size by default",
    TextValue("num_blocks", _read_blocks, _write_blocks, is_optional=True),
)
