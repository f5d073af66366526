"""The muP check: text table, figures of sizes and learning rates against width, and the page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from structattn.reports._common import DASH, Results, Row, finite, fmt_seconds
from structattn.reports._plotting import OKABE_ITO
from structattn.reports.figures import Drawing, Figure, log_axis, new_canvas, write_figure
from structattn.reports.html import escaped, figure_html, repeat_html, write_page

_KINDS = {"mup": "muP", "standard": "standard parametrisation"}
_FLAT = 0.1
_HEADER = ("structure", "parametrisation", "largest slope", "where", "best rates", "spread")


def _where(results: Results, row: Row) -> str:
    largest = row["largest"]
    return DASH if largest is None else f"{results['quantities'][largest['quantity']]}, step {largest['step']}"


def _largest(row: Row) -> str:
    return "diverged" if row["largest"] is None else f"{row['largest']['slope']:+.2f}"


def _steepness(row: Row) -> float:
    return math.inf if row["largest"] is None else abs(float(row["largest"]["slope"]))


def _transfer_of(results: Results, row: Row) -> Row | None:
    return next(
        (
            t
            for t in results["transfers"]
            if (t["structure"], t["parametrization"]) == (row["structure"], row["parametrization"])
        ),
        None,
    )


def _rate(rate: float | None) -> str:
    return DASH if rate is None else f"2^{math.log2(rate):g}"


def _cells(results: Results, row: Row) -> list[str]:
    transfer = _transfer_of(results, row)
    rates = spread = DASH
    if transfer is not None:
        rates = " ".join(_rate(rate) for rate in transfer["best_rates"])
        spread = DASH if transfer["spread"] is None else f"{transfer['spread']:.0f}"
    return [
        row["structure"],
        _KINDS[row["parametrization"]],
        _largest(row),
        _where(results, row),
        rates,
        spread,
    ]


def format_mup(results: Results) -> str:
    """The results as one aligned table, a line per structure and parametrisation."""
    lines = [list(_HEADER), *(_cells(results, row) for row in results["coordinates"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, "", *_legend(results)])


def _legend(results: Results) -> list[str]:
    first = results["coordinates"][0]
    fitted = ", ".join(map(str, first["slope_widths"]))
    words = [f"largest slope: of log size against log width, furthest from 0, fitted to the widths {fitted}; 0 is flat"]
    if results["transfers"]:
        shown = ", ".join(map(str, results["transfers"][0]["widths"]))
        words.append(
            f"best rates: of the widths {shown}, tried in factors of 2; spread: log2 of the largest over the smallest"
        )
    return words


def mup_verdict(results: Results) -> str:
    """Which structures are flat under muP, how far the standard parametrisation is from it, and how far best rates move."""
    rows = {kind: [r for r in results["coordinates"] if r["parametrization"] == kind] for kind in _KINDS}
    flat = [row["structure"] for row in rows["mup"] if _steepness(row) <= _FLAT]
    other = [row for row in rows["mup"] if row["structure"] not in flat]
    words = f"Under muP every size is flat (slopes within {_FLAT:g}) for {', '.join(flat) or 'no structure'}"
    for row in other:
        words += f"; {row['structure']} has a slope of {_largest(row)} ({_where(results, row)})"
    steepest = max(rows["standard"], key=_steepness)
    words += (
        f". In the standard parametrisation the steepest is {_largest(steepest)} "
        f"({steepest['structure']}: {_where(results, steepest)})."
    )
    spreads = {
        kind: [t["spread"] for t in results["transfers"] if t["parametrization"] == kind and t["spread"] is not None]
        for kind in _KINDS
    }
    if all(spreads.values()):
        words += (
            f" Over the widths the best learning rate moves by at most a factor of 2^{max(spreads['mup']):.0f} under muP "
            f"and 2^{max(spreads['standard']):.0f} without."
        )
    return words


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
                    fontsize=7.5, color="#b03000" if abs(steepest) > _FLAT else "#444444",
                )  # fmt: skip
            _width_axis(ax, row["widths"])
            ax.tick_params(axis="y", labelsize=7)
        line[0].set_ylabel(_KINDS[row["parametrization"]])
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
    fitted = ", ".join(map(str, pair[0]["slope_widths"]))
    caption = (
        f"{structure}: root mean square sizes against width, geometric mean over {results['config']['seeds']} draws of the weights. "
        f"In each panel the slope furthest from 0 at the widths {fitted}. Sizes that are still exactly 0 are left out."
    )
    worst = "; ".join(f"{_KINDS[row['parametrization']]}: largest slope {_largest(row)}" for row in pair)
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
        ax.set_title(f"{_KINDS[row['parametrization']]}{spread}", fontsize=9, loc="left")
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


def write_mup_report(results: Results, figures: Iterable[Figure], path: Path) -> Path:
    """Writes the self-contained page: verdict, table, figures, all slopes, how to repeat it."""
    title = "Does muP hold?"
    fitted = ", ".join(map(str, results["coordinates"][0]["slope_widths"]))
    body = [
        f"<h1>{title}</h1>",
        '<p class="question">Do sizes inside the model and the best learning rate stay where they are as the model grows wider?</p>',
        f'<p class="dim">{escaped(results["created"])} · {fmt_seconds(results["seconds"])} seconds</p>',
        f'<div class="verdict"><b>Verdict</b>{escaped(mup_verdict(results))}</div>',
        "<h2>Results</h2>",
        _table(_HEADER, [_cells(results, row) for row in results["coordinates"]]),
        "".join(f'<p class="dim">{escaped(words)}</p>' for words in _legend(results)),
        "<h2>Figures</h2>",
        *(figure_html(figure, index) for index, figure in enumerate(figures)),
        f"<h2>Slopes</h2><p class='dim'>Of log size against log width at the widths {escaped(fitted)}.</p>",
        _table(*_slopes(results)),
        repeat_html(results),
        '<h2>What is measured</h2><ul class="notes">'
        "<li>Sizes are root mean squares on held-out prompts, after steps on one fixed batch of in-context regression.</li>"
        "<li>Learned scores: attention scores of the trained weights minus those of the initial weights, for the same hidden "
        "states. Under muP the initial scores themselves fade like one over the root of the head dimension.</li>"
        "<li>Standard: every matrix starts at 1/sqrt(fan-in), scores are divided by the root of their dimension, one learning rate "
        "for all.</li></ul>",
    ]
    return write_page(title, body, path)


def _slopes(results: Results) -> tuple[tuple[str, ...], list[list[str]]]:
    names = results["quantities"]
    lines = []
    for row in results["coordinates"]:
        for name, words in names.items():
            found = {step: slope for step, slope in row["slopes"][name].items() if step != "0"}
            cells = [DASH if slope is None else f"{slope:+.2f}" for slope in found.values()]
            lines.append([row["structure"], _KINDS[row["parametrization"]], words, *cells])
    steps = [step for step in results["coordinates"][0]["slopes"]["output"] if step != "0"]
    return ("structure", "parametrisation", "size", *(f"step {step}" for step in steps)), lines


def _table(header: Iterable[str], lines: Iterable[list[str]]) -> str:
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in header)
    rows = "".join(
        f'<tr><th scope="row">{escaped(line[0])}</th>{"".join(f"<td>{escaped(c)}</td>" for c in line[1:])}</tr>'
        for line in lines
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
