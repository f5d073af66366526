"""Errors along a sequence: a line for each attention variant and baseline."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as MplFigure

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report.numbers import finite_list
from structattn_lab.report.plot import DASHES, GREY, end_labels, log_axis, new_canvas, row_style, wide
from structattn_lab.report.rows import row_name


def by_position(record: ComparisonRecord, key: str, xlabel: str) -> MplFigure | None:
    """One line for each attention variant and baseline of a list under ``details[key]``."""
    lines: list[tuple[str, list[float], dict[str, Any]]] = []
    for row in record.rows:
        if values := finite_list(row.details.get(key)):
            lines.append((row_name(row), values, {**row_style(record, row), "lw": 1.6}))
    bound = [v for _, values, _ in lines for v in values]
    if not lines:
        return None
    for index, baseline in enumerate(record.baselines):
        if values := finite_list(baseline.details.get(key)):
            lines.append((baseline.name, values, {"color": GREY, "linestyle": DASHES[index % 3], "lw": 1.2}))
    height = max(3.7, 0.19 * len(lines) + 0.7)
    figure = new_canvas(height)
    ax = figure.add_subplot()
    for _, values, style in lines:
        ax.plot(range(1, len(values) + 1), values, **style)
    if min(bound) > 0 and wide(v for _, values, _ in lines for v in values if v > 0):
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, min(bound) / 5), min(high, max(bound) * 1.5))
        log_axis(ax, "y")
    ax.margins(x=0.01)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(record.metric)
    low, high = ax.get_ylim()
    ends = [(float(len(v)), min(max(v[-1], low), high), name, str(style["color"])) for name, v, style in lines]
    end_labels(ax, ends, height - 0.6)
    return figure
