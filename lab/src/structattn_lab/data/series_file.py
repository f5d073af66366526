"""Reads and checks time series from a CSV file."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from structattn.errors import DataError, nearest_name
from structattn_lab.data.series import Floats, Times, TimeSeries, check_scale, ett_split
from structattn_lab.data.series_table import CellTable, CsvTable, pandas
from structattn_lab.data.time_steps import microseconds, most_frequent, step_of, usual_step

_EMPTY = {"", "na", "n/a", "<na>", "nan", "-nan", "null", "none", "nat"}
_ETT_COLUMNS = {"date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"}
ALL_COLUMNS = "*"
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
_CLOCK = re.compile(r"^\d{1,2}:\d\d")  # pandas would take the date of today
_ZONE = re.compile(r":\d\d(\.\d+)? ?([+-]\d\d:?(\d\d)?|Z|UTC|GMT)$", re.IGNORECASE)
# How dates are written that are not ISO 8601, with any of three separators, and the time behind them.
_DATE_FORMATS = ("%Y-%m-%d", "%m-%d-%Y", "%d-%m-%Y", "%m-%d-%y", "%d-%m-%y")
_CLOCK_FORMATS = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
_FIRST_YEAR = 1000  # four digits; what has none is read as one of the first years
_HOUR = 3_600_000_000  # microseconds
_DATES = (
    "Local days do that where clocks are set back or forward: write days and months as dates, without a time and an "
    "offset"
)
_UTC = (
    "Local times do that where clocks are set back or forward: write the times in UTC (pandas' tz_localize with "
    "ambiguous='infer' and then tz_convert('UTC')) or with offsets such as +01:00"
)


def read_series(path: Path | None, time: str, target: str) -> TimeSeries:
    """Reads one column of a CSV file as a time series: see ``read_columns``."""
    table = CsvTable(path, time)
    return _read(table, time, [_column(target, table)])[0]


def read_columns(path: Path | None, time: str, target: str) -> list[TimeSeries]:
    """Reads columns of a CSV file as time series of the same times and checks that they can be forecast.

    Args:
        path: the CSV file (see ``CsvTable``); ``None``: the packaged ETTh1.
        time: the column with the times.
        target: the column with the values; several with commas between them; or ``"*"``, all but the times.

    Raises:
        DataError: the file, a column, a value or the spacing of the times is not usable.
        MissingDependencyError: pandas is not installed.
    """
    table = CsvTable(path, time)
    return _read(table, time, _targets(table, time, target))


@dataclass(frozen=True, kw_only=True, eq=False)
class PastRows:
    """Columns of a table that a forecast starts from.

    Attributes:
        values: (columns, rows), finite.
        times: of the rows, regular, in UTC if there is a zone; ``None`` where the table has no dates.
        zone: of the times in the table; ``None`` where they have none.
    """

    values: Floats
    times: Times | None
    zone: Any = None


def read_rows(table: CellTable, time: str, targets: Sequence[str]) -> PastRows:
    """Reads columns with the checks of ``read_columns``.

    Without the column of times, and without any column of texts, which might hold them under another name,
    the rows are steps.

    Raises:
        DataError: as ``read_columns``, also for a column that is missing.
    """
    if missing := [name for name in targets if name not in table.columns]:
        raise DataError(
            f"{table.source}: expected the columns of the training, {', '.join(map(repr, targets))}, got a "
            f"{table.noun} without {', '.join(map(repr, missing))}: "
            f"{nearest_name(missing[0], [column for column in table.columns if column])}"
        )
    values = np.stack([_parse_values(table, name) for name in targets])
    if time in table.columns:
        times = _parse_times(table, time)
        _check_regular(times, table)
        zone = table.zone(time) or ("UTC" if _ZONE.search(table.cells(time)[0]) else None)
        return PastRows(values=values, times=times, zone=zone)
    others = [name for name in dict.fromkeys(table.columns) if name not in targets and table.columns.count(name) == 1]
    if texts := [name for name in others if not _is_number(table.cells(name)[0])]:
        raise DataError(
            f"{table.source}: expected a time column {time!r}, as in training, got a {table.noun} without it. Name its "
            f"column with --time: {nearest_name(time, texts)}"
        )
    return PastRows(values=values, times=None)


def _is_number(cell: str) -> bool:
    with contextlib.suppress(ValueError):
        float(cell.replace(",", "."))
        return True
    return cell.lower() in _EMPTY


def _targets(table: CellTable, time: str, target: str) -> list[str]:
    if target.strip() in table.columns:
        return [target.strip()]
    if target == ALL_COLUMNS:
        if "" in table.columns:
            raise DataError(
                f"{table.source}: expected a name of every column, got none of column {table.columns.index('') + 1}. "
                "Name it, or name the columns to forecast with --target"
            )
        return [column for column in table.columns if column != time.strip()]
    names = [_column(name, table) for name in target.split(",")]
    if len(set(names)) != len(names):
        raise DataError(f"{table.source}: columns must be unique, got {target!r}. Leave out the second one.")
    return names


def _column(name: str, table: CellTable) -> str:
    if name.strip() not in table.columns or not name.strip():
        raise DataError(
            f"{table.source}: expected a target column {name!r}, got a file without it. Name a column of the file with "
            f"--target: {nearest_name(name, [column for column in table.columns if column])}"
        )
    return name.strip()


def _read(table: CellTable, time: str, targets: list[str]) -> list[TimeSeries]:
    source = table.source
    if not targets:
        raise DataError(f"{source}: expected a column other than the times, got none. Add one with the values.")
    values = [_parse_values(table, name) for name in targets]
    times = _parse_times(table, time)
    step = _check_regular(times, table)
    split = ett_split(step) if set(table.columns) == _ETT_COLUMNS else None
    is_ett = split is not None and len(times) >= split[2]
    return [
        TimeSeries(values=column_values, times=times, name=name, step=step, is_ett=is_ett)
        for column_values, name in zip(values, targets, strict=True)
    ]


def _parse_values(table: CellTable, column: str) -> Floats:
    cells, source = table.numbers(column), table.source
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        try:
            values[i] = float(cell if "_" not in cell else "")  # Python reads 1_000 as a number, but a file does not
        except ValueError:
            if cell.lower() not in _EMPTY:
                raise DataError(
                    f"{source}: expected numbers in column {column!r}, got {cell!r} in {table.row(i)}. "
                    "Correct the cell (decimal point, no units, no thousands separators), or choose "
                    "another target column."
                ) from None
            values[i] = np.nan
    missing = np.flatnonzero(~np.isfinite(values))
    if len(missing):
        raise DataError(
            f"{source}: expected a finite number in every row of column {column!r}, got {len(missing)} "
            f"empty, NaN or infinite cells, the first one in {table.row(int(missing[0]))}. Fill them in "
            "(for example by interpolation) or keep a span without them."
        )
    check_scale(values, lambda i: f"{source}: {table.row(i)}, column {column!r}")
    return values


def _parse_times(table: CellTable, column: str) -> Times:
    pd, cells, source = pandas(), table.cells(column), table.source

    def parse(**how: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # pandas guesses a format: the result is checked
            return pd.to_datetime(pd.Series(cells, dtype=object), errors="coerce", utc=True, **how)

    parsed = parse(format="ISO8601")
    if parsed.isna().any():
        # Other formats are only tried when the column does not begin as ISO 8601.
        iso = not parsed.isna()[0]
        readings = [parsed] if iso else [parse(format=one) for one in _formats_of(cells[0])]
        complete = [r for r in readings if not r.isna().any()]
        if not iso and not complete:  # pandas guesses for each cell
            readings = [parse(dayfirst=False), parse(dayfirst=True)]
            complete = [r for r in readings if not r.isna().any()]
        if len(complete) == 2 and not complete[0].equals(complete[1]):
            raise DataError(
                f"{source}: expected unambiguous times in column {column!r}, got {cells[0]!r}, which "
                "can put the day or the month first. Write the times as YYYY-MM-DD HH:MM:SS."
            )
        if not complete:
            # Quote the row where the best reading fails.
            bad = max(int(np.flatnonzero(r.isna().to_numpy())[0]) for r in readings)
            number = " (a number, such as of a row or of seconds since 1970, is not a date)"
            hint = number if _NUMBER.fullmatch(cells[bad]) else ""
            raise DataError(
                f"{source}: expected a time in every row of column {column!r}, got {cells[bad]!r} in "
                f"{table.row(bad)}{hint}. Write the times as YYYY-MM-DD HH:MM:SS, all in the same way, in UTC or with "
                "the offset of the time zone at the end, such as +01:00."
            )
        parsed = complete[0]
    if (early := (parsed.dt.year < _FIRST_YEAR).to_numpy()).any():
        i = int(np.argmax(early))
        raise DataError(
            f"{source}: expected a year of four digits in every row of column {column!r}, got {cells[i]!r} in "
            f"{table.row(i)}. Write the times as YYYY-MM-DD HH:MM:SS."
        )
    for problem, cell in (("a time without a date", _CLOCK), ("a time zone in some rows and none in others", _ZONE)):
        has = [match is not None for match in map(cell.search, cells)]
        if (any(has) and not all(has)) or (has[0] and cell is _CLOCK):
            i = has.index(not has[0]) if not all(has) else 0
            raise DataError(
                f"{source}: expected times of one kind in column {column!r}, got {problem}: {cells[i]!r} in "
                f"{table.row(i)}. Write all times as YYYY-MM-DD HH:MM:SS."
            )
    times: Times = parsed.dt.tz_localize(None).to_numpy().astype("datetime64[us]")
    return times


def _formats_of(cell: str) -> list[str]:
    """The formats by which a time can be read, with the day or the month first, or with AM and PM."""
    found = []
    for date in _DATE_FORMATS:
        for clock in _CLOCK_FORMATS:
            for separator in "-/.":
                with contextlib.suppress(ValueError):
                    datetime.strptime(cell, one := date.replace("-", separator) + clock)
                    found.append(one)
    return found


def _check_regular(times: Times, table: CellTable) -> str:
    """The step of regular times in words; DataError for other times."""
    source = table.source
    if len(times) < 3:
        raise DataError(f"{source}: expected at least 3 data rows, got {len(times)}. Give more data.")
    steps = microseconds(times)
    if (steps <= 0).any():
        i = int(np.argmax(steps <= 0))
        problem = "the same time twice" if steps[i] == 0 else "a time before the one above it"
        remedy = "Remove the duplicate row" if steps[i] == 0 else f"Sort the {table.noun} by time"
        clocks = [
            name for name in table.columns if table.columns.count(name) == 1 and _CLOCK.search(table.cells(name)[i])
        ]
        if steps[i] == 0 and clocks:
            remedy = f"Join the date and the time of column {clocks[0]!r} in one column"
        if _are_clock_changes(times, steps, steps <= 0):
            remedy = _UTC
        raise DataError(
            f"{source}: expected times that increase from row to row, got {problem}: {_when(times[i])} and "
            f"then {_when(times[i + 1])} in {table.row(i + 1)}. {remedy}; one {table.noun} holds one series."
        )
    step = step_of(times)
    if step is not None:
        return step.words
    usual, off = usual_step(times)
    i = int(np.argmax(off))
    remedy = "Fill in the missing rows (for example pandas' asfreq and interpolate) or keep only rows without gaps"
    if _are_clock_changes(times, steps, off):
        remedy = _UTC
    elif _are_local_days(steps):
        remedy = _DATES
    elif (missing := _missing_business_days(times)) is not None:
        raise DataError(
            f"{source}: expected the same step between all rows, or every day from Monday to Friday, got "
            f"{len(missing)} of these days missing, the first one {missing[0]}. Fill them in (for example with the "
            "value of the day before: pandas' asfreq('B') and ffill), or keep only rows without gaps."
        )
    raise DataError(
        f"{source}: expected the same step between all rows, got {int(off.sum())} irregular steps; the usual "
        f"step is {usual}, and the first gap is from {_when(times[i])} to {_when(times[i + 1])} ({table.row(i + 1)}). "
        f"{remedy}."
    )


def _are_clock_changes(times: Times, steps: npt.NDArray[np.int64], off: npt.NDArray[np.bool_]) -> bool:
    """Whether steps are an hour too short or too long in the night to a Sunday of spring or autumn: daylight
    saving time.
    """
    usual = most_frequent(steps)
    expected = times[:-1][off] + np.timedelta64(1, "h")  # for changes at midnight, the new day
    weekdays = (expected.astype("datetime64[D]").astype(np.int64) + 3) % 7
    months = expected.astype("datetime64[M]").astype(np.int64) % 12 + 1
    hours = expected.astype("datetime64[h]").astype(np.int64) % 24
    is_hour = np.abs(steps[off] - usual) == _HOUR
    in_season = np.isin(months, (3, 4, 8, 9, 10, 11))
    return bool(usual <= 6 * _HOUR and (is_hour & (weekdays == 6) & (hours <= 4) & in_season).all())


def _missing_business_days(times: Times) -> npt.NDArray[np.datetime64] | None:
    """The days from Monday to Friday that are not there; ``None`` for times that are not of such days."""
    days = times.astype("datetime64[D]")
    is_daily = most_frequent(microseconds(days)) == 24 * _HOUR and len(np.unique(times - days)) == 1
    if not is_daily or not np.is_busday(days).all():
        return None
    missing: npt.NDArray[np.datetime64] = np.setdiff1d(np.arange(days[0], days[-1]), days)
    return missing[np.is_busday(missing)]


def _are_local_days(steps: npt.NDArray[np.int64]) -> bool:
    """Whether steps are the same number of days, or months, but for an hour at some of them."""
    days = np.round(steps / (24 * _HOUR))
    are_alike = (days == days[0]).all() or ((days >= 28) & (days <= 31)).all()
    return bool(days[0] >= 1 and are_alike and (np.abs(steps - days * 24 * _HOUR) <= _HOUR).all())


def _when(time: np.datetime64) -> str:
    return str(time.astype("datetime64[s]")).replace("T", " ")
