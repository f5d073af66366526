"""Several series of the same times, cut into the same windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from structattn_lab.data.series import TimeSeries, WindowedSeries
from structattn_lab.data.splits import DataSplit
from structattn_lab.tasks.base import Baseline
from structattn_lab.tasks.forecast.baselines import Method, fitted_methods, forecast_baselines, forecast_metrics


class WindowedChannels:
    """Series of the same times, each scaled by its own training rows, cut into (channels, look-back) and
    (channels, horizon) windows.

    Args:
        series: one or more, of the same times.
        look_back, horizon: see ``WindowedSeries``, also for the errors.

    Attributes:
        channels: the ``WindowedSeries``, in order.
    """

    def __init__(self, series: Sequence[TimeSeries], look_back: int, horizon: int) -> None:
        self.channels = [WindowedSeries(channel, look_back, horizon) for channel in series]
        self._scaled = torch.from_numpy(np.stack([channel.scaled for channel in self.channels]).astype(np.float32))

    @property
    def names(self) -> list[str]:
        """The columns that the series came from."""
        return [channel.series.name for channel in self.channels]

    def windows(self, split: DataSplit) -> tuple[Tensor, Tensor]:
        """As of ``WindowedSeries``: float32 views of shapes ``(n, channels, look_back)`` and
        ``(n, channels, horizon)``.
        """
        X, Y = self.channels[0].windows(split, self._scaled)
        return X.transpose(0, 1), Y.transpose(0, 1)

    def metrics(self, forecast: Tensor, truth: Tensor) -> dict[str, float]:
        """The errors of ``forecast_metrics``, averaged over the channels.

        Args:
            forecast, truth: scaled values, ``(n, channels, horizon)``.
        """
        of_channels = zip(forecast.unbind(1), truth.unbind(1), self.channels, strict=True)
        return _mean([forecast_metrics(*pair) for pair in of_channels])

    def fitted(self, season: int | None) -> list[tuple[Method, ...]]:
        """``fitted_methods`` of every channel by itself: of each method, one for each channel."""
        return list(zip(*(fitted_methods(channel, season) for channel in self.channels), strict=True))

    def baselines(self, methods: Sequence[Sequence[Method]]) -> list[Baseline]:
        """``forecast_baselines`` of what ``fitted`` returns, averaged over the channels."""
        of_channels = zip(self.channels, zip(*methods, strict=True), strict=True)
        rows = zip(
            *(forecast_baselines(channel, methods_of_channel) for channel, methods_of_channel in of_channels),
            strict=True,
        )
        return [_average(list(of_channels)) for of_channels in rows]


def _average(rows: list[Baseline]) -> Baseline:
    first = rows[0]
    note = first.note if len(rows) == 1 else f"each column by itself; of the first: {first.note}"
    leads = torch.tensor([row.details["error_by_lead"] for row in rows], dtype=torch.float64).mean(0)
    return Baseline(
        name=first.name,
        metrics=_mean([row.metrics for row in rows]),
        note=note,
        validation=sum(row.validation or 0.0 for row in rows) / len(rows),
        details={"error_by_lead": leads.tolist()},
    )


def _mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(of_channel[name] for of_channel in metrics) / len(metrics) for name in metrics[0]}
