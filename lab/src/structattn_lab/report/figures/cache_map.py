"""Quality against the bytes of the key/value cache, and against the time of a decoding step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from structattn_lab.records.comparison import ComparisonRecord, Row
from structattn_lab.report.numbers import finite
from structattn_lab.report.plot import (
    GREY,
    Drawing,
    label_left,
    log_axis,
    panel_grid,
    shared_legend,
    spec_style,
)
from structattn_lab.report.rows import by_variant, context_length

_LEVEL = 0.95
_CACHE_ITEM_BYTES = 2  # bf16


def _cached_rows(record: ComparisonRecord) -> list[Row]:
    """The rows with a known cache; none where all caches are equally large, so that there is nothing to
    map.
    """
    rows = [row for row in record.rows if row.cache_numbers is not None]
    return rows if len({row.cache_numbers for row in rows}) > 1 else []


def bytes_per_token(record: ComparisonRecord, row: Row) -> float:
    """The cache of one sequence at the context length, of all layers in bf16, over its tokens."""
    assert row.cache_numbers is not None
    return float(_CACHE_ITEM_BYTES * row.cache_numbers / context_length(record, row))


def by_cache(record: ComparisonRecord, metrics: Sequence[str] = ()) -> Drawing | None:
    """The score and further metrics against the bytes of the cache per token, with the frontier of each."""
    if not any(_cached_rows(part) for part in by_variant(record).values()):
        return None
    caption = "Quality against the size of the cache"
    return _panels(record, metrics, lambda row: bytes_per_token(record, row), "cache bytes per token", caption)


def by_decode_time(record: ComparisonRecord, metrics: Sequence[str] = ()) -> Drawing | None:
    """The same against the time of a decoding step."""
    if not any(_cached_rows(part) for part in by_variant(record).values()):
        return None
    caption = "Quality against the time of a decoding step"
    return _panels(record, metrics, lambda row: row.details.get("decode_ms"), "ms per decoded token", caption)


def _panels(
    record: ComparisonRecord,
    metrics: Sequence[str],
    cost_of: Callable[[Row], float | None],
    cost_label: str,
    caption: str,
) -> Drawing | None:
    parts = by_variant(record)
    shown = [(name, part, metric) for name, part in parts.items() for metric in (record.metric, *metrics)]
    specs = list(dict.fromkeys(row.spec for row in record.rows))
    figure, panels = panel_grid(len(shown), 3.1, sharey=False)
    drawn = joined = False
    for ax, (name, part, metric) in zip(panels, shown, strict=True):
        is_score = metric == record.metric
        points = [
            (cost, value, _half_interval(row, metric), row.spec)
            for row in _cached_rows(part)
            if (cost := cost_of(row)) is not None and (value := finite(row.metrics.get(metric))) is not None
        ]
        for cost, value, half, spec in points:
            style: dict[str, Any] = spec_style(specs, spec) | {"linestyle": "none"}
            ax.errorbar(cost, value, yerr=half or None, ms=5, lw=1, capsize=2, label=spec, **style)
            drawn = True
        joined |= _draw_frontier(ax, [(cost, value) for cost, value, *_ in points], lower_is_better=is_score)
        log_axis(ax, "x")
        ax.set_xlabel(cost_label)
        words = record.metric if is_score else metric.replace("_", " ")
        ax.set_title(", ".join(filter(None, (words, name))), fontsize=9, loc="left")
    if not drawn:
        return None
    label_left(panels, "mean over seeds")
    shared_legend(figure, panels, below=True)
    intervals = "; bars are 95 % intervals of the mean over seeds" if len(record.seeds) > 1 else "; one seed"
    line = "; the grey line joins the variants that no cheaper one beats" if joined else ""
    return figure, f"{caption}{intervals}{line}.", f"{caption}."


def _half_interval(row: Row, metric: str) -> float:
    """Half of the 95 % interval of a mean over seeds, of Student's t; 0 where the spread is unknown."""
    spread, count = row.metrics_std.get(metric), len(row.scores)
    if spread is None or count < 2:
        return 0.0
    quantile = import_module("scipy.stats").t.ppf((1 + _LEVEL) / 2, count - 1)
    return float(quantile) * spread / math.sqrt(count)


def _draw_frontier(ax: Any, points: Sequence[tuple[float, float]], *, lower_is_better: bool) -> bool:
    """A step line through the points that no cheaper or equally cheap one beats; says whether there are two
    or more to join.
    """
    sign = 1 if lower_is_better else -1
    best: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], sign * point[1])):
        if not best or sign * value < sign * best[-1][1]:
            best.append((cost, value))
    if len(best) > 1:
        ax.step(*zip(*best, strict=True), where="post", color=GREY, lw=1, zorder=1)
    return len(best) > 1
