"""The figures of a comparison of attentions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter

from structattn.studies.report._common import Results, by_variant, finite_list, ranked_rows, row_name, score_of
from structattn.studies.report._plotting import (
    GREY,
    baselines_in_view,
    curve,
    lowest,
    row_style,
    seed_words,
    spread,
    wide,
)
from structattn.studies.report.figures.by_position import by_position
from structattn.studies.report.figures.canvas import Drawing, Figure, end_labels, log_axis, new_canvas, write_figure
from structattn.studies.report.figures.forecast import by_lead_figure, examples_figure
from structattn.studies.report.figures.ranks import rank_figure, rank_over_dimension_figure


def draw_figures(results: Results, folder: Path) -> list[Figure]:
    """Draws the figures that fit the task; a figure without any data is left out.

    Args:
        results: what ``results.json`` holds.
        folder: where the files go; made when missing.

    Returns:
        The figures in reading order.
    """
    plans: list[tuple[str, Callable[[Results], Drawing | None]]] = [("scores", _scores)]
    if results["task"] == "nearest-neighbor":
        plans.append(("error-against-rank", rank_figure))
    if results["task"] == "forecast":
        plans += [("examples", examples_figure), ("error-by-lead", by_lead_figure)]
    if results["task"] == "chronos":
        plans.append(("examples", examples_figure))
    if results["task"] == "icl-regression":
        plans += [("error-against-compute", _compute), ("error-by-point", _by_point)]
        plans.append(("error-against-rank-over-dimension", rank_over_dimension_figure))
    plans.append(("learning-curves", _curves))
    drawn = [write_figure(name, functools.partial(draw, results), folder) for name, draw in plans]
    return [figure for figure in drawn if figure is not None]


def _scores(results: Results) -> Drawing | None:
    rows = list(reversed(ranked_rows(results)))
    if not rows:
        return None
    values = [v for row in rows for v in [*finite_list(row.get("scores")), score_of(row)] if v is not None]
    lines, away = baselines_in_view(results, values)
    height = 0.34 * len(rows) + 1.0 + (0.8 if lines else 0)
    figure = new_canvas(height)
    ax = figure.add_subplot()
    for place, row in enumerate(rows):
        colour = row_style(results, row)["color"]
        seeds = finite_list(row.get("scores"))
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
    ax.set_xlabel(f"{results['metric_label']} (lower is better)")
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
    caption = f"Every seed's score (bar) and their mean (dot), {seed_words(results)}"
    dashed = "; dashed lines are the baselines" if lines else ""
    alt = f"Dot plot of the score of {len(rows)} attentions{lowest(results)}."
    return figure, f"{caption}{dashed}{away}.", alt


def _curves(results: Results) -> Drawing | None:
    return draw_curves(results, "step", "training step")


def draw_curves(results: Results, key: str, label: str, levels: Sequence[tuple[float, str]] = ()) -> Drawing | None:
    """Validation error during training against ``key`` of the histories, one line per row, with the spread over seeds.

    Args:
        results: what ``results.json`` holds.
        key: ``"step"``, or another growing number of the histories.
        label: what it is, for the axis.
        levels: dashed lines across the figure, each a value and its name.
    """
    curves = [(row, *curve(results, row, key)) for row in results["rows"]]
    curves = [found for found in curves if found[1]]
    if not curves:
        return None
    figure = new_canvas(3.6 + 0.1 * len(levels))
    ax = figure.add_subplot()
    ends = []
    for row, places, values in curves:
        means = [sum(v) / len(v) for v in values]
        style = row_style(results, row)
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
    ax.margins(x=0.01)
    for value, name in levels:
        ax.axhline(value, color=GREY, lw=1.0, ls=(0, (4, 3)), zorder=1)
        ends.append((ax.get_xlim()[1], value, name, GREY))
    ax.set_xlabel(label)
    ax.set_ylabel(f"validation {results['metric']}")
    end_labels(ax, ends, 3.0)
    several = max(len(vs) for _, _, values in curves for vs in values) > 1
    band = "mean over seeds, band from lowest to highest" if several else "one seed, so no spread is shown"
    dashed = "; dashed lines are the baselines" if levels else ""
    caption = f"Error on validation data against {label} ({band}{dashed})."
    return figure, caption, f"Error against {label}{lowest(results)}."


def _compute(results: Results) -> Drawing | None:
    if len(by_variant(results)) > 1:
        return None  # errors at different sizes do not share an axis
    scores = [v for row in results["rows"] if (v := score_of(row)) is not None]
    levels, _ = baselines_in_view(results, scores) if scores else ([], "")
    return draw_curves(results, "compute", "training compute (forward FLOPs of all examples)", levels)


def _by_point(results: Results) -> Drawing | None:
    figure = by_position(results, "error_by_point", "examples in the prompt")
    caption = "Error against the examples seen in the prompt; baselines in grey, cut off at the frame."
    return None if figure is None else (figure, caption, f"Error by prompt length{lowest(results)}.")
