"""``fit``: the nearest matrix of a structure to a given dense one, in the Frobenius norm."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structattn.checks import MAX_SEED, check_bool, check_int
from structattn.errors import ConfigError, DataError, ShapeError
from structattn.matrices.base import StructuredMatrix
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.fit.target import as_matrix, check_dense, matrix_errors, relative_error, scale_of, workspace
from structattn.matrices.solver import Tick
from structattn.matrices.structure import Structure
from structattn.progress import progress_bar
from structattn.seeds import generator

_REFINE = 100  # iterations, by default, where the solver is not optimal
_EXACT = 1e-14  # a relative error that float64 cannot improve


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted matrix.

    Attributes:
        matrix: of the structure, dtype and device that were asked for.
        relative_error: ||M - dense|| / ||dense|| in the Frobenius norm, of that very matrix, over the whole
            batch (of a zero matrix: the absolute error).
        initial_error: the same before refinement, in float64.
        method: what found it, in words.
        is_optimal: no matrix of the structure is nearer (the solver is provably optimal).
    """

    matrix: StructuredMatrix
    relative_error: float
    initial_error: float
    method: str
    is_optimal: bool


def fit(
    dense: Tensor,
    like: StructuredMatrix | Structure | str,
    *,
    refine: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Fit:
    """The matrix of the given structure that is nearest to a dense matrix, in the Frobenius norm.

    Dense: a copy. Low rank: truncated SVD. Kronecker: SVD after Van Loan's rearrangement. BTT, Monarch: an
    SVD of every block (all four optimal). MLR and MLBTC: block coordinate descent, each term in turn solved
    exactly given the others, until sweeps no longer improve. Butterfly: hierarchical factorisation, exact for
    butterflies. Kaleidoscope: from the butterfly. These four are then refined by L-BFGS on all parameters.

    Args:
        dense: (num_rows, num_cols), or (*batch_shape, num_rows, num_cols) for a batch; a tensor, an array or
            nested lists. Real and finite, of any magnitude (it is scaled for the work).
        like: what to fit: a ``Structure`` or its text, or a matrix. A matrix gives structure, dtype and
            device; it is left as it is, and the result is never further from ``dense`` than its current
            weights are.
        refine: L-BFGS iterations (0: none). Default: 0 where the solver is optimal, else 100.
        seed: of every random number: the start of structures without a solver, and the small perturbation
            with which refinement leaves stationary points. Same seed, same result; the global generator is
            left as it is.
        progress: show a bar (needs tqdm, of the extra ``train``).

    Returns:
        ``Fit``; its matrix computes in ``like``'s dtype, or that of ``dense`` if ``like`` is a structure.

    Raises:
        ShapeError: ``dense`` has another shape than ``like``.
        DataError: ``dense`` holds NaN or infinity; the first position is named. Or it is complex or not
            numeric; or the nearest matrix does not fit into ``like``'s dtype.
        ConfigError: ``like`` shares right factors or caps them (``rms_cap``), so a nearest matrix has no
            separate factors; or the structure does not exist at this size.

    Cost: an SVD per block, all work in float64; refinement forms the dense matrix at every step.

    Source: Van Loan and Pitsianis 1993 (Kronecker); Parshakova et al. 2023 (MLR); Le et al. 2022 (butterfly).
    """
    dense = as_matrix(dense)
    if refine is not None:
        check_int("refine", refine, minimum=0)
    check_int("seed", seed, minimum=0, maximum=MAX_SEED)
    check_bool("progress", progress)
    with workspace(seed):
        target = check_dense(dense)
        if not isinstance(like, StructuredMatrix):
            like = Structure.of(like).build(*dense.shape[-2:], batch_shape=tuple(dense.shape[:-2]))
            like = like.to(dense.device, dense.dtype if dense.is_floating_point() else torch.get_default_dtype())
        _check_like(like, dense)
        target = target.to(next(like.parameters()).device)
        with progress_ticks(progress, f"fit {type(like).__name__}") as tick:
            return _fit_all(like, target, refine, seed, tick)


def _fit_all(like: StructuredMatrix, target: Tensor, refine: int | None, seed: int, tick: Tick) -> Fit:
    """Fits every matrix of the batch, keeps ``like``'s own where that is nearer in ``like``'s dtype."""
    solver = like.solver()
    default = 0 if solver.is_optimal else _REFINE
    steps = default if refine is None else refine
    result, whole = copy.deepcopy(like), scale_of(target)
    first, refined = 0.0, False
    indices = list(itertools.product(*map(range, like.batch_shape)))
    for number, index in enumerate(indices):
        single, scale = _single(like, index), scale_of(target[index])
        single.scale_(1 / scale)
        start, moved = _fit_one(single, target[index] / scale, steps, seed + number, tick)
        single.scale_(scale)
        first, refined = first + start * (scale / whole) ** 2, refined or moved
        with torch.no_grad():
            for name, value in result.named_parameters():
                value[index] = single.get_parameter(name).to(value)
    old_errors, new_errors = matrix_errors(like, target), matrix_errors(result, target)
    if not bool(new_errors.isfinite().all()):
        raise DataError(
            f"fit: the nearest matrix has numbers that {next(like.parameters()).dtype} cannot hold (the largest of the "
            f"given ones is {float(target.abs().max()):.3g}); scale the matrix down, or fit in float64"
        )
    with torch.no_grad():
        for index in indices:
            if new_errors[index] > old_errors[index]:
                for name, value in result.named_parameters():
                    value[index] = like.get_parameter(name)[index]
    return Fit(
        matrix=result,
        relative_error=relative_error(result, target),
        initial_error=math.sqrt(first) / (float((target / whole).norm()) or 1.0),
        method=f"{solver.method}, L-BFGS" if refined else solver.method,
        is_optimal=solver.is_optimal,
    )


def _check_like(like: StructuredMatrix, dense: Tensor) -> None:
    expected = (*like.batch_shape, like.num_rows, like.num_cols)
    if tuple(dense.shape) != expected:
        raise ShapeError(f"fit: {type(like).__name__} has shape {expected}, got a matrix of shape {tuple(dense.shape)}")
    if isinstance(like, FactoredMatrix) and (like.rms_cap or like.right_batch_shape != like.batch_shape):
        raise ConfigError("fit: the matrix must have separate right factors and no rms_cap; build one without them")


def _single(like: StructuredMatrix, index: tuple[int, ...]) -> StructuredMatrix:
    """One matrix of the batch, in float64."""
    matrix = like.rebatched(()).double()
    with torch.no_grad():
        for name, value in matrix.named_parameters():
            value.copy_(like.get_parameter(name)[index])
    return matrix


def squared_error(m: StructuredMatrix, target: Tensor) -> float:
    """||M - target||² for one matrix."""
    with torch.no_grad():
        return float((m.to_dense() - target).square().sum())


def _fit_one(matrix: StructuredMatrix, target: Tensor, steps: int, seed: int, tick: Tick) -> tuple[float, bool]:
    """Solves, refines, scales, keeps the best; returns the squared error before refinement and whether there
    was any.
    """
    solver = matrix.solver()
    start_weights, start_error = copy.deepcopy(matrix.state_dict()), squared_error(matrix, target)
    with torch.no_grad():
        solver.solve(target, tick)
    error = squared_error(matrix, target)
    if start_error < error:
        matrix.load_state_dict(start_weights)
        error = start_error
    wanted = steps > 0 and error > _EXACT**2 * float(target.square().sum())
    if wanted:
        refine_matrix(matrix, target, steps, seed, tick)
    if not solver.is_optimal:
        _scale_best(matrix, target)
    return error, wanted


@torch.no_grad()
def _scale_best(m: StructuredMatrix, target: Tensor) -> None:
    """Multiplies M by the number that brings it nearest to the target: then it is never worse than no matrix
    at all.
    """
    dense = m.to_dense()
    size = float(dense.square().sum())
    if size > 0:
        m.scale_(float((dense * target).sum()) / size)


def refine_matrix(m: StructuredMatrix, target: Tensor, steps: int, seed: int, tick: Tick | None = None) -> None:
    """Lowers ||M - target|| by L-BFGS on all parameters, in place; the best parameters met are kept, the
    first included.

    Args:
        m: one float64 matrix.
        target: (num_rows, num_cols).
        steps: iterations.
        seed: of the perturbation, a thousandth of every parameter's scale, that starts it off stationary
            points.
        tick: called with a word and the relative error after every evaluation.
    """
    parameters = list(m.parameters())
    size = float(target.square().sum()) or 1.0
    best, best_error = [p.detach().clone() for p in parameters], squared_error(m, target) / size
    stream = generator("fit", "perturbation", seed)
    with torch.no_grad():
        for p in parameters:
            noise = torch.randn(p.shape, generator=stream, dtype=p.dtype, device="cpu").to(p.device)
            p.add_(1e-3 * p.square().mean().sqrt() * noise)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=steps, history_size=20, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def evaluate() -> float:
        nonlocal best, best_error
        optimizer.zero_grad()
        loss = (m.to_dense() - target).square().sum() / size
        loss.backward()
        value = float(loss.detach())
        if value < best_error:
            best, best_error = [p.detach().clone() for p in parameters], value
        if tick is not None:
            tick("refining", value**0.5)
        return value

    optimizer.step(evaluate)
    with torch.no_grad():
        for p, value in zip(parameters, best, strict=True):
            p.copy_(value)
            p.grad = None


@contextmanager
def progress_ticks(is_wanted: bool, title: str) -> Iterator[Tick]:
    """What counts a step, with a word and the relative error: on a bar if one is wanted and tqdm is there."""
    bar: Any = None
    if is_wanted:
        with suppress(ImportError):
            bar = progress_bar(show=True, desc=title, unit="step", leave=False)

    def tick(what: str, error: float) -> None:
        if bar is not None:
            bar.set_postfix_str(f"{what}, error {error:.3g}", refresh=False)
            bar.update()

    try:
        yield tick
    finally:
        if bar is not None:
            bar.close()
