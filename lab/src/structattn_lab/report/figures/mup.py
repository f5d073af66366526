"""Figures of the muP check: sizes against width, and loss against learning rate."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from structattn_lab.records.mup import Coordinates, MupRecord, Transfer
from structattn_lab.report.numbers import finite
from structattn_lab.report.plot import (
    OKABE_ITO,
    Drawing,
    Drawings,
    label_left,
    log_axis,
    mark_axis,
    panel_grid,
    shared_legend,
)

KINDS = {"mup": "muP", "standard": "standard parametrisation"}
FLAT = 0.1


def drawings(record: MupRecord) -> Drawings:
    """Per structure, sizes against width and, where it was measured, loss against learning rate."""
    found: Drawings = {}
    for structure in dict.fromkeys(row.structure for row in record.coordinates):
        slug = "".join(c if c.isalnum() else "-" for c in structure)
        sizes = [row for row in record.coordinates if row.structure == structure]
        found[f"coordinates-{slug}"] = functools.partial(_coordinates, record, sizes)
        losses = [row for row in record.transfers if row.structure == structure]
        if losses:
            found[f"transfer-{slug}"] = functools.partial(_transfer, record, losses)
    return found


def largest_slope(row: Coordinates) -> str:
    return "diverged" if row.largest is None else f"{row.largest.slope:+.2f}"


def _width_axis(ax: Axes, widths: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    mark_axis(ax.xaxis, widths)
    ax.tick_params(axis="x", labelsize=7, rotation=90 if len(widths) > 4 else 0)


def _coordinates(record: MupRecord, pair: list[Coordinates]) -> Drawing:
    names = record.quantities
    columns = len(names)
    figure, panels = panel_grid(
        columns * len(pair), 2.35, columns=columns, width=9.6 / columns, sharex=True, sharey="col"
    )
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    steps = [step for step in pair[0].sizes["output"] if step != "0"]
    for line, row in zip(grid, pair, strict=True):
        for ax, name in zip(line, names, strict=True):
            for step, colour in zip(steps, OKABE_ITO, strict=False):
                points = [
                    (width, size) for width, size in zip(row.widths, row.sizes[name][step], strict=True) if finite(size)
                ]
                if points:
                    ax.plot(
                        *zip(*points, strict=True),
                        "o-",
                        color=colour,
                        ms=3.5,
                        lw=1.3,
                        label=f"after {step} step{'' if step == '1' else 's'}",
                    )
            slopes = [slope for step, slope in row.slopes[name].items() if step != "0" and slope is not None]
            if slopes:
                steepest = max(slopes, key=abs)
                ax.annotate(
                    f"slope {steepest:+.2f}", (0.97, 1.02), xycoords="axes fraction", ha="right", va="bottom",
                    fontsize=7.5, color="#b03000" if abs(steepest) > FLAT else "#444444",
                )  # fmt: skip
            _width_axis(ax, row.widths)
            ax.tick_params(axis="y", labelsize=7)
        line[0].set_ylabel(KINDS[row.parametrization])
    for ax, words in zip(grid[0], names.values(), strict=True):
        ax.set_title(words, fontsize=9, loc="left", pad=16)
        _least_range(ax)
    for ax in grid[-1]:
        ax.set_xlabel("width")
    shared_legend(figure, grid[0][-1:], below=True)
    structure = pair[0].structure
    draws = " ... ".join(str(n) for n in sorted({len(runs) for runs in pair[0].by_seed["output"]["0"]}))
    fitted = ", ".join(map(str, pair[0].slope_widths))
    caption = (
        f"{structure}: root mean square sizes against width, geometric mean over {draws} draws of the weights. "
        f"In each panel the slope furthest from 0 at the widths {fitted}. Sizes that are still exactly 0 are left out."
    )
    worst = "; ".join(f"{KINDS[row.parametrization]}: largest slope {largest_slope(row)}" for row in pair)
    return figure, caption, f"Sizes inside the model against width for {structure}. {worst}."


def _least_range(ax: Axes) -> None:
    """A logarithmic axis of at least two decades, so that noise does not look like a trend."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    grow = max(1.0, math.sqrt(100 / (high / low)))
    ax.set_ylim(low / grow, high * grow)
    mark_axis(ax.yaxis, [10.0**k for k in range(-8, 9, 1 if high * grow / low < 1e6 else 2)])


def _transfer(record: MupRecord, pair: list[Transfer]) -> Drawing | None:
    known = [loss for row in pair for line in row.losses for loss in line if loss is not None]
    if not known:
        return None
    lowest = min(known)
    figure, panels = panel_grid(len(pair), 2.8, width=3.8)
    for ax, row in zip(panels, pair, strict=True):
        for width, losses, best, colour in zip(row.widths, row.losses, row.best_rates, OKABE_ITO, strict=False):
            points = [(r, loss) for r, loss in zip(row.rates, losses, strict=True) if loss is not None]
            if best is None:
                continue
            ax.plot(*zip(*points, strict=True), "-", color=colour, lw=1.4, label=f"width {width}")
            ax.plot([best], [dict(points)[best]], "o", color=colour, ms=6)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2^{math.log2(value):g}"))
        ax.set_xlabel(f"learning rate at fan-in {record.config['base_width']}")
        spread = "" if row.spread is None else f", spread {row.spread:.0f}"
        ax.set_title(f"{KINDS[row.parametrization]}{spread}", fontsize=9, loc="left")
    label_left(panels, "training loss")
    start = max(row.losses[0][0] or lowest for row in pair)
    panels[0].set_ylim(0.9 * lowest, max(2.5 * lowest, 1.6 * start))
    log_axis(panels[0], "y")
    shared_legend(figure, panels[:1], below=True)
    config = record.config
    caption = (
        f"{pair[0].structure}: mean training loss of the last fifth of {config['transfer_steps']} steps against the "
        "learning rate; dots are the best rates, and the spread is log2 of the largest over the smallest. Where a line "
        "leaves the top it diverges."
    )
    return figure, caption, f"Loss against learning rate by width for {pair[0].structure}: {caption}"
