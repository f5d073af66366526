"""Quality against the key/value cache: the table of what each attention variant keeps, and what it scores."""

from __future__ import annotations

from structattn_lab.analysis.frontier import on_frontier
from structattn_lab.records.comparison import ComparisonRecord, Row
from structattn_lab.report.numbers import DASH, fmt_pm
from structattn_lab.report.rows import by_variant, fmt_row
from structattn_lab.report.table import Table

CACHE_ITEM_BYTES = 2  # bf16


def cached_rows(record: ComparisonRecord) -> list[Row]:
    """The rows with a known cache; none where all caches are equally large, so that there is nothing to
    map.
    """
    rows = [row for row in record.rows if row.cache_numbers is not None]
    return rows if len({row.cache_numbers for row in rows}) > 1 else []


def bytes_per_token(record: ComparisonRecord, row: Row) -> float:
    """The cache of one sequence at the context length, of all layers in bf16, over its tokens."""
    assert row.cache_numbers is not None
    return float(CACHE_ITEM_BYTES * row.cache_numbers / record.config["task"]["context_length"])


def cache_table(record: ComparisonRecord, metrics: tuple[str, ...] = ()) -> Table | None:
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
            f"cache: keys and values of all layers at {record.config['task']['context_length']:,} tokens in bf16, over "
            "the tokens; ms per token: the median "
            "of 64 decoding steps at the end of a sequence, the variants in turn; on the frontier: yes where no "
            f"variant with at most as many bytes has a lower mean {record.metric}; not distinguishable where one has, "
            "but the difference is not significant over the "
            "seeds (95 %, Games and Howell's test).",
        ),
    )
