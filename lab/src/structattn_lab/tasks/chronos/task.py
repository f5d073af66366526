"""Forecasting by language modelling: Chronos' tokens and T5, trained on synthetic and real series, scored on
series never seen.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.checks import check_field_types, check_int, check_number
from structattn.errors import ConfigError
from structattn.files import absolute
from structattn.progress import counted
from structattn.seeds import derive_seed, generator, seeded
from structattn_lab.data.series import TimeSeries, WindowedSeries
from structattn_lab.data.series_file import read_columns
from structattn_lab.tasks.base import Baseline, Batch, DataOption, Split, Task, on_device_of
from structattn_lab.tasks.chronos.kernel_synth import kernel_synth
from structattn_lab.tasks.chronos.model import ChronosForecaster, integration
from structattn_lab.tasks.chronos.scores import QUANTILES, forecast_scores, seasonal_forecast

_NONE = -100  # a label that is not scored
_COLUMNS = "OT,HUFL,HULL,MUFL,MULL,LUFL,LULL"  # of ETTh1: the oil temperature, and the load channels
_LARGEST = 2**24  # of every size: far beyond any use, and nothing runs out of time before it is named


@dataclass(frozen=True, kw_only=True)
class ChronosConfig:
    """The series and the model.

    Args:
        checkpoint: folder of a trained Chronos T5 to restructure and fine-tune: ``config.json`` and
            ``model.safetensors``. Its sizes and tokenizer take the place of those below. Made absolute.
            Empty: a new model.
        context_length: most steps that a forecast looks back on.
        prediction_length: steps ahead.
        season: steps of the seasonal baseline, and of the errors that MASE divides by.
        num_tokens: tokens of the tokenizer: bins of values, and two special ones.
        embed_dim: width of the model.
        num_heads: attention heads of a block.
        head_dim: dimensions of a head.
        mlp_dim: hidden units of a block.
        num_layers: blocks of the encoder, and of the decoder.
        dropout: of the model, a share.
        synthetic: share of synthetic series in training; the others are ETTh1's load channels.
        num_synthetic: synthetic series to train on.
        eval_windows: windows of each kind (synthetic and ETTh1 OT) whose tokens are scored.
        forecasts: ETTh1 OT windows of the test rows that are forecast by the pipeline.
        num_samples: sample paths of each forecast.

    Raises:
        ConfigError: a number is out of its range.
    """

    checkpoint: str = ""
    context_length: int = 96
    prediction_length: int = 24
    season: int = 24
    num_tokens: int = 512
    embed_dim: int = 64
    num_heads: int = 4
    head_dim: int = 16
    mlp_dim: int = 256
    num_layers: int = 2
    dropout: float = 0.1
    synthetic: float = 0.5
    num_synthetic: int = 256
    eval_windows: int = 128
    forecasts: int = 48
    num_samples: int = 20

    def __post_init__(self) -> None:
        check_field_types(self, "task.")
        object.__setattr__(self, "checkpoint", absolute(self.checkpoint))
        for name, value in vars(self).items():
            if isinstance(value, int):
                check_int(f"task.{name}", value, minimum=1, maximum=_LARGEST)
        if self.season >= self.context_length:
            raise ConfigError(
                f"task.season must be shorter than the context, {self.context_length} steps, got {self.season}"
            )
        check_number("task.synthetic", self.synthetic, minimum=0, maximum=1)
        check_number("task.dropout", self.dropout, minimum=0, below=1)


@functools.cache
def _etth1() -> tuple[TimeSeries, Tensor]:
    """The oil temperature of the packaged ETTh1, and its load channels, (6, rows): read once for all tasks of
    a process.
    """
    target, *loads = read_columns(None, "date", _COLUMNS)
    return target, torch.stack([torch.from_numpy(series.values).float() for series in loads])


class ChronosTask(Task):
    """Mean cross entropy of the tokens of the future, on synthetic series and on ETTh1's oil temperature,
    which no training step saw.

    Forecasts of the oil temperature are also sampled by the pipeline, and scored in its own units by MASE and
    the weighted quantile loss.

    Raises:
        MissingDependencyError: chronos-forecasting is not installed.
        ConfigError: the checkpoint is no Chronos T5, or was made for a shorter context or horizon.
        CheckpointError: its weights are missing, damaged or a pickle.
    """

    name = "chronos"
    config_class = ChronosConfig
    data_options: ClassVar[dict[str, DataOption]] = {
        "data": DataOption("checkpoint", "the folder of a trained Chronos T5 to fine-tune")
    }
    metric = "nats_per_token"
    metric_label = "cross entropy of the next token, nats"
    question = "Does structured self-attention help a Chronos T5 to forecast series that it never saw?"

    def __init__(self, config: ChronosConfig) -> None:
        super().__init__(config)
        self._bridge = integration()
        self._start = self._load() if config.checkpoint else None
        self.tokenizer = self._bridge.tokenizer_of(self.t5_config)
        series, loads = _etth1()
        self.data = WindowedSeries(series, config.context_length, config.prediction_length)
        self._window = config.context_length + config.prediction_length
        self._loads = loads[:, : self.data.bounds[0]]
        content = [series.values.tobytes(), self._loads.numpy().tobytes()]
        if config.checkpoint:
            content += [file.read_bytes() for file in sorted(Path(config.checkpoint).glob("*.safetensors"))]
        self.data_sha256 = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in content)).hexdigest()

    def _load(self) -> Any:
        """The plain model of the checkpoint, for this context and horizon."""
        model = self._bridge.load_pipeline(self.config.checkpoint, dtype=torch.float32).inner_model
        settings = dict(model.config.chronos_config)
        for name in ("context_length", "prediction_length"):
            if settings[name] < getattr(self.config, name):
                raise ConfigError(
                    f"the checkpoint was made for a {name} of {settings[name]}: task.{name} must not be longer, got "
                    f"{getattr(self.config, name)}"
                )
            settings[name] = getattr(self.config, name)
        model.config.chronos_config = settings
        return model

    @cached_property
    def t5_config(self) -> Any:
        """The config of the plain T5."""
        if self._start is not None:
            return self._start.config
        config = self.config
        return self._bridge.new_config(
            context_length=config.context_length,
            prediction_length=config.prediction_length,
            num_tokens=config.num_tokens,
            num_samples=config.num_samples,
            embed_dim=config.embed_dim,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            mlp_dim=config.mlp_dim,
            num_layers=config.num_layers,
            dropout=config.dropout,
        )

    def data_summary(self) -> dict[str, str]:
        config = self.config
        return {
            "data": "synthetic series for training; unseen synthetic series and ETTh1 for the test",
            "window": f"{config.context_length} steps in, {config.prediction_length} steps ahead",
        }

    def build_model(self, spec: str) -> ChronosForecaster:
        """A T5 with structured self-attention, in the encoder and in the decoder: a new one, or that of the
        checkpoint.
        """
        is_meta = torch.get_default_device().type == "meta"  # a comparison looks whether a spec fits
        if self._start is None or is_meta:
            model = self._bridge.new_model(self.t5_config, spec)
        else:
            model = self._bridge.structurize(copy.deepcopy(self._start), spec)
        end = int(self.tokenizer.config.use_eos_token)
        return ChronosForecaster(model, self.config.context_length + end, self.config.prediction_length + end)

    def _tokens(self, series: Tensor) -> Batch:
        """Series, (B, context + horizon), as tokens and labels."""
        context, future = series.split([self.config.context_length, self.config.prediction_length], dim=1)
        input_ids, attention_mask, scale = self.tokenizer.context_input_transform(context)
        labels, is_known = self.tokenizer.label_input_transform(future, scale)
        labels[~is_known] = _NONE
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    @cached_property
    def _synthetic(self) -> Tensor:
        """The synthetic series to train on, twice as long as a window."""
        return kernel_synth(self.config.num_synthetic, 2 * self._window, self.name, "train")

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Windows at random positions of random series, a function of (seed, step)."""
        rng = generator(self.name, "train", seed, step)
        is_synthetic = torch.rand(batch_size, generator=rng) < self.config.synthetic
        positions = torch.rand(batch_size, 2, generator=rng).tolist()
        windows = []
        for synthetic, (which, where) in zip(is_synthetic.tolist(), positions, strict=True):
            source = self._synthetic if synthetic else self._loads
            row = source[int(which * len(source))]
            start = int(where * (len(row) - self._window + 1))
            windows.append(row[start : start + self._window])
        return self._tokens(torch.stack(windows))

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean cross entropy of the labels, the end of the series included."""
        logits = model(**batch)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=_NONE)

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """Tokens of the context and of the labels."""
        forecaster = cast(ChronosForecaster, model)
        return forecaster.num_inputs + forecaster.num_outputs

    def _held_out(self, split: Split) -> dict[str, Tensor]:
        """Windows whose tokens are scored: synthetic series that training never draws, and oil temperatures
        of the split's rows.
        """
        count = self.config.eval_windows
        return {"synthetic": kernel_synth(count, self._window, self.name, split), "ett": self._oil(split, count)}

    def _oil(self, split: Split, count: int) -> Tensor:
        """``count`` windows of the oil temperature, in its units, spread evenly over a split."""
        starts = self.data.starts(split)
        values = torch.from_numpy(self.data.series.values).float()
        first = [starts[index] - self.config.context_length for index in self._chosen(split, count)]
        return torch.stack([values[start : start + self._window] for start in first])

    def _chosen(self, split: Split, count: int) -> list[int]:
        most = len(self.data.starts(split))
        return torch.linspace(0, most - 1, min(count, most), dtype=torch.float64).long().tolist()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``nats_per_token``, the mean of ``nats_synthetic`` and ``nats_ett``; on the test split also
        ``mase`` and ``wql`` of forecasts of the oil temperature."""
        scores = {}
        for name, series in self._held_out(split).items():
            batch = on_device_of(model, self._tokens(series))
            labels = batch["labels"].clone()
            labels[:, self.config.prediction_length :] = _NONE  # the end-of-series token is not scored
            logits = torch.cat([model(*parts) for parts in zip(*(batch[key].split(64) for key in batch), strict=True)])
            nats = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_NONE)
            scores[f"nats_{name}"] = float(nats)
        scores = {self.metric: sum(scores.values()) / len(scores), **scores}
        if split == "test":
            context, truth = self._test_windows()
            quantiles, median = self.forecast(model, context)
            scores |= forecast_scores(quantiles, median, truth, context, self.config.season)
        return scores

    def _test_windows(self) -> tuple[Tensor, Tensor]:
        """The look-backs and futures that are forecast, in units."""
        both = self._oil("test", self.config.forecasts)
        context, truth = both.split([self.config.context_length, self.config.prediction_length], dim=1)
        return context, truth

    @torch.no_grad()
    def forecast(self, model: nn.Module, context: Tensor) -> tuple[Tensor, Tensor]:
        """Quantiles (n, horizon, 9) and medians (n, horizon) of the pipeline's sample paths, the same at
        every call.
        """
        pipeline = cast(ChronosForecaster, model).pipeline()
        with seeded(derive_seed(self.name, "forecast"), next(model.parameters()).device):
            parts = [
                pipeline.predict_quantiles(
                    part,
                    prediction_length=self.config.prediction_length,
                    quantile_levels=list(QUANTILES),
                    num_samples=self.config.num_samples,
                )[0]
                for part in counted(context.split(16), "forecasts of the test series")
            ]
        quantiles = torch.cat(parts)
        return quantiles, quantiles[..., QUANTILES.index(0.5)]

    def baselines(self) -> list[Baseline]:
        """The season before, with intervals, and the frequencies of tokens."""
        context, truth = self._test_windows()
        season = self.config.season
        quantiles, point = seasonal_forecast(context, self.config.prediction_length, season)
        return [
            Baseline(
                name=f"seasonal naive ({season} steps)",
                metrics=forecast_scores(quantiles, point, truth, context, season),
                note=(
                    f"repeats the last {season} values; quantiles from how much the look-back changed from season to "
                    "season"
                ),
            ),
            Baseline(
                name="token frequencies",
                metrics=self._frequencies(),
                note="how often each token follows in the training windows (4,096 of them, each count raised by one)",
            ),
        ]

    def _frequencies(self) -> dict[str, float]:
        horizon = self.config.prediction_length
        counts = torch.ones(self.tokenizer.config.n_tokens, dtype=torch.float64)
        labels = self.batch(0, 0, 4096)["labels"][:, :horizon]
        counts += torch.bincount(labels.flatten(), minlength=len(counts))
        logs = (counts / counts.sum()).log()
        scores = {
            f"nats_{name}": -float(logs[self._tokens(series)["labels"][:, :horizon]].mean())
            for name, series in self._held_out("test").items()
        }
        return {self.metric: sum(scores.values()) / len(scores), **scores}

    def axis_labels(self) -> dict[str, str]:
        return {"value": "oil temperature (°C)", "step": "hours"}

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Three test forecasts in degrees: the median, and the interval from the lowest to the highest
        decile.
        """
        context, truth = self._test_windows()
        quantiles, median = self.forecast(model, context)
        count, low, high = len(context), quantiles[..., 0], quantiles[..., -1]
        shown = {"history": context, "truth": truth, "forecast": median, "low": low, "high": high}
        examples = []
        for index in sorted({count // 6, count // 2, 5 * count // 6}):
            start = self.data.first_time("test", self._chosen("test", self.config.forecasts)[index])
            examples.append({name: values[index].tolist() for name, values in shown.items()} | {"start": start})
        return {"examples": examples, "shaded": "from the lowest to the highest decile of the sample paths"}
