"""Which figures and which page a comparison gets: of one size of model, of a grid of sizes and budgets, or of a search."""

from __future__ import annotations

from pathlib import Path

from structattn.studies.report._common import Results
from structattn.studies.report.figures import draw_figures, draw_scaling, draw_search
from structattn.studies.report.html import write_report
from structattn.studies.report.scaling import write_scaling_report
from structattn.studies.report.search import write_search_report


def write_pages(results: Results, out: Path) -> Path:
    """Writes ``figures/`` and ``report.html``; returns the page. Needs matplotlib."""
    if results.get("scaling"):
        draw, write = draw_scaling, write_scaling_report
    elif results.get("search"):
        draw, write = draw_search, write_search_report
    else:
        draw, write = draw_figures, write_report
    return write(results, draw(results, out / "figures"), out / "report.html")
