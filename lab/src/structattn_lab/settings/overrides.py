"""Settings as nested frozen dataclasses: changed by ``section.field=value`` texts."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from structattn.checks import MAX_LENGTH, check_int, quoted
from structattn.errors import ConfigError, nearest_name
from structattn.grammar import assignment, flag, one_of, plain_number, split_list
from structattn_lab.settings.training import TrainingConfig

T = TypeVar("T")
Value = str | tuple[str, ...] | None  # of a setting, as it is written: a list, or nothing, only in a file
_FEW = 90  # characters of a setting's meaning
# Common short names of these settings.
_SHORT = {"training.lr": "training.learning_rate"}


def full_name(name: str) -> str:
    """The name of a setting in full, of one that has a short name."""
    return _SHORT.get(name, name)


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting's new value: ``section.field=value``.

    Attributes:
        name: of the setting, in full: ``training.lr`` may be written for ``training.learning_rate``.
        text: its value, as ``convert`` reads it.
        value: the value itself, where it is known; else it is read from the text.
    """

    name: str
    text: Value
    value: Any = None

    @classmethod
    def of(cls, name: str, value: Any) -> Change:
        """A change to a value that is known."""
        return cls(name, as_text(value), value)

    @classmethod
    def parse(cls, text: str) -> Change:
        """Reads the text form; raises ``ConfigError`` for another text."""
        try:
            name, value = assignment(text)
        except ConfigError:
            raise ConfigError(f"a setting is written section.field=value, got {quoted(text)}") from None
        return cls(full_name(name), value)

    def __str__(self) -> str:
        return f"{self.name}={self.text}"


def apply_overrides(config: T, overrides: tuple[str, ...]) -> T:
    """A copy of a nested frozen dataclass with every ``section.field=value`` applied; a later one wins.

    Raises:
        ConfigError: no such field (nearest named), a section instead of a field, a value of the wrong type,
            or values that do not fit together.
    """
    return with_changes(config, [Change.parse(override) for override in overrides])


def with_changes(config: T, changes: Iterable[Change]) -> T:
    """A copy with all changes; see ``apply_overrides``."""
    return _changed(config, [(change.name.split("."), change) for change in changes])


def _changed(config: T, changes: list[tuple[list[str], Change]]) -> T:
    """A copy with all changes made at once, each below a path of fields, so that two settings that depend on
    each other can be changed together.
    """
    hints = typing.get_type_hints(type(config))
    values: dict[str, Any] = {}
    inner: dict[str, list[tuple[list[str], Change]]] = {}
    for (head, *rest), change in changes:
        name = change.name
        if head not in hints:
            section = name.removesuffix(".".join([head, *rest]))
            inside = [] if section else _sections_with(config, name)
            if inside:
                raise ConfigError(f"unknown setting {name!r}: did you mean {' or '.join(map(repr, inside))}?")
            short = [
                short_name
                for short_name, full in _SHORT.items()
                if short_name.startswith(section) and full.rpartition(".")[2] in hints
            ]
            raise ConfigError(
                f"unknown setting {name!r}: "
                f"{nearest_name(section + head, [*(section + option for option in hints), *short])}"
            )
        current = getattr(config, head)
        if dataclasses.is_dataclass(current):
            if not rest and change.text is None and change.value is None:
                continue  # a section of a file, in which all is left out
            if not rest:
                fields = ", ".join(field.name for field in dataclasses.fields(current))
                raise ConfigError(f"{name!r} is a section; set one of its fields: {fields}")
            inner.setdefault(head, []).append((rest, change))
        elif rest:
            raise ConfigError(f"unknown setting {name!r}: {head!r} has no fields")
        else:
            values[head] = convert(change.text, hints[head], name) if change.value is None else change.value
    for head, deeper in inner.items():
        values[head] = _changed(getattr(config, head), deeper)
    if isinstance(config, TrainingConfig):
        return config.replaced(**values)  # type: ignore[return-value]
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def _sections_with(config: Any, name: str) -> list[str]:
    """The settings of this name in the sections of a dataclass, in full."""
    names = [full for full, _, _ in fields_of(config)] + list(_SHORT)
    return [full for full in names if full.endswith(f".{name}")]


