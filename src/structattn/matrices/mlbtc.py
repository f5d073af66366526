"""MLBTC, multi-level block tensor contraction: the family that contains low rank, MLR, BTT, Monarch and
Kronecker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from structattn.checks import check_type, describe, quoted
from structattn.errors import ConfigError
from structattn.grammar import positive, several
from structattn.matrices.base import StructuredMatrix, without_autocast
from structattn.matrices.block_term import BlockTerm
from structattn.matrices.family import Family, TextValue
from structattn.matrices.solver import Tick
from structattn.matrices.terms import BlockTermSum


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
                gives the condition. Or a structure of another package without ``block_terms``.
        """
        check_type("m", m, StructuredMatrix, "a StructuredMatrix", "Structure.build makes one")
        with without_autocast():
            terms = m.block_terms()
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

    def _descend(self, target: Tensor, tick: Tick) -> None:
        self.alpha.fill_(1.0)
        super()._descend(target, tick)

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


def _read_term(text: str) -> BlockTerm:
    match = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)(s?)", text)
    if match is None:
        raise ConfigError(
            "expected terms BxCxF, and after them s for the stride permutation, such as 1x1x8|16x16x256s, got "
            f"{quoted(text)}"
        )
    kind = "stride" if match[4] else "identity"
    return BlockTerm(
        left_blocks=positive(match[1]),
        right_blocks=positive(match[2]),
        inner_dim=positive(match[3]),
        left_permutation=kind,  # type: ignore[arg-type]
        right_permutation=kind,  # type: ignore[arg-type]
    )


def _write_term(term: BlockTerm) -> str:
    kinds = {term.left_permutation, term.right_permutation}
    if kinds not in ({"identity"}, {"stride"}):
        raise ConfigError("MLBTC terms with mixed or free permutations have no text form: use the object itself")
    stride = "s" if kinds == {"stride"} else ""
    return f"{term.left_blocks}x{term.right_blocks}x{term.inner_dim}{stride}"


def _write_terms(terms: Sequence[BlockTerm]) -> str:
    return "|".join(map(_write_term, terms))


FAMILY = Family(
    MLBTC,
    "mlbtc:BxCxF[s]|...",
    "mlbtc:1x1x16|16x16x256s",
    "a sum of block terms with B left and C right blocks and inner dimension F; s: stride permutation",
    TextValue("terms", several(_read_term), _write_terms),
)
