"""The cells of a CSV file or a data frame as text; finds separators, decimal commas, compression and
encoding, and raises where they are ambiguous.
"""

from __future__ import annotations

import csv
import io
import re
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from structattn.checks import describe
from structattn.errors import ConfigError, DataError, MissingDependencyError, nearest_name
from structattn.extras import install_command
from structattn_lab.data.plain_text import open_text

_SEPARATORS = (",", ";", "\t", "|")
_LONGEST_HEADER = 2**20
_DECIMALS = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")


class CellTable(Protocol):
    """Rows of cells as texts.

    Attributes:
        source: for messages.
        noun: ``"file"`` or ``"frame"``.
        columns: the names of the columns.
    """

    source: str
    noun: str
    columns: list[str]

    def cells(self, name: str) -> list[str]:
        """The texts of a column; raises ``DataError`` where none or several have this name."""

    def numbers(self, name: str) -> list[str]:
        """The texts of a column of numbers, with decimal points."""

    def row(self, index: int) -> str:
        """A data row in words, such as ``"row 2 of the file"``."""

    def zone(self, name: str) -> Any:
        """The time zone of a column of times, where the column as a whole has one."""


class CsvTable:
    """The cells of a CSV file, each as its text without surrounding spaces, so that messages can quote the
    file.

    Args:
        path: the file, with one header row; ``None``: the packaged ETTh1. Its cells are separated by commas,
            semicolons, tabs or bars; it is in UTF-8 or has a byte order mark, and may be compressed with
            gzip.
        time: the name of a column, which identifies the separator.
        needs_time: whether it must be there.

    Raises:
        DataError: the file is not a table with such a column.
        MissingDependencyError: pandas is not installed.
    """

    noun = "file"

    def __init__(self, path: Path | None, time: str, *, needs_time: bool = True) -> None:
        self.source = "packaged ETTh1.csv" if path is None else str(path)
        text = _text(path)
        begin = text.lstrip()
        if not begin:
            raise self._error("a header row and data rows", "an empty file. Check how it was written")
        if begin[0] in "{[<":
            kind = "HTML or XML" if begin[0] == "<" else "JSON"
            raise self._error("a CSV file", f"{kind}. Save its table as CSV")
        if separator := re.match(r"sep=.\r?\n", begin, re.IGNORECASE):  # which Excel reads, and writes
            text = begin[separator.end() :]
        self._rows_above = 1 if separator else 0
        self._separator, self.columns = _header(text, time)
        if not any(self.columns):
            raise self._error("names of columns in the first row", "an empty one. Remove the lines above the names")
        if needs_time and len(self.columns) == 1 and time.strip() not in self.columns:
            raise self._error(
                "a column of times and one of values",
                f"one column, {self.columns[0]!r}. Add a column with the time of each row, written as YYYY-MM-DD "
                "HH:MM:SS, and name it with --time",
            )
        if needs_time and time.strip() not in self.columns:
            raise self._error(
                f"a time column {time!r}",
                f"a file without it. Name a column of the file with --time: {nearest_name(time, self.columns)}",
            )
        self._frame = self._read(text)

    def _read(self, text: str) -> Any:
        pd = pandas()
        try:
            # Blank lines are kept so that a row's position gives its line in the file.
            frame = pd.read_csv(
                io.StringIO(text),
                sep=self._separator,
                dtype=str,
                keep_default_na=False,
                skip_blank_lines=False,
                skipinitialspace=True,
            ).fillna("")
        except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            counts = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
            if counts is None:
                raise self._error("a table with one separator", f"{error}. Save it as a plain CSV file") from error
            row = int(counts[2]) + self._rows_above
            raise self._error(
                f"{counts[1]} cells in every row, separated by {self._separator!r}",
                f"{counts[3]} in row {row} of the file. Put cells that hold a {self._separator!r} in quotes",
            ) from error
        if not isinstance(frame.index, pd.RangeIndex):
            raise self._error(
                "as many column names as cells in each row",
                f"{len(frame.columns)} names and longer rows. Name every column in the first row",
            )
        filled = np.flatnonzero((frame != "").any(axis=1).to_numpy())
        if len(filled) == 0:
            raise self._error("data rows", "only a header row. Check how the file was written")
        return frame.iloc[: filled[-1] + 1]

    def cells(self, name: str) -> list[str]:
        """The texts of a column.

        Raises:
            DataError: no column or several have this name.
        """
        name = name.strip()
        _check_once(self, name)
        return [cell.strip() for cell in self._frame.iloc[:, self.columns.index(name)].tolist()]

    def numbers(self, name: str) -> list[str]:
        """The texts of a column of numbers, with points for decimal commas.

        Raises:
            DataError: a comma or a point may separate decimals or thousands.
        """
        cells = self.cells(name)
        marks = "," if any("," in cell for cell in cells) else "."
        marked = [i for i, cell in enumerate(cells) if marks in cell]
        if self._separator == "," and marks == ".":
            return cells
        is_decimal = marks == "." or (
            all(_DECIMALS.fullmatch(cells[i]) for i in marked) and not any("." in cell for cell in cells)
        )
        if not is_decimal:
            return cells  # in any case, the error names the first one that is not a number
        everywhere = len(marked) == len(cells) and self._separator != ","
        if marked and not everywhere and all(_THOUSANDS.fullmatch(cells[i]) for i in marked):
            raise self._error(
                f"numbers in column {name!r}",
                f"{cells[marked[0]]!r} in {self.row(marked[0])}, which can be a number of thousands or one with three "
                "decimals. Write numbers with a decimal point and without thousands separators",
            )
        return [cell.replace(",", ".") for cell in cells]

    def row(self, index: int) -> str:
        """The line in the file of a data row; the header is line 1."""
        return f"row {index + 2 + self._rows_above} of the file"

    def zone(self, name: str) -> Any:
        """``None``: each cell has its own offset, or none."""
        return None

    def _error(self, expected: str, got: str) -> DataError:
        return DataError(f"{self.source}: expected {expected}, got {got}.")


