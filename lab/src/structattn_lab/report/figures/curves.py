"""Learning curves: the validation error during training, a line per attention variant."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import FuncFormatter, MaxNLocator

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report.plot import DASHES, GREY, Drawing, end_labels, log_axis, new_canvas, row_style, wide
from structattn_lab.report.rows import curve, lowest, row_name
from structattn_lab.report.task_report import TaskReport


def draw_curves(
    record: ComparisonRecord,
    key: str,
    label: str,
    levels: Sequence[tuple[float, str]] = (),
    baselines_title: str = TaskReport.baselines_title,
) -> Drawing | None:
    """Validation error during training against ``key`` of the histories, one line per row, with the spread
    over seeds.

    Args:
        record: what ``results.json`` holds.
        key: ``"step"``, or another growing number of the histories.
        label: what it is, for the axis.
        levels: dashed lines across the figure, each a value and its name: baselines.
        baselines_title: what they are, for the caption.
    """
    curves = [(row, *curve(record, row, key)) for row in record.rows]
    curves = [found for found in curves if found[1]]
    if not curves:
        return None
    figure = new_canvas(3.6 + 0.1 * len(levels))
    ax = figure.add_subplot()
    ends = []
    for row, places, values in curves:
        means = [sum(v) / len(v) for v in values]
        style = row_style(record, row)
        ax.plot(places, means, lw=1.6, marker="o" if len(places) == 1 else None, **style)
        ax.fill_between(
            places, [min(v) for v in values], [max(v) for v in values], color=style["color"], alpha=0.15, lw=0
        )
        ends.append((places[-1], means[-1], row_name(row), style["color"]))
    if wide(v for _, _, values in curves for vs in values for v in vs):
        log_axis(ax, "y")
    if key != "step" and wide(place for _, places, _ in curves for place in places):
        log_axis(ax, "x")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    if key == "step":
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    ax.margins(x=0.01)
    for value, name in levels:
        ax.axhline(value, color=GREY, lw=1.0, ls=DASHES[0], zorder=1)
        ends.append((ax.get_xlim()[1], value, name, GREY))
    ax.set_xlabel(label)
    ax.set_ylabel(f"validation {record.metric}")
    end_labels(ax, ends, 3.0)
    several = max(len(vs) for _, _, values in curves for vs in values) > 1
    band = "mean over seeds, band from lowest to highest" if several else "one seed, so no spread is shown"
    dashed = f"; dashed lines: {baselines_title}" if levels else ""
    caption = f"Error on validation data against {label} ({band}{dashed})."
    return figure, caption, f"Error against {label}{lowest(record)}."
