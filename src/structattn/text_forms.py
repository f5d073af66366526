"""The table of text forms. Values of the lower floors are read from text and written as text through it, so
that they import no parser.

``spec`` fills the table when it is imported; ``structattn/__init__`` says how, since it is above all floors.
"""

from __future__ import annotations

from structattn.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:  # ``import structattn`` is fast without these
    from collections.abc import Callable
    from typing import Any, TypeVar

    Value = TypeVar("Value")
    _Read = Callable[[str], Any]
    _Write = Callable[[Any], str]

_FORMS: dict[type, tuple[_Read, _Write]] = {}
_fillers: list[Callable[[], object]] = []


def fill_with(filler: Callable[[], object]) -> None:
    """Says what to call at the first use of the table, so that the parsers are not imported before."""
    _fillers.append(filler)


def register(kind: type, read: _Read, write: _Write) -> None:
    """Adds the text form of a type, ``read(write(value)) == value``."""
    _FORMS[kind] = read, write


def _form(kind: type) -> tuple[_Read, _Write]:
    """How values of a type, or of the type that it extends, are read and written."""
    if not _FORMS:
        for filler in _fillers:
            filler()
    for base in kind.__mro__:
        if base in _FORMS:
            return _FORMS[base]
    raise ConfigError(f"{kind.__name__} has no text form")


def read(kind: type[Value], text: str) -> Value:
    """The value of that type that a text is the form of.

    Raises:
        ConfigError: the text is none; the message shows the form concerned.
    """
    value: Value = _form(kind)[0](text)
    return value


def write(value: object) -> str:
    """The text form of a value.

    Raises:
        ConfigError: this value has none.
    """
    return _form(type(value))[1](value)
