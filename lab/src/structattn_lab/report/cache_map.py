"""The cache map: quality against the key/value cache, as a part of the report of a comparison."""

from __future__ import annotations

from functools import partial

from structattn_lab.analysis.frontier import on_frontier
from structattn_lab.records.comparison import ComparisonRecord, Row
from structattn_lab.report.figures.cache_map import by_cache, by_decode_time, bytes_per_token
from structattn_lab.report.numbers import DASH, fmt_pm
from structattn_lab.report.rows import by_variant, context_lengths, fmt_row
from structattn_lab.report.table import Table
from structattn_lab.report.task_report import TaskReport


def report(metrics: tuple[str, ...] = ()) -> TaskReport:
    """What the cache map adds to the report of a comparison: its table, and its two figures.

    Args:
        metrics: names of further metrics to show.
    """
    return TaskReport(
        figures={"cache": partial(by_cache, metrics=metrics), "decode-time": partial(by_decode_time, metrics=metrics)},
        tables={"cache": partial(_table, metrics=metrics)},
    )


def _table(record: ComparisonRecord, metrics: tuple[str, ...]) -> Table | None:
    """A line for each attention variant, the smallest cache first; of one without a cache the columns of
    caches have a dash.

    Args:
        record: of a task of language models.
        metrics: names of further metrics to show.
    """
    lines = []
    for name, part in by_variant(record).items():
        if len({row.cache_numbers for row in part.rows}) < 2:
            continue
        known = [row for row in part.rows if row.cache_numbers is not None]
        rows = sorted(known, key=lambda row: bytes_per_token(record, row))
        places = on_frontier([bytes_per_token(record, row) for row in rows], [row.scores for row in rows])
        found: list[tuple[Row, str]] = list(zip(rows, places, strict=True))
        found += [(row, DASH) for row in part.rows if row.cache_numbers is None]
        for row, place in found:
            decoding = row.details.get("decode_ms")
            lines.append(
                [
                    row.spec,
                    *([name] if name else []),
                    DASH if row.cache_numbers is None else f"{bytes_per_token(record, row):,.0f}",
                    fmt_row(row),
                    *(fmt_pm(row.metrics.get(metric), row.metrics_std.get(metric)) for metric in metrics),
                    DASH if decoding is None else f"{decoding:.2f}",
                    place,
                ]
            )
    if not lines:
        return None
    setting = ("settings",) if any(row.variant for row in record.rows) else ()
    return Table.of(
        (
            "attention",
            *setting,
            "cache bytes per token",
            record.metric,
            *(name.replace("_", " ") for name in metrics),
            "ms per token",
            "on the frontier",
        ),
        lines,
        words=("attention", *setting, "on the frontier"),
        title="Quality and cache",
        notes=(
            f"cache: keys and values of all layers at {context_lengths(record, record.rows)} tokens in bf16, over "
            "the tokens; ms per token: the median "
            "of 64 decoding steps at the end of a sequence, the variants in turn; on the frontier: yes where no "
            f"variant with at most as many bytes has a lower mean {record.metric}; not distinguishable where one has, "
            "but the difference is not significant over the "
            "seeds (95 %, Games and Howell's test).",
        ),
    )
