"""Forecasting columns of a time series: of ETTh1, or of the user's CSV file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.checks import check_field_types, check_number
from structattn.errors import ConfigError
from structattn.files import absolute
from structattn.models.forecaster import Forecaster
from structattn.progress import counted, doing
from structattn.seeds import derive_seed
from structattn_lab.data.series import usual_season
from structattn_lab.data.series_file import read_columns
from structattn_lab.data.splits import SPLITS
from structattn_lab.data.time_steps import step_of
from structattn_lab.tasks.base import Baseline, Batch, DataOption, Split, Task, check_sizes_of
from structattn_lab.tasks.forecast.baseline_models import BaselineModel, BaselineModelSpec
from structattn_lab.tasks.forecast.baselines import Method, Ridge, chunks, mean_errors
from structattn_lab.tasks.forecast.data import WindowedChannels
from structattn_lab.tasks.forecast.intervals import PERCENTS, conformal_widths
from structattn_lab.tasks.forecast.kept import FILE, Facts, Kept

INTERVAL = 80  # the percentage of truths that the intervals of examples are meant to hold


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Where the series comes from.

    Args:
        path: a CSV file; ``None`` is the packaged ETTh1. Made absolute.
        time: name of the time column.
        target: name of the column to forecast; several with commas between them; or ``*``, all but the time.

    Raises:
        ConfigError: the path is an empty text.
    """

    path: str | None = None
    time: str = "date"
    target: str = "OT"

    def __post_init__(self) -> None:
        check_field_types(self, "task.data.")
        if self.path is not None:
            if not self.path.strip():
                raise ConfigError("task.data.path must be a CSV file or none, got an empty text")
            object.__setattr__(self, "path", absolute(self.path))


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """The windows and the model.

    Args:
        data: the series.
        look_back: input steps.
        horizon: output steps.
        season: steps of the seasonal baseline. Default ``None``: a day of data that are taken more often than
            daily, a week of daily ones, a year of monthly or quarterly ones; and no such baseline for others,
            nor for a season longer than ``look_back``.
        patch_length: steps of a token.
        stride: steps between tokens.
        embed_dim: width of the model.
        num_layers: blocks of the model.
        num_heads: attention heads of a block.
        dropout: of the model, a share.

    Raises:
        ConfigError: a number below 1, or heads that do not divide the width.
    """

    data: SeriesConfig = SeriesConfig()
    look_back: int = 336
    horizon: int = 96
    season: int | None = None
    patch_length: int = 16
    stride: int = 8
    embed_dim: int = 64
    num_layers: int = 2
    num_heads: int = 4
    dropout: float = 0.2

    def __post_init__(self) -> None:
        names = ("look_back", "horizon", "patch_length", "stride", "embed_dim", "num_layers", "num_heads")
        check_sizes_of(self, *names, *(() if self.season is None else ("season",)))
        check_number("task.dropout", self.dropout, minimum=0, below=1)
        check_field_types(self, "task.")


