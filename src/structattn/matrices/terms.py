"""Sums of block terms P_L (⊕ L) P_R (⊕ Rᵀ): low rank, MLR, BTT, Monarch and MLBTC are such sums."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor, nn

from structattn.matrices.block_term import BlockTerm, TermFactors
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.feature_major import block_product, contiguous_features, exchanged_block_product
from structattn.matrices.nearest import Descent
from structattn.matrices.solver import Solver, Tick

_MAX_SWEEPS = 200
_SWEEP_TOLERANCE = 1e-5  # two sweeps that lower the error by less than this fraction of it are the last


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Entries of (P, N, R) in another order."""
    return x.index_select(1, index.to(x.device))


class _Term:
    """Applies a block term to feature-major vectors. Indices of free permutations are kept on the CPU and
    follow the vectors.
    """

    def __init__(self, shape: BlockTerm, num_rows: int, num_cols: int) -> None:
        shape.check_sizes(num_rows, num_cols)
        self.shape = shape
        with torch.device("cpu"):  # indices are facts of the structure: never on meta, never in a state
            self.rows = None if isinstance(shape.left_permutation, str) else shape.row_index(num_rows)
            self.inner = None if isinstance(shape.right_permutation, str) else shape.inner_index()
            self.rows_back = None if self.rows is None else torch.argsort(self.rows)
            self.inner_back = None if self.inner is None else torch.argsort(self.inner)

    def read(self, right: Tensor, y: Tensor) -> Tensor:
        """P_R (⊕ Rᵀ) y in the groups of the left blocks: right (P, c, d, n), y (1 or P, N, R) to (P, b, F /
        b, R).
        """
        b = self.shape.left_blocks
        blocks = y.unflatten(1, (self.shape.right_blocks, -1))
        if self.shape.right_permutation == "stride":
            return exchanged_block_product(right, blocks, b)
        features = block_product(right.transpose(2, 3), blocks)
        if self.inner is not None:
            features = _take(features.flatten(1, 2), self.inner)
            return features.unflatten(1, (b, -1))
        return features if b == self.shape.right_blocks else features.flatten(1, 2).unflatten(1, (b, -1))

    def write(self, left: Tensor, u: Tensor) -> Tensor:
        """P_L (⊕ L) u: left (P, b, a, m), u (P, b, m, R) to (P, M, R)."""
        out = block_product(left, u)
        if self.shape.left_permutation == "stride":
            out = out.transpose(1, 2)
        out = out.flatten(1, 2)
        return out if self.rows is None else _take(out, self.rows)

    def read_left(self, left: Tensor, x: Tensor) -> Tensor:
        """P_Rᵀ (⊕ Lᵀ) P_Lᵀ x in the groups of the right blocks: x (1 or P, M, R) to (P, c, F / c, R)."""
        blocks = self._left_blocks(x)
        c = self.shape.right_blocks
        if self.shape.right_permutation == "stride":
            return exchanged_block_product(left, blocks, c)
        features = block_product(left.transpose(2, 3), blocks)
        if self.inner_back is not None:
            return _take(features.flatten(1, 2), self.inner_back).unflatten(1, (c, -1))
        return features if c == self.shape.left_blocks else features.flatten(1, 2).unflatten(1, (c, -1))

    def write_right(self, right: Tensor, w: Tensor) -> Tensor:
        """(⊕ R) w: right (P, c, d, n), w (P, c, n, R) to (P, N, R)."""
        return block_product(right, w).flatten(1, 2)

    def left_features(self, left: Tensor, x: Tensor) -> Tensor:
        """(⊕ Lᵀ) P_Lᵀ x in the order of the inner dimension: (P, F, R)."""
        return block_product(left.transpose(2, 3), self._left_blocks(x)).flatten(1, 2)

    def to_right_groups(self, w: Tensor) -> Tensor:
        """P_Rᵀ w: (P, F, R) to (P, c, F / c, R)."""
        b, c = self.shape.left_blocks, self.shape.right_blocks
        if self.shape.right_permutation == "stride":
            return w.unflatten(1, (b, c, -1)).transpose(1, 2).flatten(2, 3)
        if self.inner_back is not None:
            w = _take(w, self.inner_back)
        return w.unflatten(1, (c, -1))

    def _left_blocks(self, x: Tensor) -> Tensor:
        b = self.shape.left_blocks
        if self.shape.left_permutation == "stride":
            return contiguous_features(x).unflatten(1, (-1, b)).transpose(1, 2)
        if self.rows_back is not None:
            x = _take(contiguous_features(x), self.rows_back)
        return x.unflatten(1, (b, -1))


