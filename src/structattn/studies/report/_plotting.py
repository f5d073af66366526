"""What the figures need besides matplotlib: style, places of labels, numbers read from a record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from structattn.studies.records.comparison import ComparisonRecord, Row
from structattn.studies.report._common import baseline_score, finite, finite_list, fmt_score, ranked_rows, score_of

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
SHAPES = "osD^vP*"
GREY = "#666666"
STYLE: dict[str, Any] = {
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


def spread(positions: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Moves label positions apart until neighbours are ``gap`` apart, staying as near as they can.

    Args:
        positions: wanted positions along one axis, in any order.
        gap: smallest distance between two labels; made smaller when they cannot all fit.
        low: lowest position allowed.
        high: highest position allowed.

    Returns:
        The new positions, in the order of ``positions``.
    """
    count = len(positions)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    order = sorted(range(count), key=lambda i: (positions[i], i))
    # Groups of touching labels, each as (indices, sum of the wanted starts); overlapping groups merge.
    groups: list[tuple[int, float]] = []

    def start(group: tuple[int, float]) -> float:
        return min(max(group[1] / group[0], low), high - (group[0] - 1) * gap)

    for index in order:
        groups.append((1, min(max(positions[index], low), high)))
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


def place_labels(centres: Sequence[tuple[float, float]], widths: Sequence[float], frame: Box) -> list[tuple[int, int]]:
    """Finds the nearest free place for the name of every point.

    Args:
        centres: the points, in typographic points.
        widths: how wide each label is, in typographic points.
        frame: left, bottom, right and top of the axes, which labels should not leave.

    Returns:
        For every point its side (1 right, -1 left, 0 centred) and how far the label is moved up.
    """
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in centres]
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


def seed_words(record: ComparisonRecord) -> str:
    """How many seeds were run, in words."""
    count = max((len(finite_list(row.scores)) for row in record.rows), default=0)
    return f"{count} seeds" if count > 1 else "one seed, so the spread is unknown"


def lowest(record: ComparisonRecord) -> str:
    """The best row and its score, as the end of a sentence."""
    ranked = ranked_rows(record)
    return f"; lowest: {ranked[0].spec} at {fmt_score(score_of(ranked[0]))}" if ranked else ""


def curve(record: ComparisonRecord, row: Row, key: str = "step") -> tuple[list[float], list[list[float]]]:
    """Where a row was validated, as steps or another number of its histories, and all seeds' values there."""
    found: dict[float, list[float]] = {}
    for history in row.histories:
        for point in history:
            name = f"validation_{record.metric}"
            if name not in point:
                name = next((key for key in point if key.startswith("validation_")), name)
            step, value = finite(point.get(key)), finite(point.get(name))
            if step is not None and value is not None:
                found.setdefault(step, []).append(value)
    return sorted(found), [found[step] for step in sorted(found)]


def baselines_in_view(record: ComparisonRecord, values: Sequence[float]) -> tuple[list[tuple[float, str]], str]:
    """The baselines near enough to the attentions' scores to share an axis, and words about the others."""
    shown, away = [], ""
    for baseline in record.baselines:
        value, name = baseline_score(record, baseline), baseline.name
        if value is None:
            continue
        if min(values) <= 0 or min(values) / 50 <= value <= max(values) * 50:
            shown.append((value, name))
        else:
            away += f"; {name} ({fmt_score(value)}) lies outside the axis"
    return shown, away


def row_style(record: ComparisonRecord, row: Row) -> dict[str, Any]:
    """Colour and dashes of a row: the same in every figure, and told apart without colour past seven rows."""
    index = next(i for i, r in enumerate(record.rows) if r is row)
    return {"color": OKABE_ITO[index % 7], "linestyle": LINES[index // 7 % 4]}


def spec_style(specs: Sequence[str], spec: str) -> dict[str, Any]:
    """Colour, dashes and marker of a spec among others: the same in every figure of a page."""
    index = specs.index(spec)
    return {"color": OKABE_ITO[index % 7], "linestyle": LINES[index // 7 % 4], "marker": SHAPES[index % 7]}
