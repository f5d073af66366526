"""The figures of a comparison of caches: loss and recall against bytes."""

from __future__ import annotations

from collections.abc import Callable

from structattn_lab.records.caches import CacheRow, CachesRecord
from structattn_lab.report.plot import GREY, OKABE_ITO, Drawing, log_axis, new_canvas, point_labels

_SMALLEST = 1e-3  # nats per token: smaller differences are drawn on this line


def draw_loss(record: CachesRecord) -> Drawing | None:
    """The loss above that of the first row against bytes, with intervals; both axes are logarithmic."""
    rows = [row for row in record.measured if row is not record.rows[0]]
    if not rows:
        return None
    caption = (
        f"Loss above that of {record.rows[0].name}, in nats per token, against the bytes of the cache as a share of "
        "all keys and values in 16 bits; 95 % intervals of the differences over windows. Points on the lowest line "
        f"lose at most {_SMALLEST:g}.{_open(rows)}"
    )
    return _drawn(
        rows,
        lambda row: max(row.above or 0.0, _SMALLEST),
        "nats per token above",
        caption,
        "Loss against bytes.",
        is_log=True,
    )


def draw_recall(record: CachesRecord) -> Drawing | None:
    """Recall over all tasks and distances against bytes."""
    rows = [row for row in record.measured if row.recall]
    if not rows:
        return None
    caption = (
        "Share of right answers over all retrieval tasks and distances, against the bytes of the cache as a share of "
        f"all keys and values in 16 bits.{_open(rows)}"
    )
    return _drawn(rows, lambda row: row.recall_of() or 0.0, "recall", caption, "Recall against bytes.")


def _open(rows: list[CacheRow]) -> str:
    """What open points are, where there are some."""
    has_presses = any(row.needed is not None for row in rows)
    return " Open points: the bytes of what a press keeps, if all else were freed." if has_presses else ""


def _drawn(
    rows: list[CacheRow],
    value: Callable[[CacheRow], float],
    label: str,
    caption: str,
    about: str,
    *,
    is_log: bool = False,
) -> Drawing:
    figure = new_canvas(5.6)
    ax = figure.subplots()
    points, bars = [], []
    for number, row in enumerate(rows):
        colour = OKABE_ITO[number % len(OKABE_ITO)]
        x, y = row.least or 0.0, value(row)
        ax.plot([x], [y], "o", color=colour, ms=6, mfc="white" if row.needed is not None else colour)
        if is_log and row.interval is not None:
            low, high = (max(end, _SMALLEST) for end in row.interval)
            ax.plot([x, x], [low, high], color=colour, lw=1.2, alpha=0.7, zorder=1)
            bars.append((x, low, high))
        points.append((x, y, row.name, colour))
    ax.margins(0.15)
    log_axis(ax, "x")
    if is_log:
        log_axis(ax, "y")
    else:
        ax.set_ylim(-0.05, 1.1)
    ax.set_xlabel("bytes / bytes in 16 bits", color=GREY)
    ax.set_ylabel(label)
    point_labels(figure, ax, points, bars)
    shown = "; ".join(f"{name}: {y:.3g} at {x:.2f} of the bytes" for x, y, name, _ in points)
    return figure, caption, f"{about} {shown}."
