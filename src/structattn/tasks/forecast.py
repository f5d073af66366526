"""Forecasting one column of a time series: ETTh1's oil temperature, or a CSV of the user's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.errors import ConfigError
from structattn.models.forecaster import Forecaster
from structattn.seeds import derive_seed
from structattn.tasks.base import Baseline, Batch, Split, Task
from structattn.tasks.forecast_baselines import BaselineForecast, forecast_baselines, forecast_metrics
from structattn.tasks.series import WindowedSeries, read_series


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Where the series comes from.

    Args:
        path: a CSV file; ``None`` is the packaged ETTh1.
        time: name of the time column.
        target: name of the column to forecast.
    """

    path: str | None = None
    time: str = "date"
    target: str = "OT"


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """The windows and the model.

    Args:
        data: the series.
        look_back: input steps.
        horizon: output steps.
        season: steps of the seasonal baseline (24 for hourly data with a daily rhythm).
        patch_length, stride: steps of a token and between tokens.
        embed_dim, num_layers, num_heads, dropout: of the model.

    Raises:
        ConfigError: a number below 1, or heads that do not divide the width.
    """

    data: SeriesConfig = SeriesConfig()
    look_back: int = 336
    horizon: int = 96
    season: int = 24
    patch_length: int = 16
    stride: int = 8
    embed_dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.2

    def __post_init__(self) -> None:
        for name in (
            "look_back",
            "horizon",
            "season",
            "patch_length",
            "stride",
            "embed_dim",
            "num_layers",
            "num_heads",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"task.{name} must be at least 1, got {getattr(self, name)}")
        if self.embed_dim % self.num_heads:
            raise ConfigError(f"task.num_heads must divide embed_dim: got {self.num_heads} and {self.embed_dim}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"task.dropout must lie in [0, 1), got {self.dropout}")


class ForecastTask(Task):
    """Mean squared and absolute error over all test windows, on the scaled target and in its own units."""

    name = "forecast"
    metric = "mse"
    metric_label = "mean squared error, scaled target"
    question = (
        "Does the structure of attention help to forecast a real series, and does attention beat simple methods at all?"
    )

    def __init__(self, config: ForecastConfig) -> None:
        self.config = config
        path = None if config.data.path is None else Path(config.data.path)
        series = read_series(path, config.data.time, config.data.target)
        self.data_sha256 = hashlib.sha256(series.values.tobytes()).hexdigest()
        self.data = WindowedSeries(series, config.look_back, config.horizon)
        self._windows = {split: self.data.windows(split) for split in ("train", "validation", "test")}

    def build_model(self, spec: str) -> Forecaster:
        """A patch transformer."""
        config = self.config
        return Forecaster(
            spec,
            look_back=config.look_back,
            horizon=config.horizon,
            patch_length=config.patch_length,
            stride=config.stride,
            embed_dim=config.embed_dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            dropout=config.dropout,
        )

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """The windows of a step: epochs are permutations of the training windows, a function of (seed, epoch)."""
        inputs, targets = self._windows["train"]
        count = inputs.shape[0]
        places = torch.arange(step * batch_size, (step + 1) * batch_size)
        chosen = torch.empty_like(places)
        for epoch in places.div(count, rounding_mode="floor").unique().tolist():
            rng = torch.Generator().manual_seed(derive_seed(self.name, "epoch", seed, epoch))
            here = places.div(count, rounding_mode="floor") == epoch
            chosen[here] = torch.randperm(count, generator=rng)[places[here] - epoch * count]
        return {"window": inputs[chosen], "target": targets[chosen]}

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean squared error on the scaled target."""
        return F.mse_loss(model(batch["window"]), batch["target"])

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """The patches of a window."""
        return cast(Forecaster, model).num_tokens

    @torch.no_grad()
    def _forecast(self, model: nn.Module, split: Split) -> tuple[Tensor, Tensor]:
        inputs, targets = self._windows[split]
        device = next(model.parameters()).device
        parts = [model(chunk.to(device)).cpu() for chunk in inputs.split(512)]
        return torch.cat(parts), targets

    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``mse`` and ``mae``, scaled and in units, over every window of the split."""
        forecast, truth = self._forecast(model, split)
        return forecast_metrics(forecast, truth, self.data)

    @cached_property
    def baseline_forecasts(self) -> list[BaselineForecast]:
        """Last value, seasonal and ridge regression, with their errors by lead time."""
        return forecast_baselines(self.data, self.config.season)

    def baselines(self) -> list[Baseline]:
        """Last value, seasonal and ridge regression."""
        return [row.baseline for row in self.baseline_forecasts]

    def axis_labels(self) -> dict[str, str]:
        """The packaged series is in degrees Celsius and hours; of another one only the column is known."""
        packaged = self.config.data.path is None
        target = self.config.data.target
        value = "oil temperature (°C)" if packaged and target == "OT" else target
        return {"value": value, "step": "hours" if packaged else "steps"}

    def baseline_details(self) -> dict[str, dict[str, Any]]:
        """``error_by_lead`` by the name of the baseline."""
        return {row.baseline.name: {"error_by_lead": row.error_by_lead} for row in self.baseline_forecasts}

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Three test forecasts in the data's units, and the error at each lead time."""
        forecast, truth = self._forecast(model, "test")
        inputs, _ = self._windows["test"]
        count = inputs.shape[0]
        examples = []
        for index in (count // 6, count // 2, 5 * count // 6):
            _, times = self.data.times_at("test", index)
            examples.append(
                {
                    "history": self.data.to_units(inputs[index]).tolist(),
                    "truth": self.data.to_units(truth[index]).tolist(),
                    "forecast": self.data.to_units(forecast[index]).tolist(),
                    "start": str(times[0].astype("datetime64[m]")).replace("T", " "),
                }
            )
        by_lead = (forecast.double() - truth.double()).square().mean(dim=0)
        return {"examples": examples, "error_by_lead": by_lead.tolist()}
