"""What a grid of widths and budgets says: loss against compute for each method, and the compute that it saves."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from structattn.studies.analysis.scaling_law import Interval, compute_multiplier, fit_power_law, law_intervals

Row = dict[str, Any]
_FITTED = 3  # numbers of a law; a law through as many points leaves nothing to judge it by


def scaling(rows: Sequence[Row], specs: Sequence[str]) -> dict[str, Any]:
    """The laws of a comparison's rows, as plain data for ``results.json``.

    Args:
        rows: of ``results.json``: spec, setting, width, budget, compute, scores.
        specs: in the order of the recipe; the first is what the others are measured against, unless ``standard`` is among them.

    Returns:
        ``baseline``: that spec; ``series``: for each setting and spec ``frontier``, the law over the best width of every budget, and
        ``widths``, the law at each width. A law has ``points`` (width, compute, losses of the seeds), ``fit`` (irreducible,
        coefficient, exponent, reference; ``None`` with fewer than three budgets), ``intervals`` of those (``None`` where neither seeds nor
        points are more than the fit needs), and ``multiplier``: the compute that it takes for the baseline's losses in the same
        setting, as a share (``None`` for the baseline, without a fit, or where they share no loss).

    Raises:
        ConfigError: a loss that is not positive and finite.

    Cost: 1,000 fits of the bootstrap for each interval, about a second for each law.

    The best width is chosen by the mean over seeds of the losses that are shown, for the baseline as for every other.
    """
    baseline = "standard" if "standard" in specs else specs[0]
    found: dict[tuple[str | None, str], dict[int | None, list[Row]]] = {}
    for row in rows:
        found.setdefault((row["setting"], row["spec"]), {}).setdefault(row["width"], []).append(row)
    points = {
        key: {None: _frontier(widths), **{width: _points(of_width) for width, of_width in widths.items()}}
        for key, widths in found.items()
    }
    series = []
    for (setting, spec), curves in points.items():
        standard = None if spec == baseline else points.get((setting, baseline))
        laws = {width: _law(curve, standard.get(width) if standard else None) for width, curve in curves.items()}
        series.append(
            {
                "setting": setting,
                "spec": spec,
                "frontier": laws[None],
                "widths": [{"width": width, **law} for width, law in laws.items() if width is not None],
            }
        )
    return {"baseline": baseline, "series": series}


def _points(rows: Sequence[Row]) -> list[Row]:
    return [
        {
            "width": row["width"],
            "budget": row["budget"],
            "compute": row["compute"],
            "num_params": row["num_params"],
            "losses": row["scores"],
        }
        for row in sorted(rows, key=lambda row: row["budget"])
    ]


def _frontier(widths: dict[int | None, list[Row]]) -> list[Row]:
    """The best width at each budget."""
    budgets: dict[float, list[Row]] = {}
    for rows in widths.values():
        for point in _points(rows):
            budgets.setdefault(point["budget"], []).append(point)
    return [min(budgets[budget], key=lambda point: statistics.fmean(point["losses"])) for budget in sorted(budgets)]


def _law(points: list[Row], baseline: list[Row] | None) -> dict[str, Any]:
    compute, losses = _measured(points)
    law: dict[str, Any] = {"points": points, "fit": None, "intervals": None, "multiplier": None}
    if len(set(compute)) < _FITTED:
        return law
    law["fit"] = dataclasses.asdict(fit_power_law(compute, losses))
    if _has_spread(points):
        law["intervals"] = {name: _plain(interval) for name, interval in law_intervals(compute, losses).items()}
    if baseline is not None and len({point["compute"] for point in baseline}) >= _FITTED:
        found = compute_multiplier(_measured(baseline), (compute, losses))
        if found is not None:
            known = _has_spread(points) and _has_spread(baseline)
            law["multiplier"] = {
                "estimate": found.ratio.estimate,
                "interval": _plain(found.ratio) if known else None,
                "losses": list(found.losses),
                "is_distinguishable": known and found.is_distinguishable,
            }
    return law


def _measured(points: list[Row]) -> tuple[list[float], list[list[float]]]:
    return [point["compute"] for point in points], [point["losses"] for point in points]


def _has_spread(points: list[Row]) -> bool:
    """Whether there is more than the law needs, so that an interval means something."""
    return len(points) > _FITTED or all(len(point["losses"]) > 1 for point in points)


def _plain(interval: Interval) -> list[float]:
    return [interval.low, interval.high]
