"""The Pareto frontier of cost and score."""

from __future__ import annotations

import pytest

from structattn_lab.analysis.frontier import on_frontier


def test_with_one_seed_a_row_is_on_the_frontier_or_not() -> None:
    costs = [1.0, 2.0, 2.0, 4.0, 8.0]
    assert on_frontier(costs, [[3.0], [2.0], [2.5], [2.2], [1.0]]) == ["yes", "yes", "no", "no", "yes"]


def test_a_lead_within_the_spread_is_not_distinguishable() -> None:
    costs = [1.0, 2.0, 3.0]
    spread = [[1.0, 1.2, 0.8, 1.1, 0.9], [1.1, 1.3, 0.9, 1.2, 1.0], [5.0, 5.2, 4.8, 5.1, 4.9]]
    assert on_frontier(costs, spread) == ["yes", "not distinguishable", "no"]


@pytest.mark.parametrize("lower", [0.5, 1.0])
def test_the_dearer_row_is_beaten_by_a_score_that_is_as_low(lower: float) -> None:
    assert on_frontier([2.0, 1.0], [[1.0], [lower]]) == ["yes" if lower == 1.0 else "no", "yes"]
