"""A family of structured matrices and its text form, which the file of its class says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from structattn.grammar import Form, named, optional, word
from structattn.matrices.base import StructuredMatrix


class TextValue(NamedTuple):
    """What the text form of a family has after the colon: one argument of its class.

    Attributes:
        argument: its name.
        read: the argument of a text; raises ``ConfigError`` with the problem only. ``structattn.spec`` has
            readers, such as ``positive``.
        write: its text.
        is_optional: the form may leave it out.
    """

    argument: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = word
    is_optional: bool = False


class Family(NamedTuple):
    """One family of structured matrices.

    Attributes:
        matrix: the class.
        syntax, example: of its text form, for help texts and error messages.
        meaning: in words.
        value: of its text form; ``None``: it is the name only.
    """

    matrix: type[StructuredMatrix]
    syntax: str
    example: str
    meaning: str
    value: TextValue | None = None

    @property
    def form(self) -> Form:
        """How its text is read."""
        if self.value is None:
            return Form(self.syntax, self.example, self.meaning)
        reader = optional if self.value.is_optional else named
        return Form(self.syntax, self.example, self.meaning, value=reader(self.value.argument, self.value.read))
