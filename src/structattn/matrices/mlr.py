"""Multi-level low rank (MLR): a sum of block-diagonal low-rank matrices with more and more blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from structattn.checks import check_sizes
from structattn.errors import ConfigError
from structattn.grammar import positive, several
from structattn.layout.checks import positive_ints
from structattn.matrices.base import check_matrix_size
from structattn.matrices.block_term import BlockTerm
from structattn.matrices.family import Family, TextValue
from structattn.matrices.terms import BlockTermSum


class MultiLevelLowRank(BlockTermSum):
    """M = sum over levels l of the block diagonal of L_{l,k} R_{l,k}ᵀ, k = 1 ... p_l.

    The features of level l are p_l groups of r_l numbers: each chunk of the vector, projected by its own
    block.

    Args:
        num_rows, num_cols: shape of one matrix; every p_l divides both.
        ranks: r_l per level, level 1 first.
        num_blocks: p_l per level. Default: 2^(l-1).
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``.

    Attributes:
        left: one parameter per level, (*batch_shape, p_l, num_rows / p_l, r_l).
        right: one per level, (*right_batch_shape, p_l, num_cols / p_l, r_l).

    Raises:
        ConfigError: ranks are not positive, or some p_l does not divide a size; names the level and the
            nearest sizes.

    Cost: (num_rows + num_cols) sum r_l parameters, twice that in FLOPs per vector.

    Source: Kuang et al. 2025, section 3.3; Parshakova et al. 2023 for the matrix family.
    """

    _left_fan_in_dim = -2  # both factors project chunks of inputs to the rank

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        ranks: Sequence[int],
        *,
        num_blocks: Sequence[int] | None = None,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        check_matrix_size("MultiLevelLowRank", num_rows, num_cols)
        ranks = positive_ints(ranks, "MultiLevelLowRank ranks")
        if num_blocks is None:
            num_blocks = tuple(2**level for level in range(len(ranks)))
        num_blocks = check_sizes("MultiLevelLowRank num_blocks", num_blocks)
        if len(num_blocks) != len(ranks):
            raise ConfigError(f"num_blocks needs one entry per rank: expected {len(ranks)}, got {len(num_blocks)}")
        terms = []
        for level, (rank, blocks) in enumerate(zip(ranks, num_blocks, strict=True), start=1):
            term = BlockTerm(left_blocks=blocks, right_blocks=blocks, inner_dim=blocks * rank)
            term.check_sizes(num_rows, num_cols, f"MultiLevelLowRank level {level}")
            terms.append(term)
        super().__init__(
            num_rows, num_cols, terms, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        self.ranks = ranks
        self.num_blocks = num_blocks
        self.left, self.right = self._empty_factors()
        self.reset_parameters()

    def factors(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.left, self.right, strict=True))

    @property
    def options(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "num_blocks": self.num_blocks, **super().options}

    @property
    def product_fan_ins(self) -> dict[str, int]:
        """The side of a block for right factors; sum r_l for left ones, since every output sums over all
        levels.
        """
        left = {f"left.{level}": sum(self.ranks) for level in range(len(self.ranks))}
        return {**self.feature_fan_ins, **left}

    @property
    def initial_fan_ins(self) -> dict[str, int]:
        """Those of the features: the structure is a score first of all."""
        return self.feature_fan_ins


FAMILY = Family(
    MultiLevelLowRank,
    "mlr:R|R|...",
    "mlr:16|8|4|4",
    "a multi-level low-rank matrix, one rank per level, 2^(l-1) blocks at level l",
    TextValue("ranks", several(positive)),
)
