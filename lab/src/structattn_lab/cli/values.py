"""What a word of an option may be: types of options, which the help names, and whose messages show the word
as it was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from structattn.errors import ConfigError, nearest_name

LARGEST = 2**31 - 1  # of a size: more is a mistake
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class ValueKind:
    """A kind of value.

    Attributes:
        type: of the value.
        name: in the help.
        words: in a message.
        minimum, maximum: bounds, both included.
        above, below: bounds that are not.
    """

    type: Callable[[str], Any]
    name: str
    words: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def expected(self, value: float | None = None) -> str:
        """The kind and its bounds in words; the largest size only for a value that is larger."""
        named = self.maximum is not None and (self.maximum < LARGEST or (value is not None and value > self.maximum))
        bounds = [
            f"{words} {bound}"
            for words, bound in (
                ("of at least", self.minimum),
                ("above", self.above),
                ("at most", self.maximum if named else None),
                ("below", self.below),
            )
            if bound is not None
        ]
        return " ".join([self.words, " and ".join(bounds)]).strip()

    def read(self, word: str) -> Any:
        """A word as a value.

        Raises:
            ValueError: it is none.
        """
        from structattn.checks import quoted  # imports PyTorch, which takes seconds: help does without
        from structattn.grammar import plain_number

        def wrong(value: float | None = None) -> ValueError:
            return ValueError(f"expected {self.expected(value)}, got {quoted(word, 60)}")

        if self.type not in (int, float):
            # An empty one, such as of a variable of the shell that is not set, is no folder (it would be the
            # current one).
            if self.type is Path and not word.strip():
                raise wrong()
            return self.type(word)
        try:
            value = plain_number(word, self.type)
        except ConfigError:
            raise wrong() from None
        fits = (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        if not fits:
            raise wrong(value)
        return value


def constructor(kind: ValueKind, *, several: bool) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """How tyro reads an option of one value, or of at least one. ``None`` is a default of some, and never
    written.
    """

    def read(words: list[str]) -> Any:
        if not words:
            raise ValueError(f"expected {kind.words}, or several")
        values = tuple(kind.read(word) for word in words)
        return values if several else values[0]

    def is_instance(value: Any) -> bool:
        return value is None or not isinstance(kind.type, type) or isinstance(value, tuple if several else kind.type)

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar=f"{kind.name} [{kind.name} ...]" if several else kind.name,
        instance_from_str=read,
        is_instance=is_instance,
        str_from_instance=lambda value: [str(item) for item in (value if several and value is not None else [value])],
    )


def whole(minimum: int | None = None, maximum: int | None = LARGEST) -> ValueKind:
    """A whole number within bounds."""
    return ValueKind(type=int, name="INT", words="a whole number", minimum=minimum, maximum=maximum)


def number(**bounds: float) -> ValueKind:
    """A finite number within bounds."""
    return ValueKind(type=float, name="FLOAT", words="a finite number", **bounds)


def choice(choices: tuple[str, ...]) -> ValueKind:
    """One of several words."""

    def read(word: str) -> str:
        if word not in choices:
            raise ValueError(f"unknown value {word!r}: {nearest_name(word, choices)}")
        return word

    return ValueKind(type=read, name=f"{{{','.join(choices)}}}", words="a word")


TEXT = ValueKind(type=str, name="TEXT", words="a text")
# The kinds of options that declare nothing more.
KINDS: dict[Any, ValueKind] = {
    int: whole(),
    float: number(),
    str: TEXT,
    Path: ValueKind(type=Path, name="PATH", words="a file or a folder"),
}


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Within it, an error names the option whose value is read."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


@contextmanager
def as_options(**names: str) -> Iterator[None]:
    """Within it, an error of the library calls these arguments of Python by the names of their options.

    Args:
        names: the option by the argument, such as ``num_heads="--heads"``.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))) from None


_SIZE, _POSITIVE = whole(minimum=1), number(above=0)
Count = Annotated[int, constructor(_SIZE, several=False)]
OptionalCount = Annotated[int | None, constructor(_SIZE, several=False)]
Counts = Annotated[tuple[int, ...], constructor(_SIZE, several=True)]
OptionalCounts = Annotated[tuple[int, ...] | None, constructor(_SIZE, several=True)]
Seed = Annotated[int, constructor(whole(minimum=0, maximum=_MAX_SEED), several=False)]
OptionalSeed = Annotated[int | None, constructor(whole(minimum=0, maximum=_MAX_SEED), several=False)]
Positive = Annotated[float, constructor(_POSITIVE, several=False)]
OptionalPositive = Annotated[float | None, constructor(_POSITIVE, several=False)]
Positives = Annotated[tuple[float, ...], constructor(_POSITIVE, several=True)]
Share = Annotated[float, constructor(number(above=0, below=1), several=False)]
