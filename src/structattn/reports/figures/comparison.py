"""The figures of a comparison of attentions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from structattn.reports._common import Results, by_variant, finite_list, ranked_rows, row_name, score_of, standard_row
from structattn.reports._plotting import (
    GREY,
    baselines_in_view,
    curve,
    lowest,
    row_style,
    seed_words,
    spread,
    wide,
)
from structattn.reports.figures.canvas import Drawing, Figure, end_labels, log_axis, new_canvas, write_figure
from structattn.reports.figures.ranks import rank_figure, rank_over_dimension_figure


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
        plans += [("examples", _examples), ("error-by-lead", _by_lead)]
    if results["task"] == "chronos":
        plans.append(("examples", _examples))
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


def _axis_labels(results: Results) -> dict[str, str]:
    """What a value and a step of the series are, in words: the task says, or they stay nameless."""
    return {"value": "value", "step": "steps"} | dict(results.get("axis_labels", {}))


def _examples(results: Results) -> Drawing | None:
    labels_of = _axis_labels(results)
    ranked, standard = ranked_rows(results), standard_row(results)
    shown = [row for row in ranked[:1] if (row.get("details") or {}).get("examples")]
    if standard is not None and standard not in shown and (standard.get("details") or {}).get("examples"):
        shown.append(standard)
    if not shown:
        return None
    count = min(3, *(len(row["details"]["examples"]) for row in shown), 3)
    figure = new_canvas(1.75 * count + 0.7)
    axes = [figure.add_subplot(count, 1, i + 1) for i in range(count)]
    for index, ax in enumerate(axes):
        example = shown[0]["details"]["examples"][index]
        history, truth = list(example["history"])[-168:], list(example["truth"])
        ax.plot(range(-len(history) + 1, 1), history, color="#9a9a9a", lw=1.0, label="history")
        ahead = range(1, len(truth) + 1)
        ax.plot(ahead, truth, color="black", lw=1.4, label="truth")
        for place, row in enumerate(shown):
            forecast = list(row["details"]["examples"][index]["forecast"])
            style = {**row_style(results, row), "linestyle": ("-", (0, (4, 1.5)))[place]}
            name = f"{row['spec']} (lowest error)" if row is ranked[0] else str(row["spec"])
            ax.plot(range(1, len(forecast) + 1), forecast, lw=1.4, label=name, **style)
            lower, upper = (row["details"]["examples"][index].get(edge) for edge in ("lower", "upper"))
            if lower and upper:  # the lowest and the highest decile
                ax.fill_between(range(1, len(forecast) + 1), lower, upper, color=style["color"], alpha=0.15, lw=0)
        ax.axvline(0, color=GREY, lw=0.8)
        ax.margins(x=0.01)
        ax.set_title(f"forecast from {example.get('start', '?')}", fontsize=8.5, loc="left", color="#444444")
        ax.set_ylabel(labels_of["value"])
        ax.xaxis.set_major_locator(MultipleLocator(24))
    axes[-1].set_xlabel(f"{labels_of['step']} from the start of the forecast")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    names = " and ".join(str(row["spec"]) for row in shown)
    caption = f"{count} forecasts by {names}, after at most 168 {labels_of['step']} of history: examples, not evidence."
    return figure, caption, f"History, truth and forecasts of {names} in {count} panels."


def _by_position(results: Results, key: str, xlabel: str) -> MplFigure | None:
    """One line per attention and baseline of a list under ``details[key]``."""
    lines: list[tuple[str, list[float], dict[str, Any]]] = []
    for row in results["rows"]:
        if values := finite_list((row.get("details") or {}).get(key)):
            lines.append((row_name(row), values, {**row_style(results, row), "lw": 1.6}))
    bound = [v for _, values, _ in lines for v in values]
    if not lines:
        return None
    for index, baseline in enumerate(results.get("baselines") or []):
        if values := finite_list((baseline.get("details") or {}).get(key)):
            style: dict[str, Any] = {
                "color": GREY,
                "linestyle": ((0, (4, 3)), ":", "-.")[index % 3],
                "lw": 1.2,
            }
            lines.append((str(baseline["name"]), values, style))
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
    ax.set_ylabel(str(results["metric"]))
    low, high = ax.get_ylim()
    ends = [(float(len(v)), min(max(v[-1], low), high), name, str(style["color"])) for name, v, style in lines]
    end_labels(ax, ends, height - 0.6)
    return figure


def _by_lead(results: Results) -> Drawing | None:
    figure = _by_position(results, "error_by_lead", f"{_axis_labels(results)['step']} ahead")
    caption = "Error against how far ahead the forecast looks; baselines in grey."
    return None if figure is None else (figure, caption, f"Error by forecast lead{lowest(results)}.")


def _by_point(results: Results) -> Drawing | None:
    figure = _by_position(results, "error_by_point", "examples in the prompt")
    caption = "Error against the examples seen in the prompt; baselines in grey, cut off at the frame."
    return None if figure is None else (figure, caption, f"Error by prompt length{lowest(results)}.")
