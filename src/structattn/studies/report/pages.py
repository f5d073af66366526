"""Which figures and which page a comparison gets: of one size of model, of a grid of sizes and budgets, or of a search."""

from __future__ import annotations

from pathlib import Path

from structattn.studies.records.comparison import ComparisonRecord
from structattn.studies.report.figures import draw_figures, draw_scaling, draw_search
from structattn.studies.report.html import write_report
from structattn.studies.report.scaling import write_scaling_report
from structattn.studies.report.search import write_search_report


def write_pages(record: ComparisonRecord, out: Path) -> Path:
    """Writes ``figures/`` and ``report.html``; returns the page. Needs matplotlib."""
    if record.scaling:
        draw, write = draw_scaling, write_scaling_report
    elif record.search:
        draw, write = draw_search, write_search_report
    else:
        draw, write = draw_figures, write_report
    return write(record, draw(record, out / "figures"), out / "report.html")
