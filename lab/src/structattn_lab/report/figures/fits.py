"""The figure of fits: error against parameters."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes

from structattn_lab.records.fits import FitsRecord, FittedMatrix
from structattn_lab.report.plot import (
    Drawing,
    label_left,
    mark_axis,
    panel_grid,
    shared_legend,
    spec_style,
)

_FLOOR = 1e-4  # smaller errors are drawn on this line: what separates 1e-6 from 1e-15 is not the structure


def draw_errors(record: FitsRecord, verdict: str) -> Drawing:
    """Error against parameters, one panel per matrix, one line per family; the verdict describes it."""
    matrices = record.matrices
    width = 2.55 if len(matrices) > 1 else 5.0
    figure, panels = panel_grid(len(matrices), 2.7, columns=3, width=width, sharex=True)
    rows = [row for matrix in matrices for row in matrix.rows]
    families = list(dict.fromkeys(row.family for row in rows))
    optimal = [family for family in families if all(row.is_optimal for row in rows if row.family == family)]
    for index, (ax, matrix) in enumerate(zip(panels, matrices, strict=True)):
        _panel(ax, matrix, families)
        if index + 3 >= len(matrices):
            ax.set_xlabel("parameters / dense")
            ax.tick_params(labelbottom=True)
    label_left(panels, "relative error")
    shared_legend(figure, panels, below=True)
    caption = (
        "Relative Frobenius error of the nearest matrix found, against its parameters as a share of a dense matrix's. "
        f"{_found(optimal, len(families))} Points on the lowest line have errors below {_FLOOR:g}."
    )
    names_shown = ", ".join(matrix.name for matrix in matrices)
    return figure, caption, f"Error against parameters for {names_shown}. {verdict}"


def _found(optimal: list[str], count: int) -> str:
    if len(optimal) == count:
        return "No matrix of the structures is nearer."
    descent = "the best that descent found"
    return f"Optimal: {', '.join(optimal)}; the others are {descent}." if optimal else f"All are {descent}."


def _panel(ax: Axes, matrix: FittedMatrix, families: list[str]) -> None:
    size = matrix.num_rows * matrix.num_cols
    ax.set_xscale("log")
    ax.set_yscale("log")
    for family in families:
        points = sorted(
            (row.num_params / size, max(row.relative_error, _FLOOR)) for row in matrix.rows if row.family == family
        )
        if points:
            style = spec_style(families, family)
            ax.plot(*zip(*points, strict=True), **style, lw=1.1, ms=4.5, label=family, clip_on=False)
    ax.set_ylim(_FLOOR, 1.1)
    errors = (_FLOOR, 0.001, 0.01, 0.1, 1)
    mark_axis(ax.yaxis, errors, lambda value: f"≤ {_FLOOR:g}" if value <= _FLOOR else f"{value:g}")
    mark_axis(ax.xaxis, (0.01, 0.03, 0.1, 0.3, 1), lambda value: f"{100 * value:g}%")
    title = f"{matrix.name}, {matrix.num_rows} x {matrix.num_cols}"
    ax.set_title("\n".join(textwrap.wrap(title, 26)), fontsize=9, loc="left")
