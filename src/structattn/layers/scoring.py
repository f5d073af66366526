"""Scoring: the structure of M in the score x^T M x', that is, how hidden states become queries and keys.

``Standard``, ``BTT``, ``MLR`` and ``Matrix`` are values: they say which structure. ``build`` makes the module
with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, get_args

import torch
from torch import Tensor

from structattn.checks import check_bool, check_choice, check_size, check_type, describe
from structattn.errors import ConfigError
from structattn.layers.scoring_modules import (
    BilinearScoring,
    HeadShape,
    LowRankScoring,
    MLRScoring,
    ScoreScaling,
    ScoringModule,
)
from structattn.layout.checks import positive_ints
from structattn.matrices import BlockTensorTrain, FactoredMatrix, MultiLevelLowRank, Structure, StructuredMatrix
from structattn.matrices import LowRank as LowRankMatrix


class Scoring(Protocol):
    """A value that says how queries and keys are made; ``Standard``, ``BTT``, ``MLR`` and ``Matrix`` are the
    ones there are.
    """

    def feature_dim(self, embed_dim: int, num_heads: int) -> int:
        """The dimension D of queries and keys, which the ranks of a layout must sum to."""

    def build(self, shape: HeadShape) -> ScoringModule:
        """The module with the weights."""


class _MatrixSizes(TypedDict):
    num_rows: int
    num_cols: int
    batch_shape: tuple[int, int]
    right_batch_shape: tuple[int, int]


def _matrix_sizes(shape: HeadShape) -> _MatrixSizes:
    """One E x E matrix per query head, grouped; one right factor per key head."""
    check_type("shape", shape, HeadShape, "a HeadShape")
    size, groups = shape.embed_dim, shape.num_kv_heads
    batch = (groups, shape.num_heads // groups)
    return {"num_rows": size, "num_cols": size, "batch_shape": batch, "right_batch_shape": (groups, 1)}


def _check_options(score_scale: object, rms_cap: object) -> None:
    check_choice("scaling", score_scale, get_args(ScoreScaling))
    check_bool("rms_cap", rms_cap)


def _check_heads(embed_dim: int, num_heads: int) -> None:
    check_size("embed_dim", embed_dim)
    check_size("num_heads", num_heads)


def check_scoring(scoring: object) -> None:
    """Raises ``ConfigError`` unless it is a scoring value; text and modules are named as such."""
    if not isinstance(scoring, type) and all(
        callable(getattr(scoring, name, None)) for name in ("feature_dim", "build")
    ):
        return
    remedy = 'give a value such as scoring.BTT(rank=1), or use Attention.from_spec("bilinear-btt:1", ...) for text'
    if isinstance(scoring, ScoringModule):
        remedy = "a module belongs to one layer: give the value that it was made from"
    raise ConfigError(f"scoring must be a scoring.Standard, BTT, MLR or Matrix, got {describe(scoring)}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class Standard:
    """Standard attention: score_h = <W_Q x, W_K x'> / sqrt(D), rank D in every head.

    Args:
        rank: D; ``None`` is embed_dim / num_heads.
        scaling: ``"variance"`` 1/sqrt(D) or ``"mup"`` 8/D, used when no layout gives the scaling.
        rms_cap: see ``FactoredMatrix``.
    """

    rank: int | None = None
    scaling: ScoreScaling = "variance"
    rms_cap: bool = False

    def __post_init__(self) -> None:
        _check_options(self.scaling, self.rms_cap)
        if self.rank is not None:
            check_size("Standard rank", self.rank)

    def feature_dim(self, embed_dim: int, num_heads: int) -> int:
        """The rank, or embed_dim / num_heads."""
        _check_heads(embed_dim, num_heads)
        return embed_dim // num_heads if self.rank is None else self.rank

    def build(self, shape: HeadShape) -> ScoringModule:
        """The module with W_Q for every query head and W_K for every key head."""
        sizes, rank = _matrix_sizes(shape), self.feature_dim(shape.embed_dim, shape.num_heads)
        return LowRankScoring(LowRankMatrix(rank=rank, rms_cap=self.rms_cap, **sizes), shape, self.scaling)


LowRank = Standard  # an earlier name, which code and pickles still use; matrices.LowRank is the matrix


@dataclass(frozen=True, kw_only=True)
class BTT:
    """Bilinear BTT: score_h = <norm(x), norm(M_h x')> / sqrt(E) with M_h a block tensor train; full rank in
    every head.

    Args:
        rank: s of ``BlockTensorTrain``; the paper uses 1 and 2.
        scaling: ``"variance"`` 1/sqrt(E) or ``"mup"`` 1/E, used when no layout gives the scaling.
        rms_cap: see ``FactoredMatrix``.

    Source: Kuang et al. 2025, section 4.
    """

    rank: int = 1
    scaling: ScoreScaling = "variance"
    rms_cap: bool = False

    def __post_init__(self) -> None:
        _check_options(self.scaling, self.rms_cap)
        check_size("BTT rank", self.rank)

    def feature_dim(self, embed_dim: int, num_heads: int) -> int:
        """E."""
        _check_heads(embed_dim, num_heads)
        return embed_dim

    def build(self, shape: HeadShape) -> ScoringModule:
        """The module with one block tensor train per query head, right factors shared by key head."""
        matrix = BlockTensorTrain(rank=self.rank, rms_cap=self.rms_cap, **_matrix_sizes(shape))
        return BilinearScoring(matrix, shape, self.scaling)


@dataclass(frozen=True, kw_only=True)
class MLR:
    """Bilinear MLR: score_h = sum over levels of <norm(L_l^T x), norm(R_l^T x')> / sqrt(r_l p_l), p_l =
    2^(l-1).

    Args:
        ranks: r_l, level 1 first. With sum r_l = E / H it costs as much as standard attention, at rank sum
            r_l p_l.
        scaling: ``"variance"`` 1/sqrt(r_l p_l) or ``"mup"`` 8/(r_l p_l), used when no layout gives the
            scaling.
        divide_by_levels: divide the sum by the number of levels. Default ``False``.
        rms_cap: see ``FactoredMatrix``.

    Source: Kuang et al. 2025, section 4.
    """

    ranks: tuple[int, ...]
    scaling: ScoreScaling = "variance"
    divide_by_levels: bool = False
    rms_cap: bool = False

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            *,
            ranks: Sequence[int],
            scaling: ScoreScaling = "variance",
            divide_by_levels: bool = False,
            rms_cap: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        _check_options(self.scaling, self.rms_cap)
        check_bool("divide_by_levels", self.divide_by_levels)
        object.__setattr__(self, "ranks", positive_ints(self.ranks, "MLR ranks"))

    def feature_dim(self, embed_dim: int, num_heads: int) -> int:
        """sum r_l 2^(l-1)."""
        _check_heads(embed_dim, num_heads)
        return sum(rank * 2**level for level, rank in enumerate(self.ranks))

    def build(self, shape: HeadShape) -> ScoringModule:
        """The module with one multi-level low-rank matrix per query head, right factors shared by key
        head.
        """
        matrix = MultiLevelLowRank(ranks=self.ranks, rms_cap=self.rms_cap, **_matrix_sizes(shape))
        return MLRScoring(matrix, shape, self.scaling, self.divide_by_levels)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Any structured matrix as a score: score_h = <norm(x), norm(M_h x')> / sqrt(E), as ``BTT`` is for one
    family.

    Without ``qk_norm``, layout and rotary embedding the score is x^T M_h x' / sqrt(E) exactly, and the order
    of contraction is the one with the fewest FLOPs at the lengths given (``Attention.cost`` says which).

    Args:
        matrix: what M is. A ``Structure``, or its text (``"monarch"``, ``"mlbtc:1x1x16|16x16x256s"``): every
            head gets fresh weights. Or a square ``StructuredMatrix`` of size E: without batch dimensions
            every head starts as a copy of it, with batch_shape (num_heads,) head h as a copy of matrix h
            (then key heads share no factors).
        scaling: ``"variance"`` 1/sqrt(E) or ``"mup"`` 1/E, used when no layout gives the scaling.
        rms_cap: see ``FactoredMatrix``; of a StructuredMatrix it is that matrix's own.

    Raises:
        ConfigError: the text is no structure, or (when built) the sizes or batch dimensions do not fit.

    Source: Kuang et al. 2025, section 3, where every member of the family is a candidate for M.
    """

    matrix: Structure | StructuredMatrix | str
    scaling: ScoreScaling = "variance"
    rms_cap: bool = False

    def __post_init__(self) -> None:
        _check_options(self.scaling, self.rms_cap)
        if not isinstance(self.matrix, StructuredMatrix):
            object.__setattr__(self, "matrix", Structure.of(self.matrix))

    def feature_dim(self, embed_dim: int, num_heads: int) -> int:
        """E."""
        _check_heads(embed_dim, num_heads)
        return embed_dim

    def build(self, shape: HeadShape) -> ScoringModule:
        """The module with one matrix per query head; right factors shared by key head where the structure has
        any.
        """
        sizes = _matrix_sizes(shape)
        if isinstance(self.matrix, StructuredMatrix):
            return BilinearScoring(_copies(self.matrix, shape), shape, self.scaling)
        matrix = Structure.of(self.matrix).build(rms_cap=self.rms_cap, **sizes)
        matrix.reset_parameters(matrix.product_fan_ins)  # the score is a product M x' with x, whatever the family
        return BilinearScoring(matrix, shape, self.scaling)


def _copies(matrix: StructuredMatrix, shape: HeadShape) -> StructuredMatrix:
    """The given matrix, one copy per head."""
    size, heads, groups = shape.embed_dim, shape.num_heads, shape.num_kv_heads
    if (matrix.num_rows, matrix.num_cols) != (size, size) or matrix.batch_shape not in ((), (heads,)):
        raise ConfigError(
            f"the matrix of a score must be {size} x {size} with batch_shape () or ({heads},), got {matrix.num_rows} x "
            f"{matrix.num_cols} with batch_shape {matrix.batch_shape}"
        )
    batch = (groups, heads // groups)
    if isinstance(matrix, FactoredMatrix):
        right = (groups, 1) if not matrix.batch_shape else batch
        copies: StructuredMatrix = matrix.rebatched(batch, right)
    else:
        copies = matrix.rebatched(batch)
    depth = len(matrix.batch_shape)
    with torch.no_grad():
        for name, value in copies.named_parameters():
            weight: Tensor = matrix.get_parameter(name)
            if depth:  # right factors that the given heads share are one matrix wide
                weight = weight.expand(heads, *weight.shape[1:]).reshape(*batch, *weight.shape[1:])
            value.copy_(weight.expand_as(value))
    return copies
