"""What a sweep searches: parameters as texts, ``training.learning_rate=log:1e-5:5e-3``.

    NAME=log:LOW:HIGH       every order of magnitude as likely as the others; whole numbers where the setting has them
    NAME=uniform:LOW:HIGH   every number as likely as the others
    NAME=int:LOW:HIGH       every whole number, LOW and HIGH too
    NAME=choice:A,B,...     one of these

``NAME`` is a setting as ``--set`` has it, ``task...`` or ``training...``, or ``attention``. A comma inside round or square brackets
belongs to a choice; in a choice of attentions also one before an option: ``choice:standard,mlr:8|8,values=8|8`` has two.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from structattn.errors import ConfigError, nearest_name
from structattn.spec.grammar import split_specs
from structattn.spec.layers import LayerSpecs
from structattn.studies.settings import convert, full_name
from structattn.studies.training.config import TrainingConfig

ATTENTION = "attention"
_FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or choice:A,B,..."
Value = float | int | str
CheckSpec = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of one run, which ``--set`` and the parameters of a sweep change."""

    task: Any
    training: TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A setting that a sweep varies: over a range, or over choices.

    Args:
        name: of the setting, in full, or ``"attention"``.
        low, high: the range, both ends included; whole numbers for a setting of whole numbers. ``None`` with choices.
        log: search the logarithm.
        choices: texts, as ``--set`` takes them.
    """

    name: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[str, ...] = ()

    def setting(self, value: Value) -> str:
        """The value as ``--set`` takes it, exactly."""
        return f"{self.name}={value if isinstance(value, str) else repr(value)}"


def setting_types(config: Any, prefix: str = "") -> dict[str, Any]:
    """The annotated type of every setting of nested dataclasses, by its dotted name."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        inner = dataclasses.is_dataclass(value)
        found |= setting_types(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": hint}
    return found


def parse_parameters(
    texts: Sequence[str], settings: RunSettings, check_spec: CheckSpec = LayerSpecs.parse
) -> tuple[Parameter, ...]:
    """Reads the parameters of a sweep.

    Args:
        texts: see the top of this file.
        settings: those of the runs, which say what there is to vary.
        check_spec: raises ``ConfigError`` for a text that names no model of the task. Default: for one that is no attention spec.

    Raises:
        ConfigError: none, one twice, an unknown setting (nearest named), a range that is none or not of the setting's type, a
            choice that is none of the setting's values.
    """
    if not texts:
        raise ConfigError(f"nothing to sweep: give at least one parameter, as NAME={_FORMS}")
    known = {ATTENTION: str, **setting_types(settings)}
    parameters = tuple(_parse(text, known, check_spec) for text in texts)
    names = [parameter.name for parameter in parameters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is swept twice: give every parameter once")
    return parameters


def _parse(text: str, known: dict[str, Any], check_spec: CheckSpec) -> Parameter:
    written, equals, rest = text.partition("=")
    name = full_name(written.strip())
    kind, colon, body = rest.strip().partition(":")
    if not equals or not colon:
        raise ConfigError(f"a parameter is written NAME={_FORMS}, got {text!r}")
    if name not in known:
        raise ConfigError(f"unknown parameter {name!r}: {nearest_name(name, known)}")
    hint = _without_none(known[name])
    if kind == "choice":
        return Parameter(name=name, choices=_choices(name, hint, body, check_spec))
    if kind not in ("log", "uniform", "int"):
        raise ConfigError(f"{name}: unknown kind of parameter {kind!r}: expected {_FORMS}")
    if hint not in (int, float):
        raise ConfigError(f"{name} is no number: give its values, as {name}=choice:A,B,...")
    if (kind == "int") != (hint is int) and kind != "log":
        takes, better = ("whole numbers", "int") if hint is int else ("any number", "uniform")
        raise ConfigError(f"{name} takes {takes}: {better}:LOW:HIGH, or log:LOW:HIGH, got {rest.strip()!r}")
    low, high = _range(name, hint, body)
    if kind == "log" and low <= 0:
        raise ConfigError(f"{name}: a range of orders of magnitude begins above 0, got {body!r}")
    return Parameter(name=name, low=low, high=high, log=kind == "log")


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _range(name: str, kind: type, body: str) -> tuple[float, float]:
    ends = body.split(":")
    if len(ends) != 2:
        raise ConfigError(f"{name}: a range has two ends, LOW:HIGH, got {body!r}")
    low, high = (convert(end.strip(), kind, name) for end in ends)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{name}: a range ends at numbers, got {body!r}")
    if not low < high:
        raise ConfigError(f"{name}: the lower end of a range comes first, got {body!r}")
    return low, high


def _choices(name: str, hint: Any, body: str, check_spec: CheckSpec) -> tuple[str, ...]:
    choices = split_specs(body) if name == ATTENTION else _split(body)
    if not all(choices):
        raise ConfigError(f"{name}: expected a choice before and after every comma, got {body!r}")
    if twice := [choice for choice in choices if choices.count(choice) > 1]:
        raise ConfigError(f"{name}: every choice once, got {twice[0]!r} twice")
    for choice in choices:
        if name == ATTENTION:
            check_spec(choice)
        elif choice.lower() != "none":
            convert(choice, hint, name)
    return tuple(choices)


def _split(body: str) -> list[str]:
    """The texts between commas that stand outside of brackets."""
    parts, depth = [""], 0
    for character in body:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
