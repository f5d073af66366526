"""Time series from a CSV file: reading and checking them."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from structattn.errors import DataError, MissingDependencyError, nearest_name
from structattn.tasks.series import Floats, Series, Times, ett_split

_EMPTY = {"", "na", "n/a", "<na>", "nan", "-nan", "null", "none", "nat"}
_INFINITE = {sign + word for sign in ("", "+", "-") for word in ("inf", "infinity")}
_ETT_COLUMNS = {"date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"}
ALL_COLUMNS = "*"


def read_series(path: Path | None, time: str, target: str) -> Series:
    """Reads one column of a CSV file as a time series: see ``read_columns``."""
    return _read(path, time, lambda columns, source: [_column(target, columns, source)])[0]


def read_columns(path: Path | None, time: str, target: str) -> list[Series]:
    """Reads columns of a CSV file as time series of the same times and checks that they can be forecast.

    Args:
        path: the CSV file, with one header row; None takes the packaged ETTh1.
        time: the column with the times.
        target: the column with the values; several with commas between them; or ``"*"``, all but the times.

    Returns:
        A series for each column.

    Raises:
        DataError: the file, a column, a value or the spacing of the times is not usable.
        MissingDependencyError: pandas is not installed.
    """

    def choose(columns: list[str], source: str) -> list[str]:
        if target in columns:
            return [target]
        if target == ALL_COLUMNS:
            return [column for column in columns if column != time]
        names = [_column(name.strip(), columns, source) for name in target.split(",")]
        if len(set(names)) != len(names):
            raise DataError(f"{source}: expected every column once, got {target!r}. Leave out the second one.")
        return names

    return _read(path, time, choose)


def _column(name: str, columns: list[str], source: str) -> str:
    if name not in columns:
        raise DataError(
            f"{source}: expected a target column {name!r}, got a file without it. Name a column of the file: "
            f"{nearest_name(name, columns)}"
        )
    return name


def _read(path: Path | None, time: str, choose: Callable[[list[str], str], list[str]]) -> list[Series]:
    source = "packaged ETTh1.csv" if path is None else str(path)
    frame = _read_table(_read_bytes(path), source)
    columns = [str(column) for column in frame.columns]
    if time not in columns:
        raise DataError(
            f"{source}: expected a time column {time!r}, got a file without it. Name a column of the file: "
            f"{nearest_name(time, columns)}"
        )
    targets = choose(columns, source)
    values = [_parse_values([str(cell).strip() for cell in frame[name]], name, source) for name in targets]
    times = _parse_times([str(cell).strip() for cell in frame[time]], time, source)
    step = _check_regular(times, source)
    split = ett_split(step) if set(columns) == _ETT_COLUMNS else None
    is_ett = split is not None and len(times) >= split[2]
    return [
        Series(values=own, times=times, name=name, step=step, is_ett=is_ett)
        for own, name in zip(values, targets, strict=True)
    ]


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
