"""Model selection: the setting that validation chooses for each method, and which of their test scores are
statistically distinguishable.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib import import_module

from structattn.errors import MissingDependencyError
from structattn.extras import install_command
from structattn_lab.records.comparison import BaselineRow, Choice, CriticalDifferences, Row

_LEVEL = 0.95


def search(rows: Sequence[Row], baselines: Sequence[BaselineRow]) -> tuple[Choice, ...]:
    """The choice by validation in each group of a comparison's rows: for each method the row with the lowest
    validation score.

    A baseline without a validation score keeps its first row.
    """
    found = []
    for group in dict.fromkeys(row.group for row in rows):
        chosen = _choose([(i, row.spec, row.validation) for i, row in enumerate(rows) if row.group == group])
        best = _choose(
            [
                (i, row.name, math.inf if row.validation is None else row.validation)
                for i, row in enumerate(baselines)
                if row.group == group
            ]
        )
        needed = critical_differences([rows[i].scores for i in chosen])
        found.append(Choice(group=group, rows=chosen, baselines=best, critical_differences=needed))
    return tuple(found)


def _choose(entries: Sequence[tuple[int, str, float]]) -> tuple[int, ...]:
    """The index of the lowest value of each name, in the order of the names."""
    names = dict.fromkeys(name for _, name, _ in entries)
    return tuple(min((value, i) for i, other, value in entries if other == name)[1] for name in names)


def critical_differences(scores: Sequence[Sequence[float]]) -> CriticalDifferences | None:
    """The critical difference of each method's mean over seeds from the lowest: larger ones are not explained
    by the seeds.

    Games and Howell's test: the 95 % point of the studentised range of all methods, since the lowest was
    picked from among them, with the variances of only the two methods and Welch's degrees of freedom. One
    variance for all, as in Tukey's, would let a single method whose seeds differ much hide every other
    difference. It does not account for other test data.

    Args:
        scores: one for each seed, of each method, lower is better.

    Returns:
        The differences, 0 for the lowest itself and where neither of the two has any spread. ``None`` with
        one seed or one method.

    Raises:
        MissingDependencyError: without SciPy.

    Source: Games and Howell 1976; Welch 1947.
    """
    count, seeds = len(scores), min(map(len, scores))
    if count < 2 or seeds < 2:
        return None
    best = min(range(count), key=lambda i: statistics.fmean(scores[i]))
    errors = [statistics.variance(own) / len(own) for own in scores]
    differences = tuple(
        0.0 if i == best else _games_howell(count, (errors[best], errors[i]), (len(scores[best]), len(own)))
        for i, own in enumerate(scores)
    )
    return CriticalDifferences(level=_LEVEL, seeds=seeds, best=best, differences=differences)


def _games_howell(count: int, errors: tuple[float, float], sizes: tuple[int, int]) -> float:
    """The critical difference of two of ``count`` means, from the squared standard errors of the two."""
    both = sum(errors)
    if both == 0:
        return 0.0
    try:
        stats = import_module("scipy.stats")
    except ImportError as error:
        raise MissingDependencyError(
            f"SciPy is not installed: {install_command('train')} brings it ({error})"
        ) from error
    freedom = both**2 / sum(error**2 / (size - 1) for error, size in zip(errors, sizes, strict=True))
    return float(stats.studentized_range.ppf(_LEVEL, count, freedom)) * math.sqrt(both / 2)
