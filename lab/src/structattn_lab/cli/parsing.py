"""From the words of a command line to a command, with every mistake in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import operator
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import tyro

from structattn.errors import ConfigError, nearest_name
from structattn_lab.cli.commands import COMMANDS, ParsedCommand
from structattn_lab.cli.output import summary_of
from structattn_lab.cli.values import KINDS, choice, constructor

_DESCRIPTION = """Compare, train and inspect attention variants.

Examples:
  structattn compare nearest-neighbor --preset demo    train five attention variants, write a report
  structattn train text --attention "mlr:8|8|8|8"      train one language model
  structattn specs                                     list what --attention takes
  structattn settings forecast                         list what --set takes
  structattn compare --help                            the options of one command

structattn --version prints the version. With --traceback, an error shows where it was raised."""


_VALUES = tyro.constructors.ConstructorRegistry()


@_VALUES.primitive_rule
def _values(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """The options that take one value, or at least one, and declare no bounds of their own."""
    if info._primitive_spec is not None:
        return None
    kind: Any = info.type
    members = [member for member in get_args(kind) if member is not NoneType]
    if get_origin(kind) in (Union, UnionType) and len(members) == 1:  # the first one where a member is a Literal
        kind = members[0]
    several = get_args(kind)[1:] == (...,)
    markers: set[Any] = set(info.markers)
    if several and tyro.conf.UseAppendAction not in markers:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return constructor(choice(get_args(kind)), several=several)
    return constructor(KINDS[kind], several=several) if kind in KINDS else None


def parse(arguments: Sequence[str]) -> ParsedCommand:
    """The command that the words after the program's name describe.

    Prints help and exits if the words ask for it, or if there are none.

    Raises:
        ConfigError: an unknown command or option (the nearest is named), a missing or wrong value.
    """
    _check_encoding(arguments)
    words = [word for word in arguments[:2] if not word.startswith("-")]
    name = next((name for name in (" ".join(words), *words[:1]) if name in COMMANDS), None)
    if name is not None and list(arguments[: len(name.split())]) == name.split():
        rest = arguments[len(name.split()) :]
        return cast(ParsedCommand, _read(COMMANDS[name], rest, f"structattn {name}"))
    group = {command: kind for command, kind in COMMANDS.items() if command.split()[0] in words[:1]}
    if words[:1] and not group:
        raise ConfigError(f"unknown command {words[0]!r}: {nearest_name(words[0], COMMANDS)}")
    if group and len(words) > 1:
        raise ConfigError(f"unknown command {' '.join(words)!r}: {nearest_name(' '.join(words), group)}")
    if not arguments or {"-h", "--help"} & set(arguments):
        _print_help(group or COMMANDS)
        raise SystemExit(0)
    if group:
        raise ConfigError(f"structattn {words[0]} needs one of {', '.join(group)}; structattn --help says what they do")
    raise ConfigError(
        f"expected a command before its options, got {arguments[0]!r}: one of {', '.join(COMMANDS)}; structattn --help "
        "says what they do"
    )


def _check_encoding(arguments: Sequence[str]) -> None:
    """Bytes that are no UTF-8 come as halves of surrogate pairs, which no record, report or log can hold:
    better here than after training.
    """
    for previous, word in zip(("", *arguments), arguments, strict=False):
        try:
            word.encode()
        except UnicodeEncodeError:
            option, equals, value = word.partition("=")
            if not (option.startswith("--") and equals):
                option, value = previous if previous.startswith("--") else "the argument", word
            raise ConfigError(
                f"{option}: expected text in UTF-8, got {value!r}, with other bytes in it. Rename the file, or write "
                "it in UTF-8"
            ) from None


def _print_help(commands: dict[str, type[ParsedCommand]]) -> None:
    """The commands with the first line of their docstrings."""
    kinds: list[Any] = [
        Annotated[kind, tyro.conf.subcommand(name, description=summary_of(kind))] for name, kind in commands.items()
    ]
    with contextlib.suppress(SystemExit):
        tyro.cli(functools.reduce(operator.or_, kinds), args=["--help"], prog="structattn", description=_DESCRIPTION)


def _read(kind: type[Any], arguments: Sequence[str], program: str) -> object:
    """The command of one class; tyro's own report of a mistake becomes one line."""
    report = io.StringIO()
    if {"-h", "--help"} & set(arguments):
        _hide_unset_defaults(kind)
    for option in _given_once(kind):
        if sum(word.partition("=")[0].replace("_", "-") == option for word in arguments) > 1:
            raise ConfigError(f"{option} is given twice, and the first would be lost: give all values after one")
    try:
        with contextlib.redirect_stderr(report), _VALUES:
            return tyro.cli(kind, args=arguments, prog=program, description=inspect.cleandoc(kind.__doc__ or ""))
    except SystemExit as end:
        if not end.code:
            raise
    options = [
        f"--{'no-' if negative else ''}{field.name.replace('_', '-')}"
        for field in dataclasses.fields(kind)
        if "Positional" not in str(field.type)
        for negative in ((False, True) if field.type == "bool" else (False,))
    ]
    for word in arguments:
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option not in [*options, "--help"]:
            positive = [spelling for spelling in options if not spelling.startswith("--no-")]
            hint = nearest_name(option, positive) if positive else "it has none"
            raise ConfigError(f"unknown option {option!r} of {program}: {hint}")
    raise ConfigError(f"{_first_part(report.getvalue())}; {program} --help shows what it takes")


def _hide_unset_defaults(kind: type[Any]) -> None:
    """Help shows no default that stands for what its text says."""
    hints, types = get_type_hints(kind, include_extras=True), get_type_hints(kind)
    for field in dataclasses.fields(kind):
        is_empty = field.default is dataclasses.MISSING and get_origin(types[field.name]) is tuple
        if is_empty or field.default in (None, "", ()):
            kind.__annotations__[field.name] = Annotated[hints[field.name], tyro.conf.arg(help_behavior_hint="")]


def _given_once(kind: type[Any]) -> list[str]:
    """The options of several values, which all come after one, and --attention."""
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if name == "attention" or ("tuple" in str(hints[name]) and "Append" not in str(hints[name]))
    ]


def _first_part(report: str) -> str:
    """What tyro says before its first rule, without the frame, in one line; a terminal without UTF-8 has a
    rule below the title too.
    """
    lines = [line.strip("│╭╰╮╯ ") for line in report.splitlines()][1:]
    content: list[str] = []
    for line in lines:
        if set(line) in ({"─"}, {"-"}):
            if content:
                break
            continue
        content.append(line)
    words = " ".join(content).replace("(required)", "").removeprefix("Error parsing ")
    return " ".join(words.split()).rstrip(".")
