"""What a comparison says in the terminal: of one size of model, or of a grid of sizes and budgets."""

from __future__ import annotations

from structattn.reports import table
from structattn.reports._common import Results
from structattn.reports.scaling import format_scaling, scaling_verdict


def format_results(results: Results) -> str:
    """The table: scaling laws where there are budgets, else a line per attention."""
    return format_scaling(results) if results.get("scaling") else table.format_table(results)


def verdict(results: Results) -> str:
    """What the comparison shows, and what it does not."""
    return scaling_verdict(results) if results.get("scaling") else table.verdict(results)
