"""The step between the rows of a regular time series, and the times that follow its last row."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from structattn_lab.data.series import Times
from structattn_lab.data.series_table import pandas

Numbers = npt.NDArray[np.int64]
_DAY = np.timedelta64(1, "D")
_UNITS = (
    ("day", 86_400_000_000),
    ("hour", 3_600_000_000),
    ("minute", 60_000_000),
    ("second", 1_000_000),
    ("millisecond", 1000),
    ("microsecond", 1),
)


@dataclass(frozen=True, kw_only=True)
class TimeStep:
    """The time between two rows: of one kind, the others are empty.

    Attributes:
        microseconds: a fixed time.
        months: calendar months, from a moment of a month, or of its last day, to the same one of another
            month.
        calendar: pandas' name of another calendar, such as ``"B"`` for business days.
    """

    microseconds: int = 0
    months: int = 0
    calendar: str = ""

    @property
    def words(self) -> str:
        """Such as ``"1 hour"``."""
        if self.months:
            return _count(self.months, "month")
        if self.calendar:
            return "1 business day" if self.calendar == "B" else f"calendar step {self.calendar}"
        return next(_count(self.microseconds // size, unit) for unit, size in _UNITS if self.microseconds % size == 0)

    def fits(self, times: Times) -> bool:
        """Whether times have this step everywhere; one time has every step."""
        if len(times) < 2:
            return True
        if self.microseconds:
            return bool((microseconds(times) == self.microseconds).all())
        if self.months:
            months = month_steps(times)
            return months is not None and bool((months == self.months).all())
        expected = pandas().date_range(times[0], periods=len(times), freq=self.calendar)
        return bool((expected.to_numpy().astype(times.dtype) == times).all())

    def after(self, times: Times, count: int) -> Times:
        """The ``count`` times after the last one of ``times``, which have this step.

        A series of last days of months continues with last days; where another day is not in a month, its
        last day takes the place.
        """
        last, number = times[-1], np.arange(1, count + 1)
        if self.microseconds:
            return last + number * np.timedelta64(self.microseconds, "us")
        if self.calendar:
            later = pandas().date_range(last, periods=count + 1, freq=self.calendar)[1:]
            return later.to_numpy().astype(times.dtype)
        months = last.astype("datetime64[M]") + number * self.months
        begin, end = months.astype(times.dtype), (months + 1).astype(times.dtype)
        since_start, until_end = _in_month(times)
        if (until_end <= _DAY).all():
            return end - until_end[-1]
        day, clock = np.divmod(since_start[-1], _DAY)
        return np.minimum(begin + day * _DAY, end - _DAY) + clock


def step_of(times: Times) -> TimeStep | None:
    """The step that increasing times have everywhere; ``None`` if they are irregular."""
    steps = microseconds(times)
    if (steps == steps[0]).all():
        return TimeStep(microseconds=int(steps[0]))
    months = month_steps(times)
    if months is not None:
        return TimeStep(months=int(months[0])) if (months == months[0]).all() else None
    calendar = _calendar(times)
    step = None if calendar is None else TimeStep(calendar=calendar)
    return step if step is not None and step.fits(times) else None  # pandas looks at days only


def usual_step(times: Times) -> tuple[str, npt.NDArray[np.bool_]]:
    """The most frequent step of irregular times in words, and which steps differ from it."""
    months = month_steps(times)
    steps = microseconds(times) if months is None else months
    usual = most_frequent(steps)
    step = TimeStep(microseconds=usual) if months is None else TimeStep(months=usual)
    return step.words, steps != usual


def microseconds(times: Times) -> Numbers:
    """The steps between times."""
    return np.diff(times).astype("timedelta64[us]").astype(np.int64)


def month_steps(times: Times) -> Numbers | None:
    """Steps in calendar months if all times are the same moment of a month or of its last day."""
    since_start, until_end = _in_month(times)
    if not ((since_start == since_start[0]).all() or (until_end == until_end[0]).all()):
        return None
    numbers: Numbers = times.astype("datetime64[M]").astype(np.int64)
    return numbers[1:] - numbers[:-1]


def _in_month(times: Times) -> tuple[npt.NDArray[np.timedelta64], npt.NDArray[np.timedelta64]]:
    """The time since the start of the month, and until its end."""
    months = times.astype("datetime64[M]")
    begin: Times = months.astype(times.dtype)
    end: Times = (months + 1).astype(times.dtype)
    return times - begin, end - times


def _calendar(times: Times) -> str | None:
    """The name that pandas gives to the spacing, such as ``"B"``."""
    pd = pandas()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas 3 announces that a later version returns an object
        frequency = pd.infer_freq(pd.DatetimeIndex(times))
    return None if frequency is None else str(getattr(frequency, "freqstr", frequency))


def most_frequent(numbers: Numbers) -> int:
    """The number that is there most often."""
    values, counts = np.unique(numbers, return_counts=True)
    return int(values[np.argmax(counts)])


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
