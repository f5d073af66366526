"""Every family as block terms: the constructive half of "MLBTC contains them all"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from structattn.errors import ConfigError
from structattn.matrices.base import StructuredMatrix
from structattn.matrices.btt import stride_term
from structattn.matrices.butterfly import Butterfly
from structattn.matrices.elementary import Dense, Kronecker, LowRank
from structattn.matrices.kaleidoscope import Kaleidoscope
from structattn.matrices.terms import BlockTerm, BlockTermSum


@dataclass(frozen=True, kw_only=True)
class TermFactors:
    """One block term with its factors.

    Attributes:
        term: the shape.
        left: (*batch_shape, b, num_rows / b, F / b).
        right: (*right_batch_shape, c, num_cols / c, F / c).
    """

    term: BlockTerm
    left: Tensor
    right: Tensor


@singledispatch
def block_terms(m: StructuredMatrix) -> list[TermFactors]:
    """The matrix as a sum of block terms, exactly; the factors are those in use (after ``rms_cap``), without
    gradient.

    Raises:
        ConfigError: the result would not be smaller than a dense matrix (a Kaleidoscope of several stages,
            unless its inside is narrow), or a structure of another package.
    """
    raise ConfigError(
        f"{type(m).__name__} has no block terms that are known here; write it as one of the family, or register it "
        "with structattn.matrices.embedding.block_terms"
    )


@block_terms.register
@torch.no_grad()
def _sum(m: BlockTermSum) -> list[TermFactors]:
    return [
        TermFactors(
            term=term,
            left=left.reshape(*m.batch_shape, *left.shape[1:]),
            right=right.reshape(*m.right_batch_shape, *right.shape[1:]),
        )
        for term, (left, right) in zip(m.terms, m.used_factors(), strict=True)
    ]


@block_terms.register
@torch.no_grad()
def _low_rank(m: LowRank) -> list[TermFactors]:
    left, right = m.used_factors()
    return _one_block(
        left.reshape(*m.batch_shape, m.num_rows, m.rank), right.reshape(*m.right_batch_shape, m.num_cols, m.rank)
    )


@block_terms.register
@torch.no_grad()
def _dense(m: Dense) -> list[TermFactors]:
    """W I or I Wᵀ, the identity on the shorter side."""
    inner = min(m.num_rows, m.num_cols)
    eye = torch.eye(inner, dtype=m.weight.dtype, device=m.weight.device).expand(*m.batch_shape, inner, inner)
    return _one_block(m.weight, eye) if m.num_cols <= m.num_rows else _one_block(eye, m.weight.transpose(-2, -1))


@block_terms.register
@torch.no_grad()
def _kronecker(m: Kronecker) -> list[TermFactors]:
    """BTT of rank 1 in which all left blocks are A and all right blocks Bᵀ."""
    (a, b), (c, d) = m.row_dims, m.col_dims
    outer, inner = m.used_factors()
    # Either factor may be the shared one; a term shares its right factors only, so A is repeated where it is
    # shared.
    outer_shape, inner_shape = m.batch_shape, m.right_batch_shape
    if not m.inner_first:
        outer, inner_shape = m._spread_right(outer), m.batch_shape
    left = outer.reshape(*outer_shape, 1, a, c).expand(*outer_shape, b, a, c)
    right = inner.transpose(1, 2).reshape(*inner_shape, 1, d, b).expand(*inner_shape, c, d, b)
    return [TermFactors(term=stride_term(b, c, 1), left=left, right=right)]


@block_terms.register
@torch.no_grad()
def _butterfly(m: Butterfly) -> list[TermFactors]:
    """The halves of the stages, each fused: those before the split touch only the outer indices, the others
    the inner ones.

    So the fused right half is block diagonal in (i_1 ... i_split), the fused left half in (o_split+1 ...
    o_k): a BTT whose rank is that of the butterfly.
    """
    if not m.split:  # one stage: one dense block on the right
        right = m.used_stage(0)[:, 0, 0].transpose(1, 2).reshape(*m.right_batch_shape, m.num_cols, m.num_rows)
        eye = torch.eye(m.num_rows, dtype=right.dtype, device=right.device)
        return _one_block(eye.expand(*m.batch_shape, m.num_rows, m.num_rows), right)
    a, b = math.prod(m.row_radices[: m.split]), math.prod(m.row_radices[m.split :])
    c, d = math.prod(m.col_radices[: m.split]), math.prod(m.col_radices[m.split :])
    s, inner = m.rank, m.inner_dim
    eye = torch.eye(inner, dtype=m.left[0].dtype, device=m.left[0].device)
    # Column (i_c, k', s) of the left half, for rows (i_a, i_b): only those with k' = i_b are not zero.
    left = m._left_expand(eye.expand(m.num_matrices, -1, -1)).reshape(-1, a, b, c, b, s)
    left = left.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3).reshape(*m.batch_shape, b, a, c * s)
    # Row (k, i_b, s) of the right half, for columns (i_c, i_d): only those with i_c = k are not zero.
    eye = torch.eye(m.num_cols, dtype=eye.dtype, device=eye.device)
    right = m._right_features(eye[None]).reshape(-1, c, b, s, c, d)
    right = right.diagonal(dim1=1, dim2=4).permute(0, 4, 3, 1, 2).reshape(*m.right_batch_shape, c, d, b * s)
    return [TermFactors(term=stride_term(b, c, s), left=left, right=right)]


@block_terms.register
@torch.no_grad()
def _kaleidoscope(m: Kaleidoscope) -> list[TermFactors]:
    """One stage: a product of dense matrices. A narrow inside: low rank, everything but the last butterfly on
    the left.
    """
    mixing = max(
        sum(max(pair) > 1 for pair in zip(butterfly.row_radices, butterfly.col_radices, strict=True))
        for butterfly in m.butterflies
    )
    if m.inner_size * (m.num_rows + m.num_cols) < m.num_rows * m.num_cols:
        eye = torch.eye(m.inner_size, dtype=m.right.stages[0].dtype, device=m.right.stages[0].device)
        left = m._left_expand(eye.expand(m.num_matrices, -1, -1)).reshape(*m.batch_shape, m.num_rows, m.inner_size)
        right = m.right._matmul(eye[None]).reshape(*m.right_batch_shape, m.num_cols, m.inner_size)
        return _one_block(left, right)
    if mixing > 1:
        raise ConfigError(
            f"a Kaleidoscope whose butterflies have {mixing} stages is not one MLBTC term: its stages mix the indices "
            f"1, ..., {mixing}, ..., 1 in turn, and a term holds two runs of stages, each of which must leave some "
            "index unchanged, but wherever the cut is, one run mixes them all and becomes one dense block. It is a "
            "term smaller than a dense matrix only if its butterflies have one stage, or its inner_size makes it low "
            "rank. Use MLBTC.from_matrix on each "
            "butterfly, or fit an MLBTC to to_dense()"
        )
    dense = Dense(m.num_rows, m.num_cols, batch_shape=m.batch_shape)
    dense.weight = torch.nn.Parameter(m.to_dense())
    return _dense(dense)


def _one_block(left: Tensor, right: Tensor) -> list[TermFactors]:
    """L Rᵀ as one term of one block: left (*batch_shape, num_rows, F), right (*right_batch_shape, num_cols,
    F).
    """
    term = BlockTerm(left_blocks=1, right_blocks=1, inner_dim=left.shape[-1])
    return [TermFactors(term=term, left=left.unsqueeze(-3), right=right.unsqueeze(-3))]
