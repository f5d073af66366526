"""The figure of fits: error against parameters."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes

from structattn_lab.records.fits import FitsRecord, FittedMatrix
from structattn_lab.report.plot import (
    GREY,
    OKABE_ITO,
    Drawing,
    label_left,
    mark_axis,
    panel_grid,
    shared_legend,
)

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


def draw_errors(record: FitsRecord, verdict: str) -> Drawing:
    """Error against parameters, one panel per matrix, one line per family; the verdict describes it."""
    matrices = record.matrices
    width = 2.55 if len(matrices) > 1 else 5.0
    figure, panels = panel_grid(len(matrices), 2.7, columns=3, width=width, sharex=True)
    families = [f for f in _MARKS if any(row.family == f for matrix in matrices for row in matrix.rows)]
    for index, (ax, matrix) in enumerate(zip(panels, matrices, strict=True)):
        _panel(ax, matrix, families)
        if index + 3 >= len(matrices):
            ax.set_xlabel("parameters / dense")
            ax.tick_params(labelbottom=True)
    label_left(panels, "relative error")
    shared_legend(figure, panels, below=True)
    caption = (
        "Relative Frobenius error of the nearest matrix found, against its parameters as a share of a dense matrix's. "
        "Low rank, BTT and Kronecker are optimal; the others are the best that descent found. Points on the lowest "
        f"line have errors below {_FLOOR:g}."
    )
    names_shown = ", ".join(matrix.name for matrix in matrices)
    return figure, caption, f"Error against parameters for {names_shown}. {verdict}"


def _panel(ax: Axes, matrix: FittedMatrix, families: list[str]) -> None:
    size = matrix.num_rows * matrix.num_cols
    ax.set_xscale("log")
    ax.set_yscale("log")
    for family in families:
        points = sorted(
            (row.num_params / size, max(row.relative_error, _FLOOR)) for row in matrix.rows if row.family == family
        )
        if points:
            mark, colour = _MARKS[family]
            ax.plot(*zip(*points, strict=True), marker=mark, color=colour, lw=1.1, ms=4.5, label=family, clip_on=False)
    ax.set_ylim(_FLOOR, 1.1)
    errors = (_FLOOR, 0.001, 0.01, 0.1, 1)
    mark_axis(ax.yaxis, errors, lambda value: f"≤ {_FLOOR:g}" if value <= _FLOOR else f"{value:g}")
    mark_axis(ax.xaxis, (0.01, 0.03, 0.1, 0.3, 1), lambda value: f"{100 * value:g}%")
    title = f"{matrix.name}, {matrix.num_rows} x {matrix.num_cols}"
    ax.set_title("\n".join(textwrap.wrap(title, 26)), fontsize=9, loc="left")
