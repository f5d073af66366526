"""What a comparison says in the terminal: of one size of model, of a grid of sizes and budgets, or of a search."""

from __future__ import annotations

from structattn.studies.report import table
from structattn.studies.report._common import Results
from structattn.studies.report.scaling import format_scaling, scaling_verdict
from structattn.studies.report.search import format_search, search_verdict


def format_results(results: Results) -> str:
    """The table: scaling laws where there are budgets, choices where there is a search, else a line per attention."""
    if results.get("search"):
        return format_search(results)
    return format_scaling(results) if results.get("scaling") else table.format_table(results)


def verdict(results: Results) -> str:
    """What the comparison shows, and what it does not."""
    if results.get("search"):
        return search_verdict(results)
    return scaling_verdict(results) if results.get("scaling") else table.verdict(results)
