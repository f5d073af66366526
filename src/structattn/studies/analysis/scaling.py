"""Scaling laws of a grid of widths and budgets: loss against compute for each method, and the compute that it saves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from structattn.studies.analysis.scaling_law import Interval, compute_multiplier, fit_power_law, law_intervals
from structattn.studies.records.comparison import ComputeShare, Law, LawPoint, Row, Scaling, Series

_FITTED = 3  # parameters of a law; with as many points there are no residuals


def scaling(rows: Sequence[Row], specs: Sequence[str]) -> Scaling:
    """The laws of a comparison's rows.

    Args:
        rows: of the comparison, each with a budget.
        specs: in the order of the recipe; the first is the baseline of the others, unless ``standard`` is among them.

    Raises:
        ConfigError: a loss that is not positive and finite.

    Cost: 1,000 fits of the bootstrap for each interval, about a second for each law.

    The best width is chosen by the mean over seeds of the losses that are shown, for the baseline and all other methods.
    """
    baseline = "standard" if "standard" in specs else specs[0]
    found: dict[tuple[str | None, str], dict[int | None, list[LawPoint]]] = {}
    for row in rows:
        found.setdefault((row.setting, row.spec), {}).setdefault(row.width, []).append(_point(row))
    series = []
    for (setting, spec), widths in found.items():
        other = {} if spec == baseline else found.get((setting, baseline), {})
        frontier = _law(None, _best_of(widths), _best_of(other))
        laws = [_law(width, points, other.get(width, [])) for width, points in widths.items() if width is not None]
        series.append(Series(setting=setting, spec=spec, frontier=frontier, widths=tuple(laws)))
    return Scaling(baseline=baseline, series=tuple(series))


def _point(row: Row) -> LawPoint:
    assert row.budget is not None  # without budgets there are no laws
    return LawPoint(
        width=row.width, budget=row.budget, compute=row.compute, num_params=row.num_params, losses=row.scores
    )


def _best_of(widths: dict[int | None, list[LawPoint]]) -> list[LawPoint]:
    """The best width at each budget."""
    budgets: dict[float, list[LawPoint]] = {}
    for point in (point for points in widths.values() for point in points):
        budgets.setdefault(point.budget, []).append(point)
    return [min(points, key=lambda point: statistics.fmean(point.losses)) for points in budgets.values()]


def _law(width: int | None, points: list[LawPoint], baseline: list[LawPoint]) -> Law:
    points = sorted(points, key=lambda point: point.budget)
    compute, losses = _measured(points)
    if len(set(compute)) < _FITTED:
        return Law(width=width, points=tuple(points), fit=None, intervals=None, multiplier=None)
    intervals = None
    if _has_spread(points):
        intervals = {name: _ends(interval) for name, interval in law_intervals(compute, losses).items()}
    return Law(
        width=width,
        points=tuple(points),
        fit=fit_power_law(compute, losses),
        intervals=intervals,
        multiplier=_share(points, sorted(baseline, key=lambda point: point.budget)),
    )


def _share(points: list[LawPoint], baseline: list[LawPoint]) -> ComputeShare | None:
    """The compute for the baseline's losses; ``None`` where there are too few, or the two have none in common."""
    if len({point.compute for point in baseline}) < _FITTED:
        return None
    found = compute_multiplier(_measured(baseline), _measured(points))
    if found is None:
        return None
    known = _has_spread(points) and _has_spread(baseline)
    return ComputeShare(
        estimate=found.ratio.estimate,
        interval=_ends(found.ratio) if known else None,
        losses=found.losses,
        is_distinguishable=known and found.is_distinguishable,
    )


def _measured(points: list[LawPoint]) -> tuple[list[float], list[tuple[float, ...]]]:
    return [point.compute for point in points], [point.losses for point in points]


def _has_spread(points: list[LawPoint]) -> bool:
    """Whether there are more points or seeds than the law needs, so that an interval is meaningful."""
    return len(points) > _FITTED or all(len(point.losses) > 1 for point in points)


def _ends(interval: Interval) -> tuple[float, float]:
    return interval.low, interval.high
