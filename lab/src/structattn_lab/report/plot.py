"""What the figures share: style, colours, panels, axes, and labels that do not overlap.

Figures are drawn with matplotlib's object interface: no pyplot, no window, no state.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import AutoLocator, FixedLocator, FuncFormatter, Locator, LogLocator, NullFormatter, NullLocator

from structattn_lab.records.comparison import ComparisonRecord, Row

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", "-.", ":")
_SHAPES = "osD^vP*"
DASHES: tuple[Any, ...] = ((0, (4, 3)), ":", "-.")
GREY = "#666666"
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}

Box = tuple[float, float, float, float]


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Moves label positions apart until neighbours are ``gap`` apart, staying as near as they can.

    Args:
        positions: wanted positions along one axis, from 0 to 1, in any order.
        gap: smallest distance between two labels; made smaller when they cannot all fit.

    Returns:
        The new positions, in the order of ``positions``.
    """
    count = len(positions)
    if count > 1:
        gap = min(gap, 1 / (count - 1))
    order = sorted(range(count), key=lambda i: (positions[i], i))
    # Groups of touching labels, each as (indices, sum of the wanted starts); overlapping groups merge.
    groups: list[tuple[int, float]] = []

    def start(group: tuple[int, float]) -> float:
        return min(max(group[1] / group[0], 0.0), 1 - (group[0] - 1) * gap)

    for index in order:
        groups.append((1, min(max(positions[index], 0.0), 1.0)))
        while len(groups) > 1 and start(groups[-2]) + groups[-2][0] * gap > start(groups[-1]):
            n2, sum2 = groups.pop()
            n1, sum1 = groups.pop()
            groups.append((n1 + n2, sum1 + sum2 - n2 * n1 * gap))
    placed = [start(group) + k * gap for group in groups for k in range(group[0])]
    result = [0.0] * count
    for index, position in zip(order, placed, strict=True):
        result[index] = position
    return result


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def place_labels(
    centres: Sequence[tuple[float, float]], widths: Sequence[float], frame: Box, obstacles: Sequence[Box] = ()
) -> list[tuple[int, int]]:
    """Finds the nearest free place for the name of every point.

    Args:
        centres: the points, in typographic points.
        widths: how wide each label is, in typographic points.
        frame: left, bottom, right and top of the axes, which labels should not leave.
        obstacles: further boxes that labels should not cover.

    Returns:
        For every point its side (1 right, -1 left, 0 centred) and how far the label is moved up.
    """
    taken = [*((x - 5, y - 5, x + 5, y + 5) for x, y in centres), *obstacles]
    heights = (0, *(sign * 12 * k for k in range(1, 9) for sign in (1, -1)))
    moves = [(side, dy) for dy in heights for side in (1, -1, 0) if side or dy]
    chosen = []
    for (x, y), width in zip(centres, widths, strict=True):
        tried: list[tuple[float, int, int, int, Box]] = []
        for side, dy in moves:
            left = x + (8 if side > 0 else -8 - width if side < 0 else -width / 2)
            box = (left, y + dy - 6, left + width, y + dy + 6)
            outside = max(0.0, frame[0] - box[0]) + max(0.0, box[2] - frame[2])
            outside += max(0.0, frame[1] - box[1]) + max(0.0, box[3] - frame[3])
            cost = sum(_overlap(box, other) for other in taken) + 50 * outside + 0.01 * abs(dy)
            tried.append((cost, len(tried), side, dy, box))
        _, _, side, dy, box = min(tried)
        taken.append(box)
        chosen.append((side, dy))
    return chosen


def wide(values: Iterable[float]) -> bool:
    """Whether values need a logarithmic axis: all positive and more than 20 times apart."""
    items = list(values)
    return bool(items) and min(items) > 0 and max(items) / min(items) > 20


Drawing = tuple[MplFigure, str, str]  # with its caption and a description for readers who do not see it
Drawings = dict[str, Callable[[], Drawing | None]]  # by file name; ``None`` where there is nothing to show
MOST_COLUMNS = 4  # panels side by side


@contextmanager
def in_style(name: str = "") -> Iterator[None]:
    """Figures are drawn in the style of this file; the ids in the SVG of a name are always the same."""
    style: Any = _STYLE | ({"svg.hashsalt": f"structattn-{name}"} if name else {})
    with matplotlib.rc_context(style):
        yield


def png(draw: Callable[[], MplFigure]) -> bytes:
    """A figure in the style of this file."""
    with in_style():
        return content(draw(), "png")


