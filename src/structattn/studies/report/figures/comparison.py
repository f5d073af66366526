"""The figures of a comparison of attentions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from structattn.studies.records.comparison import ComparisonRecord
from structattn.studies.report._common import finite_list, ranked_rows, row_name, score_of
from structattn.studies.report._plotting import GREY, baselines_in_view, lowest, row_style, seed_words, spread, wide
from structattn.studies.report.figures.canvas import Drawing, Figure, log_axis, new_canvas, write_figure
from structattn.studies.report.figures.curves import draw_curves
from structattn.studies.tasks.registry import figures_of


def draw_figures(record: ComparisonRecord, folder: Path) -> list[Figure]:
    """Draws the scores, the figures of the task, and the learning curves; a figure without any data is left out.

    Args:
        record: what ``results.json`` holds.
        folder: where the files go; made when missing.

    Returns:
        The figures in reading order.
    """
    plans: dict[str, Callable[[ComparisonRecord], Drawing | None]] = {
        "scores": _scores,
        **figures_of(record.task),
        "learning-curves": functools.partial(draw_curves, key="step", label="training step"),
    }
    drawn = [write_figure(name, functools.partial(draw, record), folder) for name, draw in plans.items()]
    return [figure for figure in drawn if figure is not None]


def _scores(record: ComparisonRecord) -> Drawing | None:
    rows = list(reversed(ranked_rows(record)))
    if not rows:
        return None
    values = [v for row in rows for v in [*finite_list(row.scores), score_of(row)] if v is not None]
    lines, away = baselines_in_view(record, values)
    height = 0.34 * len(rows) + 1.0 + (0.8 if lines else 0)
    figure = new_canvas(height)
    ax = figure.add_subplot()
    for place, row in enumerate(rows):
        colour = row_style(record, row)["color"]
        seeds = finite_list(row.scores)
        ax.plot(seeds, [place] * len(seeds), "|", color=colour, ms=11, mew=1.3, alpha=0.75)
        ax.plot([score_of(row) or 0.0], [place], "o", color=colour, ms=6.5)
    everything = values + [value for value, _ in lines]
    if wide(everything):
        log_axis(ax, "x")
    else:
        low, high = min(0.0, *everything), max(everything)
        ax.set_xlim(low, high + 0.06 * (high - low or 1.0))
    ax.set_yticks(range(len(rows)), [row_name(row) for row in rows])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.grid(False, axis="y")
    ax.set_xlabel(f"{record.metric_label} (lower is better)")
    for value, _ in lines:
        ax.axvline(value, color=GREY, lw=1.0, ls=(0, (4, 3)), zorder=1)
    ax.set_xlim(ax.get_xlim())
    at = [float((ax.transScale + ax.transLimits).transform((value, 0.0))[0]) for value, _ in lines]
    for (value, name), top in zip(lines, spread(at, 0.05), strict=True):
        ax.annotate(
            name, (value, 1.0), (top, 1 + 0.12 / height), xycoords=ax.get_xaxis_transform(),
            textcoords="axes fraction", rotation=30 if top < 0.7 else -30, rotation_mode="anchor",
            ha="left" if top < 0.7 else "right", va="bottom", fontsize=8, color=GREY,
            arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.6, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
    caption = f"Every seed's score (bar) and their mean (dot), {seed_words(record)}"
    dashed = "; dashed lines are the baselines" if lines else ""
    alt = f"Dot plot of the score of {len(rows)} attentions{lowest(record)}."
    return figure, f"{caption}{dashed}{away}.", alt
