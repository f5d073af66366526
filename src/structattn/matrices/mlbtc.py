"""MLBTC, multi-level block tensor contraction: the family that contains low rank, MLR, BTT, Monarch and
Kronecker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from structattn.checks import describe
from structattn.errors import ConfigError
from structattn.matrices.base import StructuredMatrix, without_autocast
from structattn.matrices.embedding import block_terms
from structattn.matrices.terms import BlockTerm, BlockTermSum


class MLBTC(BlockTermSum):
    """M = Σ_l α_l P_L (⊕_{k'} L_{l,k'}) P_R (⊕_k R_{l,k}ᵀ) with learnable α and any permutations.

    Args:
        num_rows, num_cols: shape of one matrix; the blocks of every term divide it.
        terms: the shape of every term: blocks, inner dimension, permutations (see ``BlockTerm``).
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.

    Attributes:
        alpha: (*batch_shape, number of terms), 1 at first.
        left: one parameter per term, (*batch_shape, b, num_rows / b, F / b).
        right: one per term, (*right_batch_shape, c, num_cols / c, F / c).

    Raises:
        ConfigError: no terms, or blocks that do not divide the sizes; the nearest sizes that work are named.

    Cost: Σ_l F_l (num_rows / b_l + num_cols / c_l) parameters and one α per term; twice the former in FLOPs
        per vector.

    Source: Kuang et al. 2025, section 3.
    """

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
        if not isinstance(terms, tuple | list) or not all(isinstance(term, BlockTerm) for term in terms) or not terms:
            raise ConfigError(f"MLBTC: terms must be one or more BlockTerm, got {describe(terms)}")
        super().__init__(
            num_rows, num_cols, terms, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        self.alpha = nn.Parameter(torch.ones(*self.batch_shape, len(terms)))
        self.left, self.right = self._empty_factors()
        self.reset_parameters()

    @classmethod
    def from_matrix(cls, m: StructuredMatrix) -> MLBTC:
        """The same matrix (and batch of matrices) as an MLBTC, with its dtype and device; parameters are
        copies.

        Dense, low rank, Kronecker, Monarch, Butterfly and BTT become one term, MLR one term per level. A
        Butterfly is fused into one dense-block term of rank s, exact but of E^1.5 rather than E log E
        parameters.

        Raises:
            ConfigError: a Kaleidoscope that is not a single term smaller than a dense matrix; the message
                gives the condition. Or a structure that is not of this package.
        """
        with without_autocast():
            terms = block_terms(m)
        right_shape = terms[0].right.shape[:-3]
        out = cls(
            m.num_rows,
            m.num_cols,
            tuple(term.term for term in terms),
            batch_shape=m.batch_shape,
            right_batch_shape=tuple(right_shape),
        ).to(terms[0].left)
        with torch.no_grad():
            for (left, right), term in zip(out.factors(), terms, strict=True):
                left.copy_(term.left)
                right.copy_(term.right)
        return out

    @torch.no_grad()
    def reset_parameters(self, fan_ins: object = None) -> None:
        """Draws the factors as every structure does, and sets α to 1."""
        super().reset_parameters(fan_ins)  # type: ignore[arg-type]
        nn.init.ones_(self.alpha)

    def factors(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.left, self.right, strict=True))

    def used_factors(self) -> list[tuple[Tensor, Tensor]]:
        """α_l goes with the left factor, the small tensor nearest to it."""
        alpha = self.alpha.reshape(-1, len(self.left), 1, 1, 1)
        return [(alpha[:, level] * left, right) for level, (left, right) in enumerate(super().used_factors())]

    @property
    def options(self) -> dict[str, Any]:
        return {"terms": self.terms, **super().options}

    @property
    def product_fan_ins(self) -> dict[str, int]:
        """num_cols / c_l for right factors; Σ F_l / b_l for left ones, since every output sums over all
        terms.
        """
        total = sum(term.inner_dim // term.left_blocks for term in self.terms)
        return {**self.feature_fan_ins, **{f"left.{level}": total for level in range(len(self.terms))}}
