"""What the table, the figures and the page share: picking numbers out of a record, and numbers in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from structattn.studies.records.comparison import BaselineRow, ComparisonRecord, Row

Table = tuple[list[str], list[list[str]]]  # the header, and the cells of each line
AnyRow = TypeVar("AnyRow", Row, BaselineRow)
DASH = "\N{EN DASH}"


def finite(value: Any) -> float | None:
    """The value as a float, or ``None`` when it is missing, not a number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def finite_list(values: Any) -> list[float]:
    """The finite numbers of a list, in order; an empty list when there is none."""
    return [v for v in (finite(x) for x in values or []) if v is not None]


def score_of(row: Row) -> float | None:
    """The mean score of an attention row."""
    return finite(row.score)


def baseline_score(record: ComparisonRecord, baseline: BaselineRow) -> float | None:
    """A baseline's value of the metric that the comparison is decided by."""
    return finite(baseline.metrics.get(record.metric))


def row_name(row: Row) -> str:
    """What a row is called in a figure: its spec, and the settings that it differs in from other rows."""
    return f"{row.spec} ({row.variant})" if row.variant else row.spec


def ranked_rows(record: ComparisonRecord) -> list[Row]:
    """The rows with a finite score, best (lowest) first."""
    scored = [(s, i, row) for i, row in enumerate(record.rows) if (s := score_of(row)) is not None]
    return [row for _, _, row in sorted(scored, key=lambda t: t[:2])]


def by_variant(record: ComparisonRecord) -> dict[str, ComparisonRecord]:
    """The part of a record at each variant of the settings, by its text; by an empty text where there is only one."""

    def at(name: str, rows: Sequence[AnyRow]) -> tuple[AnyRow, ...]:
        return tuple(row for row in rows if (row.variant or "") == name)

    names = dict.fromkeys(row.variant or "" for row in record.rows)
    return {name: replace(record, rows=at(name, record.rows), baselines=at(name, record.baselines)) for name in names}


def standard_row(record: ComparisonRecord) -> Row | None:
    """The row of standard attention with a finite score, if the comparison has one."""
    rows = ranked_rows(record)
    exact = [row for row in rows if row.spec == "standard"]
    return next(iter(exact or [row for row in rows if row.spec.startswith("standard:")]), None)


def other_metrics(record: ComparisonRecord) -> list[str]:
    """Names of the metrics besides the score, in the order in which they first appear."""
    names: dict[str, None] = {}
    for metrics in [row.metrics for row in record.rows] + [row.metrics for row in record.baselines]:
        names.update(dict.fromkeys(metrics))
    names.pop(record.metric, None)
    return list(names)


def fmt_score(value: float | None) -> str:
    """A score with three significant digits: ``0.0612``, ``1.24``, ``2.1e-07``."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-4 or size >= 1e6:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def fmt_pm(value: float | None, std: float | None) -> str:
    """A score with its spread, with as many decimals in both: ``0.0612 ± 0.0100``."""
    text = fmt_score(value)
    if value is None or std is None:
        return text
    decimals = len(text.partition(".")[2])
    return f"{text} ± {std:.1e}" if "e" in text else f"{text} ± {std:.{decimals}f}"


def fmt_count(value: Any) -> str:
    """A count in human units: ``812``, ``12.3k``, ``4.5M``, ``1.2G``."""
    number = finite(value)
    if number is None:
        return DASH
    units = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"))
    for divisor, unit in units:
        if abs(number) < 999.5 * divisor:
            return f"{number:.0f}" if not unit else f"{number / divisor:.1f}{unit}"
    return f"{number / 1e12:.1f}T"


def fmt_flops(value: float) -> str:
    """A number of FLOPs: ``4e12``, ``1.25e9``."""
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def fmt_seconds(value: Any) -> str:
    """Seconds with one decimal below 100 and none above."""
    number = finite(value)
    return DASH if number is None else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def fmt_mib(value: Any) -> str:
    """Bytes as whole MiB."""
    number = finite(value)
    return DASH if number is None else f"{number / 2**20:.0f}"