def convert(text: Value, kind: Any, name: str) -> Any:
    """The text as a value of the annotated type of a field; ``name`` is that of the field, for the error."""
    try:
        if text is None:
            return _nothing(kind)
        return _convert(text, kind, name) if isinstance(text, str) else _listed(text, kind, name)
    except ConfigError as error:
        raise error if str(error).startswith(name) else ConfigError(f"{name}: {error}") from None


def _nothing(kind: Any) -> None:
    if type(None) not in typing.get_args(kind):
        raise ConfigError(f"expected {type_in_words(kind)}, got nothing")


def _listed(texts: tuple[str, ...], kind: Any, name: str) -> Any:
    """A list of a file, whose items may have commas."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _listed(texts, next(a for a in args if a is not type(None)), name)
    if origin is not tuple:
        raise ConfigError(f"expected one value, {type_in_words(kind)}, got a list of {len(texts)}")
    if args[-1] is not ... and len(texts) != len(args):
        raise ConfigError(f"expected {len(args)} values, got {len(texts)}")
    return tuple(_convert(text, args[0], name) for text in texts)


def _convert(text: str, kind: Any, name: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in args and text.lower() == "none":
            return None
        return _convert(text, next(a for a in args if a is not type(None)), name)
    if origin is typing.Literal:
        return one_of("value", args)(text)
    if origin is tuple:
        parts = [part for part in split_list(text.removeprefix("(").removesuffix(")")) if part]
        if args[-1] is not ... and len(parts) != len(args):
            raise ConfigError(f"expected {len(args)} values, such as {','.join('1' for _ in args)}, got {quoted(text)}")
        return tuple(_convert(part, args[0], name) for part in parts)
    if kind is bool:
        return flag(text.lower())
    if kind in (int, float):
        value = plain_number(text, kind)
        if not math.isfinite(value):
            raise ConfigError(f"expected a finite number, got {quoted(text)}")
        if kind is int:
            check_int(name, value, maximum=MAX_LENGTH)
        return value
    return kind(text)


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The name, as ``--set`` writes it, annotated type and value of every setting below a dataclass."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hints[name], value


def meanings(config: Any, prefix: str = "") -> dict[str, str]:
    """What every setting below a dataclass is, in a few words: the beginning of its entry in the docstring of
    the class.
    """
    words: dict[str, str] = {}
    entries = _argument_entries(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            words |= meanings(value, f"{prefix}{field.name}.")
        else:
            words[f"{prefix}{field.name}"] = _few_words(entries.get(field.name, ""))
    return words


def _argument_entries(kind: type) -> dict[str, str]:
    """The text of every argument in the section ``Args`` of a docstring; one entry may describe several."""
    lines = (inspect.getdoc(kind) or "").partition("\nArgs:\n")[2].splitlines()
    section = itertools.takewhile(lambda line: line.startswith(" "), lines)
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in section:
        if not line.startswith(" " * 8):  # a new entry
            head, _, line = line.partition(":")
            names = head.replace(" ", "").split(",")
        for name in names:
            entries[name] = f"{entries.get(name, '')} {line.strip()}".strip()
    return entries


def _few_words(text: str) -> str:
    """The first sentence, or its beginning."""
    first = re.split(r"(?<=[\w)])[.;:](?= |$)", text.replace("``", ""), maxsplit=1)[0].rstrip(".")
    return textwrap.shorten(first, _FEW, placeholder=" ...")


def type_in_words(kind: Any) -> str:
    """An annotation as the command line writes values of it: ``int or none``, ``float,...``,
    ``no | bf16``.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if a is type(None) else type_in_words(a) for a in args)
    if origin is typing.Literal:
        return " | ".join(map(str, args))
    if origin is tuple:
        return f"{type_in_words(args[0])},..." if args[-1] is ... else ",".join(map(type_in_words, args))
    return {"bool": "true | false", "str": "text"}.get(kind.__name__, kind.__name__)


def as_text(value: Any) -> str:
    """A value as ``convert`` reads it."""
    if isinstance(value, tuple):
        return ",".join(map(as_text, value)) or "()"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
