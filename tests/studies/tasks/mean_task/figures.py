"""What a report shows of the mean: the error by coordinate."""

from __future__ import annotations

from structattn.studies.records import ComparisonRecord
from structattn.studies.report._common import Table, row_name
from structattn.studies.report.figures.by_position import by_position
from structattn.studies.report.figures.canvas import Drawing


def error_by_coordinate(record: ComparisonRecord) -> Drawing | None:
    figure = by_position(record, "error_by_coordinate", "coordinate")
    return None if figure is None else (figure, "Error by coordinate.", "Error by coordinate.")


def largest_error(record: ComparisonRecord) -> Table:
    return ["method", "largest error"], [[row_name(row), "1.25"] for row in record.rows]


FIGURES = {"error-by-coordinate": error_by_coordinate}
TABLES = {"The largest error of a coordinate": largest_error}
