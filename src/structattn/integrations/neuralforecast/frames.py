"""``check_frame``: whether a data frame of series meets the assumptions of neuralforecast."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import Any

import pandas as pd

from structattn.errors import ConfigError, DataError, MissingDependencyError

# The units of polars offsets, as arguments of a pandas.DateOffset.
_POLARS_UNITS = {
    "ns": ("nanoseconds", 1),
    "us": ("microseconds", 1),
    "ms": ("microseconds", 1000),
    "s": ("seconds", 1),
    "m": ("minutes", 1),
    "h": ("hours", 1),
    "d": ("days", 1),
    "w": ("days", 7),
    "mo": ("months", 1),
    "q": ("months", 3),
    "y": ("months", 12),
}


def check_frame(
    df: Any, freq: str | int, *, id_col: str = "unique_id", time_col: str = "ds", target_col: str = "y"
) -> None:
    """Checks what neuralforecast assumes of a frame and does not check: without it, a model trains on wrong
    windows.

    It looks for missing columns, values that are not numbers, rows without an id or a time, rows of one
    series with the same time, and steps between rows other than ``freq`` (gaps, times off the grid or another
    frequency). Unequal lengths, starts and ends of series, and rows in any order, are fine.

    Args:
        df: a pandas or polars DataFrame, one row per series and time; a column ``available_mask`` of 0 and 1
            may mark rows that are only there to fill. One of polars is copied to pandas.
        freq: pandas offset (``"h"``, ``"MS"``) or, for a polars frame, polars offset (``"1h"``, ``"1mo"``),
            as neuralforecast takes it; an int where times are ints.
        id_col, time_col, target_col: names of the columns.

    Raises:
        DataError: lists every problem, its first position and what to do.
        ConfigError: ``freq`` is not a frequency, or does not fit the type of the times.
        MissingDependencyError: polars needs pyarrow to copy the frame to pandas.

    Cost: one sort of the frame.
    """
    is_polars = not isinstance(df, pd.DataFrame)
    if is_polars:
        df = _from_polars(df)
    missing = [name for name in (id_col, time_col, target_col) if name not in df.columns]
    if missing:
        raise DataError(
            f"the frame has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, df.columns))}: "
            "rename or pass id_col, time_col and target_col"
        )
    if df.empty:
        raise DataError("the frame has no rows")
    offset = _offset(df[time_col], freq, time_col, is_polars=is_polars)
    problems = _values(df, [name for name in df.columns if name not in (id_col, time_col)])
    unnamed = df[id_col].isna() | df[time_col].isna()
    if unnamed.any():
        problems.append(f"{unnamed.sum()} rows without {id_col} or {time_col}: drop them")
    problems += _steps(df[~unnamed].sort_values([id_col, time_col]), offset, freq, id_col, time_col)
    if problems:
        raise DataError("the frame does not hold series as neuralforecast reads them:\n- " + "\n- ".join(problems))


def _from_polars(df: Any) -> pd.DataFrame:
    """A polars frame as one of pandas."""
    is_polars = type(df).__module__.split(".")[0] == "polars"
    if not is_polars or not hasattr(df, "to_pandas"):
        remedy = ": call collect() first" if is_polars and hasattr(df, "collect") else ""
        raise DataError(f"expected a pandas.DataFrame or a polars.DataFrame, got {type(df).__name__}{remedy}")
    try:
        found = df.to_pandas()
    except ImportError as error:
        raise MissingDependencyError("a polars frame is copied to pandas by pyarrow: pip install pyarrow") from error
    if not isinstance(found, pd.DataFrame):  # a column has to_pandas too
        raise DataError(f"expected a pandas.DataFrame or a polars.DataFrame, got a polars {type(df).__name__}")
    return found


def _polars_offset(times: pd.Series, freq: str) -> Any:
    """The pandas offset of one of polars, ``None`` for other text. Where all times end a month, so do the
    next ones.
    """
    if not re.fullmatch(r"(\d{1,9}[a-z]+)+", freq):
        return None
    steps: Counter[str] = Counter()
    for count, unit in re.findall(r"(\d+)([a-z]+)", freq):
        if unit not in _POLARS_UNITS:
            return None
        name, factor = _POLARS_UNITS[unit]
        steps[name] += factor * int(count)
    if not any(steps.values()):
        return None
    if set(steps) == {"months"} and times.dropna().dt.is_month_end.all():
        return pd.offsets.MonthEnd(steps["months"])
    return pd.DateOffset(**steps)


def _offset(times: pd.Series, freq: str | int, time_col: str, *, is_polars: bool) -> Any:
    """The offset from one time to the next."""
    if pd.api.types.is_integer_dtype(times):
        if isinstance(freq, bool) or not isinstance(freq, int) or freq < 1:
            raise ConfigError(f"{time_col} holds ints, so freq must be a positive int, got {freq!r}")
        return freq
    if not pd.api.types.is_datetime64_any_dtype(times):
        raise DataError(
            f"{time_col} must hold timestamps or ints, got {times.dtype}: convert it with "
            + ("polars' str.to_datetime" if is_polars else "pandas.to_datetime")
        )
    if is_polars:
        if isinstance(freq, str) and (offset := _polars_offset(times, freq)) is not None:
            return offset
        raise ConfigError(
            f"{time_col} holds timestamps of polars, so freq must be a polars offset, such as '1h', '1d' or '1mo': got "
            f"{freq!r}"
        )
    if isinstance(freq, str):
        with contextlib.suppress(ValueError):
            return pd.tseries.frequencies.to_offset(freq)
    raise ConfigError(
        f"{time_col} holds timestamps, so freq must be a pandas offset, such as 'h', 'D' or 'MS': got {freq!r}"
    )


def _values(df: pd.DataFrame, columns: list[Any]) -> list[str]:
    """Columns that are not numeric, or not finite."""
    problems = []
    for name in columns:
        column = df[name]
        if not pd.api.types.is_numeric_dtype(column):
            problems.append(f"column {name!r} holds {column.dtype}, not numbers: convert or drop it")
            continue
        bad = column.isna() | column.isin([float("inf"), float("-inf")])
        if bad.any():
            # neuralforecast lets NaN pass where available_mask is 0, but most of its models compute with it
            # all the same.
            problems.append(
                f"column {name!r} is not a finite number in {bad.sum()} rows, first at index "
                f"{df.index[bad.to_numpy()][0]!r}: put in any "
                "number, and mark the rows by a column available_mask of 1 and, there, 0"
            )
        elif name == "available_mask" and not column.isin([0, 1]).all():
            problems.append("column 'available_mask' must hold only 0 and 1")
    return problems


def _steps(df: pd.DataFrame, offset: Any, freq: str | int, id_col: str, time_col: str) -> list[str]:
    """Times of one series that are the same, and steps that are not ``freq``; the frame is sorted."""
    problems = []
    if (again := df.duplicated([id_col, time_col])).any():
        problems.append(
            f"{again.sum()} rows have the {id_col} and {time_col} of another, first "
            f"{_where(df[again].iloc[0], id_col, time_col)}: keep one, "
            "df.drop_duplicates (polars: unique), or their mean"
        )
        df = df[~again]
    follows = (df[id_col] == df[id_col].shift(-1)).to_numpy()[:-1]
    times = df[time_col].iloc[:-1][follows]
    expected = times + offset
    found = df[time_col].iloc[1:][follows]
    wrong = expected.to_numpy() != found.to_numpy()
    if wrong.any():
        row = df.iloc[:-1][follows].iloc[int(wrong.argmax())]
        problems.append(
            f"{wrong.sum()} of {len(wrong)} steps are not {freq!r}, first after {_where(row, id_col, time_col)}, where "
            f"{expected[wrong].iloc[0]} should follow, and {found[wrong].iloc[0]} does: "
            + (
                "is this the frequency?"
                if wrong.all()
                else "move times onto the grid, fill gaps with utilsforecast.preprocessing.fill_gaps, and mark "
                "the new rows by a column available_mask of 1 and, there, 0"
            )
        )
    return problems


def _where(row: pd.Series, id_col: str, time_col: str) -> str:
    return f"{row[time_col]} of {row[id_col]!r}"
