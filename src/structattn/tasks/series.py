"""One time series from a CSV file: reading and checking it, splitting it by time, cutting it into windows."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from structattn.errors import ConfigError, DataError, MissingDependencyError, nearest_name

SeriesSplit = Literal["train", "validation", "test"]
Floats = npt.NDArray[np.float64]
Times = npt.NDArray[np.datetime64]

_EMPTY = {"", "na", "n/a", "<na>", "nan", "-nan", "null", "none", "nat"}
_INFINITE = {sign + word for sign in ("", "+", "-") for word in ("inf", "infinity")}
_ETT_SPLIT = (8640, 11520, 14400)
_SPLITS: tuple[SeriesSplit, ...] = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """A regular time series without missing values.

    Attributes:
        values: the measurements, one per step.
        times: when each was taken (UTC when the file gave offsets), strictly increasing.
        name: the column that the values came from.
        step: the time between two values in words, such as ``"1 hour"``.
        is_ett: True for the packaged ETTh1, which has its own customary split.
    """

    values: Floats
    times: Times
    name: str
    step: str
    is_ett: bool = False


def read_series(path: Path | None, time: str, target: str) -> Series:
    """Reads one column of a CSV file as a time series and checks that it can be forecast.

    Args:
        path: the CSV file, with one header row; None takes the packaged ETTh1.
        time: the column with the times.
        target: the column with the values.

    Returns:
        The series.

    Raises:
        DataError: the file, a column, a value or the spacing of the times is not usable.
        MissingDependencyError: pandas is not installed.
    """
    source = "packaged ETTh1.csv" if path is None else str(path)
    frame = _read_table(_read_bytes(path), source)
    for role, column in (("time", time), ("target", target)):
        if column not in frame.columns:
            hint = nearest_name(column, [str(c) for c in frame.columns])
            raise DataError(
                f"{source}: expected a {role} column {column!r}, got a file without it. Name a column of the "
                f"file: {hint}"
            )
    values = _parse_values([str(cell).strip() for cell in frame[target]], target, source)
    times = _parse_times([str(cell).strip() for cell in frame[time]], time, source)
    step = _check_regular(times, source)
    return Series(values=values, times=times, name=target, step=step, is_ett=path is None)


def split_points(n: int, *, is_ett: bool) -> tuple[int, int, int]:
    """Where the training, validation and test rows end.

    Args:
        n: the number of rows.
        is_ett: True for the customary split of hourly ETT data (12, 4 and 4 months of 30 days; later rows are
            unused); False for 60, 20 and 20 % of all rows.

    Returns:
        ``(a, b, c)``: train is ``[0, a)``, validation ``[a, b)``, test ``[b, c)``.

    Raises:
        DataError: fewer rows than the ETT split needs.
    """
    if not is_ett:
        return n * 6 // 10, n * 8 // 10, n
    if n < _ETT_SPLIT[2]:
        raise DataError(
            f"expected at least {_ETT_SPLIT[2]} rows for the ETT split, got {n}. Use the whole ETT file, or "
            "the 60/20/20 split."
        )
    return _ETT_SPLIT


class WindowedSeries:
    """A series scaled by its training rows and cut into (look-back, horizon) windows, one per possible start.

    A training window lies wholly inside the training rows. A validation or test window has all its targets
    inside its own split and may look back across the left border, as a forecaster in use would.

    Attributes:
        series: the data in its own units.
        look_back: steps that a forecaster sees.
        horizon: steps that it forecasts.
        bounds: the ends of the three splits, see ``split_points``.
        mean: mean of the training rows.
        std: population standard deviation of the training rows.
        scaled: ``(values - mean) / std`` of all rows.
    """

    def __init__(self, series: Series, look_back: int, horizon: int) -> None:
        """Fits the scaler on the training rows.

        Args:
            series: the data.
            look_back: steps that a forecaster sees, at least 1.
            horizon: steps that it forecasts, at least 1.

        Raises:
            ConfigError: look_back or horizon below 1.
            DataError: too few rows for one window in every split, or a target that is constant in training.
        """
        for name, value in (("look_back", look_back), ("horizon", horizon)):
            if value < 1:
                raise ConfigError(f"expected {name} of at least 1, got {value}. Give a positive number of steps.")
        n = len(series.values)
        self.series = series
        self.look_back = look_back
        self.horizon = horizon
        self.bounds = split_points(n, is_ett=series.is_ett)
        if not _fits(self.bounds, look_back, horizon):
            raise DataError(_too_short(n, look_back, horizon, is_ett=series.is_ett))
        train = series.values[: self.bounds[0]]
        if float(train.max()) == float(train.min()):
            raise DataError(
                f"expected column {series.name!r} to vary in its training rows, got the constant "
                f"{train[0]:g} in all {len(train)}. Choose another target column or another stretch of the "
                "data."
            )
        self.mean = float(train.mean())
        self.std = float(train.std())
        self.scaled: Floats = (series.values - self.mean) / self.std
        self._tensor = torch.from_numpy(self.scaled.astype(np.float32))

    def starts(self, split: SeriesSplit) -> range:
        """The row of the first target of each window, in the order of ``windows``.

        Args:
            split: which rows.

        Raises:
            ConfigError: no such split.
        """
        if split not in _SPLITS:
            raise ConfigError(f"expected a split, got {split!r}. Use one of them: {nearest_name(split, _SPLITS)}")
        edges = (self.look_back, *self.bounds)
        i = _SPLITS.index(split)
        first = edges[0] if i == 0 else edges[i]
        return range(first, edges[i + 1] - self.horizon + 1)

    def windows(self, split: SeriesSplit) -> tuple[Tensor, Tensor]:
        """All windows of a split, scaled, as overlapping float32 views of one tensor: do not write into them.

        Args:
            split: which rows.

        Returns:
            ``(X, Y)`` of shapes ``(n, look_back)`` and ``(n, horizon)``.
        """
        starts = self.starts(split)
        first, stop = starts.start, starts.stop
        X = self._tensor[first - self.look_back : stop - 1].unfold(0, self.look_back, 1)
        Y = self._tensor[first : stop - 1 + self.horizon].unfold(0, self.horizon, 1)
        return X, Y

    def to_units(self, scaled: Tensor) -> Tensor:
        """Scaled values in the units of the data.

        Args:
            scaled: any shape.
        """
        return scaled * self.std + self.mean

    def times_at(self, split: SeriesSplit, index: int) -> tuple[Times, Times]:
        """The times of one window.

        Args:
            split: which rows.
            index: the row in ``windows(split)``; negative counts from the end.

        Returns:
            The times of its look-back and of its targets.
        """
        start = self.starts(split)[index]
        times = self.series.times
        return times[start - self.look_back : start], times[start : start + self.horizon]


def _fits(bounds: tuple[int, int, int], look_back: int, horizon: int) -> bool:
    a, b, c = bounds
    return a >= look_back + horizon and b - a >= horizon and c - b >= horizon


def _too_short(n: int, look_back: int, horizon: int, *, is_ett: bool) -> str:
    a, b, _ = _ETT_SPLIT
    if is_ett:
        return (
            f"expected look_back + horizon of at most {a} and a horizon of at most {b - a} for the ETT "
            f"split, got look_back {look_back} and horizon {horizon}. Choose shorter ones."
        )
    need = max(n, (look_back + horizon) * 10 // 6 - 10, horizon * 5 - 10)
    while not _fits(split_points(need, is_ett=False), look_back, horizon):
        need += 1
    return (
        f"expected at least {need} rows for look_back {look_back} and horizon {horizon} (60 % of the rows "
        f"train, and one window must fit in each split), got {n}. Give more data, or a shorter look_back or "
        "horizon."
    )


def _read_bytes(path: Path | None) -> bytes:
    if path is None:
        return files("structattn.tasks").joinpath("data", "ETTh1.csv").read_bytes()
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"expected a CSV file at {path}, got no such file. Check the path.") from None
    except OSError as error:
        raise DataError(
            f"expected a readable CSV file at {path}, got: {error}. Check that it is a file and its permissions."
        ) from error


def _pandas() -> Any:
    try:
        return import_module("pandas")
    except ImportError as error:
        raise MissingDependencyError(
            "reading a time series needs pandas, which is not installed: pip install 'structattn[train]'"
        ) from error


def _read_table(content: bytes, source: str) -> Any:
    """The file as a frame of text cells, so that every later message can quote what the file says."""
    pd = _pandas()
    empty = f"{source}: expected a header row and data rows, got an empty file. Check how it was written."
    if not content.strip():
        raise DataError(empty)
    try:
        # Blank lines are kept so that a row's position gives its line in the file.
        frame = pd.read_csv(
            io.BytesIO(content),
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            encoding="utf-8-sig",
        ).fillna("")
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise DataError(
            f"{source}: expected comma-separated text in UTF-8, got: {error}. Save it as a plain CSV file."
        ) from error
    if not isinstance(frame.index, pd.RangeIndex):
        raise DataError(
            f"{source}: expected as many column names as cells in each row, got {len(frame.columns)} names "
            "and longer rows. Name every column in the first row."
        )
    filled = np.flatnonzero((frame != "").any(axis=1).to_numpy())
    if len(filled) == 0:
        raise DataError(f"{source}: expected data rows, got only a header row. Check how the file was written.")
    return frame.iloc[: filled[-1] + 1]


def _parse_values(cells: list[str], column: str, source: str) -> Floats:
    values = np.full(len(cells), np.nan)
    missing: list[int] = []
    for i, cell in enumerate(cells):
        if cell.lower() in _EMPTY or cell.lower() in _INFINITE:
            missing.append(i)
            continue
        try:
            values[i] = float(cell if "_" not in cell else "")
        except ValueError:
            raise DataError(
                f"{source}: expected numbers in column {column!r}, got {cell!r} in row {_row(i)} of the "
                "file. Correct the cell (decimal point, no units, no thousands separators), or choose "
                "another target column."
            ) from None
        if not math.isfinite(values[i]):  # a number beyond the largest float
            missing.append(i)
    if missing:
        raise DataError(
            f"{source}: expected a finite number in every row of column {column!r}, got {len(missing)} "
            f"empty, NaN or infinite cells, the first one in row {_row(missing[0])} of the file. Fill them "
            "in (for example by interpolation) or keep a stretch without them."
        )
    return values


def _row(index: int) -> int:
    """The line in the file; the header is line 1."""
    return index + 2


def _parse_times(cells: list[str], column: str, source: str) -> Times:
    pd = _pandas()

    def parse(**how: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # pandas guessing a format: we check the outcome
            return pd.to_datetime(pd.Series(cells, dtype=object), errors="coerce", utc=True, **how)

    parsed = parse(format="ISO8601")
    if parsed.isna().any():
        # Other ways of writing count only when the column does not begin as ISO 8601.
        iso = not parsed.isna()[0]
        readings = [parsed] if iso else [parse(dayfirst=False), parse(dayfirst=True)]
        complete = [r for r in readings if not r.isna().any()]
        if len(complete) == 2 and not complete[0].equals(complete[1]):
            raise DataError(
                f"{source}: expected one way to read the times in column {column!r}, got {cells[0]!r}, which "
                "can put the day or the month first. Write the times as YYYY-MM-DD HH:MM:SS."
            )
        if not complete:
            # Quote the row where the best reading fails.
            bad = max(int(np.flatnonzero(r.isna().to_numpy())[0]) for r in readings)
            raise DataError(
                f"{source}: expected a time in every row of column {column!r}, got {cells[bad]!r} in row "
                f"{_row(bad)} of the file. Write the times as YYYY-MM-DD HH:MM:SS, all in the same way."
            )
        parsed = complete[0]
    times: Times = parsed.dt.tz_localize(None).to_numpy().astype("datetime64[us]")
    return times


def _check_regular(times: Times, source: str) -> str:
    """The step of regular times in words; DataError for other times."""
    if len(times) < 3:
        raise DataError(f"{source}: expected at least 3 data rows, got {len(times)}. Give more data.")
    steps = np.diff(times).astype("timedelta64[us]").astype(np.int64)
    if (steps <= 0).any():
        i = int(np.argmax(steps <= 0))
        problem = "the same time twice" if steps[i] == 0 else "a time before the one above it"
        remedy = "Remove the double row" if steps[i] == 0 else "Sort the file by time"
        raise DataError(
            f"{source}: expected times that increase from row to row, got {problem}: {_when(times[i])} and "
            f"then {_when(times[i + 1])} in row {_row(i + 1)} of the file. {remedy}; one file holds one "
            "series."
        )
    if (steps == steps[0]).all():
        return _duration(int(steps[0]))
    months = _month_steps(times)
    if months is not None:
        usual = _most_frequent(months)
        if (months == usual).all():
            return _count(usual, "month")
        off, step = months != usual, _count(usual, "month")
    else:
        frequency = _calendar_frequency(times)
        if frequency is not None:
            return "1 business day" if frequency == "B" else f"calendar step {frequency}"
        usual = _most_frequent(steps)
        off, step = steps != usual, _duration(usual)
    i = int(np.argmax(off))
    raise DataError(
        f"{source}: expected the same step between all rows, got {int(off.sum())} irregular steps; the usual "
        f"step is {step}, and the first gap is from {_when(times[i])} to {_when(times[i + 1])} (row "
        f"{_row(i + 1)} of the file). Fill in the missing rows (for example pandas' asfreq and interpolate) "
        "or keep a stretch without gaps."
    )


def _month_steps(times: Times) -> npt.NDArray[np.int64] | None:
    """Steps in calendar months if all times are the same moment of a month or of its last day."""
    months = times.astype("datetime64[M]")
    since_start = times - months.astype(times.dtype)
    until_end = (months + 1).astype(times.dtype) - times
    if not ((since_start == since_start[0]).all() or (until_end == until_end[0]).all()):
        return None
    numbers: npt.NDArray[np.int64] = months.astype(np.int64)
    return numbers[1:] - numbers[:-1]


def _calendar_frequency(times: Times) -> str | None:
    """The name that pandas gives to the spacing, such as ``"B"``."""
    pd = _pandas()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas 3 announces that a later version returns an object
        found = pd.infer_freq(pd.DatetimeIndex(times))
    return None if found is None else str(getattr(found, "freqstr", found))


def _most_frequent(numbers: npt.NDArray[np.int64]) -> int:
    found, counts = np.unique(numbers, return_counts=True)
    return int(found[np.argmax(counts)])


def _when(time: np.datetime64) -> str:
    return str(time.astype("datetime64[s]")).replace("T", " ")


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def _duration(microseconds: int) -> str:
    units = (
        ("day", 86_400_000_000),
        ("hour", 3_600_000_000),
        ("minute", 60_000_000),
        ("second", 1_000_000),
        ("millisecond", 1000),
        ("microsecond", 1),
    )
    return next(_count(microseconds // size, unit) for unit, size in units if microseconds % size == 0)
