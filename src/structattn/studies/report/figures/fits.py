"""The figure of fits: error against parameters."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from structattn.studies.report._plotting import GREY, OKABE_ITO
from structattn.studies.report.figures.canvas import Drawing, Figure, new_canvas, write_figure
from structattn.studies.report.fits import fit_verdict

Results = Mapping[str, Any]
Row = Mapping[str, Any]

_FLOOR = 1e-4  # smaller errors are drawn on this line: what separates 1e-6 from 1e-15 is not the structure
_MARKS = {
    "lowrank": ("o", OKABE_ITO[6]),
    "mlr": ("s", OKABE_ITO[0]),
    "btt": ("^", OKABE_ITO[1]),
    "monarch": ("v", OKABE_ITO[1]),
    "kronecker": ("D", OKABE_ITO[3]),
    "butterfly": ("P", OKABE_ITO[2]),
    "kaleidoscope": ("X", OKABE_ITO[4]),
    "mlbtc": ("*", OKABE_ITO[5]),
    "dense": ("h", GREY),
}


def draw_fits(results: Results, folder: Path) -> Figure:
    """Draws error against parameters, one panel per matrix, one line per family."""
    figure = write_figure("error-against-parameters", lambda: _drawing(results), folder)
    assert figure is not None  # there is at least one matrix
    return figure


def _drawing(results: Results) -> Drawing:
    matrices = results["matrices"]
    columns = min(3, len(matrices))
    rows = math.ceil(len(matrices) / columns)
    canvas = new_canvas(2.7 * rows + 0.5, 7.6 if columns > 1 else 5.0)
    grid: Any = canvas.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    families = [f for f in _MARKS if any(row["family"] == f for matrix in matrices for row in matrix["rows"])]
    for ax, matrix in zip(grid.flat, matrices, strict=False):
        _panel(ax, matrix, families)
    for ax in list(grid.flat)[len(matrices) :]:
        ax.set_axis_off()
    for index, ax in enumerate(grid.flat[: len(matrices)]):
        if index % columns == 0:
            ax.set_ylabel("relative error")
        if index + columns >= len(matrices):
            ax.set_xlabel("parameters / dense")
            ax.tick_params(labelbottom=True)
    handles, names = grid.flat[0].get_legend_handles_labels()
    for ax in grid.flat[1 : len(matrices)]:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            if name not in names:
                handles.append(handle)
                names.append(name)
    spare = len(matrices) < rows * columns
    place: dict[str, Any] = {"loc": "center"} if spare else {"loc": "outside lower center", "ncols": 4}
    (list(grid.flat)[-1] if spare else canvas).legend(handles, names, frameon=False, **place)
    caption = (
        "Relative Frobenius error of the nearest matrix found, against its parameters as a share of a dense matrix's. Low rank, "
        "BTT and Kronecker are optimal; the others are the best that descent found. Points on the lowest line have errors "
        f"below {_FLOOR:g}."
    )
    names_shown = ", ".join(matrix["name"] for matrix in matrices)
    return canvas, caption, f"Error against parameters for {names_shown}. {fit_verdict(results)}"


def _panel(ax: Axes, matrix: Row, families: list[str]) -> None:
    size = matrix["num_rows"] * matrix["num_cols"]
    ax.set_xscale("log")
    ax.set_yscale("log")
    for family in families:
        points = sorted(
            (row["num_params"] / size, max(row["relative_error"], _FLOOR))
            for row in matrix["rows"]
            if row["family"] == family
        )
        if points:
            mark, colour = _MARKS[family]
            ax.plot(*zip(*points, strict=True), marker=mark, color=colour, lw=1.1, ms=4.5, label=family, clip_on=False)
    ax.set_ylim(_FLOOR, 1.1)
    ax.yaxis.set_major_locator(FixedLocator([_FLOOR, 0.001, 0.01, 0.1, 1]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"≤ {_FLOOR:g}" if value <= _FLOOR else f"{value:g}"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_locator(FixedLocator([0.01, 0.03, 0.1, 0.3, 1]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    ax.xaxis.set_minor_locator(NullLocator())
    title = f"{matrix['name']}, {matrix['num_rows']} x {matrix['num_cols']}"
    ax.set_title("\n".join(textwrap.wrap(title, 26)), fontsize=9, loc="left")
