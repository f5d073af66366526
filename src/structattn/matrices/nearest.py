"""The low-rank blocks, block terms and sums of them that are nearest to one float64 matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structattn.matrices.block_term import BlockTerm

_EXACT = 1e-14  # a relative error that float64 cannot improve


def split_svd(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-``rank`` factors U Vᵀ of each block, singular values shared evenly; zeros beyond the
    sides.

    Args:
        blocks: (..., A, D).
        rank: columns of U and V.

    Returns:
        U (..., A, rank) and V (..., D, rank).

    Source: Eckart and Young 1936.
    """
    u, s, vh = torch.linalg.svd(blocks, full_matrices=False)
    keep = min(rank, s.shape[-1])
    root = s[..., None, :keep].sqrt()
    left, right = u[..., :keep] * root, vh.transpose(-2, -1)[..., :keep] * root
    if keep < rank:
        left = torch.nn.functional.pad(left, (0, rank - keep))
        right = torch.nn.functional.pad(right, (0, rank - keep))
    return left, right


def nearest_term(term: BlockTerm, dense: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the block term nearest to ``dense``: optimal for its permutations, whatever they are.

    Feature f of a term belongs to one left block k' and one right block k and adds a matrix of rank 1 to the
    submatrix of only their rows and columns. So every submatrix (k', k) is a separate problem: the best
    approximation whose rank is the number of its features, by a truncated SVD; submatrices without features
    are not reached at all.

    Args:
        term: the shape.
        dense: (num_rows, num_cols).

    Returns:
        left (b, num_rows / b, F / b), right (c, num_cols / c, F / c).
    """
    b, c, inner = term.left_blocks, term.right_blocks, term.inner_dim
    num_rows, num_cols = dense.shape
    rows = dense[torch.argsort(term.row_index(num_rows)).to(dense.device)]
    blocks = rows.reshape(b, num_rows // b, c, num_cols // c).transpose(1, 2).flatten(0, 1)  # (b c, a, d)
    feature = torch.arange(inner)
    source = term.inner_index()
    pair = feature // (inner // b) * c + source // (inner // c)
    counts = torch.bincount(pair, minlength=b * c)
    left = dense.new_zeros(b, num_rows // b, inner // b)
    right = dense.new_zeros(c, num_cols // c, inner // c)
    # Features of one pair take its singular vectors in their order; pairs of equal count share one batched
    # SVD.
    order = torch.argsort(pair, stable=True)
    start = torch.cumsum(counts, 0) - counts
    place = torch.empty_like(feature)
    place[order] = feature - start[pair[order]]
    for count in counts.unique().tolist():
        if not count:
            continue
        chosen = (counts == count).nonzero()[:, 0]
        u, v = split_svd(blocks[chosen.to(dense.device)], count)
        number = torch.zeros(b * c, dtype=torch.long)
        number[chosen] = torch.arange(len(chosen))
        f = (counts[pair] == count).nonzero()[:, 0]
        g = source[f]
        left[f // (inner // b), :, f % (inner // b)] = u[number[pair[f]], :, place[f]]
        right[g // (inner // c), :, g % (inner // c)] = v[number[pair[f]], :, place[f]]
    return left, right


def term_product(term: BlockTerm, left: Tensor, right: Tensor) -> Tensor:
    """The dense form of one block term, (num_rows, num_cols)."""
    num_rows = left.shape[0] * left.shape[1]
    features = torch.block_diag(*right).t()[term.inner_index().to(right.device)]
    blocks = left @ features.reshape(term.left_blocks, -1, features.shape[1])
    return blocks.flatten(0, 1)[term.row_index(num_rows).to(left.device)]


@dataclass
class Descent:
    """A sum of block terms that approaches ``target``; every sweep over the terms improves it.

    Block coordinate descent with momentum: each term in turn takes its nearest matrix to what the others
    leave (``nearest_term``), the others being extrapolated along their last change. A sweep that would raise
    the error is undone and repeated without extrapolation, which cannot raise it. Smooth kernels, whose
    levels exchange rank slowly, converge in a fifth to a tenth of the sweeps.

    Attributes:
        target: (num_rows, num_cols).
        terms: the shapes.
        factors: left and right of every term.
        parts: their dense forms; zeros before the first sweep.
        error: ||target - sum of parts||.

    Source: Parshakova et al. 2023 for the descent; Nesterov 1983 for the momentum.
    """

    target: Tensor
    terms: Sequence[BlockTerm]
    factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    error: float = math.inf

    def __post_init__(self) -> None:
        if not self.parts:
            self.parts = [torch.zeros_like(self.target) for _ in self.terms]

    def run(self, sweeps: int, tolerance: float, tick: Callable[[str, float], None] | None = None) -> Descent:
        """Sweeps until two in a row reduce the error by less than ``tolerance``, relative to it, or
        ``sweeps`` are done; returns itself.
        """
        size = float(self.target.norm()) or 1.0
        previous, momentum, idle = self.parts, 0, 0
        for _ in range(sweeps if len(self.terms) > 1 else 1):
            weight = momentum / (momentum + 3)
            parts, factors = self._sweep([p + weight * (p - q) for p, q in zip(self.parts, previous, strict=True)])
            error = float((self.target - _total(parts)).norm())
            if error > self.error and momentum:
                previous, momentum = self.parts, 0
                continue
            idle = idle + 1 if self.error - error <= tolerance * error else 0
            if error <= self.error:
                previous, self.parts, self.factors, self.error = self.parts, parts, factors, error
            momentum += 1
            if tick is not None:
                tick("sweeping", self.error / size)
            if idle == 2 or error <= _EXACT * size:
                break
        return self

    def _sweep(self, parts: list[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        factors = []
        rest = self.target - _total(parts)
        for index, term in enumerate(self.terms):
            goal = rest + parts[index]
            factors.append(nearest_term(term, goal))
            parts[index] = term_product(term, *factors[-1])
            rest = goal - parts[index]
        return parts, factors


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)