class FrameTable:
    """The cells of a data frame of pandas as texts, from which the same numbers and times are read.

    Args:
        frame: with names as columns; an index of times or periods, or one of this name, is the column
            ``time``, if there is none.
        time: see above.

    Raises:
        ConfigError: it is no data frame.
        DataError: it has no rows.
    """

    noun = "frame"

    def __init__(self, frame: Any, time: str) -> None:
        pd = pandas()
        if not isinstance(frame, pd.DataFrame):
            raise ConfigError(f"frame must be a pandas.DataFrame, got {describe(frame)}")
        self.source = "the frame"
        index = frame.index.to_timestamp() if isinstance(frame.index, pd.PeriodIndex) else frame.index
        if time not in frame.columns and (isinstance(index, pd.DatetimeIndex) or index.name == time):
            frame = frame.set_axis(index.rename(time), axis=0).reset_index()
        if not len(frame):
            raise DataError("the frame: expected data rows, got none")
        self.columns = [str(name).strip() for name in frame.columns]
        self._frame = frame

    def _column(self, name: str) -> Any:
        _check_once(self, name)
        return self._frame.iloc[:, self.columns.index(name)]

    def cells(self, name: str) -> list[str]:
        """The texts of a column."""
        pd, column = pandas(), self._column(name)
        if pd.api.types.is_float_dtype(column):
            return [repr(value) for value in column.to_numpy("float64", na_value=float("nan")).tolist()]
        return ["" if missing else str(cell).strip() for cell, missing in zip(column, column.isna(), strict=True)]

    def numbers(self, name: str) -> list[str]:
        """The same: decimal commas are those of files."""
        return self.cells(name)

    def row(self, index: int) -> str:
        """By its position, from 0."""
        return f"row {index} of the frame"

    def zone(self, name: str) -> Any:
        """Of a column of ``datetime64`` with a zone."""
        return getattr(self._column(name).dtype, "tz", None)


def _check_once(table: CellTable, name: str) -> None:
    if table.columns.count(name) > 1:
        raise DataError(f"{table.source}: expected different names of columns, got {name!r} twice. Rename one of them.")


def pandas() -> Any:
    """Imports pandas, which tables need."""
    try:
        return import_module("pandas")
    except ImportError as error:
        raise MissingDependencyError(
            f"reading a time series needs pandas, which is not installed: {install_command('train')}"
        ) from error


def _text(path: Path | None) -> str:
    if path is None:
        return files("structattn_lab.data").joinpath("files", "ETTh1.csv").read_text(encoding="utf-8")
    with open_text(str(path), "a CSV file") as file:
        return file.read()


def _header(text: str, time: str) -> tuple[str, list[str]]:
    """The separator with which the first row has the time column, and most names; and those names."""
    candidates = []
    begin = text[:_LONGEST_HEADER]  # copying a large file for each separator would take long
    for separator in _SEPARATORS:
        try:
            names = next(csv.reader(io.StringIO(begin), delimiter=separator, skipinitialspace=True), [])
        except csv.Error:  # a cell that is too long
            continue
        candidates.append((separator, [name.strip() for name in names]))
    if not candidates:
        return ",", []
    with_time = [pair for pair in candidates if time.strip() in pair[1]]
    return max(with_time or candidates, key=lambda pair: len(pair[1]))
