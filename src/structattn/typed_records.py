"""Dataclasses from JSON, read strictly, with the path of any error."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

from structattn.checks import describe
from structattn.errors import CheckpointError, nearest_name

T = TypeVar("T")
_WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def read_as(kind: type[T], data: object, where: str) -> T:
    """A dataclass from JSON data.

    Fields are strings, numbers, bools, tuples, dicts by string, other dataclasses, ``Literal``, ``None`` or
    any JSON value (``Any``). A field with a default may be missing: it is newer than some records.

    Args:
        kind: the dataclass.
        data: what ``json.loads`` returned.
        where: the file, for the message.

    Raises:
        CheckpointError: a field is unknown or missing, or its value has another type; the message has its
            path, what was expected and what came.
    """
    try:
        return typing.cast(T, _value(kind, data, ""))
    except _WrongRecordError as error:
        path, words = error.args
        raise CheckpointError(f"{where}: {path + ': ' if path else ''}{words}") from None


class _WrongRecordError(Exception):
    """An error in a record: the path of the field, and the message."""


@functools.cache
def typed_fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """Type of each field, and whether it must be there."""
    hints = typing.get_type_hints(kind)
    none = dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is none and field.default_factory is none)
        for field in dataclasses.fields(kind)
    }


def _value(kind: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _value(args[0], value, path)  # ``X | None`` is the only union
    if origin is typing.Literal:
        if value not in args:
            raise _WrongRecordError(path, f"expected one of {', '.join(map(repr, args))}, got {describe(value)}")
        return value
    if origin is tuple:
        _expect(isinstance(value, list | tuple), path, "a list", value)
        if args[-1] is ...:
            return tuple([_value(args[0], entry, f"{path}[{i}]") for i, entry in enumerate(value)])
        _expect(len(value) == len(args), path, f"a list of {len(args)} values", value)
        return tuple([_value(args[i], entry, f"{path}[{i}]") for i, entry in enumerate(value)])
    if origin is dict:
        _expect(isinstance(value, dict), path, "an object", value)
        return {str(key): _value(args[1], entry, f"{path}.{key}".lstrip(".")) for key, entry in value.items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), value, path)
    accepted = (int, float) if kind is float else kind
    _expect(isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)), path, _WORDS[kind], value)
    return value


def _dataclass(kind: type, value: Any, path: str) -> Any:
    _expect(isinstance(value, dict), path, f"an object ({kind.__name__})", value)
    fields = typed_fields(kind)
    for name in value:
        if name not in fields:
            raise _WrongRecordError(path, f"unknown field {name!r} of {kind.__name__}: {nearest_name(name, fields)}")
    for name, (_, is_required) in fields.items():
        if is_required and name not in value:
            raise _WrongRecordError(path, f"field {name!r} of {kind.__name__} is missing")
    return kind(**{name: _value(fields[name][0], entry, f"{path}.{name}".lstrip(".")) for name, entry in value.items()})


def _expect(fits: bool, path: str, expected: str, value: object) -> None:
    if not fits:
        raise _WrongRecordError(path, f"expected {expected}, got {describe(value)}")
