"""Levels whose segments are units of the text: paragraphs, lines and words in place of blocks of equal size.

A ``TextLayout`` says which level is which part; ``TextUnits`` says what each token means for them; from both
and the tokens of a batch comes a ``LevelLayout`` with free segments, which ``ops`` computes. No token changes
a segment before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from structattn.checks import check_choice, check_int_tensor, check_sequences, check_tensor, check_type, describe
from structattn.errors import ConfigError, ShapeError
from structattn.layout.checks import positive_ints
from structattn.layout.levels import LevelLayout
from structattn.layout.scaling import Scaling

Unit = Literal["paragraph", "line", "word"]
UNITS: tuple[Unit, ...] = get_args(Unit)  # from the largest to the smallest

# What is marked of the text of a token.
_HAS_NEWLINE = 1 << 0
_HAS_EMPTY_LINE = 1 << 1
_BEGINS_NEWLINE = 1 << 2
_ENDS_NEWLINE = 1 << 3
_BEGINS_SPACE = 1 << 4
_ENDS_SPACE = 1 << 5
_IS_SPACE = 1 << 6


@dataclass(frozen=True)
class Segments:
    """Where the segments of each sequence of a batch start.

    Attributes:
        units: from the largest to the smallest.
        rows: for each batch row (packed sequence) and each unit the starts, rising from 0; those of a unit
            include those of the larger ones.
    """

    units: tuple[Unit, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class TextLayout:
    """``LevelLayout`` with level 1 global and the deeper ones units of the text, such as paragraph > line.

    Args:
        ranks: dimensions per level, level 1 first; two to four.
        units: of the levels from 2 on, ``"paragraph"``, ``"line"`` or ``"word"``, from the largest to the
            smallest. Default: the largest ones, ``paragraph``, then ``line``, then ``word``.
        scaling, value_ranks, sink_tokens: as ``LevelLayout``.

    Raises:
        ConfigError: not one unit per deeper level, units that are unknown or not in that order, or as
            ``LevelLayout``.
    """

    ranks: tuple[int, ...]
    units: tuple[Unit, ...] = ()
    scaling: Scaling = "variance"
    value_ranks: tuple[int, ...] | None = None
    sink_tokens: int = 0

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            ranks: Sequence[int],
            units: Sequence[Unit] = (),
            scaling: Scaling = "variance",
            value_ranks: Sequence[int] | None = None,
            sink_tokens: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", positive_ints(self.ranks, "ranks"))
        check_type("units", self.units, tuple | list, f"a tuple of {', '.join(UNITS)}")
        object.__setattr__(self, "units", tuple(self.units))
        if not 2 <= len(self.ranks) <= len(UNITS) + 1:
            raise ConfigError(
                f"a text layout has 2 to {len(UNITS) + 1} ranks, one for all text and one for each of "
                f"{', '.join(UNITS)}; got {self.ranks}"
            )
        if not self.units:
            object.__setattr__(self, "units", UNITS[: len(self.ranks) - 1])
        for unit in self.units:
            check_choice("text unit", unit, UNITS)
        order = [UNITS.index(unit) for unit in self.units]
        if len(order) != len(self.ranks) - 1 or order != sorted(set(order)):
            raise ConfigError(
                "a text layout needs one unit for each rank but the first, from the largest to the smallest "
                f"({', '.join(UNITS)}): got ranks {self.ranks} and units {self.units}"
            )
        object.__setattr__(self, "value_ranks", self.bound.value_ranks)

    @property
    def head_dim(self) -> int:
        """D, the sum of the ranks."""
        return sum(self.ranks)

    @property
    def has_default_units(self) -> bool:
        """Whether the units are those that this number of ranks has by default."""
        return self.units == UNITS[: len(self.units)]

    @property
    def bound(self) -> LevelLayout:
        """The layout of a text with one segment per level, whose costs no other text exceeds."""
        return self._with(((0,),) * len(self.ranks))

    def _with(self, boundaries: Sequence[object]) -> LevelLayout:
        return LevelLayout.from_boundaries(
            self.ranks, boundaries, self.scaling, self.value_ranks, sink_tokens=self.sink_tokens
        )

    def at(self, segments: Segments) -> LevelLayout:
        """The layout of a batch with these segments, from ``TextUnits.segments``; units that the layout does
        not have are ignored.

        Raises:
            ConfigError: a unit of the layout is not among the segments.
        """
        check_type("segments", segments, Segments, "a Segments", "TextUnits.segments makes them from tokens")
        if missing := [unit for unit in self.units if unit not in segments.units]:
            raise ConfigError(
                f"the segments have no {missing[0]}: expected {', '.join(self.units)}, got {segments.units}"
            )
        unit_indices = [segments.units.index(unit) for unit in self.units]
        boundaries = [((0,), *(row[unit] for unit in unit_indices)) for row in segments.rows]
        if not boundaries:  # an empty batch
            return self.bound
        return self._with(boundaries)

    def fits(self, layout: object) -> bool:
        """Whether a layout has these levels, with any segments."""
        return (
            isinstance(layout, LevelLayout)
            and layout.boundaries is not None
            and layout == self._with(layout.boundaries)
        )


@dataclass(frozen=True)
class TextUnits:
    """How each token of a vocabulary begins and ends text units; made by ``of``.

    A line ends with the token that holds a newline, a paragraph with the one that completes two newlines in a
    row: the segment begins at the token after it. A word ends with whitespace; it also begins with a token
    such as ``" the"``, whitespace and more.

    Args:
        marks: one byte per token, its marks.
    """

    marks: bytes

    def __post_init__(self) -> None:
        check_type(
            "marks", self.marks, bytes, "one byte per token", "TextUnits.of makes them from the text of each token"
        )

    @classmethod
    def of(cls, texts: Sequence[str]) -> TextUnits:
        """From the text of each token, in the order of their ids.

        Example:
            >>> units = TextUnits.of(["a", "b", " ", "\\n"])
            >>> units.segments(torch.tensor([[0, 2, 1, 3, 3, 1, 3, 0]])).rows
            (((0, 5), (0, 4, 5, 7), (0, 2, 4, 5, 7)),)
        """
        if (
            isinstance(texts, str)
            or not isinstance(texts, Sequence)
            or not all(isinstance(text, str) for text in texts)
        ):
            raise ConfigError(f"texts must be the text of each token, a list of str, got {describe(texts)}")
        return cls(bytes(map(_marks, texts)))

    def __repr__(self) -> str:
        return f"TextUnits({len(self.marks)} tokens)"

    def marks_of(self, tokens: Tensor) -> Tensor:
        """The marks of token ids, uint8 of their shape, on the CPU.

        Raises:
            ShapeError: an id is out of range.
        """
        check_tensor("tokens", tokens)
        check_int_tensor("tokens", tokens, (None,) * tokens.dim())
        if tokens.is_meta:
            raise ShapeError("tokens are on the meta device and have no numbers, from which text units are read")
        ids = tokens.detach().cpu().long()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.marks):
            raise ShapeError(f"token ids lie in [0, {len(self.marks)}), got {int(ids.min())} to {int(ids.max())}")
        return _table(self.marks)[ids]

    def segments(
        self,
        tokens: Tensor,
        *,
        left_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        units: Sequence[Unit] = UNITS,
    ) -> Segments:
        """The segments of whole sequences.

        Args:
            tokens: (B, T) ids.
            left_padding, cu_seqlens: as of ``structured_attention``, one of the two. Packed sequences are the
                rows of what is returned. Default ``None``.
            units: which to return. Default: all.

        Raises:
            ShapeError: the tokens are not (B, T) ints, an id is out of range, or a shape does not fit.
            ConfigError: a unit is unknown.

        Cost: O(B T), on the CPU: tokens on a GPU are copied, which waits for it.
        """
        check_int_tensor("tokens", tokens, (None, None))
        check_type("units", units, tuple | list, f"a tuple of {', '.join(UNITS)}")
        for unit in units:
            check_choice("text unit", unit, UNITS)
        batch, length = tokens.shape
        check_sequences(batch, left_padding, cu_seqlens, length)
        index = torch.arange(length, device="cpu").expand(batch, -1)
        if cu_seqlens is None:
            sequence = torch.arange(batch, device="cpu")[:, None].expand(-1, length)
            position = index if left_padding is None else index - left_padding.detach().cpu()[:, None]
            count = batch
        else:
            offsets = cu_seqlens.detach().cpu().long()
            sequence = torch.bucketize(index, offsets[1:], right=True)
            position, count = index - offsets[sequence], len(offsets) - 1
        marks = torch.nn.functional.pad(self.marks_of(tokens), (2, 0))
        unit_starts = _starts(marks, position, sequence, count, tuple(units))
        return Segments(
            tuple(units), tuple(tuple(starts or (0,) for starts in row) for row in zip(*unit_starts, strict=True))
        )


def _marks(text: str) -> int:
    holds = {
        _HAS_NEWLINE: "\n" in text,
        _HAS_EMPTY_LINE: "\n\n" in text,
        _BEGINS_NEWLINE: text.startswith("\n"),
        _ENDS_NEWLINE: text.endswith("\n"),
        _BEGINS_SPACE: text[:1].isspace(),
        _ENDS_SPACE: text[-1:].isspace(),
        _IS_SPACE: text.isspace(),
    }
    return sum(mark for mark, is_set in holds.items() if is_set)


@lru_cache(maxsize=8)
def _table(marks: bytes) -> Tensor:
    return torch.tensor(list(marks), dtype=torch.uint8, device="cpu")


def _starts(
    marks: Tensor, position: Tensor, sequence: Tensor, count: int, units: tuple[Unit, ...]
) -> list[list[tuple[int, ...]]]:
    """For each unit and each of ``count`` sequences, the positions at which a segment starts.

    Args:
        marks: (B, T + 2) uint8, of the two tokens before and of the tokens.
        position: (B, T), in the sequence; negative in padding.
        sequence: (B, T), its number, not falling.
    """
    token_marks = marks[:, 2:]
    # A sequence does not depend on what is before it.
    last = marks[:, 1:-1].where(position >= 1, 0)
    second_last = marks[:, :-2].where(position >= 2, 0)
    is_first = position == 0
    line = (last & _HAS_NEWLINE) != 0
    unit_starts = []
    for unit in units:
        match unit:
            case "paragraph":
                across = ((last & _BEGINS_NEWLINE) != 0) & ((second_last & _ENDS_NEWLINE) != 0)
                begins = ((last & _HAS_EMPTY_LINE) != 0) | across
            case "line":
                begins = line
            case "word":
                spaced = ((last & _ENDS_SPACE) != 0) | ((token_marks & _BEGINS_SPACE) != 0)
                begins = line | (spaced & ((token_marks & _IS_SPACE) == 0))
        begins = is_first | (begins & (position > 0))
        starts = iter(position[begins].tolist())
        counts = torch.bincount(sequence[begins], minlength=count).tolist()
        unit_starts.append([tuple(next(starts) for _ in range(n)) for n in counts])
    return unit_starts


@dataclass(frozen=True)
class TextStep:
    """The next tokens of a text, as ``TextHistory`` sees them before it takes them.

    Attributes:
        segments: as far back as these tokens see: the current segments and those that begin with them.
        marks: of the new tokens, per row, without padding.
        current: the start of each unit's last segment, per row.
    """

    segments: Segments
    marks: tuple[bytes, ...]
    current: tuple[tuple[int, ...], ...]


class TextHistory:
    """What decoding must remember of the tokens so far: a byte each, and where the current segments started.

    Args:
        table: of the vocabulary.
        units: those that are wanted.
        left_padding: (B,) ints, or ``None``.
    """

    def __init__(self, table: TextUnits, units: tuple[Unit, ...], left_padding: Sequence[int] | None = None) -> None:
        self.table = table
        self.units = units
        self._padding = None if left_padding is None else tuple(left_padding)
        self.marks: list[bytes] = []  # per row, once there are tokens
        self._current: list[tuple[int, ...]] = []
        self._previous: tuple[list[bytes], list[tuple[int, ...]]] = [], []

    @property
    def length(self) -> int:
        """Tokens so far of all rows, without padding."""
        return sum(map(len, self.marks))

    @property
    def num_rows(self) -> int | None:
        """Texts, known from the first tokens on or from ``left_padding``."""
        return len(self.marks or self._padding or ()) or None

    def step(self, tokens: Tensor, length: int) -> TextStep:
        """The segments that the next tokens (B, n) see, after ``length`` tokens, padding included. Nothing is
        changed.

        Cost: that of the new tokens, however many there were before.
        """
        batch, count = tokens.shape
        num_rows = self.num_rows or batch
        if num_rows != batch:
            raise ShapeError(f"the tokens need a row for each of the texts: expected {num_rows}, got {batch}")
        rows = self.marks or [b""] * batch
        current = self._current or [(0,) * len(self.units)] * batch
        new = self.table.marks_of(tokens)
        last_two = torch.tensor([list(row[-2:].rjust(2, b"\0")) for row in rows], dtype=torch.uint8, device="cpu")
        position = torch.arange(length, length + count, device="cpu").expand(batch, -1)
        if self._padding is not None:
            position = position - torch.tensor(self._padding, device="cpu")[:, None]
            new = new.where(position >= 0, 0)
        sequence = torch.arange(batch, device="cpu")[:, None].expand(-1, count)
        new_starts = _starts(torch.cat([last_two.view(batch, 2), new], dim=1), position, sequence, batch, self.units)
        visible_starts, ends = [], []
        for row, current_starts in enumerate(current):
            # Older segments than the current ones are out of sight: they may be one.
            starts, levels = {0}, []
            for start, begun in zip(current_starts, (of_unit[row] for of_unit in new_starts), strict=True):
                starts |= {start, *begun}
                levels.append(tuple(sorted(starts)))
            visible_starts.append(tuple(levels))
            ends.append(
                tuple((of_unit[row] or (start,))[-1] for start, of_unit in zip(current_starts, new_starts, strict=True))
            )
        num_tokens = (position >= 0).sum(1).tolist()
        marks = tuple(bytes(row[count - n :]) for row, n in zip(new.tolist(), num_tokens, strict=True))
        return TextStep(Segments(self.units, tuple(visible_starts)), marks, tuple(ends))

    def take(self, step: TextStep) -> None:
        """Adds the tokens of a step."""
        self._previous = self.marks, self._current
        rows = self.marks or [b""] * len(step.marks)
        self.marks = [row + new for row, new in zip(rows, step.marks, strict=True)]
        self._current = list(step.current)

    def undo(self) -> None:
        """Takes back the tokens of the last ``take``; nothing else was done since."""
        self.marks, self._current = self._previous

    def reset(self) -> None:
        """Forgets all tokens."""
        self.marks, self._current = [], []

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``, padding included."""
        if self.marks:
            padding = self._padding or (0,) * len(self.marks)
            self.restore([row[: max(0, length - pad)] for row, pad in zip(self.marks, padding, strict=True)])

    def restore(self, marks: list[bytes]) -> None:
        """Begins with tokens of these marks, per row, without padding."""
        self.marks = marks
        self._current = []
        for row in marks:
            position = torch.arange(len(row), device="cpu")[None]
            of_row = torch.tensor([[0, 0, *row]], dtype=torch.uint8, device="cpu")
            unit_starts = _starts(of_row, position, torch.zeros_like(position), 1, self.units)
            self._current.append(tuple((starts[0] or (0,))[-1] for starts in unit_starts))

    def select(self, rows: Sequence[int]) -> None:
        """Row b becomes row ``rows[b]``."""
        if self._padding is not None:
            self._padding = tuple(self._padding[row] for row in rows)
        if self.marks:
            self.marks = [self.marks[row] for row in rows]
            self._current = [self._current[row] for row in rows]
