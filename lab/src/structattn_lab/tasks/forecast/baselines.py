"""Forecasts without attention: what any model must beat before its score means something."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from structattn.errors import ConfigError, ShapeError
from structattn.progress import counted
from structattn_lab.data.series import WindowedSeries
from structattn_lab.data.splits import DataSplit
from structattn_lab.tasks.base import Baseline

PENALTIES = (1e-6, 1.0, 10.0, 100.0, 1000.0, 10000.0)
CHUNK = 16384  # windows


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
    return _metrics(*mean_errors(chunks(forecast, truth)), data)


def chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Spans of rows of tensors, of which a copy takes little memory: windows are views of a series, and much
    larger as copies.
    """
    return list(zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True))


def mean_errors(pairs: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Squared and absolute errors in float64, means over all windows.

    Args:
        pairs: forecasts and truths, each (n, ..., horizon): spans of the windows.

    Returns:
        Two tensors of shape (..., horizon).
    """
    count, squared, absolute = 0, torch.zeros(()), torch.zeros(())
    for forecast, truth in pairs:
        error = forecast.detach().double() - truth.double()
        count += len(error)
        squared = squared + error.square().sum(0)
        absolute = absolute + error.abs().sum(0)
    return squared / count, absolute / count


def _metrics(squared: Tensor, absolute: Tensor, data: WindowedSeries) -> dict[str, float]:
    mse, mae = float(squared.mean()), float(absolute.mean())
    return {"mse": mse, "mae": mae, "mse_units": mse * data.std**2, "mae_units": mae * data.std}


class Method(ABC):
    """A forecaster without attention, fitted to the windows of one series.

    Attributes:
        name, note: of the method, and how it works.
        most_steps: the longest horizon; ``None`` where there is no limit.
    """

    name: str
    note: str
    most_steps: int | None = None

    @abstractmethod
    def __call__(self, X: Tensor, horizon: int) -> Tensor:
        """Scaled look-backs, ``(n, look_back)``, to the first ``horizon`` steps, ``(n, horizon)``."""


class LastValue(Method):
    """The last value, at every step."""

    name, note = "last value", "repeats the last value of the look-back"

    def __call__(self, X: Tensor, horizon: int) -> Tensor:
        return X[:, -1:].expand(-1, horizon)


class Seasonal(Method):
    """The last season, again and again.

    Args:
        season: its steps.
    """

    def __init__(self, season: int) -> None:
        self.season = season
        self.name = f"seasonal ({season} steps)"
        self.note = f"repeats the last {season} values of the look-back"

    def __call__(self, X: Tensor, horizon: int) -> Tensor:
        return X[:, X.shape[1] - self.season + torch.arange(horizon) % self.season]


class Ridge(Method):
    """Linear from the look-back to each step ahead, both minus the last value, with an intercept.

    Args:
        weights: ``(look_back + 1, horizon)`` in float64.
        penalty: on their squares.
    """

    name = "ridge regression"

    def __init__(self, weights: Tensor, penalty: float) -> None:
        self.weights, self.penalty, self.most_steps = weights, penalty, weights.shape[1]
        self.note = (
            "linear from the look-back to each step ahead, both minus the last value, with an intercept; closed "
            f"form on the training windows, penalty {penalty:g} chosen on the validation split"
        )

    def __call__(self, X: Tensor, horizon: int) -> Tensor:
        return _features(X) @ self.weights[:, :horizon] + X[:, -1:]


def simple_methods(look_back: int, season: int | None) -> list[Method]:
    """The methods that need no fit.

    Args:
        look_back: steps that they see.
        season: steps of one season, such as 24 for hourly data with a daily rhythm; ``None``, or one longer
            than the look-back: no seasonal method.

    Raises:
        ConfigError: season below 1.
    """
    if season is not None and season < 1:
        raise ConfigError(f"expected a season of at least 1 step, got {season}. For hourly data a day is 24.")
    return [LastValue(), *([Seasonal(season)] if season is not None and look_back >= season else [])]


def fitted_methods(data: WindowedSeries, season: int | None) -> list[Method]:
    """The last value, the last season and ridge regression, fitted to the training windows; see
    ``simple_methods``.
    """
    return [*simple_methods(data.look_back, season), Ridge(*_fit_ridge(data))]


def forecast_baselines(data: WindowedSeries, methods: Sequence[Method]) -> list[Baseline]:
    """Scores on the test split.

    Args:
        data: the windows.
        methods: fitted to them.

    Returns:
        One row for each method, with ``error_by_lead`` in its details: the mean squared error (scaled) of
        each step ahead.
    """
    return [_score(method, data) for method in methods]


def _score(method: Method, data: WindowedSeries) -> Baseline:
    def errors(split: DataSplit) -> tuple[Tensor, Tensor]:
        return mean_errors((method(X, data.horizon), Y) for X, Y in _windows(data, split, f"{method.name}, {split}"))

    squared, absolute = errors("test")
    validation, _ = errors("validation")
    return Baseline(
        name=method.name,
        metrics=_metrics(squared, absolute, data),
        note=method.note,
        validation=float(validation.mean()),
        details={"error_by_lead": squared.tolist()},
    )


def _windows(data: WindowedSeries, split: DataSplit, text: str) -> Iterator[tuple[Tensor, ...]]:
    """The windows of a split in float64, in spans."""
    return counted(chunks(*data.windows(split, torch.from_numpy(data.scaled))), text)


def _features(X: Tensor) -> Tensor:
    return torch.cat([X - X[:, -1:], X.new_ones(len(X), 1)], 1)


def _fit_ridge(data: WindowedSeries) -> tuple[Tensor, float]:
    """The weights ``(look_back + 1, horizon)`` and the penalty with the lowest validation error."""
    size = data.look_back + 1
    gram = torch.zeros(size, size, dtype=torch.float64)
    moment = torch.zeros(size, data.horizon, dtype=torch.float64)
    for x, y in _windows(data, "train", "ridge regression, fit"):
        features = _features(x)
        gram += features.T @ features
        moment += features.T @ (y - x[:, -1:])
    # One eigendecomposition serves all penalties: (gram + p I)^-1 = V diag(1 / (e + p)) V^T.
    eigenvalues, vectors = torch.linalg.eigh(gram)
    eigenvalues = eigenvalues.clamp_min(0.0)
    rotated = vectors.T @ moment
    tried = [vectors @ (rotated / (eigenvalues + penalty)[:, None]) for penalty in PENALTIES]
    errors = [0.0] * len(tried)
    for x, y in _windows(data, "validation", "ridge regression, penalty"):
        features, target = _features(x), y - x[:, -1:]
        for i, weights in enumerate(tried):
            errors[i] += float((features @ weights - target).square().sum())
    best = min(range(len(tried)), key=errors.__getitem__)
    return tried[best], PENALTIES[best]
