"""The grammar of all text forms, in one place, so that the same mistake gets the same message everywhere.

    NAME[:VALUE][,KEY=VALUE...]     a term, such as ``mlr:32|16,scaling=paper``: one of a table of ``Form``
    A|B|...                         values of one kind
    KEY=VALUE                       an assignment
    A,B,...                         a list, whose commas are outside of brackets

Readers of a single word raise ``ConfigError`` with only the problem; ``reading`` adds the whole text and its
form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from structattn.checks import quoted
from structattn.errors import ConfigError, NotRegisteredError, nearest_name

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)
_MOST_DIGITS = 18  # more do not fit in 64 bits


def no_value(text: str) -> dict[str, Any]:
    """Reads the value of a form that has none."""
    if text:
        raise ConfigError(f"this form has no number, got {quoted(text)}")
    return {}


@dataclass(frozen=True)
class Form:
    """One form of a term.

    Attributes:
        syntax, example, meaning: for help texts and error messages.
        value: reads the text after the colon, empty if there is none, to named arguments.
        options: reads the value of each option, by the name of the option.
        make: makes what the term is of from the arguments; by default a dict of them.
    """

    syntax: str
    example: str
    meaning: str
    value: Callable[[str], dict[str, Any]] = no_value
    options: Mapping[str, Callable[[str], Any]] | None = None
    make: Callable[..., dict[str, Any]] = dict

    @property
    def help(self) -> str:
        """How it is written, as a sentence."""
        return f"Written {self.syntax}, such as {self.example}"


def check_name(what: str, name: object) -> None:
    """Raises ``ConfigError`` unless a term can begin with the name of ``what``."""
    if not (isinstance(name, str) and re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", name)):
        raise ConfigError(f"the name of {what} has letters, digits, - and _, got {quoted(name)}")


@contextmanager
def reading(what: str, text: str, help_text: str) -> Iterator[None]:
    """Within it, an error names the text that is read, and ends with a sentence of help."""
    try:
        yield
    except NotRegisteredError as error:
        raise NotRegisteredError(f"{what} {quoted(text)}: {error}. {help_text}", error.reason) from None
    except ConfigError as error:
        raise ConfigError(f"{what} {quoted(text)}: {error}. {help_text}") from None


def read_term(text: str, forms: Mapping[str, Form]) -> tuple[str, dict[str, Any]]:
    """The name of a term and its arguments, those of its value and its options.

    Args:
        text: ``NAME[:VALUE][,KEY=VALUE...]``.
        forms: by name.

    Raises:
        ConfigError: an unknown name or option, an option that is given twice, or a value that cannot be read.
    """
    head, *options = text.strip().split(",")
    name, colon, value = (part.strip() for part in head.partition(":"))
    if name not in forms:
        raise ConfigError(f"unknown form {quoted(name)}: {nearest_name(name, forms)}")
    arguments = forms[name].value(value)
    if colon and not value:  # a form whose value may be left out, but not after a colon
        raise ConfigError("expected a value after the colon, got nothing")
    return name, arguments | read_options(options, forms[name].options or {})


def read_options(texts: Iterable[str], readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Options ``KEY=VALUE`` by their names, each of which has a reader.

    Raises:
        ConfigError: an option that is unknown, given twice or without a value, or that its reader rejects.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key = text.partition("=")[0].strip()
        if key not in readers:
            remedy = nearest_name(key, readers) if readers else "this form has no options"
            raise ConfigError(f"unknown option {quoted(key)}: {remedy}")
        if key in options:
            raise ConfigError(f"the {key} is given twice")
        options[key] = readers[key](assignment(text)[1])
    return options


def write_term(name: str, value: object = None, /, **options: object) -> str:
    """The text of a term: what is ``None`` is left out."""
    texts = [f",{key}={word(option)}" for key, option in options.items() if option is not None]
    return "".join([name, "" if value is None else f":{word(value)}", *texts])


def word(value: object) -> str:
    """A value as one word: ``true``, ``4``, ``1.5`` or ``32|16``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "|".join(map(word, value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e16 else repr(value)
    return str(value)


def assignment(text: str) -> tuple[str, str]:
    """The two sides of ``KEY=VALUE``."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not key or not equals:
        raise ConfigError(f"expected key=value, got {quoted(text.strip())}")
    return key, value


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if not re.fullmatch(f"[0-9]{{1,{_MOST_DIGITS}}}", text):
        raise ConfigError(f"expected a whole number, got {quoted(text[:20])}")
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(f"0*[1-9][0-9]{{0,{_MOST_DIGITS - 1}}}", text):
        raise ConfigError(f"expected a positive whole number, got {quoted(text[:20])}")
    return int(text)


def number(text: str) -> float:
    """A number of at least 0; not ``nan``, ``infinity`` or ``1_000``, which ``float`` reads."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", text):
        raise ConfigError(f"expected a number, such as 4 or 1.5, got {quoted(text)}")
    return float(text)


def plain_number(text: str, kind: Callable[[str], Number]) -> Number:
    """A number as people write it, with a sign if it has one; not ``1_000`` or digits of other scripts, which
    ``int`` and ``float`` read.
    """
    try:
        if "_" in text or not text.isascii():
            raise ValueError
        return kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ConfigError(f"expected {expected}, got {quoted(text)}") from None


def flag(text: str) -> bool:
    """``true`` or ``false``."""
    if text not in ("true", "false"):
        raise ConfigError(f"expected true or false, got {quoted(text)}")
    return text == "true"


def one_of(what: str, choices: Iterable[Value]) -> Callable[[str], Value]:
    """The reader of one of these words; ``what`` is what they are, in an error message."""
    words = {str(value): value for value in choices}

    def read(text: str) -> Value:
        if text not in words:
            raise ConfigError(f"unknown {what} {quoted(text)}: {nearest_name(text, words)}")
        return words[text]

    return read


def several(read: Callable[[str], Value], separator: str = "|") -> Callable[[str], tuple[Value, ...]]:
    """The reader of values of one kind, such as ``32|16|8``."""
    return lambda text: tuple(read(part) for part in text.split(separator))


def named(name: str, read: Callable[[str], Any]) -> Callable[[str], dict[str, Any]]:
    """The reader of the value of a form, as the argument of that name."""
    return lambda text: {name: read(text)}


def optional(name: str, read: Callable[[str], Any]) -> Callable[[str], dict[str, Any]]:
    """As ``named``, for a value that may be left out."""
    return lambda text: {name: read(text)} if text else {}


def split_list(text: str) -> list[str]:
    """The texts between commas that are outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def split_specs(text: str) -> list[str]:
    """As ``split_list``, for terms with options: a comma before an option ``key=value`` belongs to its term.

    Example:
        >>> split_specs("standard,mlr:8|8,values=8|8,[standard,window:64]")
        ['standard', 'mlr:8|8,values=8|8', '[standard,window:64]']
    """
    specs: list[str] = []
    for part in split_list(text):
        if specs and re.match(r"\w+=", part):
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs
