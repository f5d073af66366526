"""What a comparison shows: of one size of model, of a grid of sizes and budgets, or of model selection."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report import comparison, scaling, selection
from structattn_lab.report.figures import comparison as comparison_figures
from structattn_lab.report.figures import scaling as scaling_figures
from structattn_lab.report.figures import selection as selection_figures
from structattn_lab.report.page import write_page
from structattn_lab.report.task_parts import spec_namer


def _kind(record: ComparisonRecord) -> tuple[Any, Any]:
    """The module of tables, verdict and page, and that of figures."""
    if record.search:
        return selection, selection_figures
    return (scaling, scaling_figures) if record.scaling else (comparison, comparison_figures)


def text(record: ComparisonRecord) -> str:
    """The tables and the verdict for a terminal."""
    kind, _ = _kind(record)
    tables = [kind.table(record), *(comparison.task_tables(record) if kind is comparison else ())]
    return "\n\n".join([*(table.text() for table in tables), kind.verdict(record)])


def write_pages(record: ComparisonRecord, out: Path) -> Path:
    """Writes ``figures/`` and ``report.html``; returns the page."""
    kind, figures = _kind(record)
    return write_page(kind.page(record, figures.draw(_named(record), out / "figures")), out / "report.html")


def _named(record: ComparisonRecord) -> ComparisonRecord:
    """The record with every spec by the name that figures give it."""
    name_of, laws = spec_namer(record.task), record.scaling
    if laws is not None:
        series = tuple(replace(one, spec=name_of(one.spec)) for one in laws.series)
        laws = replace(laws, baseline=name_of(laws.baseline), series=series)
    return replace(record, rows=tuple(replace(row, spec=name_of(row.spec)) for row in record.rows), scaling=laws)
