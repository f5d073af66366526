"""Settings as nested frozen dataclasses: changed by ``section.field=value`` texts, written as and read from plain data."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from structattn.errors import ConfigError, nearest_name

T = TypeVar("T")


def _convert(text: str, kind: Any, name: str) -> Any:
    """The text as a value of the annotated type of a field."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if type(None) in args and text.lower() == "none":
            return None
        return _convert(text, next(a for a in args if a is not type(None)), name)
    if origin is typing.Literal:
        if text not in args:
            raise ConfigError(f"{name}: {text!r} is not one of {', '.join(map(repr, args))}")
        return text
    if origin is tuple:
        parts = [part for part in text.strip("()").split(",") if part.strip()]
        return tuple(_convert(part.strip(), args[0], name) for part in parts)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name}: expected true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{name}: expected {kind.__name__}, got {text!r}") from error


def replace_field(config: T, path: list[str], text: str, name: str) -> T:
    """A copy of a nested dataclass with one field set from text.

    Args:
        config: a frozen dataclass.
        path: names of the fields from the outside in.
        text: the new value.
        name: what the user wrote, for messages.

    Raises:
        ConfigError: no such field (nearest named), a section in place of a field, or a value of the wrong type.
    """
    hints = typing.get_type_hints(type(config))
    head, *rest = path
    if head not in hints:
        raise ConfigError(f"unknown setting {name!r}: {nearest_name(head, hints)}")
    current = getattr(config, head)
    if dataclasses.is_dataclass(current) and not isinstance(current, type):
        if not rest:
            fields = ", ".join(f.name for f in dataclasses.fields(current))
            raise ConfigError(f"{name!r} is a section; set one of its fields: {fields}")
        value: Any = replace_field(current, rest, text, name)
    elif rest:
        raise ConfigError(f"unknown setting {name!r}: {head!r} has no fields")
    else:
        value = _convert(text, hints[head], name)
    return dataclasses.replace(config, **{head: value})  # type: ignore[type-var]


def apply_overrides(config: T, overrides: tuple[str, ...]) -> T:
    """A copy of ``config`` with every ``section.field=value`` applied in order; raises ``ConfigError`` as above."""
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"a setting is written section.field=value, got {override!r}")
        config = replace_field(config, name.strip().split("."), text.strip(), name.strip())
    return config


def to_plain(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON data."""
    return dataclasses.asdict(config)


def from_plain(kind: type[T], data: dict[str, Any]) -> T:
    """A dataclass of type ``kind`` from what ``to_plain`` wrote.

    Raises:
        ConfigError: a field is unknown or missing.
    """
    hints = typing.get_type_hints(kind)
    unknown = set(data) - set(hints)
    if unknown:
        raise ConfigError(
            f"{kind.__name__}: unknown field {sorted(unknown)[0]!r}: {nearest_name(sorted(unknown)[0], hints)}"
        )
    values: dict[str, Any] = {}
    for name, value in data.items():
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, dict):
            values[name] = from_plain(typing.cast(type, hints[name]), value)
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from error