class BlockTermSum(FactoredMatrix):
    """M = Σ_l P_L (⊕ L_l) P_R (⊕ R_lᵀ), a sum of block terms. A structure supplies the terms and their
    ``factors``.

    Args:
        num_rows, num_cols, batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.
        terms: the shapes of the terms.

    Raises:
        ConfigError: blocks do not divide the sizes; the nearest sizes that work are named.

    Cost: Σ_l F_l (num_rows / b_l + num_cols / c_l) parameters, twice that in FLOPs per vector.
    """

    _left_fan_in_dim: ClassVar[int] = -1  # left factors are applied to features

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        terms: Sequence[BlockTerm],
        *,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(
            num_rows, num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        self._work = tuple(_Term(shape, num_rows, num_cols) for shape in terms)

    @property
    def terms(self) -> tuple[BlockTerm, ...]:
        """The shapes of the terms."""
        return tuple(term.shape for term in self._work)

    def _empty_factors(self) -> tuple[nn.ParameterList, nn.ParameterList]:
        """Parameters of the right shapes: left (*batch_shape, b, num_rows / b, F / b), right (..., c,
        num_cols / c, F / c).
        """
        left, right = nn.ParameterList(), nn.ParameterList()
        for term in self.terms:
            b, c, inner = term.left_blocks, term.right_blocks, term.inner_dim
            left.append(self._empty(*self.batch_shape, b, self.num_rows // b, inner // b))
            right.append(self._empty(*self.right_batch_shape, c, self.num_cols // c, inner // c))
        return left, right

    @abstractmethod
    def factors(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """The left and right parameter of every term, in the shapes of ``BlockTerm`` after the batch
        dimensions.
        """

    @property
    def factor_groups(self) -> list[list[nn.Parameter]]:
        return [[left for left, _ in self.factors()], [right for _, right in self.factors()]]

    def used_factors(self) -> list[tuple[Tensor, Tensor]]:
        """The factors as they are used: (P, b, a, m) and (P', c, d, n), capped."""
        return [(self._used(left, self._left_fan_in_dim), self._used(right, -2)) for left, right in self.factors()]

    def _used_terms(self) -> Iterator[tuple[_Term, Tensor, Tensor]]:
        for term, (left, right) in zip(self._work, self.used_factors(), strict=True):
            yield term, left, right

    def _matmul(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1 and self.right_batch_shape != self.batch_shape:
            return super()._matmul(x)
        return _sum([t.write(left, self._spread_right(t.read(right, x))) for t, left, right in self._used_terms()])

    def _rmatmul(self, x: Tensor) -> Tensor:
        used = self._used_terms()
        return _sum([t.write_right(self._spread_right(right), t.read_left(left, x)) for t, left, right in used])

    def _left_features(self, x: Tensor) -> Tensor:
        return _joined([t.left_features(left, x) for t, left, _ in self._used_terms()])

    def _right_features(self, y: Tensor) -> Tensor:
        return _joined([t.read(right, y).flatten(1, 2) for t, _, right in self._used_terms()])

    def _left_expand(self, u: Tensor) -> Tensor:
        used = zip(self._used_terms(), u.split(self.feature_sizes, dim=1), strict=True)
        return _sum([t.write(left, part.unflatten(1, (left.shape[1], -1))) for (t, left, _), part in used])

    def _right_expand(self, w: Tensor) -> Tensor:
        used = zip(self._used_terms(), w.split(self.feature_sizes, dim=1), strict=True)
        return _sum([t.write_right(self._spread_right(right), t.to_right_groups(part)) for (t, _, right), part in used])

    @property
    def feature_fan_ins(self) -> dict[str, int]:
        """The side of a block on both sides: num_rows / b_l and num_cols / c_l."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        out = {}
        for term, (left, right) in zip(self.terms, self.factors(), strict=True):
            out[names[id(left)]] = self.num_rows // term.left_blocks
            out[names[id(right)]] = self.num_cols // term.right_blocks
        return out

    @property
    def feature_sizes(self) -> tuple[int, ...]:
        """The number of features of each term, F_l."""
        return tuple(term.inner_dim for term in self.terms)

    @property
    def inner_dim(self) -> int:
        """Σ F_l."""
        return sum(self.feature_sizes)

    @property
    def left_flops(self) -> int:
        """2 num_rows Σ F_l / b_l."""
        return sum(2 * self.num_rows * term.inner_dim // term.left_blocks for term in self.terms)

    @property
    def right_flops(self) -> int:
        """2 num_cols Σ F_l / c_l."""
        return sum(2 * self.num_cols * term.inner_dim // term.right_blocks for term in self.terms)

    @property
    def rank_bound(self) -> int:
        """min(num_rows, num_cols, Σ F_l), which random factors reach.

        The rank of a product of random sparse factors is the largest number of disjoint paths from rows
        through features to columns. All blocks of a term are alike, so a flow that loads every feature of a
        term equally loads all rows and all columns equally too, and only the three totals limit it.
        """
        return min(self.num_rows, self.num_cols, self.inner_dim)

    def solver(self) -> Solver:
        is_one = len(self.terms) == 1
        return Solver(self._descend, "blockwise SVD" if is_one else "block coordinate descent", is_optimal=is_one)

    def _descend(self, target: Tensor, tick: Tick) -> None:
        """Block coordinate descent from zero; with one term one step is the optimum."""
        descent = Descent(target, self.terms).run(_MAX_SWEEPS, _SWEEP_TOLERANCE, tick)
        for (left, right), (new_left, new_right) in zip(self.factors(), descent.factors, strict=True):
            left.copy_(new_left)
            right.copy_(new_right)

    @torch.no_grad()
    def block_terms(self) -> list[TermFactors]:
        return [
            TermFactors(
                term=term,
                left=left.reshape(*self.batch_shape, *left.shape[1:]),
                right=right.reshape(*self.right_batch_shape, *right.shape[1:]),
            )
            for term, (left, right) in zip(self.terms, self.used_factors(), strict=True)
        ]


def _sum(parts: list[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
