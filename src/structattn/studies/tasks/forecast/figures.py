"""What a report shows of forecasts: examples, the error by lead time, and the error of each column."""

from __future__ import annotations

from structattn.studies.records.comparison import ComparisonRecord
from structattn.studies.report.figures.by_position import by_position
from structattn.studies.report.figures.examples import axis_labels, examples_figure
from structattn.studies.report.numbers import fmt_score
from structattn.studies.report.plot import Drawing
from structattn.studies.report.rows import lowest, row_name
from structattn.studies.report.table import Table
from structattn.studies.tasks.forecast.baseline_models import PREFIX


def name_of(spec: str) -> str:
    """The name of a spec in figures: a baseline model is known by its name alone."""
    return spec.removeprefix(PREFIX)


def error_by_lead(record: ComparisonRecord) -> Drawing | None:
    """Error against how far ahead."""
    figure = by_position(record, "error_by_lead", f"{axis_labels(record)['step']} ahead")
    caption = "Error against how far ahead the forecast looks; baselines in grey."
    return None if figure is None else (figure, caption, f"Error by forecast lead{lowest(record)}.")


def error_by_column(record: ComparisonRecord) -> Table | None:
    """The error of each column of the data, where there are several."""
    errors = {row_name(row): row.details.get("error_by_column") or {} for row in record.rows}
    names = list(dict.fromkeys(name for found in errors.values() for name in found))
    if not names:
        return None
    rows = [[name, *(fmt_score(found.get(one)) for one in names)] for name, found in errors.items()]
    return Table.of(("method", *names), rows, title="Error of each column")


FIGURES = {"examples": examples_figure, "error-by-lead": error_by_lead}
TABLES = {"error-by-column": error_by_column}
