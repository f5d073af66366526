"""Numbers as the text of tables, captions and verdicts."""

from __future__ import annotations

import math
from typing import Any

DASH = "\N{EN DASH}"
_MOST_MORE = 3  # decimals, to show a small spread


def finite(value: Any) -> float | None:
    """The value as a float, or ``None`` when it is missing, not a number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def finite_list(values: Any) -> list[float]:
    """The finite numbers of a list, in order; an empty list when there is none."""
    return [v for v in (finite(x) for x in values or []) if v is not None]


def fmt_score(value: float | None) -> str:
    """A score with three significant digits: ``0.0612``, ``1.24``, ``2.1e-07``; a dash if not finite."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-4 or size >= 1e6:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def fmt_pm(value: float | None, std: float | None) -> str:
    """A score with its spread, with as many decimals in both: ``0.0612 ± 0.0100``.

    Both get more than ``fmt_score`` gives, where the spread would be ``0.00``: ``2.577 ± 0.003``.
    """
    text = fmt_score(value)
    if value is None or std is None:
        return text
    if "e" in text:
        return f"{text} ± {std:.1e}"
    decimals = len(text.partition(".")[2])
    decimals += next((more for more in range(_MOST_MORE + 1) if round(std, decimals + more) > 0), 0)
    return f"{value:.{decimals}f} ± {std:.{decimals}f}"


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


def fmt_date(created: str) -> str:
    """The minute of a time in ISO 8601 and UTC: ``2026-11-24 12:39 UTC``."""
    return f"{created[:16].replace('T', ' ')} UTC"


def fmt_mib(value: Any) -> str:
    """Bytes as whole MiB."""
    number = finite(value)
    return DASH if number is None else f"{number / 2**20:.0f}"
