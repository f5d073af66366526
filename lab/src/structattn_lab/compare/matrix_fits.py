"""Compares structures on matrices: the fits of ``analysis.fits``, with their record and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from structattn.checks import MAX_SEED, check_int
from structattn.errors import ConfigError
from structattn.matrices.fit.target import check_dense
from structattn_lab.analysis.fits import NamedMatrix, default_structures, fit_all, parse_candidate
from structattn_lab.records.common import REPORT, Results
from structattn_lab.records.environment import origin
from structattn_lab.records.fits import FitsRecord
from structattn_lab.runs.folders import Owner, opened


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
    """Fits every structure to every matrix; writes ``results.json``, ``figures/error-against-parameters`` and
    ``report.html``.

    Args:
        matrices: what to fit.
        structures: texts (see ``parse_candidate``); empty for ``default_structures`` of each matrix.
        out: output folder, created. Default: a new one below ``runs/``.
        refine, seed: see ``matrices.fit``.
        command: the command line, for the record.
        show_progress: a progress bar per long fit.
        on_open: called with the output folder before anything is fitted.

    Raises:
        ConfigError: no matrix, two of one name, a structure that is unknown or does not exist at a size
            (before anything is fitted), or an unusable folder.
        DataError: a matrix is not finite.
    """
    from structattn_lab.report.fits import report  # matplotlib is optional
    from structattn_lab.report.writer import write_results

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
            matrices=tuple(fit_all(matrix, candidates, show_progress) for matrix, candidates in plans),
        )
        return write_results(record, report(record), folder)
