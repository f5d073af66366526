"""The sheet that figures are drawn on: writing it to files, axes, and labels that do not overlap."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from structattn.files import remove_temporary, write_atomic
from structattn.studies.report._plotting import STYLE, place_labels, spread


@dataclass(frozen=True)
class Figure:
    """A figure on disk.

    Attributes:
        name: short name, also the stem of both files.
        path_png: the figure as pixels, 160 per inch.
        path_svg: the figure as vectors.
        caption: one sentence on what is shown and how far it can be trusted.
        alt: a description for readers who do not see the figure.
    """

    name: str
    path_png: Path
    path_svg: Path
    caption: str
    alt: str


Drawing = tuple[MplFigure, str, str]  # with its caption and a description for readers who do not see it
MOST_COLUMNS = 4  # panels side by side


def write_figure(name: str, draw: Callable[[], Drawing | None], folder: Path) -> Figure | None:
    """Draws one figure in the house's style and writes it as PNG and SVG, the same bytes for the same data.

    Args:
        name: stem of both files.
        draw: makes the drawing, with its caption and its description; ``None`` when there is nothing to show.
        folder: where the files go; made when missing.
    """
    style: Any = {**STYLE, "svg.hashsalt": f"structattn-{name}"}
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(style):
        drawing = draw()
        if drawing is None:
            return None
        canvas, caption, alt = drawing
        remove_temporary(Path(folder))
        paths = []
        for kind in ("png", "svg"):
            buffer = io.BytesIO()
            options: Any = {"metadata": no_metadata} if kind == "svg" else {}
            canvas.savefig(buffer, format=kind, dpi=160, **options)
            paths.append(Path(folder) / f"{name}.{kind}")
            write_atomic(paths[-1], buffer.getvalue())
    return Figure(name, paths[0], paths[1], caption, alt)


def new_canvas(height: float, width: float = 7.2) -> MplFigure:
    """An empty figure of that size in inches."""
    figure = MplFigure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def panel_grid(count: int, height: float, columns: int = 2) -> tuple[MplFigure, list[Axes]]:
    """A figure of ``count`` panels with one vertical axis, in rows of ``height`` inches and at most ``columns`` panels."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = new_canvas(height * rows + 0.6, max(5.4, (3.9 if columns < MOST_COLUMNS else 3.1) * columns))
    axes: Any = figure.subplots(rows, columns, squeeze=False, sharey=True)
    panels = list(axes.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def log_axis(ax: Axes, which: str) -> None:
    """Makes an axis logarithmic, with plain numbers at 1, 2 and 5 (or at powers of ten over a wide range)."""
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    low, high = sorted(ax.get_xlim() if which == "x" else ax.get_ylim())
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 2000 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def end_labels(ax: Axes, ends: Sequence[tuple[float, float, str, str]], height: float) -> None:
    """Names lines to the right of their ends ``(x, y, name, colour)``, moved apart, with thin leaders."""
    ax.set_xlim(ax.get_xlim())
    ax.set_ylim(ax.get_ylim())
    to_axes = ax.transScale + ax.transLimits
    points = [to_axes.transform((x, y)) for x, y, _, _ in ends]
    places = spread([float(p[1]) for p in points], 12 / 72 / height)
    for (x, y, name, colour), place in zip(ends, places, strict=True):
        leader = {
            "arrowstyle": "-",
            "color": colour,
            "lw": 0.6,
            "alpha": 0.6,
            "shrinkA": 0,
            "shrinkB": 1,
            "relpos": (0, 0.5),  # from the left edge of a name, not through it
        }
        ax.annotate(
            name, (x, y), (1.03, place), textcoords="axes fraction", va="center", color=colour, fontsize=8,
            arrowprops=leader, annotation_clip=False,
        )  # fmt: skip


def point_labels(figure: MplFigure, ax: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Names points ``(x, y, name, colour)``, each label at the nearest free place around its point."""
    figure.draw_without_rendering()
    unit = figure.dpi / 72
    pixels = [ax.transData.transform((x, y)) for x, y, _, _ in points]
    frame = [float(v) / unit for v in ax.get_window_extent().extents]
    places = place_labels(
        [(float(p[0]) / unit, float(p[1]) / unit) for p in pixels],
        [5.2 * len(name) for _, _, name, _ in points],
        (frame[0], frame[1], frame[2], frame[3]),
    )
    for (x, y, name, colour), (side, dy) in zip(points, places, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 3}
        ax.annotate(
            name, (x, y), (8 * side, dy), textcoords="offset points", fontsize=8, color=colour, va="center",
            ha=("center", "left", "right")[side], arrowprops=leader if abs(dy) > 12 else None,
        ).set_in_layout(False)  # fmt: skip


def shared_legend(figure: MplFigure, panels: Sequence[Axes]) -> None:
    """One legend above all panels, each label once."""
    found: dict[str, Any] = {}
    for ax in panels:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    longest = max(map(len, found), default=0)
    columns = max(1, min(4, int(90 / (longest + 8))))
    figure.legend(
        list(found.values()), list(found), loc="outside upper center", ncols=columns, frameon=False, fontsize=8
    )
