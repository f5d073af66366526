"""Asynchronous successive halving (ASHA): which trials of a sweep stop early."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

REDUCTION = 4  # of the trials that reach a rung, the best quarter continues


@dataclass(frozen=True, kw_only=True)
class SuccessiveHalving:
    """Compares every trial at rungs, ``grace`` steps, 4 times as many, and so on, with the earlier trials at
    that rung.

    Args:
        grace: steps that every trial gets.
        longest: steps of the longest trial.

    Source: Li et al. 2020, section 3.3. A quantile between two scores is interpolated.
    """

    grace: int
    longest: int
    _rungs: dict[int, dict[int, float]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        count = 1 + int(math.log(self.longest / self.grace) / math.log(REDUCTION))
        self._rungs.update({self.grace * REDUCTION**k: {} for k in reversed(range(count))})

    def stops(self, trial: int, step: int, score: float) -> bool:
        """Whether a trial stops at a step with this validation score (lower is better)."""
        for rung, scores in self._rungs.items():
            if step >= rung and trial not in scores:
                with np.errstate(invalid="ignore"):  # between two infinite scores
                    best = np.quantile(list(scores.values()), 1 / REDUCTION) if scores else math.inf
                scores[trial] = score
                return bool(score > best)
        return False