def content(canvas: MplFigure, kind: str) -> bytes:
    """The bytes of a file of that kind, the same for the same figure."""
    metadata: Any = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else {}
    buffer = io.BytesIO()
    canvas.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def new_canvas(height: float, width: float = 7.2) -> MplFigure:
    """An empty figure of that size in inches."""
    figure = MplFigure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def panel_grid(
    count: int,
    height: float,
    *,
    columns: int = 2,
    width: float | None = None,
    sharex: bool = False,
    sharey: bool | Literal["col"] = True,
) -> tuple[MplFigure, list[Axes]]:
    """A figure of ``count`` panels in rows of ``height`` inches and at most ``columns`` panels of ``width``
    inches.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    width = width or (3.9 if columns < MOST_COLUMNS else 3.1)
    figure = new_canvas(height * rows + 0.6, max(5.0, width * columns))
    axes: Any = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    panels = list(axes.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def label_left(panels: Sequence[Axes], text: str) -> None:
    """Names the vertical axis of the panels of the first column."""
    for ax in panels:
        if ax.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            ax.set_ylabel(text)


def mark_axis(axis: Axis, values: Iterable[float], text: Callable[[float], str] = "{:g}".format) -> None:
    """Marks an axis at these values only."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())


def dot_rows(ax: Axes, rows: Sequence[tuple[str, str, Sequence[float], float]]) -> None:
    """A row for each ``(name, colour, values, middle)``, from the bottom: bars at the values, a dot in the
    middle.
    """
    for place, (_, colour, values, middle) in enumerate(rows):
        ax.plot(values, [place] * len(values), "|", color=colour, ms=11, mew=1.3, alpha=0.75)
        ax.plot([middle], [place], "o", color=colour, ms=6.5)
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.grid(False, axis="y")


def log_axis(ax: Axes, which: str) -> None:
    """Makes an axis logarithmic, with plain numbers at 1, 2 and 5 (at powers of ten over a wide range, and
    evenly over a short one).
    """
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    low, high = sorted(ax.get_xlim() if which == "x" else ax.get_ylim())
    axis = ax.xaxis if which == "x" else ax.yaxis
    locator: Locator = LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 2000 else (1.0,))
    if sum(low <= value <= high for value in locator.tick_values(low, high)) < 2:
        locator = AutoLocator()  # one number does not say how far apart two points are
    axis.set_major_locator(locator)
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


def point_labels(
    figure: MplFigure,
    ax: Axes,
    points: Sequence[tuple[float, float, str, str]],
    bars: Sequence[tuple[float, float, float]] = (),
) -> None:
    """Names points ``(x, y, name, colour)``, each label at the nearest free place around its point, beside
    vertical bars ``(x, low, high)``.
    """
    figure.draw_without_rendering()
    unit = figure.dpi / 72
    ends = [[ax.transData.transform((x, y)) / unit for y in span] for x, *span in bars]
    pixels = [ax.transData.transform((x, y)) for x, y, _, _ in points]
    frame = [float(v) / unit for v in ax.get_window_extent().extents]
    places = place_labels(
        [(float(p[0]) / unit, float(p[1]) / unit) for p in pixels],
        [5.2 * len(name) for _, _, name, _ in points],
        (frame[0], frame[1], frame[2], frame[3]),
        [(float(low[0]) - 1, float(low[1]), float(low[0]) + 1, float(high[1])) for low, high in ends],
    )
    for (x, y, name, colour), (side, dy) in zip(points, places, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 3}
        ax.annotate(
            name, (x, y), (8 * side, dy), textcoords="offset points", fontsize=8, color=colour, va="center",
            ha=("center", "left", "right")[side], arrowprops=leader if abs(dy) > 12 else None,
        ).set_in_layout(False)  # fmt: skip


def shared_legend(figure: MplFigure, panels: Sequence[Axes], *, below: bool = False) -> None:
    """One legend above or below all panels, each label once."""
    loc: Any = f"outside {'lower' if below else 'upper'} center"
    found: dict[str, Any] = {}
    for ax in panels:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = list(found)
    room = 15 * figure.get_figwidth()  # letters

    def fits(columns: int) -> bool:
        lines, longer = divmod(len(labels), columns)  # matplotlib puts one label more into the first columns
        left = iter(labels)
        parts = [list(islice(left, lines + (number < longer))) for number in range(columns)]
        return sum(max(map(len, part)) + 8 for part in parts) <= room

    columns = next((n for n in range(len(labels), 1, -1) if fits(n)), 1)
    lines = -(-len(labels) // columns)
    figure.set_figheight(
        figure.get_figheight() + 0.17 * max(0, lines - 2)
    )  # what the panels keep is what they had for short ones
    figure.legend(list(found.values()), labels, loc=loc, ncols=columns, frameon=False, fontsize=8)


def spec_style(specs: Sequence[str], spec: str) -> dict[str, Any]:
    """Colour, dashes and marker of a spec among others: the same in every figure of a page, no two pairs of
    colour and marker alike.
    """
    return {**_style(specs.index(spec)), "marker": _SHAPES[(specs.index(spec) + specs.index(spec) // 7) % 7]}


def row_style(record: ComparisonRecord, row: Row) -> dict[str, Any]:
    """Colour and dashes of a row: the same in every figure, and different in black and white beyond seven
    rows.
    """
    return _style(next(i for i, other in enumerate(record.rows) if other is row))


def _style(index: int) -> dict[str, Any]:
    return {"color": OKABE_ITO[index % 7], "linestyle": _LINES[index // 7 % 4]}
