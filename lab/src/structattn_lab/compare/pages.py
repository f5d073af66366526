"""What a comparison shows: of one size of model, of a grid of sizes and budgets, or of model selection."""

from __future__ import annotations

from pathlib import Path

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report import comparison, scaling, selection, writer
from structattn_lab.report.report import Report
from structattn_lab.report.task_report import TaskReport
from structattn_lab.tasks.registry import report_of


def report(record: ComparisonRecord, task: TaskReport | None = None) -> Report:
    """The report of a comparison.

    Args:
        record: of the comparison.
        task: what its task adds. Default: by the name in the record.
    """
    task = task or report_of(record)
    if record.search:
        return selection.report(record, task)
    return scaling.report(record, task) if record.scaling else comparison.report(record, task)


def text(record: ComparisonRecord, task: TaskReport | None = None) -> str:
    """The tables and the verdict for a terminal; see ``report``."""
    return writer.text(report(record, task))


def write_pages(record: ComparisonRecord, out: Path, task: TaskReport | None = None) -> Path:
    """Writes ``figures/`` and ``report.html`` into a folder; returns the page; see ``report``."""
    return writer.write_report(report(record, task), out)
