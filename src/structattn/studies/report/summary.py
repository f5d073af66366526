"""What a comparison says in the terminal: of one size of model, of a grid of sizes and budgets, or of a search."""

from __future__ import annotations

from structattn.studies.records.comparison import ComparisonRecord
from structattn.studies.report import table
from structattn.studies.report.scaling import format_scaling, scaling_verdict
from structattn.studies.report.search import format_search, search_verdict


def format_results(record: ComparisonRecord) -> str:
    """The table: scaling laws where there are budgets, choices where there is a search, else a line per attention."""
    if record.search:
        return format_search(record)
    return format_scaling(record) if record.scaling else table.format_table(record)


def verdict(record: ComparisonRecord) -> str:
    """What the comparison shows, and what it does not."""
    if record.search:
        return search_verdict(record)
    return scaling_verdict(record) if record.scaling else table.verdict(record)
