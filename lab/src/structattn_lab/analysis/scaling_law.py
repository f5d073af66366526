"""Loss against compute as a power law above an irreducible loss, and the compute that one method saves
against another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from structattn.errors import ConfigError
from structattn_lab.records.comparison import ComputeShare, Law, LawPoint, PowerLaw, Row, Scaling, Series

Floats = npt.NDArray[np.float64]
Losses = Sequence[Sequence[float]]
Fitted = tuple[Floats, Floats, Floats]  # irreducible losses, coefficients and exponents, (R,), of R fits
_NAMES = ("irreducible", "coefficient", "exponent")
_NUM_PARAMS = len(_NAMES)  # with as many points there are no residuals
_EXPONENTS = np.geomspace(0.005, 3.0, 80)
_REFINED = 17
# The grid around the best exponent: as wide as the step of the one before, four times.
_WIDTHS = [float(np.log(_EXPONENTS[1] / _EXPONENTS[0])) / 8**i for i in range(4)]
_HUBER = 1.345  # of the spread of the residuals: 95 % as efficient as least squares where noise is normal
_PASSES = 4
_CHUNK = 256  # replicates that are fitted at once
_MOST_NOISE = 20.0  # of the logarithm of a loss: beyond it a fit has no numbers, and a law no meaning


def scaling_laws(rows: Sequence[Row], specs: Sequence[str]) -> Scaling:
    """The laws of a comparison's rows.

    Args:
        rows: of the comparison, each with a budget.
        specs: in the order of the recipe; the first is the baseline of the others, unless ``standard`` is
            among them.

    Raises:
        ConfigError: a loss that is not positive and finite, or no validation loss to choose a width by.

    Cost: 1,000 fits of the bootstrap for each interval, about a second for each law.

    The best width at a budget is the one with the lowest validation loss, the mean over seeds, for the
    baseline and all other methods; the losses of laws are those of the test split.
    """
    baseline = "standard" if "standard" in specs else specs[0]
    found: dict[tuple[str | None, str], dict[int | None, list[Row]]] = {}
    for row in rows:
        found.setdefault((row.setting, row.spec), {}).setdefault(row.width, []).append(row)
    series = []
    for (setting, spec), widths in found.items():
        other = {} if spec == baseline else found.get((setting, baseline), {})
        frontier = _law(None, _best_of(widths), _best_of(other))
        laws = [
            _law(width, _points(of_width), _points(other.get(width, [])))
            for width, of_width in widths.items()
            if width is not None
        ]
        series.append(Series(setting=setting, spec=spec, frontier=frontier, widths=tuple(laws)))
    return Scaling(baseline=baseline, series=tuple(series))


def _points(rows: Sequence[Row]) -> list[LawPoint]:
    points = []
    for row in rows:
        assert row.budget is not None  # without budgets there are no laws
        points.append(
            LawPoint(
                width=row.width, budget=row.budget, compute=row.compute, num_params=row.num_params, losses=row.scores
            )
        )
    return points


def _best_of(widths: dict[int | None, list[Row]]) -> list[LawPoint]:
    """The best width at each budget."""
    budgets: dict[float | None, list[Row]] = {}
    for row in (row for rows in widths.values() for row in rows):
        budgets.setdefault(row.budget, []).append(row)
    return _points([best_width(rows) for rows in budgets.values()])


def best_width(rows: Sequence[Row]) -> Row:
    """Of the rows of a method at one budget, one for each width, the one with the lowest validation loss.

    Raises:
        ConfigError: there are several, and one has no finite validation loss.
    """
    unknown = [row for row in rows if not math.isfinite(row.validation)]
    if unknown and len(rows) > 1:
        raise ConfigError(
            f"{unknown[0].spec} at width {unknown[0].width} has no finite validation loss, by which the best width is "
            "chosen: leave this width out"
        )
    return min(rows, key=lambda row: row.validation)


def _law(width: int | None, points: list[LawPoint], baseline: list[LawPoint]) -> Law:
    points = sorted(points, key=lambda point: point.budget)
    compute, losses = _measured(points)
    law = Law(width=width, points=tuple(points), fit=None, intervals=None, multiplier=None)
    if len(set(compute)) < _NUM_PARAMS:
        return law
    return replace(
        law,
        fit=fit_power_law(compute, losses),
        intervals=law_intervals(compute, losses) if _has_spread(points) else None,
        multiplier=_multiplier(points, sorted(baseline, key=lambda point: point.budget)),
    )


def _multiplier(points: list[LawPoint], baseline: list[LawPoint]) -> ComputeShare | None:
    """The compute for the baseline's losses; ``None`` where there are too few, or the two have none in
    common.
    """
    if len({point.compute for point in baseline}) < _NUM_PARAMS:
        return None
    found = compute_multiplier(_measured(baseline), _measured(points))
    if found is None or (_has_spread(points) and _has_spread(baseline)):
        return found
    return replace(found, interval=None, is_distinguishable=False)


def _measured(points: list[LawPoint]) -> tuple[list[float], list[tuple[float, ...]]]:
    return [point.compute for point in points], [point.losses for point in points]


def _has_spread(points: list[LawPoint]) -> bool:
    """Whether there are more points or seeds than the law needs, so that an interval is meaningful."""
    return len(points) > _NUM_PARAMS or all(len(point.losses) > 1 for point in points)


def fit_power_law(compute: Sequence[float] | Floats, losses: Losses) -> PowerLaw:
    """The power law nearest to measured losses, by a robust fit of their logarithms.

    Args:
        compute: FLOPs of each point, at least three different ones.
        losses: for each point those of its seeds, at least one; their mean is fitted.

    Returns:
        The law; its irreducible loss is not negative, and its exponent between 0.005 and 3.

    Raises:
        ConfigError: fewer points, or numbers that are not positive.

    Method: for a given exponent the law is linear in the other two, and least squares weighted by 1 / L^2,
    nearly those of the logarithms, are solved in closed form; all exponents are tried. Huber's weights,
    updated in turn with the fit, keep a few bad runs from deciding it (Hoffmann et al. 2022 fit by Huber's
    loss as well).
    """
    points, values = _checked(compute, losses)
    return _power_law(points, _fit(points, _means(values)[None]))


def _checked(compute: Sequence[float] | Floats, losses: Losses) -> tuple[Floats, list[Floats]]:
    points = np.asarray(compute, dtype=np.float64)
    values = [np.asarray(of_point, dtype=np.float64) for of_point in losses]
    if len(points) != len(values) or len(set(points.tolist())) < 3:
        raise ConfigError(
            "a power law with irreducible loss is fitted to at least 3 different compute budgets, got "
            f"{len(set(points.tolist()))} of {len(points)} and losses of {len(values)}"
        )
    if any(v.ndim != 1 or not len(v) or not np.isfinite(v).all() or not (v > 0).all() for v in (points, *values)):
        raise ConfigError("compute and losses must be positive, and each point has the loss of at least one seed")
    return points, values


def _means(values: Sequence[Floats]) -> Floats:
    return np.array([v.mean() for v in values])


def _power_law(points: Floats, fitted: Fitted) -> PowerLaw:
    """The first of the fits."""
    irreducible, coefficient, exponent = (float(values[0]) for values in fitted)
    return PowerLaw(irreducible, coefficient, exponent, float(np.exp(np.log(points).mean())))


def _fit(points: Floats, losses: Floats) -> Fitted:
    """The fits of R sets of losses (R, n) at the same n points."""
    if len(losses) > _CHUNK:
        parts = [_fit(points, losses[i : i + _CHUNK]) for i in range(0, len(losses), _CHUNK)]
        first, second, third = (np.concatenate(found) for found in zip(*parts, strict=True))
        return first, second, third
    logs = np.log(points) - np.log(points).mean()
    robust = np.ones_like(losses)
    for _ in range(_PASSES):
        weights = robust / losses**2
        everywhere = np.broadcast_to(_EXPONENTS, (len(losses), len(_EXPONENTS)))
        best = _best(logs, losses, weights, everywhere)
        for width in _WIDTHS:
            near = best[2][:, None] * np.exp(np.linspace(-width, width, _REFINED))
            best = _best(logs, losses, weights, near.clip(_EXPONENTS[0], _EXPONENTS[-1]))
        fitted = best[0][:, None] + best[1][:, None] * np.exp(-best[2][:, None] * logs)
        residuals = np.log(losses / fitted)
        spread = 1.4826 * np.median(np.abs(residuals), axis=1, keepdims=True) + 1e-12
        robust = np.minimum(1.0, _HUBER * spread / np.maximum(np.abs(residuals), 1e-300))
    return best


@np.errstate(over="ignore", invalid="ignore")  # of exponents for which a set of losses has no finite law
def _best(logs: Floats, losses: Floats, weights: Floats, exponents: Floats) -> Fitted:
    """The best of the exponents (R, G) for each set of losses (R, n), with the corresponding values."""
    basis = np.exp(-exponents[:, :, None] * logs)  # (R, G, n)
    w, y = weights[:, None], losses[:, None]
    total, s_y = w.sum(-1), (w * y).sum(-1)
    s_b, s_bb, s_by = (w * basis).sum(-1), (w * basis**2).sum(-1), (w * basis * y).sum(-1)
    spread = total * s_bb - s_b**2
    slope = (total * s_by - s_b * s_y) / np.maximum(spread, 1e-300)
    floor = (s_y - slope * s_b) / total
    # At the limits: no irreducible loss, or a constant loss.
    slope = np.where(floor < 0, s_by / s_bb, slope)
    floor = np.where(floor < 0, 0.0, floor)
    floor = np.where(slope < 0, s_y / total, floor)
    slope = np.maximum(slope, 0.0)
    error = (w * (y - floor[..., None] - slope[..., None] * basis) ** 2).sum(-1)
    index = np.where(np.isfinite(error), error, np.inf).argmin(-1)[:, None]
    floor, slope, exponents = (np.take_along_axis(a, index, 1)[:, 0] for a in (floor, slope, exponents))
    return floor, slope, exponents


def _replicates(points: Floats, values: list[Floats], count: int, rng: np.random.Generator) -> Floats:
    """Samples of the mean losses (count, n), as other seeds and other points near the law could have given.

    Relative deviations of seeds, and those of points, have one variance at all budgets, which is estimated
    from few: each sample has another one, as the estimate leaves it open, so that all of them have Student's
    distribution.
    """
    means, counts = _means(values), np.array([len(of_point) for of_point in values])
    law = _power_law(points, _fit(points, means[None]))
    fitted = np.array([law.loss(c) for c in points])
    of_seeds, of_points = int((counts - 1).sum()), len(points) - _NUM_PARAMS
    variance = 0.0
    noise = np.zeros((count, len(points)))

    def student(freedom: int) -> Floats:
        return rng.standard_normal(noise.shape) * np.sqrt(freedom / rng.chisquare(freedom, (count, 1)))

    if of_seeds:
        variance = sum(float((x / x.mean() - 1) @ (x / x.mean() - 1)) for x in values) / of_seeds
        noise += student(of_seeds) * np.sqrt(variance / counts)
    if of_points > 0:
        residuals = np.log(means / fitted)
        beyond = residuals @ residuals / of_points - float((variance / counts).mean())  # what seeds do not explain
        noise += student(of_points) * math.sqrt(max(0.0, beyond))
    return fitted * np.exp(noise.clip(-_MOST_NOISE, _MOST_NOISE))


def law_intervals(
    compute: Sequence[float] | Floats, losses: Losses, *, replicates: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """95 % intervals (low, high) of ``irreducible``, ``coefficient`` and ``exponent``, by a parametric
    bootstrap over seeds and points.

    Args:
        compute, losses: as ``fit_power_law``.
        replicates, seed: of the bootstrap.

    Raises:
        ConfigError: as ``fit_power_law``.
    """
    points, values = _checked(compute, losses)
    drawn = _fit(points, _replicates(points, values, replicates, np.random.default_rng(seed)))
    return {name: _interval(of_name) for name, of_name in zip(_NAMES, drawn, strict=True)}


def _interval(drawn: Floats) -> tuple[float, float]:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def compute_multiplier(
    baseline: tuple[Sequence[float] | Floats, Losses],
    method: tuple[Sequence[float] | Floats, Losses],
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> ComputeShare | None:
    """The compute that a method needs for the losses of a baseline, as a share of the baseline's compute.

    The share is the geometric mean over the losses that both reached, between the fitted laws, so that
    nothing is extrapolated.

    Args:
        baseline, method: compute and losses, as ``fit_power_law``.
        replicates, seed: of the bootstrap.

    Returns:
        The share with its interval; ``None`` where no loss was reached by both.

    Raises:
        ConfigError: as ``fit_power_law``.
    """
    sides = [_checked(*baseline), _checked(*method)]
    fitted = [_fit(points, _means(values)[None]) for points, values in sides]
    ends = [
        [_power_law(points, fits).loss(c) for c in (points.max(), points.min())]
        for (points, _), fits in zip(sides, fitted, strict=True)
    ]
    low, high = max(e[0] for e in ends), min(e[1] for e in ends)
    if not low < high:
        return None
    targets = np.linspace(low, high, 32)

    def shares(fits_of_sides: Sequence[Fitted]) -> Floats:
        logs = [_log_compute(points, targets, fits) for (points, _), fits in zip(sides, fits_of_sides, strict=True)]
        return np.exp((logs[1] - logs[0]).mean(1))

    rng = np.random.default_rng(seed)
    drawn = [_fit(points, _replicates(points, values, replicates, rng)) for points, values in sides]
    interval = _interval(shares(drawn))
    return ComputeShare(
        estimate=float(shares(fitted)[0]),
        interval=interval,
        losses=(low, high),
        is_distinguishable=interval[1] < 1 or interval[0] > 1,
    )


def _log_compute(points: Floats, targets: Floats, fits: Fitted) -> Floats:
    """log FLOPs (R, targets) at which R laws reach losses, clipped to the measured range and as much again on
    both sides: a replicate that never reaches a loss counts as "much more", not "infinitely more"."""
    floor, slope, exponent = (values[:, None] for values in fits)
    logs = np.log(points)
    above = np.maximum(targets - floor, 1e-300) / np.maximum(slope, 1e-300)
    span = logs.max() - logs.min()
    return np.clip(logs.mean() - np.log(above) / exponent, logs.min() - span, logs.max() + span)
