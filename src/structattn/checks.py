"""Checks of single arguments: one for each kind of value, so that every mistake is reported in the same words."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from structattn.errors import ConfigError, ShapeError, nearest_name


def describe(value: object) -> str:
    """What an error message says of a wrong value: its type and, where that is short, the value itself.

    Returns:
        ``"3 (int)"``, ``"None"``, ``"a Tensor of shape (2, 3)"`` or ``"an Attention"``.
    """
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | int | float | complex | tuple | list | dict | set | bytes):
        text = repr(value)
        return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def is_int(value: object) -> bool:
    """Whether a value is an int, or the symbolic int that stands for one while PyTorch traces; a bool is not."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def check_int(name: str, value: Any, *, minimum: int | None = None, maximum: int | None = None) -> None:
    """Raises ``ConfigError`` unless ``value`` is an int within the bounds, both included; a bool is no int."""
    if not (is_int(value) and (minimum is None or value >= minimum) and (maximum is None or value <= maximum)):
        raise ConfigError(f"{name} must be an int{_bounds(minimum, maximum)}, got {describe(value)}")


def check_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raises ``ConfigError`` unless ``value`` is a finite int or float within the bounds.

    Args:
        minimum, maximum: bounds that are allowed themselves.
        above, below: bounds that are not.
    """
    fits = (isinstance(value, float | torch.SymFloat) or is_int(value)) and (
        not isinstance(value, int | float) or math.isfinite(value)
    )
    fits = (
        fits
        and (minimum is None or value >= minimum)
        and (maximum is None or value <= maximum)
        and (above is None or value > above)
        and (below is None or value < below)
    )
    if not fits:
        raise ConfigError(
            f"{name} must be a finite number{_bounds(minimum, maximum, above, below)}, got {describe(value)}"
        )


def check_bool(name: str, value: Any) -> None:
    """Raises ``ConfigError`` unless ``value`` is ``True`` or ``False``."""
    if not isinstance(value, bool | torch.SymBool):
        raise ConfigError(f"{name} must be True or False, got {describe(value)}")


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ``ConfigError`` with the nearest known name unless ``value`` is one of them."""
    known = tuple(known)
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, got {describe(value)}")
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}: {nearest_name(value, known)}")


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], expected: str, remedy: str = "") -> None:
    """Raises ``ConfigError`` unless ``value`` is an instance of ``kinds``.

    Args:
        expected: the kinds in words, as ``"a LevelLayout or None"``.
        remedy: what to write instead, put behind the message.
    """
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} must be {expected}, got {describe(value)}{'; ' + remedy if remedy else ''}")


def check_tensor(name: str, value: Any) -> None:
    """Raises ``ShapeError`` unless ``value`` is a dense tensor: not an array, a list, ``None``, sparse or nested."""
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} must be a torch.Tensor, got {describe(value)}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested" if value.is_nested else f"a {value.layout}"
        raise ShapeError(f"{name} must be a dense tensor (layout torch.strided), got {kind} tensor")


def check_device(name: str, value: Any) -> torch.device:
    """The device of that name; raises ``ConfigError`` where there is none on this machine."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{name} must be a device of this machine, got {describe(value)}: {reason}") from None
    return device


def _bounds(
    minimum: float | None, maximum: float | None, above: float | None = None, below: float | None = None
) -> str:
    parts = [
        f"{words} {bound}"
        for words, bound in (("of at least", minimum), ("above", above), ("at most", maximum), ("below", below))
        if bound is not None
    ]
    return f" {' and '.join(parts)}" if parts else ""
