"""Figures of the muP check: sizes against width, and loss against learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from structattn.studies.report._common import finite
from structattn.studies.report._plotting import OKABE_ITO
from structattn.studies.report.figures.canvas import Drawing, Figure, log_axis, new_canvas, write_figure
from structattn.studies.report.mup import FLAT, KINDS, largest_slope

Results = Mapping[str, Any]
Row = Mapping[str, Any]


def draw_mup(results: Results, folder: Path) -> list[Figure]:
    """Draws, per structure, sizes against width and, where it was measured, loss against learning rate."""
    figures = []
    for structure in dict.fromkeys(row["structure"] for row in results["coordinates"]):
        slug = "".join(c if c.isalnum() else "-" for c in structure)
        pair = [row for row in results["coordinates"] if row["structure"] == structure]
        figures.append(write_figure(f"coordinates-{slug}", lambda pair=pair: _coordinates(results, pair), folder))  # type: ignore[misc]
        pair = [row for row in results["transfers"] if row["structure"] == structure]
        if pair:
            figures.append(write_figure(f"transfer-{slug}", lambda pair=pair: _transfer(results, pair), folder))  # type: ignore[misc]
    return [figure for figure in figures if figure is not None]


def _width_axis(ax: Axes, widths: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(widths))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="x", labelsize=7, rotation=90 if len(widths) > 4 else 0)


def _coordinates(results: Results, pair: list[Row]) -> Drawing:
    names: dict[str, str] = dict(results["quantities"])
    figure = new_canvas(2.35 * len(pair) + 0.5, 9.6)
    grid: Any = figure.subplots(len(pair), len(names), squeeze=False, sharex=True, sharey="col")
    steps = [step for step in pair[0]["sizes"]["output"] if step != "0"]
    for line, row in zip(grid, pair, strict=True):
        for ax, name in zip(line, names, strict=True):
            for step, colour in zip(steps, OKABE_ITO, strict=False):
                points = [
                    (width, size)
                    for width, size in zip(row["widths"], row["sizes"][name][step], strict=True)
                    if finite(size)
                ]
                if points:
                    ax.plot(*zip(*points, strict=True), "o-", color=colour, ms=3.5, lw=1.3, label=step)
            slopes = [slope for step, slope in row["slopes"][name].items() if step != "0" and slope is not None]
            if slopes:
                steepest = max(slopes, key=abs)
                ax.annotate(
                    f"slope {steepest:+.2f}", (0.97, 1.02), xycoords="axes fraction", ha="right", va="bottom",
                    fontsize=7.5, color="#b03000" if abs(steepest) > FLAT else "#444444",
                )  # fmt: skip
            _width_axis(ax, row["widths"])
            ax.tick_params(axis="y", labelsize=7)
        line[0].set_ylabel(KINDS[row["parametrization"]])
    for ax, words in zip(grid[0], names.values(), strict=True):
        ax.set_title(words, fontsize=9, loc="left", pad=16)
        _least_range(ax)
    for ax in grid[-1]:
        ax.set_xlabel("width")
    handles, labels = grid[0][-1].get_legend_handles_labels()
    figure.legend(
        handles, [f"after {n} step{'' if n == '1' else 's'}" for n in labels], loc="outside lower center", ncols=6,
        frameon=False,
    )  # fmt: skip
    structure = pair[0]["structure"]
    draws = " ... ".join(str(n) for n in sorted({len(runs) for runs in pair[0]["by_seed"]["output"]["0"]}))
    fitted = ", ".join(map(str, pair[0]["slope_widths"]))
    caption = (
        f"{structure}: root mean square sizes against width, geometric mean over {draws} draws of the weights. "
        f"In each panel the slope furthest from 0 at the widths {fitted}. Sizes that are still exactly 0 are left out."
    )
    worst = "; ".join(f"{KINDS[row['parametrization']]}: largest slope {largest_slope(row)}" for row in pair)
    return figure, caption, f"Sizes inside the model against width for {structure}. {worst}."


def _least_range(ax: Axes) -> None:
    """A logarithmic axis of at least two decades, so that noise does not look like a trend."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    grow = max(1.0, math.sqrt(100 / (high / low)))
    ax.set_ylim(low / grow, high * grow)
    decades = FixedLocator([10.0**k for k in range(-8, 9, 1 if high * grow / low < 1e6 else 2)])
    ax.yaxis.set_major_locator(decades)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _transfer(results: Results, pair: list[Row]) -> Drawing:
    figure = new_canvas(3.4, 7.6)
    grid: Any = figure.subplots(1, len(pair), squeeze=False, sharey=True)[0]
    lowest = min(loss for row in pair for line in row["losses"] for loss in line if finite(loss) is not None)
    for ax, row in zip(grid, pair, strict=True):
        for width, losses, best, colour in zip(
            row["widths"], row["losses"], row["best_rates"], OKABE_ITO, strict=False
        ):
            points = [(r, loss) for r, loss in zip(row["rates"], losses, strict=True) if finite(loss) is not None]
            if not points:
                continue
            ax.plot(*zip(*points, strict=True), "-", color=colour, lw=1.4, label=str(width))
            ax.plot([best], [dict(points)[best]], "o", color=colour, ms=6)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2^{math.log2(value):g}"))
        ax.set_xlabel(f"learning rate at fan-in {results['config']['base_width']}")
        spread = "" if row["spread"] is None else f", spread {row['spread']:.0f}"
        ax.set_title(f"{KINDS[row['parametrization']]}{spread}", fontsize=9, loc="left")
    grid[0].set_ylabel("training loss")
    start = max(row["losses"][0][0] or lowest for row in pair)
    grid[0].set_ylim(0.9 * lowest, max(2.5 * lowest, 1.6 * start))
    log_axis(grid[0], "y")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, [f"width {n}" for n in labels], loc="outside lower center", ncols=6, frameon=False)
    config = results["config"]
    caption = (
        f"{pair[0]['structure']}: mean training loss of the last fifth of {config['transfer_steps']} steps against the learning rate; "
        "dots are the best rates, and the spread is log2 of the largest over the smallest. Where a line leaves the top it diverges."
    )
    return figure, caption, f"Loss against learning rate by width for {pair[0]['structure']}: {caption}"
