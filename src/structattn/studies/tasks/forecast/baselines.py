"""Forecasts without attention: what any model must beat before its score means something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from structattn.errors import ConfigError, ShapeError
from structattn.studies.data.series import SeriesSplit, WindowedSeries
from structattn.studies.tasks.base import Baseline

PENALTIES = (1e-6, 1.0, 10.0, 100.0, 1000.0, 10000.0)
_CHUNK = 65536


@dataclass(frozen=True, kw_only=True)
class BaselineForecast:
    """A baseline on the test split.

    Attributes:
        baseline: its name, scores and how it works.
        error_by_lead: mean squared error (scaled) of each step ahead, ``horizon`` numbers.
    """

    baseline: Baseline
    error_by_lead: list[float]


def forecast_metrics(forecast: Tensor, truth: Tensor, data: WindowedSeries) -> dict[str, float]:
    """Errors of a forecast, averaged over windows and steps.

    Args:
        forecast: scaled values, ``(n, horizon)``.
        truth: the scaled values that came, same shape.
        data: gives the scale.

    Returns:
        ``mse`` and ``mae`` of the scaled values, ``mse_units`` and ``mae_units`` in the units of the data
        (the first in squared units).

    Raises:
        ShapeError: the shapes differ or hold no value.
    """
    if forecast.shape != truth.shape or forecast.numel() == 0:
        raise ShapeError(
            f"expected forecast and truth of one non-empty shape (n, horizon), got {tuple(forecast.shape)} "
            f"and {tuple(truth.shape)}. Give one forecast for each window."
        )
    error = forecast.detach().double() - truth.detach().double()
    mse = float(error.square().mean())
    mae = float(error.abs().mean())
    return {"mse": mse, "mae": mae, "mse_units": mse * data.std**2, "mae_units": mae * data.std}


def forecast_baselines(data: WindowedSeries, season: int | None) -> list[BaselineForecast]:
    """Scores on the test split of the last value, the last season and ridge regression.

    Args:
        data: the windows.
        season: steps of one season, such as 24 for hourly data with a daily rhythm. The seasonal row is left
            out when the look-back is shorter than that, or without a season.

    Returns:
        One row for each method.

    Raises:
        ConfigError: season below 1.
    """
    if season is not None and season < 1:
        raise ConfigError(f"expected a season of at least 1 step, got {season}. For hourly data a day is 24.")
    lead = torch.arange(data.horizon)

    def last(X: Tensor) -> Tensor:
        return X[:, -1:].expand(-1, data.horizon)

    rows = [_score("last value", last, data, "repeats the last value of the look-back")]
    if season is not None and data.look_back >= season:
        note = f"repeats the last {season} values of the look-back"
        places = data.look_back - season + lead % season
        rows.append(_score(f"seasonal ({season} steps)", lambda X: X[:, places], data, note))
    weights, penalty = _fit_ridge(data)
    note = (
        "linear from the look-back to each step ahead, both minus the last value, with an intercept; closed "
        f"form on the training windows, penalty {penalty:g} chosen on the validation split"
    )
    rows.append(_score("ridge regression", lambda X: _predict(weights, X), data, note))
    return rows


def _windows(data: WindowedSeries, split: SeriesSplit) -> tuple[Tensor, Tensor]:
    """``data.windows(split)`` in float64."""
    starts = data.starts(split)
    scaled = torch.from_numpy(np.ascontiguousarray(data.scaled))
    X = scaled[starts.start - data.look_back : starts.stop - 1].unfold(0, data.look_back, 1)
    Y = scaled[starts.start : starts.stop - 1 + data.horizon].unfold(0, data.horizon, 1)
    return X, Y


def _score(name: str, method: Callable[[Tensor], Tensor], data: WindowedSeries, note: str) -> BaselineForecast:
    X, truth = _windows(data, "test")
    forecast = method(X)
    metrics = forecast_metrics(forecast, truth, data)
    by_lead = [float(e) for e in (forecast - truth).square().mean(0)]
    X, truth = _windows(data, "validation")
    validation = float((method(X) - truth).square().mean())
    baseline = Baseline(name=name, metrics=metrics, note=note, validation=validation)
    return BaselineForecast(baseline=baseline, error_by_lead=by_lead)


def _features(X: Tensor) -> Tensor:
    return torch.cat([X - X[:, -1:], X.new_ones(len(X), 1)], 1)


def _predict(weights: Tensor, X: Tensor) -> Tensor:
    return _features(X) @ weights + X[:, -1:]


def _fit_ridge(data: WindowedSeries) -> tuple[Tensor, float]:
    """The weights ``(look_back + 1, horizon)`` and the penalty with the lowest validation error."""
    X, Y = _windows(data, "train")
    size = data.look_back + 1
    gram = X.new_zeros(size, size)
    moment = X.new_zeros(size, data.horizon)
    for x, y in zip(torch.split(X, _CHUNK), torch.split(Y, _CHUNK), strict=True):  # the views would be large as copies
        features = _features(x)
        gram += features.T @ features
        moment += features.T @ (y - x[:, -1:])
    # One eigendecomposition serves all penalties: (gram + p I)^-1 = V diag(1 / (e + p)) V^T.
    eigenvalues, vectors = torch.linalg.eigh(gram)
    eigenvalues = eigenvalues.clamp_min(0.0)
    rotated = vectors.T @ moment
    X, Y = _windows(data, "validation")
    best: tuple[float, float, Tensor] | None = None
    for penalty in PENALTIES:
        weights = vectors @ (rotated / (eigenvalues + penalty)[:, None])
        error = float((_predict(weights, X) - Y).square().mean())
        if best is None or error < best[0]:
            best = (error, penalty, weights)
    assert best is not None
    return best[2], best[1]