class ForecastTask(Task):
    """Mean squared and absolute error over all test windows, on the scaled target and in its own units; means
    over the columns.

    Models are ``Forecaster`` with an attention spec, which sees one column at a time, or with
    ``baseline:NAME`` a baseline model of neuralforecast (see ``BaselineModelSpec``).
    """

    name = "forecast"
    config_class = ForecastConfig
    data_options: ClassVar[dict[str, DataOption]] = {
        "data": DataOption("data.path", "your CSV file"),
        "time": DataOption("data.time", "its time column"),
        "target": DataOption("data.target", "the column to forecast"),
    }
    metric = "mse"
    metric_label = "mean squared error, scaled target"
    question = (
        "Does the structure of attention help to forecast a real series, and does attention beat simple methods at all?"
    )

    def __init__(self, config: ForecastConfig) -> None:
        super().__init__(config)
        path = None if config.data.path is None else Path(config.data.path)
        with doing(f"reading {'ETTh1' if path is None else path}"):
            series = read_columns(path, config.data.time, config.data.target)
        self.data_sha256 = hashlib.sha256(b"".join(column.values.tobytes() for column in series)).hexdigest()
        self.data = WindowedChannels(series, config.look_back, config.horizon)
        self._windows = {split: self.data.windows(split) for split in SPLITS}

    @classmethod
    def check_spec(cls, spec: str) -> None:
        """Attention specs, and baseline models."""
        if BaselineModelSpec.parse(spec) is None:
            super().check_spec(spec)

    @classmethod
    def describe_spec(cls, spec: str) -> str:
        if BaselineModelSpec.parse(spec) is None:
            return super().describe_spec(spec)
        return f"the baseline model {spec.partition(':')[2]} of neuralforecast"

    def data_summary(self) -> dict[str, str]:
        config, first = self.config, self.data.channels[0].series
        return {
            "data": "ETTh1, in the package" if config.data.path is None else str(config.data.path),
            "rows": f"{len(first.values):,}, {first.step} apart",
            "columns": ", ".join(self.data.names),
            "window": f"{config.look_back} steps in, {config.horizon} steps ahead",
            "windows": ", ".join(f"{len(inputs):,} {split}" for split, (inputs, _) in self._windows.items()),
        }

    def build_model(self, spec: str) -> Forecaster | BaselineModel:
        """A patch transformer, or a baseline model."""
        return build_forecaster(self.config, spec, len(self.data.channels))

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """The windows of a step: epochs are permutations of the training windows, a function of (seed,
        epoch).
        """
        inputs, targets = self._windows["train"]
        count = inputs.shape[0]
        positions = torch.arange(step * batch_size, (step + 1) * batch_size)
        chosen = torch.empty_like(positions)
        for epoch in positions.div(count, rounding_mode="floor").unique().tolist():
            rng = torch.Generator().manual_seed(derive_seed(self.name, "epoch", seed, epoch))
            here = positions.div(count, rounding_mode="floor") == epoch
            chosen[here] = torch.randperm(count, generator=rng)[positions[here] - epoch * count]
        return {"window": inputs[chosen], "target": targets[chosen]}

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean squared error on the scaled target."""
        return F.mse_loss(model(batch["window"]), batch["target"])

    def flops(self, model: nn.Module, step: int | None = None) -> int:
        """Forward FLOPs of one window with all its columns."""
        return len(self.data.channels) * super().flops(model, step)

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """The patches of a window with all its columns; for a baseline model, which may have no tokens, the
        columns.
        """
        return len(self.data.channels) * cast(Forecaster | BaselineModel, model).num_tokens

    @torch.no_grad()
    def _forecast(self, model: nn.Module, split: Split) -> tuple[Tensor, Tensor]:
        inputs, targets = self._windows[split]
        device = next(model.parameters()).device
        spans = inputs.split(max(1, 512 // inputs.shape[1]))
        parts = [model(span.to(device)).cpu() for span in counted(spans, f"scoring the {split} windows")]
        return torch.cat(parts), targets

    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``mse`` and ``mae``, scaled and in units, over every window of the split."""
        return self.data.metrics(*self._forecast(model, split))

    @cached_property
    def _season(self) -> int | None:
        return self.config.season or usual_season(self.data.channels[0].series)

    @cached_property
    def _methods(self) -> list[tuple[Method, ...]]:
        return self.data.fitted(self._season)

    @cached_property
    def _baselines(self) -> list[Baseline]:
        return self.data.baselines(self._methods)

    def baselines(self) -> list[Baseline]:
        """Last value, seasonal and ridge regression, with ``error_by_lead``; computed once."""
        return self._baselines

    def run_files(self, model: nn.Module) -> dict[str, bytes]:
        """Scale, time step and widths of intervals, with which ``structattn forecast`` does without the
        training data.
        """
        return {FILE: self.kept_with_run(model).content()}

    def kept_with_run(self, model: nn.Module) -> Kept:
        """See ``Kept``."""
        forecast, truth = self._forecast(model, "validation")
        # Column by column: a copy of all errors may take much memory.
        of_columns = zip(forecast.unbind(1), truth.unbind(1), strict=True)
        widths = [conformal_widths((predicted - true).abs(), PERCENTS) for predicted, true in of_columns]
        return self._kept(widths=torch.stack(widths, dim=1), windows=torch.tensor(len(truth)))

    def baseline_files(self) -> dict[str, bytes]:
        """The same for the baselines, with the weights of ridge regression, and the validation rows."""
        return {FILE: self.kept_with_baselines().content()}

    def kept_with_baselines(self) -> Kept:
        """See ``Kept``."""
        ridge = cast(tuple[Ridge, ...], self._methods[-1])
        begin, end, _ = self.data.channels[0].bounds
        rows = [channel.scaled[begin - self.config.look_back : end] for channel in self.data.channels]
        penalties = tuple(channel.penalty for channel in ridge)
        tensors = {
            "ridge": torch.stack([channel.weights for channel in ridge]),
            "validation": torch.from_numpy(np.stack(rows)),
        }
        return self._kept(season=self._season, penalties=penalties, **tensors)

    def _kept(self, *, season: int | None = None, penalties: tuple[float, ...] = (), **tensors: Tensor) -> Kept:
        channels = self.data.channels
        step = step_of(channels[0].series.times)
        assert step is not None  # else the series was refused
        facts = Facts(
            columns=tuple(self.data.names),
            step=step,
            look_back=self.config.look_back,
            horizon=self.config.horizon,
            season=season,
            penalties=penalties,
        )
        scale = {
            name: torch.tensor([getattr(channel, name) for channel in channels], dtype=torch.float64)
            for name in ("mean", "std")
        }
        return Kept(facts=facts, tensors={**scale, **tensors})

    def axis_labels(self) -> dict[str, str]:
        """Of ETT data the oil temperature is in degrees Celsius; of other columns only the name is known."""
        shown = self.data.channels[-1].series
        value = "oil temperature (°C)" if shown.is_ett and shown.name == "OT" else shown.name
        return {"value": value, "step": "hours" if shown.step == "1 hour" else "steps"}

    def scores(self, model: nn.Module, *, with_details: bool) -> tuple[dict[str, float], dict[str, Any]]:
        """See ``Task``: both are of the same forecasts, which are made once."""
        forecast, truth = self._forecast(model, "test")
        return self.data.metrics(forecast, truth), self._details(model, forecast, truth) if with_details else {}

    def details(self, model: nn.Module) -> dict[str, Any]:
        """What the figures show.

        ``examples``: three test forecasts of the last column in the data's units, with intervals;
        ``coverage``: the share of all test values inside such intervals, which are meant to hold ``INTERVAL``
        percent of them: as wide as the errors of the validation windows, for each column and lead time (split
        conformal). ``error_by_lead``; ``error_by_column`` where there are several; ``train_windows``, the
        windows of an epoch.
        """
        return self._details(model, *self._forecast(model, "test"))

    def _details(self, model: nn.Module, forecast: Tensor, truth: Tensor) -> dict[str, Any]:
        validation, true = self._forecast(model, "validation")
        errors = (validation - true).abs()
        # With too few windows for this share the largest error has to do.
        width = torch.minimum(conformal_widths(errors, [INTERVAL])[0], errors.amax(0))
        inputs, _ = self._windows["test"]
        count = inputs.shape[0]
        channel = self.data.channels[-1]
        examples = []
        for index in (count // 6, count // 2, 5 * count // 6):
            middle = forecast[index, -1]
            shown = {
                "history": inputs[index, -1],
                "truth": truth[index, -1],
                "forecast": middle,
                "low": middle - width[-1],
                "high": middle + width[-1],
            }
            words = {"start": channel.first_time("test", index), "label": self.axis_labels()["value"]}
            examples.append({name: channel.to_units(values).tolist() for name, values in shown.items()} | words)
        squared, _ = mean_errors(chunks(forecast, truth))
        details = {
            "examples": examples,
            "interval": INTERVAL / 100,
            "coverage": int(((forecast - truth).abs() <= width).sum()) / truth.numel(),
            "error_by_lead": squared.mean(0).tolist(),
            "train_windows": self._windows["train"][0].shape[0],
        }
        if len(self.data.channels) > 1:
            details["error_by_column"] = dict(zip(self.data.names, squared.mean(1).tolist(), strict=True))
        return details


def build_forecaster(config: ForecastConfig, spec: str, num_channels: int) -> Forecaster | BaselineModel:
    """The model of a spec, with new weights: its data are not needed.

    Args:
        config: settings.
        spec: of attention, or of a baseline model.
        num_channels: columns that are forecast.
    """
    model = BaselineModelSpec.parse(spec)
    if model is not None:
        return BaselineModel(model, look_back=config.look_back, horizon=config.horizon, num_channels=num_channels)
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
