"""One table for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tabulate import SEPARATING_LINE, tabulate

T = TypeVar("T")
Columns = Sequence[tuple[str, Callable[[T], str]]]  # by name, with the text that a row has there


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a table.

    Attributes:
        cells: texts; the first one names the line.
        is_best: marked, by ``*`` in a terminal and by a star and a colour on the page.
        note: only on the page, below the name.
        share: only on the page, the length of a bar, from 0 to 1, see ``Table.bars``.
    """

    cells: tuple[str, ...]
    is_best: bool = False
    note: str = ""
    share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines below a header.

    Attributes:
        header: names of the columns.
        lines: those of what is compared.
        baselines: further lines, set off from the others.
        baselines_title: above them, on the page.
        words: names of the columns that hold words, aligned left as the first one is; numbers are aligned
            right.
        bars: name of the column with a bar below each number.
        title: above the table.
        notes: how to read it.
    """

    header: tuple[str, ...]
    lines: tuple[Line, ...]
    baselines: tuple[Line, ...] = ()
    baselines_title: str = "Baselines"
    words: tuple[str, ...] = ()
    bars: str = ""
    title: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        header: Iterable[str],
        rows: Iterable[Iterable[str]],
        *,
        words: tuple[str, ...] = (),
        title: str = "",
        notes: tuple[str, ...] = (),
    ) -> Table:
        """A table of cells only."""
        lines = tuple(Line(cells=tuple(cells)) for cells in rows)
        return cls(header=tuple(header), lines=lines, words=words, title=title, notes=notes)

    @classmethod
    def of_columns(
        cls,
        columns: Columns[T],
        rows: Iterable[T],
        *,
        best: T | None = None,
        words: tuple[str, ...] = (),
        title: str = "",
        notes: tuple[str, ...] = (),
    ) -> Table:
        """A table with a line for each row, of which the best one is marked."""
        lines = tuple(Line(cells=tuple(text(row) for _, text in columns), is_best=row is best) for row in rows)
        return cls(header=tuple(name for name, _ in columns), lines=lines, words=words, title=title, notes=notes)

    def is_words(self, column: int) -> bool:
        """Whether a column holds words."""
        return self.header[column] in self.words

    def text(self) -> str:
        """For a terminal, without a final newline."""
        marked = any(line.is_best for line in (*self.lines, *self.baselines))

        def cells(line: Line) -> list[str]:
            mark = ("* " if line.is_best else "  ") if marked else ""
            return [_printable(cell) for cell in (mark + line.cells[0], *line.cells[1:])]

        rows: list[object] = [cells(line) for line in self.lines]
        if self.baselines:
            rows += [SEPARATING_LINE, *(cells(line) for line in self.baselines)]
        drawn = tabulate(
            rows,
            ("  " * marked + self.header[0], *self.header[1:]),
            tablefmt="simple",
            colalign=["right" if i and not self.is_words(i) else "left" for i in range(len(self.header))],
            disable_numparse=True,
            preserve_whitespace=True,
        )
        head = [self.title] if self.title else []
        notes = ["", *map(_printable, self.notes)] if self.notes else []
        return "\n".join(line.rstrip() for line in [*head, *drawn.splitlines(), *notes])


def _printable(text: str) -> str:
    """The text without control characters, which could move the cursor or break the alignment."""
    return "".join(c if c.isprintable() else "?" for c in text)
