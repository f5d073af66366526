"""Quality against cost: which rows no cheaper row beats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from structattn_lab.analysis.model_selection import critical_differences

Place = Literal["yes", "not distinguishable", "no"]


def on_frontier(costs: Sequence[float], scores: Sequence[Sequence[float]]) -> list[Place]:
    """Whether each row is on the Pareto frontier of cost and mean score, both lower is better.

    Args:
        costs: one for each row.
        scores: of each row, one for each seed.

    Returns:
        For each row ``"yes"`` where no row that costs at most as much has a lower mean;
        ``"not distinguishable"`` where one has, but by less than the critical difference of all such rows
        (see ``critical_differences``); else ``"no"``. With one seed, whose spread is unknown, ``"yes"`` or
        ``"no"``.
    """
    means = [statistics.fmean(own) for own in scores]
    found: list[Place] = []
    for i, cost in enumerate(costs):
        rivals = [k for k, other in enumerate(costs) if other <= cost]
        best = min(means[k] for k in rivals)
        needed = critical_differences([scores[k] for k in rivals])
        if means[i] == best:
            found.append("yes")
        elif needed is not None and means[i] - best <= needed.differences[rivals.index(i)]:
            found.append("not distinguishable")
        else:
            found.append("no")
    return found
