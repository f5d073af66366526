"""Fits of structures to matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from structattn_lab.records.fits import FitRow, FitsRecord, FittedMatrix
from structattn_lab.report.figures.fits import draw_errors
from structattn_lab.report.numbers import fmt_count, fmt_date, fmt_seconds
from structattn_lab.report.report import Origin, Report, Section
from structattn_lab.report.table import Table

_BUDGET = 0.25


def _fmt_error(value: float) -> str:
    """A relative error with three digits: ``0.0612``, ``2.1e-05``."""
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.4f}" if value else "0"


def _nearest(matrix: FittedMatrix) -> FitRow | None:
    """The smallest error within a quarter of the parameters of a dense matrix; the fewest parameters among
    equals.
    """
    budget = _BUDGET * matrix.num_rows * matrix.num_cols
    rows = [row for row in matrix.rows if row.num_params <= budget]
    return min(rows, key=lambda row: (max(row.relative_error, 1e-9), row.num_params), default=None)


def _table(matrix: FittedMatrix) -> Table:
    """In the order of parameters, the nearest structure of few parameters marked."""
    size = matrix.num_rows * matrix.num_cols
    columns: list[tuple[str, Callable[[FitRow], str]]] = [
        ("structure", lambda row: row.structure),
        ("parameters", lambda row: f"{row.num_params:,}"),
        ("of dense", lambda row: f"{100 * row.num_params / size:.1f}%"),
        ("error", lambda row: _fmt_error(row.relative_error)),
        ("method", _method),
        ("seconds", lambda row: fmt_seconds(row.seconds)),
    ]
    ordered = sorted(matrix.rows, key=lambda row: (row.num_params, row.relative_error))
    title = (
        f"{matrix.name}, {matrix.num_rows} x {matrix.num_cols}: {matrix.about}; a dense matrix has {fmt_count(size)} "
        "parameters"
    )
    return Table.of_columns(columns, ordered, best=_nearest(matrix), words=("method",), title=title)


def _method(row: FitRow) -> str:
    optimal, detail = " (optimal)" * row.is_optimal, f": {row.detail}" * bool(row.detail)
    return f"{row.method}{optimal}{detail}"


def _verdict(record: FitsRecord) -> str:
    """For every matrix, what is nearest within a quarter of the dense parameters, beside low rank."""
    sentences = []
    for matrix in record.matrices:
        best = _nearest(matrix)
        if best is None:
            sentences.append(f"{matrix.name}: nothing was fitted within a quarter of the dense parameters.")
            continue
        low = _nearest(replace(matrix, rows=tuple(row for row in matrix.rows if row.family == "lowrank")))
        beside = f" (low rank: {_fmt_error(low.relative_error)})" if low is not None and low is not best else ""
        sentences.append(
            f"{matrix.name}: {best.structure}, with a relative error of {_fmt_error(best.relative_error)}{beside}."
        )
    return f"Nearest within {100 * _BUDGET:.0f} % of the parameters of a dense matrix. " + " ".join(sentences)


def report(record: FitsRecord) -> Report:
    """Verdict, figure, a table for each matrix, how to repeat it."""
    words, of_matrices = _verdict(record), [_table(matrix) for matrix in record.matrices]
    note = "error: relative, Frobenius norm; * nearest within a quarter of the dense parameters"
    return Report(
        title="Structures fitted to matrices",
        question="How near does each structure come to a given matrix, and at how many parameters?",
        byline=[fmt_date(record.created)],
        verdict=words,
        sections=(
            Section(drawings={"error-against-parameters": functools.partial(draw_errors, record, words)}),
            *(Section(heading="Tables" * (not i), table=table) for i, table in enumerate(of_matrices)),
        ),
        tables=(*of_matrices[:-1], replace(of_matrices[-1], notes=(note,))),
        origin=Origin.of(record),
        notes=(
            "Error: ||M - A|| / ||A|| in the Frobenius norm, in float64.",
            "Optimal: no matrix of the structure is nearer. Otherwise the error is the best found and an upper bound.",
            "★ and *: the nearest within a quarter of the parameters of a dense matrix.",
            "Seconds are wall-clock on this machine, one run.",
        ),
    )
