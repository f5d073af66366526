"""Fits structures to matrices: error against parameters, as a table, a figure and a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from structattn.checks import MAX_SEED, check_int
from structattn.errors import ConfigError
from structattn.matrices import Fit, Structure, allocate_ranks, fit
from structattn.matrices.btt import factor_pair
from structattn.matrices.fit.target import check_dense
from structattn.spec.grammar import Form, named, positive, read_term, reading
from structattn_lab.analysis.matrix_examples import NamedMatrix
from structattn_lab.environment import origin
from structattn_lab.folders import Owner, opened
from structattn_lab.records.common import REPORT, Results
from structattn_lab.records.fits import FitRow, FitsRecord, FittedMatrix

_ALLOCATED = "mlr-allocated"
_FORM = Form(
    syntax=f"{_ALLOCATED}:R",
    example=f"{_ALLOCATED}:8",
    meaning="MLR of total rank R, with the ranks found",
    value=named("rank", positive),
)


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
    """The candidate of a text: any ``Structure``, or ``mlr-allocated:R``, MLR of total rank R with the ranks found.

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
    """A sweep over every family with fewer parameters than a dense matrix of that shape; families that do not exist at the size are left out."""
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


def fit_matrices(
    matrices: Sequence[NamedMatrix],
    structures: Sequence[str],
    out: Path | None = None,
    *,
    refine: int | None = None,
    seed: int = 0,
    command: str = "",
    show_progress: bool = True,
    on_open: Callable[[Path], None] | None = None,
) -> Results[FitsRecord]:
    """Fits every structure to every matrix; writes ``results.json``, ``figures/error-against-parameters`` and ``report.html``.

    Args:
        matrices: what to fit.
        structures: texts (see ``parse_candidate``); empty for ``default_structures`` of each matrix.
        out: output folder, created. Default: a new one below ``runs/``.
        refine, seed: see ``matrices.fit``.
        command: the command line, for the record.
        show_progress: a progress bar per long fit.
        on_open: called with the output folder before anything is fitted.

    Raises:
        ConfigError: no matrix, two of one name, a structure that is unknown or does not exist at a size (before anything is
            fitted), or an unusable folder.
        DataError: a matrix is not finite.
    """
    from structattn_lab.report.figures.fits import draw  # matplotlib is optional
    from structattn_lab.report.fits import page
    from structattn_lab.report.page import write_results

    names = [matrix.name for matrix in matrices]
    if not matrices or len(set(names)) != len(names):
        raise ConfigError(f"give at least one matrix, without repetition; got {', '.join(names) or 'none'}")
    if len({"".join(text.split()) for text in structures}) != len(structures):
        raise ConfigError(f"structures must be unique, got {', '.join(structures)}")
    check_int("seed", seed, minimum=0, maximum=MAX_SEED)
    if refine is not None:
        check_int("refine", refine, minimum=0)
    plans = []
    for matrix in matrices:
        check_dense(matrix.values)
        rows, cols = matrix.values.shape
        texts = tuple(structures) or default_structures(rows, cols)
        candidates = [parse_candidate(text, refine=refine, seed=seed) for text in texts]
        with torch.device("meta"):
            for candidate in candidates:
                candidate.size.build(rows, cols)
        plans.append((matrix, candidates))
    settings = {"matrices": names, "structures": list(structures), "refine": refine, "seed": seed}
    owner = Owner(command="fit", task="", settings=settings, last=REPORT)
    with opened(out, owner, resume=None, on_open=on_open) as folder:
        record = FitsRecord(
            **origin(command),
            seed=seed,
            refine=refine,
            matrices=tuple(_fit_all(matrix, candidates, show_progress) for matrix, candidates in plans),
        )
        return write_results(record, folder, draw, page)


def _fit_all(matrix: NamedMatrix, candidates: Iterable[Candidate], show_progress: bool) -> FittedMatrix:
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
