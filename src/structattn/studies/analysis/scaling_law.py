"""Loss against compute as a power law above an irreducible loss, and the compute that one method saves against another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from structattn.errors import ConfigError

Floats = npt.NDArray[np.float64]
_EXPONENTS = np.geomspace(0.005, 3.0, 80)
_REFINED = 17
# The grid around the best exponent: as wide as the step of the one before, four times.
_WIDTHS = [float(np.log(_EXPONENTS[1] / _EXPONENTS[0])) / 8**i for i in range(4)]
_HUBER = 1.345  # of the spread of the residuals: 95 % as efficient as least squares where noise is normal
_PASSES = 4
_CHUNK = 256  # replicates that are fitted at once


@dataclass(frozen=True)
class PowerLaw:
    """L(C) = irreducible + coefficient (C / reference)^-exponent.

    Attributes:
        irreducible: the loss at infinite compute.
        coefficient: the loss above it at ``reference``.
        exponent: how fast that decreases.
        reference: FLOPs; the geometric mean of the fitted ones.
    """

    irreducible: float
    coefficient: float
    exponent: float
    reference: float

    def loss(self, compute: float) -> float:
        """The loss at that many FLOPs."""
        return self.irreducible + self.coefficient * (compute / self.reference) ** -self.exponent

    def compute(self, loss: float) -> float:
        """The FLOPs at which the loss is reached; infinite where it never is."""
        if loss <= self.irreducible or self.coefficient <= 0:
            return math.inf
        return float(self.reference * (self.coefficient / (loss - self.irreducible)) ** (1 / self.exponent))


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    estimate: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Multiplier:
    """How much compute a method needs for the loss of a baseline, as a share of the baseline's.

    Attributes:
        ratio: 0.8 is 20 % less.
        losses: the range of losses (low, high) over which the ratio is averaged: those that both reached.
    """

    ratio: Interval
    losses: tuple[float, float]

    @property
    def is_distinguishable(self) -> bool:
        """Whether the interval excludes 1."""
        return 1.0 not in self.ratio


def fit_power_law(compute: Sequence[float] | Floats, losses: Sequence[Sequence[float]]) -> PowerLaw:
    """The power law nearest to measured losses, by a robust fit of their logarithms.

    Args:
        compute: FLOPs of each point, at least three different ones.
        losses: for each point those of its seeds, at least one; their mean is fitted.

    Returns:
        The law; its irreducible loss is not negative, and its exponent between 0.005 and 3.

    Raises:
        ConfigError: fewer points, or numbers that are not positive.

    Method: for a given exponent the law is linear in the other two, and least squares weighted by 1 / L^2, nearly those of the
    logarithms, are solved in closed form; all exponents are tried. Huber's weights, updated in turn with the fit, keep a few bad runs
    from deciding it (Hoffmann et al. 2022 fit by Huber's loss as well).
    """
    points, values = _checked(compute, losses)
    return _law(points, *(float(found[0]) for found in _fit(points, _means(values)[None])))


def _checked(compute: Sequence[float] | Floats, losses: Sequence[Sequence[float]]) -> tuple[Floats, list[Floats]]:
    points = np.asarray(compute, dtype=np.float64)
    values = [np.asarray(of_point, dtype=np.float64) for of_point in losses]
    if len(points) != len(values) or len(set(points.tolist())) < 3:
        raise ConfigError(
            f"a power law with irreducible loss is fitted to at least 3 different compute budgets, got {len(set(points.tolist()))} "
            f"of {len(points)} and losses of {len(values)}"
        )
    if any(v.ndim != 1 or not len(v) or not np.isfinite(v).all() or not (v > 0).all() for v in (points, *values)):
        raise ConfigError("compute and losses must be positive, and each point has the loss of at least one seed")
    return points, values


def _means(values: Sequence[Floats]) -> Floats:
    return np.array([v.mean() for v in values])


def _law(points: Floats, irreducible: float, coefficient: float, exponent: float) -> PowerLaw:
    return PowerLaw(irreducible, coefficient, exponent, float(np.exp(np.log(points).mean())))


def _fit(points: Floats, losses: Floats) -> tuple[Floats, Floats, Floats]:
    """Irreducible losses, coefficients and exponents, (R,), of R sets of losses (R, n) at the same n points."""
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


def _best(logs: Floats, losses: Floats, weights: Floats, exponents: Floats) -> tuple[Floats, Floats, Floats]:
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
    index = error.argmin(-1)[:, None]
    floor, slope, exponents = (np.take_along_axis(a, index, 1)[:, 0] for a in (floor, slope, exponents))
    return floor, slope, exponents


def _replicates(points: Floats, values: list[Floats], count: int, rng: np.random.Generator) -> Floats:
    """Bootstrap samples of losses (count, n): seeds are resampled at every point, and deviations of points from the law are those of
    other points."""
    means = _means(values)
    floor, slope, exponent = (float(found[0]) for found in _fit(points, means[None]))
    fitted = np.array([_law(points, floor, slope, exponent).loss(c) for c in points])
    residuals = np.log(means / fitted)
    # Three parameters were fitted, so residuals are smaller than errors.
    residuals = (residuals - residuals.mean()) * math.sqrt(len(points) / max(1, len(points) - 3))
    drawn = fitted * np.exp(rng.choice(residuals, size=(count, len(points))))
    for i, of_point in enumerate(values):
        if len(of_point) > 1:
            again = rng.choice(of_point, size=(count, len(of_point))).mean(1) / means[i]
            drawn[:, i] *= 1 + (again - 1) * math.sqrt(len(of_point) / (len(of_point) - 1))
    return drawn


def law_intervals(
    compute: Sequence[float] | Floats, losses: Sequence[Sequence[float]], *, replicates: int = 1000, seed: int = 0
) -> dict[str, Interval]:
    """95 % intervals of ``irreducible``, ``coefficient`` and ``exponent``, by a bootstrap over seeds and points.

    Args:
        compute, losses: as ``fit_power_law``.
        replicates: of the bootstrap.
        seed: of its draws.

    Raises:
        ConfigError: as ``fit_power_law``.
    """
    points, values = _checked(compute, losses)
    law = fit_power_law(points, losses)
    found = _fit(points, _replicates(points, values, replicates, np.random.default_rng(seed)))
    names = ("irreducible", "coefficient", "exponent")
    return {name: _interval(getattr(law, name), drawn) for name, drawn in zip(names, found, strict=True)}


def _interval(estimate: float, drawn: Floats) -> Interval:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(estimate, float(low), float(high))


def compute_multiplier(
    baseline: tuple[Sequence[float], Sequence[Sequence[float]]],
    method: tuple[Sequence[float], Sequence[Sequence[float]]],
    *,
    replicates: int = 1000,
    seed: int = 0,
) -> Multiplier | None:
    """The compute that a method needs for the losses of a baseline, as a share of the baseline's compute.

    The ratio is the geometric mean over the losses that both reached, between the fitted laws, so that nothing is extrapolated.

    Args:
        baseline, method: compute and losses, as ``fit_power_law``.
        replicates, seed: of the bootstrap.

    Returns:
        The ratio with its interval; ``None`` where no loss was reached by both.

    Raises:
        ConfigError: as ``fit_power_law``.
    """
    sides = [_checked(*baseline), _checked(*method)]
    laws = [fit_power_law(points, losses) for (points, _), (_, losses) in zip(sides, (baseline, method), strict=True)]
    ends = [[law.loss(c) for c in (points.max(), points.min())] for law, (points, _) in zip(laws, sides, strict=True)]
    low, high = max(e[0] for e in ends), min(e[1] for e in ends)
    if not low < high:
        return None
    targets = np.linspace(low, high, 32)
    rng = np.random.default_rng(seed)
    found = [_fit(points, _replicates(points, values, replicates, rng)) for points, values in sides]
    logs = [_log_compute(points, targets, *f) for (points, _), f in zip(sides, found, strict=True)]
    estimates = [_log_compute(s[0], targets, *_as_arrays(law)) for s, law in zip(sides, laws, strict=True)]
    estimate = float(np.exp((estimates[1] - estimates[0]).mean()))
    ratios = np.exp((logs[1] - logs[0]).mean(1))
    return Multiplier(_interval(estimate, ratios), (low, high))


def _as_arrays(law: PowerLaw) -> tuple[Floats, Floats, Floats]:
    return np.array([law.irreducible]), np.array([law.coefficient]), np.array([law.exponent])


def _log_compute(points: Floats, targets: Floats, floor: Floats, slope: Floats, exponent: Floats) -> Floats:
    """log FLOPs (R, targets) at which R laws reach losses, clipped to the measured range and as much again on both sides: a
    replicate that never reaches a loss counts as "much more", not "infinitely more"."""
    logs = np.log(points)
    above = np.maximum(targets - floor[:, None], 1e-300) / np.maximum(slope[:, None], 1e-300)
    span = logs.max() - logs.min()
    return np.clip(logs.mean() - np.log(above) / exponent[:, None], logs.min() - span, logs.max() + span)
