"""A time series, split by time and cut into windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from structattn.errors import ConfigError, DataError, nearest_name
from structattn_lab.data.splits import SPLITS, DataSplit

Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.datetime64]

_BEYOND = 1e4  # times further from the median than the others: a failed sensor, or a mark of a missing value
_LARGEST, _SMALLEST = 1e18, 1e-18  # numbers whose squares float32 holds
_ROUNDING = 1e-12  # of the largest value
_ETT_HOURS = (8640, 11520, 14400)  # the ends of its splits
_DAY = 86_400_000_000  # microseconds
_SEASONS = {"1 day": 7, "1 business day": 5, "1 month": 12, "3 months": 4}
_ETT_STEPS = {"1 hour": 1, "15 minutes": 4}  # rows per hour


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeSeries:
    """A regular time series without missing values.

    Attributes:
        values: the measurements, one per step.
        times: when each was taken (UTC when the file gave offsets), strictly increasing.
        name: the column that the values came from.
        step: the time between two values in words, such as ``"1 hour"``.
        is_ett: True for a complete file of the ETT data, hourly or quarter-hourly, which have a customary
            split.
    """

    values: Floats
    times: Times
    name: str
    step: str
    is_ett: bool = False


def ett_split(step: str) -> tuple[int, int, int] | None:
    """The customary ends of the splits of ETT data, by the step between rows in words; ``None`` for other
    steps.
    """
    if step not in _ETT_STEPS:
        return None
    a, b, c = (hours * _ETT_STEPS[step] for hours in _ETT_HOURS)
    return a, b, c


def check_scale(values: Floats, where: Callable[[int], str]) -> None:
    """Raises ``DataError`` for numbers that make scores meaningless: a few cells far beyond all others, as of
    a failed sensor or a mark of missing values, determine the scale, so that everything else is 0; squares
    beyond float32 are infinite.

    Args:
        values: finite numbers.
        where: names the position of a value, for the message.
    """
    middle = float(np.median(values))
    with np.errstate(over="ignore"):
        distance = np.abs(values - middle)
    order = np.argsort(distance)
    ranked = distance[order]
    first = max(0, len(values) - max(3, len(values) // 100))  # at most three such cells, or one in a hundred
    rest = np.maximum(ranked[first - 1 : -1], abs(middle))
    if first and len(beyond := np.flatnonzero((ranked[first:] > _BEYOND * rest) & (rest > 0))):
        i = int(order[first + beyond[0] :].min())
        usual = float(ranked[first + beyond[0] - 1])
        raise DataError(
            f"{where(i)}: expected a number like the others, got {values[i]:g}, while {first + beyond[0]} of "
            f"{len(values)} are within {usual:g} of "
            f"{middle:g}. Scores would measure only this cell: correct it, or fill it in by interpolation"
        )
    if (large := np.abs(values) > _LARGEST).any():
        i = int(np.argmax(large))
        raise DataError(
            f"{where(i)}: expected numbers of at most {_LARGEST:g}, whose squares float32 holds, got {values[i]:g}. "
            "Correct it, or write the column in a larger unit"
        )


def split_points(series: TimeSeries) -> tuple[int, int, int]:
    """Where the training, validation and test rows end: ``(a, b, c)``, train is ``[0, a)``, validation
    ``[a, b)``, test ``[b, c)``.

    Of ETT data they are 12, 4 and 4 months of 30 days, and later rows are unused; of other data 60, 20 and 20
    % of all rows.
    """
    customary = ett_split(series.step) if series.is_ett else None
    return _shares(len(series.values)) if customary is None else customary


def _shares(n: int) -> tuple[int, int, int]:
    return n * 6 // 10, n * 8 // 10, n


def usual_season(series: TimeSeries) -> int | None:
    """Steps of the usual season: a day, a week of daily values, a year of months; ``None`` if there is
    none.
    """
    if series.step in _SEASONS:
        return _SEASONS[series.step]
    steps = np.diff(series.times[:2]).astype("timedelta64[us]").astype(np.int64)
    step = int(steps[0])
    return None if step >= _DAY or _DAY % step else _DAY // step


class WindowedSeries:
    """A series scaled by its training rows and cut into (look-back, horizon) windows, one per possible start.

    A training window lies wholly inside the training rows. A validation or test window has all its targets
    inside its split and may look back into the split before it, as a deployed forecaster would.

    Args:
        series: the data.
        look_back: steps that a forecaster sees.
        horizon: steps that it forecasts.

    Attributes:
        bounds: the ends of the three splits, see ``split_points``.
        mean, std: of the training rows; the population standard deviation.
        scaled: ``(values - mean) / std`` of all rows.

    Raises:
        ConfigError: look_back or horizon below 1.
        DataError: too few rows for one window in every split, or a target that is constant in training.
    """

    def __init__(self, series: TimeSeries, look_back: int, horizon: int) -> None:
        for name, value in (("look_back", look_back), ("horizon", horizon)):
            if value < 1:
                raise ConfigError(f"expected {name} of at least 1, got {value}. Give a positive number of steps.")
        self.series = series
        self.look_back = look_back
        self.horizon = horizon
        self.bounds = split_points(series)
        if not _fits(self.bounds, look_back, horizon):
            raise DataError(_too_short(series, look_back, horizon))
        if not np.isfinite(series.values).all():
            raise DataError(f"expected finite numbers in column {series.name!r}, got others. Fill them in.")
        check_scale(series.values, lambda i: f"column {series.name!r}, value {i}")
        train = series.values[: self.bounds[0]]
        spread = float(train.max()) - float(train.min())
        if spread <= _ROUNDING * float(np.abs(train).max()):  # values that differ only by rounding are constant too
            raise DataError(
                f"expected column {series.name!r} to vary in its training rows, got the constant "
                f"{train[0]:g} in all {len(train)}. Choose another target column or another span of the "
                "data."
            )
        if spread < _SMALLEST:
            raise DataError(
                f"expected column {series.name!r} to vary by at least {_SMALLEST:g}, whose square float32 holds, got "
                f"{spread:g}. Write the column in a smaller unit."
            )
        self.mean = float(train.mean())
        self.std = float(train.std())
        self.scaled: Floats = (series.values - self.mean) / self.std

    def starts(self, split: DataSplit) -> range:
        """The row of the first target of each window, in the order of ``windows``; raises ``ConfigError`` for
        an unknown split.
        """
        if split not in SPLITS:
            raise ConfigError(f"expected a split, got {split!r}. Use one of them: {nearest_name(split, SPLITS)}")
        edges = (self.look_back, *self.bounds)
        i = SPLITS.index(split)
        return range(edges[i], edges[i + 1] - self.horizon + 1)

    def windows(self, split: DataSplit, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All windows of a split, as overlapping views of one tensor: do not write into them.

        Args:
            split: which rows.
            values: of the same rows, (..., rows). Default: those of the series, scaled, in float32.

        Returns:
            ``(X, Y)`` of shapes ``(..., n, look_back)`` and ``(..., n, horizon)``.
        """
        if values is None:
            values = torch.from_numpy(self.scaled.astype(np.float32))
        starts = self.starts(split)
        X = values[..., starts.start - self.look_back : starts.stop - 1].unfold(-1, self.look_back, 1)
        Y = values[..., starts.start : starts.stop - 1 + self.horizon].unfold(-1, self.horizon, 1)
        return X, Y

    def to_units(self, scaled: Tensor) -> Tensor:
        """Scaled values, of any shape, in the units of the data."""
        return scaled * self.std + self.mean

    def times_at(self, split: DataSplit, index: int) -> tuple[Times, Times]:
        """The times of the look-back and of the targets of a window; ``index`` is its row in
        ``windows(split)``.
        """
        start = self.starts(split)[index]
        times = self.series.times
        return times[start - self.look_back : start], times[start : start + self.horizon]

    def first_time(self, split: DataSplit, index: int) -> str:
        """The time of the first target of one window, to the minute, for people."""
        _, times = self.times_at(split, index)
        return str(times[0].astype("datetime64[m]")).replace("T", " ")


def _fits(bounds: tuple[int, int, int], look_back: int, horizon: int) -> bool:
    a, b, c = bounds
    return a >= look_back + horizon and b - a >= horizon and c - b >= horizon


def _too_short(series: TimeSeries, look_back: int, horizon: int) -> str:
    n = len(series.values)
    if series.is_ett:
        a, b, _ = split_points(series)
        return (
            f"expected look_back + horizon of at most {a} and a horizon of at most {b - a} for the ETT "
            f"split, got look_back {look_back} and horizon {horizon}. Choose shorter ones."
        )
    need = max(n, (look_back + horizon) * 10 // 6 - 10, horizon * 5 - 10)
    while not _fits(_shares(need), look_back, horizon):
        need += 1
    return (
        f"expected at least {need} rows for look_back {look_back} and horizon {horizon} (60 % of the rows "
        f"train, and one window must fit in each split), got {n}. Give more data, or a shorter look_back or "
        "horizon."
    )
