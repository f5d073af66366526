"""Fits structures to matrices: error against parameters, as a table, a figure and a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from structattn.errors import ConfigError
from structattn.grammar import Form, named, positive, read_term, reading
from structattn.matrices import Fit, Structure, allocate_ranks, fit
from structattn.matrices.btt import factor_pair
from structattn_lab.records.fits import FitRow, FittedMatrix

_ALLOCATED = "mlr-allocated"
_FORM = Form(
    syntax=f"{_ALLOCATED}:R",
    example=f"{_ALLOCATED}:8",
    meaning="MLR of total rank R, with the ranks found",
    value=named("rank", positive),
)


@dataclass(frozen=True, kw_only=True)
class NamedMatrix:
    """A matrix with a name and a description.

    Attributes:
        name: short, for tables and titles.
        about: one phrase.
        values: (num_rows, num_cols), float64.
    """

    name: str
    about: str
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of the figure: a family, a text, and how to fit it.

    Attributes:
        family: the line it belongs to.
        text: what the user writes.
        size: a structure with the same number of parameters, which exists for the same sizes.
        run: fits a matrix; its argument is whether to show progress.
    """

    family: str
    text: str
    size: Structure
    run: Callable[[Tensor, bool], Fit]


def parse_candidate(text: str, *, refine: int | None = None, seed: int = 0) -> Candidate:
    """The candidate of a text: any ``Structure``, or ``mlr-allocated:R``, MLR of total rank R with the ranks
    found.

    Raises:
        ConfigError: unknown family or wrong numbers.
    """
    if text.partition(":")[0] == _ALLOCATED:
        with reading("structure", text, _FORM.help):
            total = read_term(text, {_ALLOCATED: _FORM})[1]["rank"]
        return Candidate(
            family="mlr",
            text=text,
            size=Structure.parse(f"lowrank:{total}"),
            run=lambda dense, show: allocate_ranks(dense, total, _levels(dense), progress=show),
        )
    structure = Structure.parse(text)
    return Candidate(
        family=structure.family,
        text=text,
        size=structure,
        run=lambda dense, show: fit(dense, structure, refine=refine, seed=seed, progress=show),
    )


def _levels(dense: Tensor) -> tuple[int, ...]:
    """1, 2, 4 and 8 blocks, as far as they divide both sides and leave blocks of at least 4."""
    return tuple(
        p for p in (1, 2, 4, 8) if not (dense.shape[0] % p or dense.shape[1] % p) and min(dense.shape) // p >= 4
    )


def default_structures(num_rows: int, num_cols: int) -> tuple[str, ...]:
    """A sweep over every family with fewer parameters than a dense matrix of that shape; families that do not
    exist at the size are left out.
    """
    (_, b), (c, _) = factor_pair(num_rows)[::-1], factor_pair(num_cols)[::-1]
    powers = [2**k for k in range(12)]
    texts = [f"lowrank:{r}" for r in powers]
    texts += [f"{_ALLOCATED}:{r}" for r in powers[2:5]]
    texts += [f"btt:{s}" for s in powers]
    texts += ["kronecker", *(f"butterfly:{s}" for s in powers[:4]), "kaleidoscope", "kaleidoscope:2"]
    texts += [f"mlbtc:1x1x{r}|{b}x{c}x{b * c}s" for r in powers[:6]]
    return tuple(text for text in texts if 0 < _num_params(text, num_rows, num_cols) < num_rows * num_cols)


def _num_params(text: str, num_rows: int, num_cols: int) -> int:
    """Parameters of a candidate at a size, 0 if it does not exist there."""
    try:
        with torch.device("meta"):
            return parse_candidate(text).size.build(num_rows, num_cols).num_params
    except ConfigError:
        return 0


def fit_all(matrix: NamedMatrix, candidates: Iterable[Candidate], show_progress: bool) -> FittedMatrix:
    rows = []
    for candidate in candidates:
        start = time.perf_counter()
        found = candidate.run(matrix.values, show_progress)
        rows.append(
            FitRow(
                family=candidate.family,
                structure=candidate.text,
                num_params=found.matrix.num_params,
                flops=found.matrix.flops,
                relative_error=found.relative_error,
                is_optimal=found.is_optimal,
                method=found.method,
                detail=_detail(found),
                seconds=time.perf_counter() - start,
            )
        )
    num_rows, num_cols = matrix.values.shape
    return FittedMatrix(name=matrix.name, about=matrix.about, num_rows=num_rows, num_cols=num_cols, rows=tuple(rows))


def _detail(found: Fit) -> str:
    """The ranks that an allocation chose, with the blocks of each level."""
    options = found.matrix.options
    if "ranks" not in options:
        return ""
    return ", ".join(f"{r} at {p}" for r, p in zip(options["ranks"], options["num_blocks"], strict=True))
