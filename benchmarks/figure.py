"""The figure of a run: time against the axis, both logarithmic, one panel per mode and set of other sizes.

With a key/value cache: time in units of the baseline's, and below it bytes of the cache per token.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

# Axis label and value.
TIME: dict[str, Callable[[Row], float]] = {"median ms": lambda row: row["median_ms"]}
CACHE: dict[str, Callable[[Row], float]] = {
    "time / baseline's time": lambda row: 1 / row["speedup"],
    "cache bytes per token": lambda row: row["cache_bytes_per_token"],
}
MIN_SIZES = 3  # with fewer a table says more
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")


def png(result: dict[str, Any]) -> bytes | None:
    """The figure as PNG, or ``None`` when no panel would have 3 sizes.

    Args:
        result: what ``run.run`` returned.
    """
    axis = result["axis"]
    panels: dict[tuple[str, str], list[Row]] = {}  # (mode, other sizes in words) to rows
    names = varying(result["rows"], axis)
    for row in result["rows"]:
        others = ", ".join(f"{name} = {row['sizes'][name]:,}" for name in names if name in row["sizes"])
        panels.setdefault((row["mode"], others), []).append(row)
    panels = {key: rows for key, rows in panels.items() if len({row["sizes"][axis] for row in rows}) >= MIN_SIZES}
    if not panels:
        return None

    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    columns = list(dict.fromkeys(others for _, others in panels))
    # A line of panels for each of these.
    shown = [
        (mode, quantity, value)
        for mode in dict.fromkeys(mode for mode, _ in panels)
        for quantity, value in _quantities([row for row in result["rows"] if row["mode"] == mode]).items()
    ]
    labels = list(dict.fromkeys(row["label"] for row in result["rows"] if not row["is_baseline"]))
    with rc_context({"font.size": 10, "axes.axisbelow": True}):
        figure = Figure(figsize=(5.2 * len(columns) + 2.6, 4.0 * len(shown) + 0.5), layout="constrained")
        axes = figure.subplots(len(shown), len(columns), squeeze=False)
        handles: dict[str, Any] = {}
        for i, (mode, quantity, value) in enumerate(shown):
            for j, others in enumerate(columns):
                ax, rows = axes[i][j], panels.get((mode, others))
                ax.set_visible(rows is not None)
                if rows is None:
                    continue
                for label in dict.fromkeys(row["label"] for row in rows):
                    line = sorted((row for row in rows if row["label"] == label), key=lambda row: row["sizes"][axis])
                    x = [row["sizes"][axis] for row in line]
                    (handles[label],) = ax.plot(x, [value(row) for row in line], **_style(label, labels))
                ax.set_xscale("log", base=2)
                ax.set_yscale("log")
                low, high = ax.get_ylim()
                for formatted in [ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter][: 1 + (high < 100 * low)]:
                    formatted(lambda number, _: f"{number:,g}")
                ax.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
                ticks = sorted({row["sizes"][axis] for row in rows})
                ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
                ax.set(title=mode + (f", {others}" if others else ""), xlabel=axis, ylabel=quantity)
                ax.grid(color="#e4e4e4", linewidth=0.6)
        ordered = sorted(handles, key=lambda label: labels.index(label) if label in labels else -1)
        figure.legend([handles[label] for label in ordered], ordered, loc="outside right upper", frameon=False)
        figure.suptitle(f"{result['benchmark']}, {result['device']}, {result['dtype']}, {result['date']}")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def _quantities(rows: list[Row]) -> dict[str, Callable[[Row], float]]:
    """What is drawn of the rows of a mode: axis labels and values."""
    return CACHE if all("cache_bytes_per_token" in row for row in rows) else TIME


def varying(rows: list[Row], axis: str) -> list[str]:
    """The names of the sizes, but the axis, that differ between rows of one mode."""
    names = dict.fromkeys(name for row in rows for name in row["sizes"] if name != axis)
    modes = {row["mode"] for row in rows}

    def differs(name: str) -> bool:
        return any(len({row["sizes"].get(name) for row in rows if row["mode"] == mode}) > 1 for mode in modes)

    return [name for name in names if differs(name)]


def _style(label: str, labels: list[str]) -> dict[str, Any]:
    """The baseline in black; the others by colour, marker and, past six, dashes."""
    if label not in labels:
        return {"color": "black", "linewidth": 2.2, "marker": "o", "markersize": 4}
    i = labels.index(label)
    return {
        "color": COLOURS[i % 6],
        "linestyle": DASHES[i // 6 % 4],
        "linewidth": 1.5,
        "marker": MARKERS[i % 6],
        "markersize": 4,
    }
