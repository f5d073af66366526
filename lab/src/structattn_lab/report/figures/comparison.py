"""The figures of a comparison of attention variants."""

from __future__ import annotations

import functools

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report.figures.curves import draw_curves
from structattn_lab.report.numbers import finite_list
from structattn_lab.report.plot import (
    DASHES,
    GREY,
    Drawing,
    Drawings,
    dot_rows,
    log_axis,
    new_canvas,
    row_style,
    spread,
    wide,
)
from structattn_lab.report.rows import baselines_in_view, lowest, ranked_rows, row_name, seed_words
from structattn_lab.report.task_report import TaskReport


def drawings(record: ComparisonRecord, task: TaskReport) -> Drawings:
    """The scores, the figures of the task, and the learning curves."""
    of_task: Drawings = {name: functools.partial(draw, record) for name, draw in task.figures.items()}
    return {
        "scores": functools.partial(draw_scores, record, task.baselines_title),
        **of_task,
        "learning-curves": functools.partial(draw_curves, record, "step", "training step"),
    }


def draw_scores(record: ComparisonRecord, baselines_title: str = TaskReport.baselines_title) -> Drawing | None:
    """The score of every seed and their mean, a row for each attention variant; dashed lines are the
    baselines.
    """
    rows = list(reversed(ranked_rows(record)))
    if not rows:
        return None
    values = [v for row in rows for v in [*finite_list(row.scores), row.score]]
    lines, away = baselines_in_view(record, values)
    height = 0.34 * len(rows) + 1.0 + (0.8 if lines else 0)
    figure = new_canvas(height)
    ax = figure.add_subplot()
    dot_rows(ax, [(row_name(r), row_style(record, r)["color"], finite_list(r.scores), r.score) for r in rows])
    everything = values + [value for value, _ in lines]
    if wide(everything):
        log_axis(ax, "x")
    else:
        low, high = min(0.0, *everything), max(everything)
        ax.set_xlim(low, high + 0.06 * (high - low or 1.0))
    # At the right, so that a long one has the room below the names too.
    ax.set_xlabel(f"{record.metric_label} (lower is better)", loc="right")
    for value, _ in lines:
        ax.axvline(value, color=GREY, lw=1.0, ls=DASHES[0], zorder=1)
    ax.set_xlim(ax.get_xlim())
    at = [float((ax.transScale + ax.transLimits).transform((value, 0.0))[0]) for value, _ in lines]
    tops = spread(at, 0.09)
    # All in one direction, since two that lean towards each other would cross; to the left where the last has
    # no room at its right.
    rotation, side = (30, "left") if max(tops, default=0.0) < 0.7 else (-30, "right")
    for (value, name), top in zip(lines, tops, strict=True):
        ax.annotate(
            name, (value, 1.0), (top, 1 + 0.12 / height), xycoords=ax.get_xaxis_transform(),
            textcoords="axes fraction", rotation=rotation, rotation_mode="anchor",
            ha=side, va="bottom", fontsize=8, color=GREY,
            arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.6, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
    caption = f"A bar for the score of each seed and a dot for their mean ({seed_words(record)})"
    dashed = f"; dashed lines: {baselines_title}" if lines else ""
    alt = f"Dot plot of the score of {len(rows)} attention variants{lowest(record)}."
    return figure, f"{caption}{dashed}{away}.", alt
