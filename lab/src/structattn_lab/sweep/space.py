"""The parameters of a sweep as texts, such as ``training.learning_rate=log:1e-5:5e-3``.

    NAME=log:LOW:HIGH       log-uniform; whole numbers where the setting has them
    NAME=uniform:LOW:HIGH   uniform
    NAME=int:LOW:HIGH       every whole number, including LOW and HIGH
    NAME=choice:A,B,...     one of these

``NAME`` is a setting as for ``--set``, ``task...`` or ``training...``, or ``attention``. A comma inside round
or square brackets belongs to a choice; in a choice of attention variants also one before an option:
``choice:standard,mlr:8|8,values=8|8`` has two.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from structattn.checks import quoted
from structattn.errors import ConfigError, nearest_name
from structattn.grammar import one_of, reading, several, split_list, split_specs
from structattn.spec.layers import LayerSpecs
from structattn_lab.old_formats import todays_spec
from structattn_lab.records.sweep import Parameter
from structattn_lab.settings.overrides import Change, convert, fields_of
from structattn_lab.settings.training import TrainingConfig

ATTENTION = "attention"
_KINDS = ("log", "uniform", "int", "choice")
_FORMS = "log:LOW:HIGH, NAME=uniform:LOW:HIGH, NAME=int:LOW:HIGH or NAME=choice:A,B,..."
CheckSpec = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of one run, which ``--set`` and the parameters of a sweep change."""

    task: Any
    training: TrainingConfig


def parse_parameters(
    texts: Sequence[str], settings: RunSettings, check_spec: CheckSpec = LayerSpecs.parse
) -> tuple[Parameter, ...]:
    """Reads the parameters of a sweep.

    Args:
        texts: see the top of this file.
        settings: those of the runs, which define the names.
        check_spec: raises ``ConfigError`` for a text that is not a model of the task. Default: for one that
            is not an attention spec.

    Raises:
        ConfigError: no parameter, a repeated one, an unknown setting (nearest named), a range that is empty
            or not of the setting's type, or a choice that is not a value of the setting.
    """
    if not texts:
        raise ConfigError(f"nothing to sweep: give at least one parameter, as NAME={_FORMS}")
    hints = {ATTENTION: str} | {name: hint for name, hint, _ in fields_of(settings)}
    parameters = tuple(_parse(text, hints, check_spec) for text in texts)
    names = [parameter.name for parameter in parameters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is swept twice: parameters must be unique")
    return parameters


def _parse(text: str, hints: dict[str, Any], check_spec: CheckSpec) -> Parameter:
    with reading("parameter", text, f"Written NAME={_FORMS}"):
        setting = Change.parse(text)
        name, (kind, _, body) = setting.name, str(setting.text).partition(":")
        if name not in hints:
            raise ConfigError(f"unknown setting {quoted(name)}: {nearest_name(name, hints)}")
        hint = _without_none(hints[name])
        if one_of("kind", _KINDS)(kind) == "choice":
            return Parameter(name=name, choices=_choices(name, hint, body, check_spec))
        if hint not in (int, float):
            raise ConfigError(f"{name} is not a number: give its values, as {name}=choice:A,B,...")
        if (kind == "int") != (hint is int) and kind != "log":
            takes, better = ("whole numbers", "int") if hint is int else ("any number", "uniform")
            raise ConfigError(f"{name} takes {takes}: {better}:LOW:HIGH, or log:LOW:HIGH")
        low, high = _range(name, hint, body)
        if kind == "log" and low <= 0:
            raise ConfigError(f"a log range begins above 0, got {quoted(body)}")
        return Parameter(name=name, low=low, high=high, log=kind == "log")


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _range(name: str, kind: type, body: str) -> tuple[float, float]:
    ends = several(lambda end: convert(end.strip(), kind, name), ":")(body)
    if len(ends) != 2:
        raise ConfigError(f"a range has two ends, LOW:HIGH, got {quoted(body)}")
    low, high = ends
    if not low < high:
        raise ConfigError(f"the lower end of a range comes first, got {quoted(body)}")
    return low, high


def _choices(name: str, hint: Any, body: str, check_spec: CheckSpec) -> tuple[str, ...]:
    choices = list(map(todays_spec, split_specs(body))) if name == ATTENTION else split_list(body)
    if not all(choices):
        raise ConfigError(f"expected a choice before and after every comma, got {quoted(body)}")
    if twice := [choice for choice in choices if choices.count(choice) > 1]:
        raise ConfigError(f"choices must be unique, got {quoted(twice[0])} twice")
    for choice in choices:
        if name == ATTENTION:
            check_spec(choice)
        elif choice.lower() != "none":
            convert(choice, hint, name)
    return tuple(choices)
