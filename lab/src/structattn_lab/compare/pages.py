"""What a comparison shows: of one size of model, of a grid of sizes and budgets, or of model selection."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from structattn_lab.records.common import REPORT
from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report import comparison, scaling, selection
from structattn_lab.report.figures import comparison as comparison_figures
from structattn_lab.report.figures import scaling as scaling_figures
from structattn_lab.report.figures import selection as selection_figures
from structattn_lab.report.page import write_page
from structattn_lab.report.task_report import TaskReport
from structattn_lab.tasks.registry import report_of


def text(record: ComparisonRecord, task: TaskReport | None = None) -> str:
    """The tables and the verdict for a terminal.

    Args:
        record: of the comparison.
        task: what its task adds. Default: by the name in the record.
    """
    if record.search:
        tables, verdict = [selection.table(record)], selection.verdict(record)
    elif record.scaling:
        tables, verdict = [scaling.table(record)], scaling.verdict(record)
    else:
        task = task or report_of(record)
        tables = [comparison.table(record, task), *comparison.task_tables(record, task)]
        verdict = comparison.verdict(record, task)
    return "\n\n".join([*(table.text() for table in tables), verdict])


def write_pages(record: ComparisonRecord, out: Path, task: TaskReport | None = None) -> Path:
    """Writes ``figures/`` and ``report.html``; returns the page.

    Args:
        record: of the comparison.
        out: the folder.
        task: what its task adds. Default: by the name in the record.
    """
    task, folder = task or report_of(record), out / "figures"
    named = _named(record, task)
    if record.search:
        page = selection.page(record, selection_figures.draw(named, folder, task), task)
    elif record.scaling:
        page = scaling.page(record, scaling_figures.draw(named, folder, task))
    else:
        page = comparison.page(record, comparison_figures.draw(named, folder, task), task)
    return write_page(page, out / REPORT)


def _named(record: ComparisonRecord, task: TaskReport) -> ComparisonRecord:
    """The record with every spec by the name that figures give it."""
    laws = record.scaling
    if laws is not None:
        series = tuple(replace(line, spec=task.name_of(line.spec)) for line in laws.series)
        laws = replace(laws, baseline=task.name_of(laws.baseline), series=series)
    return replace(record, rows=tuple(replace(row, spec=task.name_of(row.spec)) for row in record.rows), scaling=laws)
