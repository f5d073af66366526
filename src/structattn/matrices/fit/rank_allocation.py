"""Allocation of rank to the levels of an MLR matrix: exchanges between levels at a given total rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from structattn.checks import check_bool, check_size, check_sizes
from structattn.errors import ConfigError
from structattn.matrices.block_term import BlockTerm
from structattn.matrices.fit.fit import Fit, fit, progress_ticks
from structattn.matrices.fit.target import as_matrix, check_dense, relative_error, scale_of, workspace
from structattn.matrices.mlr import MultiLevelLowRank
from structattn.matrices.nearest import Descent, nearest_term, term_product

_SWEEPS = 60
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class _State:
    """Ranks of the levels with the dense form of each; levels of rank 0 are left out of the descent."""

    target: Tensor
    num_blocks: tuple[int, ...]
    ranks: tuple[int, ...]
    parts: tuple[Tensor, ...]
    error: float = float("inf")

    def settled(self) -> _State:
        """The same ranks after a descent from these dense forms."""
        kept = [level for level, rank in enumerate(self.ranks) if rank]
        terms = [
            BlockTerm(left_blocks=p, right_blocks=p, inner_dim=p * self.ranks[level])
            for level, p in enumerate(self.num_blocks)
            if level in kept
        ]
        descent = Descent(self.target, terms, parts=[self.parts[level] for level in kept]).run(_SWEEPS, _TOLERANCE)
        parts = [torch.zeros_like(self.target) for _ in self.ranks]
        for level, part in zip(kept, descent.parts, strict=True):
            parts[level] = part
        return replace(self, parts=tuple(parts), error=descent.error)

    def moved(self, giver: int, taker: int, step: int) -> _State:
        """With ``step`` ranks moved from one level to another; its error is that after the descent."""
        ranks = list(self.ranks)
        ranks[giver] -= step
        ranks[taker] += step
        return replace(self, ranks=tuple(ranks)).settled()

    def moves(self, step: int) -> list[tuple[int, int]]:
        """Givers and takers of ``step`` ranks, the most promising first.

        A level gains the energy of its next singular values, and loses that of its last ones; the response of
        the other levels is not predicted, so the last, finest step tries every pair, and coarser ones only
        the three most promising.
        """
        gains, losses = [], []
        rest = self.target - torch.stack(self.parts).sum(0)
        for p, rank, part in zip(self.num_blocks, self.ranks, self.parts, strict=True):
            grid = (rest + part).reshape(p, rest.shape[0] // p, p, rest.shape[1] // p)
            energy = torch.linalg.svdvals(grid.diagonal(dim1=0, dim2=2).permute(2, 0, 1)).square().sum(0)
            gains.append(float(energy[rank : rank + step].sum()))
            losses.append(float(energy[rank - step : rank].sum()) if rank >= step else float("inf"))
        count = range(len(self.ranks))
        pairs = [(gains[taker] - losses[giver], giver, taker) for giver in count for taker in count if giver != taker]
        pairs = sorted((pair for pair in pairs if pair[0] > float("-inf")), reverse=True)
        return [(giver, taker) for _, giver, taker in (pairs if step == 1 else pairs[:3])]


def allocate_ranks(
    dense: Tensor, total_rank: int, num_blocks: Sequence[int] = (1, 2, 4, 8), *, progress: bool = False
) -> Fit:
    """Fits an MLR matrix whose ranks sum to ``total_rank`` to a dense matrix; the ranks are found by exchange
    between levels.

    Starting from the three best of even ranks and all rank on one level, rank moves from the level that loses
    least to the one that gains most, in steps that are halved from total_rank / 4 to 1, as long as the error
    falls. The result is never worse than ``fit`` with even ranks, nor than truncated SVD of the same total
    rank if one of the levels has one block.

    Args:
        dense: (num_rows, num_cols), real and finite.
        total_rank: Σ r_l; the matrix has (num_rows + num_cols) times as many parameters.
        num_blocks: p_l of the levels to choose from; each divides both sizes. Default ``(1, 2, 4, 8)``.
        progress: as ``fit``.

    Returns:
        ``Fit`` of a ``MultiLevelLowRank`` with the levels that got any rank, in ``dense``'s dtype.

    Raises:
        ShapeError, DataError: as ``fit``.
        ConfigError: no levels, two alike, blocks that do not divide the sizes, or a total below 1.

    Cost: some tens of sweeps, each one SVD per block and level. Deterministic.

    Source: Parshakova, Hastie, Darve and Boyd 2023, Factor fitting, rank allocation, and partitioning in
    multilevel low rank matrices.
    """
    dense = as_matrix(dense)
    check_size("total_rank", total_rank)
    check_bool("progress", progress)
    blocks = check_sizes("num_blocks", num_blocks)
    if len(set(blocks)) != len(blocks):
        raise ConfigError(f"allocate_ranks: the levels must differ, got num_blocks {blocks}")
    if dense.dim() > 2:
        raise ConfigError(f"allocate_ranks takes one matrix, got shape {tuple(dense.shape)}")
    with workspace(0):
        target = check_dense(dense)
        scale = scale_of(target)
        MultiLevelLowRank(target.shape[0], target.shape[1], (1,) * len(blocks), num_blocks=blocks)  # checks the sizes
        best = _best(target / scale, total_rank, blocks, progress)
        best.matrix.scale_(scale)
        matrix = best.matrix.to(dense.dtype if dense.is_floating_point() else torch.get_default_dtype())
        error = relative_error(matrix, target)
        return replace(best, matrix=matrix, relative_error=error, is_optimal=False, method="rank exchange")


def _best(target: Tensor, total_rank: int, blocks: tuple[int, ...], progress: bool) -> Fit:
    """Even ranks and one level are far apart, and each may lead to a local optimum: the exchange starts from
    the three best.
    """
    count = len(blocks)
    even = tuple(total_rank // count + (level < total_rank % count) for level in range(count))
    single = [tuple(total_rank if other == level else 0 for other in range(count)) for level in range(count)]
    fits = sorted(
        (_fitted(target, blocks, ranks, progress) for ranks in [even, *single]), key=lambda f: f.relative_error
    )
    for start in fits[:3]:
        state = _exchanged(_state(target, blocks, start), max(1, total_rank // 4), progress)
        fits.append(_fitted(target, blocks, state.ranks, progress, state.parts))
    return min(fits, key=lambda f: f.relative_error)


def _exchanged(state: _State, step: int, progress: bool) -> _State:
    """Moves rank as long as the error falls, in steps that are halved down to 1."""
    size = float(state.target.norm()) or 1.0
    with progress_ticks(progress, "rank exchange") as tick:
        while step:
            for giver, taker in state.moves(step):
                trial = state.moved(giver, taker, step)
                tick(f"moving {step}", trial.error / size)
                if trial.error < state.error * (1 - 1e-6):
                    state = trial
                    break
            else:
                step //= 2
    return state


def _fitted(
    target: Tensor,
    num_blocks: tuple[int, ...],
    ranks: tuple[int, ...],
    progress: bool,
    parts: tuple[Tensor, ...] | None = None,
) -> Fit:
    """The fit with given ranks, zeros left out; no worse than the given dense levels if there are any."""
    kept = [level for level, rank in enumerate(ranks) if rank]
    like = MultiLevelLowRank(
        target.shape[0],
        target.shape[1],
        tuple(ranks[level] for level in kept),
        num_blocks=tuple(num_blocks[level] for level in kept),
    ).to(target)
    if parts is not None:
        with torch.no_grad():
            for level, term, (left, right) in zip(kept, like.terms, like.factors(), strict=True):
                new_left, new_right = nearest_term(term, parts[level])
                left.copy_(new_left)
                right.copy_(new_right)
    return fit(target, like, progress=progress)


def _state(target: Tensor, num_blocks: tuple[int, ...], fit: Fit) -> _State:
    """A fitted matrix as the start of the exchange."""
    m = fit.matrix
    assert isinstance(m, MultiLevelLowRank)  # of _fitted
    ranks, parts = [0] * len(num_blocks), [torch.zeros_like(target) for _ in num_blocks]
    for rank, p, term, (left, right) in zip(m.ranks, m.num_blocks, m.terms, m.factors(), strict=True):
        level = num_blocks.index(p)
        ranks[level], parts[level] = rank, term_product(term, left.detach(), right.detach())
    error = float((target - torch.stack(parts).sum(0)).norm())
    return _State(target, num_blocks, tuple(ranks), tuple(parts), error)
