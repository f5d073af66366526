"""Forecasts of the future with a finished run, or with any row of a finished comparison, baselines
included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from structattn.checks import check_int, check_path, check_type
from structattn.errors import ConfigError, DataError
from structattn.files import write_atomic
from structattn.progress import doing
from structattn_lab.data.plain_text import is_there
from structattn_lab.data.series_file import read_rows
from structattn_lab.data.series_table import CellTable, CsvTable, FrameTable, pandas
from structattn_lab.data.time_steps import step_of
from structattn_lab.inference.forecast_choice import choose
from structattn_lab.tasks.forecast.future import Forecast, check_request, forecast_units

LEVELS = (80, 95)
_STEPS = "step"  # the column in place of the times, where the data have none


def forecast(
    run: str | Path,
    frame: Any,
    *,
    horizon: int | None = None,
    levels: Sequence[int] = LEVELS,
    row: str | None = None,
    variant: str | None = None,
    time: str | None = None,
) -> Any:
    """Forecasts what follows the last row of a data frame, in the units of the data.

    For each column y and step h ahead:

        y_h = mean + std * f(window)_h          y-lo-p, y-hi-p = y_h -+ std * q_h(p)

    ``f`` is the model or the baseline, ``window`` the last look-back scaled by mean and standard deviation of
    the training rows. ``q_h(p)`` is the error of rank ceil(p / 100 (n + 1)) among its n absolute errors at
    step h of the validation windows (split conformal prediction). An interval holds the truth with a
    probability of at least p % if the error is exchangeable with those of validation. Time series are not
    exactly so: where the future differs from the validation rows, the intervals hold less.

    Args:
        run: the folder of a comparison of the task ``forecast``, or of one of its runs. No file in it
            changes.
        frame: a pandas ``DataFrame`` with the columns of the training and its time column, or an index of
            times; at least the look-back, with the checks of training. Without any dates the rows are steps.
        horizon: steps ahead. Default: that of the training. Models and ridge regression go no further; the
            last value and the last season do, as far as the validation rows measure the errors.
        levels: of the intervals, in percent.
        row: of a comparison, its spec or the name of a baseline, such as ``"ridge regression"``, or how it
            begins. Default: the one with the lowest validation error. Of several seeds the one with the
            lowest validation error forecasts.
        variant: of a comparison with several settings, the name of one. Default: the one with the lowest
            validation error, where they forecast the same columns as far ahead.
        time: the time column of the frame. Default: that of the training.

    Returns:
        A ``DataFrame`` with one row for each step: the time (without dates: ``step``, the number of the row
        in the frame from 0), and for each column its forecast, under its name, and ``NAME-lo-80``,
        ``NAME-hi-80`` and so on for each level. Its ``attrs`` are ``row``, what forecast, and ``why``.

    Raises:
        CheckpointError: the folder holds no finished run or comparison, or is damaged.
        ConfigError: it is of another task, an unknown row or variant, a horizon or level that cannot be.
        DataError: the frame is not usable: other columns or steps than those of the training, too few rows,
            gaps, missing values.
        MissingDependencyError: pandas, or neuralforecast for its models, is not installed.

    Cost: one forward pass.

    Source: Vovk et al. 2005, Lei et al. 2018 (split conformal prediction).
    """
    asked = _Asked(run, horizon=horizon, levels=levels, row=row, variant=variant)
    time = asked.time if time is None else time.strip()
    return asked.forecast(FrameTable(frame, time), time).table


def forecast_file(
    run: Path,
    data: Path | None,
    out: Path,
    *,
    horizon: int | None = None,
    levels: Sequence[int] = LEVELS,
    row: str | None = None,
    variant: str | None = None,
    time: str | None = None,
    overwrite: bool = False,
) -> Forecast:
    """The same from a CSV file; writes the table as CSV, and a figure of the last window and the forecast
    beside it.

    Args:
        run, horizon, levels, row, variant, time: see ``forecast``.
        data: the CSV file. Default: the one of the training.
        out: the CSV file to write, with the suffix ``.csv``; the figure has the suffix ``.png`` in its place.
        overwrite: replace both, if they are there.

    Raises:
        ConfigError: as ``forecast``; or ``out`` has another suffix, is there, is the input, or is in the
            folder of the run.
        CheckpointError, DataError, MissingDependencyError: as ``forecast``; or a file cannot be written.
    """
    # matplotlib is optional: only the figure needs it
    from structattn_lab.report.plot import png
    from structattn_lab.tasks.forecast.figures import future_figure

    _check_out(out, run, overwrite=overwrite)
    asked = _Asked(run, horizon=horizon, levels=levels, row=row, variant=variant)
    time = asked.time if time is None else time.strip()
    path = data if data is not None else asked.data
    if path is not None:
        _check_input(path, out, is_named=data is not None)
    with doing(f"reading {'ETTh1' if path is None else path}"):
        table = CsvTable(path, time, needs_time=False)
    forecast_table = asked.forecast(table, time)
    figure, is_new = png(lambda: future_figure(forecast_table)), not out.exists()
    write_atomic(out, _csv(forecast_table))
    try:
        write_atomic(out.with_suffix(".png"), figure)
    except BaseException:  # such as on a full disk: half of the output would stop the next call
        if is_new:
            out.unlink(missing_ok=True)
        raise
    return forecast_table


def _check_input(path: Path, out: Path, *, is_named: bool) -> None:
    """Raises ``ConfigError`` if an output is the input, and ``DataError`` if the file of the training is
    gone.
    """
    if not is_there(str(path)):
        if not is_named:
            raise DataError(f"the training data, {path}, are not there: give the series with --data")
        return  # reading it says so
    for file in (out, out.with_suffix(".png")):
        if file.exists() and file.samefile(path):
            raise ConfigError(f"--out would replace the input, {path}: give another --out")


def _check_out(out: Path, run: Path, *, overwrite: bool) -> None:
    """Raises ``ConfigError`` unless a forecast may be written there."""
    if out.suffix != ".csv":
        raise ConfigError(f"--out must be the name of a file with the suffix .csv, got {str(out)!r}")
    figure = out.with_suffix(".png")
    place = out.resolve()
    if run.resolve() in place.parents:
        raise ConfigError(f"--out must be outside of the folder {run}, which a forecast only reads, got {out}")
    for path in (out, figure):
        if path.is_dir():
            raise ConfigError(f"{path} is a folder: give another --out")
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} is there: give another --out, or --overwrite to replace it")
    folder = next(parent for parent in place.parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to {folder}: give another --out")


def _csv(forecast: Forecast) -> str:
    """The table as text: days as dates, other times to the second."""
    table, times = forecast.table.copy(), np.concatenate([forecast.past_times, forecast.times])
    if forecast.has_dates:
        column = table[forecast.time]
        are_days = column.dt.tz is None and (times == times.astype("datetime64[D]")).all()
        table[forecast.time] = [f"{time:%Y-%m-%d}" if are_days else time.isoformat(sep=" ") for time in column]
    text: str = table.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    return text


class _Asked:
    """A row of a comparison, or a run, and what is asked of it: everything that can be checked before data
    are read.

    Attributes:
        time, data: the time column and the file of the training.
    """

    def __init__(
        self, run: str | Path, *, horizon: int | None, levels: Sequence[int], row: str | None, variant: str | None
    ) -> None:
        if horizon is not None:
            check_int("horizon", horizon, minimum=1)
        check_type("levels", levels, (tuple, list, range), "a list of percentages, such as (80, 95)")
        for name, value in (("row", row), ("variant", variant)):
            check_type(name, value, (str, NoneType), "a text or None")
        self._chosen = choose(check_path("run", run), row, variant)
        config = self._chosen.config
        self.time, self.data = config.data.time.strip(), None if config.data.path is None else Path(config.data.path)
        self._horizon = horizon or self._chosen.forecaster.kept.facts.horizon
        self._levels = check_request(
            self._chosen.forecaster, self._chosen.name, self._horizon, levels, self._chosen.unlimited
        )

    def forecast(self, table: CellTable, time: str) -> Forecast:
        """Reads the table and forecasts.

        Raises:
            DataError: see ``forecast``.
        """
        forecaster, horizon, levels = self._chosen.forecaster, self._horizon, self._levels
        facts = forecaster.kept.facts
        rows = read_rows(table, time, facts.columns)
        count = rows.values.shape[1]
        if count < facts.look_back:
            raise DataError(
                f"{table.source}: expected at least {facts.look_back:,} rows, which {self._chosen.name} looks back on, "
                f"got {count:,}. Give more"
            )
        past_times = np.arange(count) if rows.times is None else rows.times
        times = np.arange(count, count + horizon)
        if rows.times is not None:
            if not facts.step.fits(rows.times):
                step = step_of(rows.times)
                assert step is not None  # else they were refused
                raise DataError(
                    f"{table.source}: expected rows {facts.step.words} apart, as in training, got {step.words}. Give "
                    "data of the same frequency, or train with these"
                )
            times = facts.step.after(rows.times, horizon)
        point, widths = forecast_units(forecaster, rows.values, horizon, levels)
        name = time if rows.times is not None else _STEPS
        columns: dict[str, Any] = {name: times if rows.zone is None else _in_zone(times, rows.zone)}
        for i, column in enumerate(facts.columns):
            columns[column] = point[i]
            for level, width in zip(levels, widths, strict=True):
                columns[f"{column}-lo-{level}"] = point[i] - width[i]
                columns[f"{column}-hi-{level}"] = point[i] + width[i]
        if len(columns) != 1 + len(facts.columns) * (1 + 2 * len(levels)):
            raise DataError(
                f"{table.source}: the names of columns and of their intervals, such as {facts.columns[0]}-lo-80, must "
                f"differ, got {', '.join(map(repr, (name, *facts.columns)))}. Rename a column, and train again"
            )
        frame = pandas().DataFrame(columns)
        frame.attrs = {"row": self._chosen.name, "why": self._chosen.why}
        return Forecast(
            row=self._chosen.name,
            why=self._chosen.why,
            time=name,
            columns=facts.columns,
            levels=levels,
            windows=forecaster.windows(horizon),
            table=frame,
            times=times,
            past=rows.values,
            past_times=past_times,
            has_dates=rows.times is not None,
        )


def _in_zone(times: Any, zone: Any) -> Any:
    return pandas().Series(times).dt.tz_localize("UTC").dt.tz_convert(zone)
