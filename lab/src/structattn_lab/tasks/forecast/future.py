"""Forecasts beyond the end of a series: a trained model or a baseline, the scale of its training, and
conformal intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from structattn.errors import ConfigError
from structattn_lab.data.series import Floats, Times
from structattn_lab.tasks.forecast.baselines import CHUNK, Method, Ridge, simple_methods
from structattn_lab.tasks.forecast.intervals import check_percents, conformal_widths
from structattn_lab.tasks.forecast.kept import Facts, Kept


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A forecast of the future, and what it continues.

    Attributes:
        row: the spec or the name of the method.
        why: why it was taken.
        time: the name of the first column.
        columns: that were forecast.
        levels: of the intervals, in percent.
        windows: validation windows that the widths of the intervals come from.
        table: a pandas ``DataFrame``, see ``structattn_lab.inference.forecast.forecast``.
        times: of its rows, in UTC if the data have a zone; the numbers of rows where they have no dates.
        past: the values before it, ``(columns, rows)``, at least the look-back.
        past_times: of these, as ``times``.
        has_dates: whether the data have dates.
    """

    row: str
    why: str
    time: str
    columns: tuple[str, ...]
    levels: tuple[int, ...]
    windows: int
    table: Any
    times: Times | npt.NDArray[np.int64]
    past: Floats
    past_times: Times | npt.NDArray[np.int64]
    has_dates: bool


class FutureForecaster(Protocol):
    """Forecasts of one row of a comparison, in scaled values.

    Attributes:
        kept: of its training.
        most_steps: the longest horizon; ``None`` where the method has no limit.
    """

    kept: Kept
    most_steps: int | None

    def windows(self, horizon: int) -> int:
        """The number of validation windows that the widths of intervals come from."""

    def forecast(self, window: Floats, horizon: int) -> Tensor:
        """(columns, look_back) to (columns, horizon)."""

    def widths(self, percents: Sequence[int], horizon: int) -> Tensor:
        """(percents, columns, horizon)."""


class ModelForecaster:
    """A trained model.

    Args:
        kept: with the run.
        load: reads the model, in eval mode, when it is needed: what the user gave is checked first.
    """

    def __init__(self, kept: Kept, load: Callable[[], nn.Module]) -> None:
        self.kept, self._model = kept, cache(load)
        self.most_steps: int | None = kept.facts.horizon

    def windows(self, horizon: int) -> int:
        """The same for every horizon."""
        return int(self.kept.tensors["windows"])

    @torch.no_grad()
    def forecast(self, window: Floats, horizon: int) -> Tensor:
        """In float32, as in training."""
        out: Tensor = self._model()(torch.from_numpy(window.astype(np.float32))[None])
        return out[0, :, :horizon]

    def widths(self, percents: Sequence[int], horizon: int) -> Tensor:
        """Those of the run."""
        return self.kept.tensors["widths"][[percent - 1 for percent in percents], :, :horizon]


class BaselineForecaster:
    """A baseline.

    Args:
        kept: with the comparison.
        name: that of its row.
    """

    def __init__(self, kept: Kept, name: str) -> None:
        facts = kept.facts
        self.kept, self._rows = kept, kept.tensors["validation"]
        of_columns = zip(kept.tensors["ridge"], facts.penalties, strict=True)
        simple = simple_methods(facts.look_back, facts.season)
        methods: list[tuple[Method, ...]] = [(simple_method,) * len(facts.columns) for simple_method in simple]
        methods.append(tuple(Ridge(weights, penalty) for weights, penalty in of_columns))
        (self._methods,) = (method for method in methods if method[0].name == name)
        self._validation_rows = self._rows.shape[1] - facts.look_back
        self.most_steps = self._methods[0].most_steps

    def windows(self, horizon: int) -> int:
        """Those of the training; beyond its horizon fewer, the longer it is."""
        return max(0, self._validation_rows - max(horizon, self.kept.facts.horizon) + 1)

    def forecast(self, window: Floats, horizon: int) -> Tensor:
        """In float64."""
        rows = torch.from_numpy(window)
        return torch.cat([method(row[None], horizon) for method, row in zip(self._methods, rows, strict=True)])

    def widths(self, percents: Sequence[int], horizon: int) -> Tensor:
        """From the errors of the method on the validation windows."""
        look_back, used = self.kept.facts.look_back, self.windows(horizon)
        of_columns = []
        for method, row in zip(self._methods, self._rows, strict=True):
            X = row.unfold(0, look_back, 1)[:used].split(CHUNK)
            Y = row[look_back:].unfold(0, horizon, 1)[:used].split(CHUNK)
            errors = torch.cat([(method(x, horizon) - y).abs() for x, y in zip(X, Y, strict=True)])
            of_columns.append(conformal_widths(errors, percents))
        return torch.stack(of_columns, dim=1)


def check_request(
    forecaster: FutureForecaster, name: str, horizon: int, percents: Sequence[int], unlimited: Sequence[str]
) -> tuple[int, ...]:
    """The percentages in order.

    Args:
        forecaster: of the row.
        name: of the row.
        horizon: steps ahead.
        percents: of the intervals.
        unlimited: rows of the same comparison whose horizon has no limit.

    Raises:
        ConfigError: the horizon is longer than the method can do, or than the validation rows; or as
            ``check_percents``.
    """
    facts: Facts = forecaster.kept.facts
    if forecaster.most_steps is not None and horizon > forecaster.most_steps:
        rows = f", or take a row without a limit: {' or '.join(map(repr, unlimited))}" if unlimited else ""
        raise ConfigError(
            f"{name} forecasts at most {forecaster.most_steps:,} steps, the horizon of its training, got a horizon of "
            f"{horizon:,}: give a shorter one, or train with --set task.horizon={horizon}{rows}"
        )
    windows = forecaster.windows(horizon)
    if windows < 1:
        raise ConfigError(
            f"the intervals of {name} come from the {facts.horizon - 1 + forecaster.windows(facts.horizon):,} "
            "validation rows of the training, which "
            f"have no window of {horizon:,} steps: give a shorter horizon"
        )
    return check_percents(percents, windows)


def forecast_units(
    forecaster: FutureForecaster, values: Floats, horizon: int, percents: Sequence[int]
) -> tuple[Floats, Floats]:
    """A forecast and its widths in the units of the data.

    Args:
        forecaster: of the row.
        values: (columns, rows), at least the look-back.
        horizon, percents: see ``check_request``.

    Returns:
        (columns, horizon), and half the width of each interval, (percents, columns, horizon).
    """
    mean, std = (forecaster.kept.tensors[name].numpy()[:, None] for name in ("mean", "std"))
    window = (values[:, -forecaster.kept.facts.look_back :] - mean) / std
    point = forecaster.forecast(window, horizon).double().numpy() * std + mean
    widths = forecaster.widths(percents, horizon).double().numpy() * std if percents else np.empty((0, *point.shape))
    return point, widths
