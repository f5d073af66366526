"""What a search says: the setting that validation chooses for each method, and which of their test scores differ by more than their seeds do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from structattn.errors import MissingDependencyError

Row = dict[str, Any]
_LEVEL = 0.95


def search(rows: Sequence[Row], baselines: Sequence[Row]) -> list[dict[str, Any]]:
    """The choices of a comparison's rows, as plain data for ``results.json``.

    Args:
        rows: of ``results.json``: spec, group, searched, validation, scores.
        baselines: the same, with a name for a spec.

    Returns:
        For each group ``group``, its name; ``rows``, the places in ``rows`` of each method's choice, by the lowest validation score;
        ``baselines``, the same for baselines, where one without a validation score keeps its first; ``critical_difference`` (see there).
    """
    found = []
    for group in dict.fromkeys(row["group"] for row in rows):
        chosen = _choose([(i, row["spec"], row["validation"]) for i, row in enumerate(rows) if row["group"] == group])
        best = _choose(
            [
                (i, row["name"], math.inf if row["validation"] is None else row["validation"])
                for i, row in enumerate(baselines)
                if row["group"] == group
            ]
        )
        difference = critical_difference([rows[i]["scores"] for i in chosen])
        found.append({"group": group, "rows": chosen, "baselines": best, "critical_difference": difference})
    return found


def _choose(entries: Sequence[tuple[int, str, float]]) -> list[int]:
    """The place of the lowest value of each name, in the order of the names."""
    names = dict.fromkeys(name for _, name, _ in entries)
    return [min((value, i) for i, other, value in entries if other == name)[1] for name in names]


def critical_difference(scores: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """How far two means over seeds must be apart before seeds are no explanation, for all pairs together.

    Tukey's honestly significant difference: the 95 % point of the studentised range, times the standard error of a mean, with one
    variance for all methods. It knows nothing of other test data.

    Args:
        scores: one for each seed, of each method.

    Returns:
        ``level``, ``difference``, and ``seeds`` per method; ``None`` with one seed, one method, or no spread at all.

    Raises:
        MissingDependencyError: without SciPy.

    Source: Tukey 1949.
    """
    count, seeds = len(scores), min(map(len, scores))
    if count < 2 or seeds < 2:
        return None
    variance = statistics.fmean(statistics.variance(own) for own in scores)
    if variance == 0:
        return None
    try:
        stats = import_module("scipy.stats")
    except ImportError as error:
        raise MissingDependencyError(
            f"SciPy is not installed: pip install 'structattn[train]' brings it ({error})"
        ) from error
    quantile = float(stats.studentized_range.ppf(_LEVEL, count, count * (seeds - 1)))
    return {"level": _LEVEL, "difference": quantile * math.sqrt(variance / seeds), "seeds": seeds}
