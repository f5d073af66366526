"""Checks of single arguments: one for each kind of value, so that all errors have the same wording."""

from __future__ import annotations

import contextlib
import os
import sys
import typing
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from structattn.errors import ConfigError, ShapeError, nearest_name
from structattn.tracing import constant_when_traced

MAX_SIZE = 2**31 - 1  # of one dimension: more is a mistake, and does not fit into memory
MAX_SEED = 2**63 - 1  # what a generator of torch takes
MAX_SCALE = 1e20  # of scores: far above it float32 holds no product with one, and softmax equals a maximum
MAX_LENGTH = 2**40  # of positions, which some layouts count in int64 together with a row
_LONGEST_NAME = 255  # bytes of a file name: no common file system has longer ones
INT_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # those that torch computes with


def shortened(text: str, longest: int = 200) -> str:
    """The beginning of a text that is too long for a message."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def quoted(value: object, longest: int = 200) -> str:
    """A wrong value as Python writes it, so that every letter can be printed; only its beginning where it is
    long.
    """
    return shortened(repr(value), longest)


def describe(value: object) -> str:
    """What an error message says of a wrong value: its type and, where that is short, the value itself.

    Returns:
        ``"3 (int)"``, ``"None"``, ``"a Tensor of shape (2, 3)"`` or ``"an Attention"``.
    """
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        if value.is_nested or is_lazy(value):  # it has no shape, and reading it fails
            return "a nested Tensor" if value.is_nested else "a parameter that has no shape yet"
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, str | int | float | complex | tuple | list | dict | set | bytes):
        return f"{quoted(value, 60)} ({kind})"
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def is_int(value: object) -> bool:
    """Whether a value is an int, or the symbolic int that PyTorch uses instead while it traces; a bool is
    not.
    """
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


@constant_when_traced
def is_exporting() -> bool:
    """``torch.compiler.is_exporting``, whose value ``torch.compile`` of PyTorch 2.11 takes to be true when it
    traces the call.
    """
    return torch.compiler.is_exporting()


def holds(condition: bool | torch.SymBool) -> bool:
    """Whether a comparison of lengths is true; in a program that is exported, whether it is so at every
    length it may be given.
    """
    if is_exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # it takes long to import

        return statically_known_true(condition)
    return True if condition else False  # noqa: SIM210 (a branch, where Dynamo makes the condition a guard; bool() does not)


def check_int(name: str, value: Any, *, minimum: int | None = None, maximum: int | None = None) -> None:
    """Raises ``ConfigError`` unless ``value`` is an int within the bounds, both included; a bool is not an
    int.
    """
    if not (is_int(value) and (minimum is None or value >= minimum) and (maximum is None or value <= maximum)):
        raise ConfigError(f"{name} must be an int{_bounds(minimum, maximum)}, got {describe(value)}")


def check_size(name: str, value: Any, maximum: int = MAX_SIZE) -> None:
    """Raises ``ConfigError`` unless ``value`` is an int from 1 to the largest size."""
    is_large = is_int(value) and isinstance(value, int) and value > maximum
    check_int(name, value, minimum=1, maximum=maximum if is_large else None)  # named only where it matters


def check_sizes(name: str, values: Any, *, entry: str = "entry", maximum: int = MAX_SIZE) -> tuple[int, ...]:
    """The values as a tuple; raises ``ConfigError`` unless they are a sequence of ints from 1 to the largest
    size.

    Args:
        entry: what one of them is, as ``"level"``; they are counted from 1.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        remedy = f"; for one number write ({values!r},)" if is_int(values) else ""
        raise ConfigError(f"{name} must be a tuple or list of ints, got {describe(values)}{remedy}")
    for number, value in enumerate(values, start=1):
        if not (type(value) is int and 1 <= value <= maximum):
            check_size(f"{name}: {entry} {number}", value, maximum)
    return tuple(values)


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
        minimum, maximum: inclusive bounds.
        above, below: exclusive bounds.
    """
    fits = isinstance(value, torch.SymFloat | torch.SymInt) or (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
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


def check_scale(name: str, value: Any) -> None:
    """Raises ``ConfigError`` unless ``value`` is a number that others can be multiplied by and stay finite in
    float32.
    """
    check_number(name, value)
    if not -MAX_SCALE <= value <= MAX_SCALE:
        raise ConfigError(f"{name} must be from {-MAX_SCALE} to {MAX_SCALE}, got {describe(value)}")


def check_bool(name: str, value: Any) -> None:
    """Raises ``ConfigError`` unless ``value`` is ``True`` or ``False``."""
    if value is not True and value is not False and not isinstance(value, torch.SymBool):
        raise ConfigError(f"{name} must be True or False, got {describe(value)}")


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ``ConfigError`` with the nearest known name unless ``value`` is one of them."""
    known = tuple(known)
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, got {describe(value)}")
    if value not in known:
        raise ConfigError(f"unknown {name} {quoted(value)}: {nearest_name(value, known)}")


def check_type(
    name: str, value: Any, kinds: type | tuple[type, ...] | UnionType, expected: str, remedy: str = ""
) -> None:
    """Raises ``ConfigError`` unless ``value`` is an instance of ``kinds``.

    Args:
        expected: the kinds in words, as ``"a LevelLayout or None"``.
        remedy: what to write instead, put behind the message.
    """
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} must be {expected}, got {describe(value)}{'; ' + remedy if remedy else ''}")


def check_path(name: str, value: Any) -> Path:
    """The path; raises ``ConfigError`` unless it is the text or ``Path`` of a name that a file can have."""
    name_bytes = b""
    if isinstance(value, str | Path) and "\0" not in str(value):
        with contextlib.suppress(UnicodeEncodeError):  # a lone surrogate
            name_bytes = os.fsencode(Path(value).name)
    if not 1 <= len(name_bytes) <= _LONGEST_NAME:
        raise ConfigError(f"{name} must be the name of a file or folder, or a Path, got {describe(value)}")
    return Path(value)


def check_tensor(name: str, value: Any) -> None:
    """Raises ``ShapeError`` unless ``value`` is a dense tensor: not an array, a list, ``None``, sparse,
    nested or distributed.
    """
    if not isinstance(value, Tensor):
        remedy = "; torch.as_tensor makes one" if isinstance(value, list | tuple) or hasattr(value, "__array__") else ""
        raise ShapeError(f"{name} must be a torch.Tensor, got {describe(value)}{remedy}")
    if not torch.compiler.is_compiling() and is_lazy(value):  # a compiler cannot trace this check
        raise ShapeError(f"{name} has no shape yet: run the module that it belongs to once")
    if value.is_quantized:
        raise ShapeError(f"{name} is quantised: give {name}.dequantize()")
    if value.is_nested:
        raise ShapeError(f"{name} must be a dense tensor, got a nested one: pack its sequences into one (cu_seqlens)")
    if value.layout != torch.strided:
        raise ShapeError(f"{name} must be a dense tensor (layout torch.strided), got a {value.layout} tensor")
    if type(value).__name__ == "DTensor":  # known by its name, since its module takes long to import
        raise ShapeError(
            f"{name} must be a tensor of one device, got a DTensor: give its local part, {name}.to_local()"
        )


def check_like(name: str, value: Tensor, parameter: Tensor) -> None:
    """Raises ``ShapeError`` unless ``value`` can be combined with a parameter: one device, and one dtype
    unless autocast casts both.
    """
    if value.device != parameter.device:
        raise ShapeError(f"{name} is on {value.device}, the parameters are on {parameter.device}; move one of them")
    if value.dtype != parameter.dtype and not (is_autocast(value) and is_autocast(parameter)):
        raise ShapeError(f"{name} is {value.dtype}, the parameters are {parameter.dtype}; convert one of them")


def no_autocast() -> bool:
    """Whether autocast is known to be off for all devices: the cheap check, which is enough for most
    calls.
    """
    return not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled()


def is_autocast(value: Tensor) -> bool:
    """Whether autocast is on and casts this tensor: it leaves float64 and ints as they are."""
    if no_autocast():
        return False
    # torch.amp.is_autocast_available knows that the meta device has none, and PyTorch 2.11 cannot compile it.
    casts = value.is_floating_point() and value.dtype != torch.float64 and not value.is_meta
    return casts and torch.is_autocast_enabled(value.device.type)


def check_int_tensor(name: str, value: Any, shape: tuple[int | None, ...]) -> None:
    """Raises ``ShapeError`` unless ``value`` is a tensor of ints of that shape, in which ``None`` is any
    size.
    """
    check_tensor(name, value)
    fits = value.dim() == len(shape) and all(b in (None, a) for a, b in zip(value.shape, shape, strict=True))
    if not (fits and value.dtype in INT_DTYPES):
        wanted = ", ".join("any" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "")
        raise ShapeError(
            f"{name} must be ints (such as torch.int64) of shape ({wanted}), got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )


def check_sequences(batch: int, left_padding: Any, cu_seqlens: Any, length: int | None = None) -> None:
    """Raises ``ShapeError`` unless the padding of a batch, or the offsets of sequences packed into one row,
    have its shape; with the length of a row also where their numbers do not fit it, which waits for a GPU.
    """
    if length is not None and left_padding is not None and cu_seqlens is not None:
        raise ConfigError("give cu_seqlens (packed sequences) or left_padding (padded batch), not both")
    if left_padding is not None:
        check_int_tensor("left_padding", left_padding, (batch,))
    if cu_seqlens is not None:
        check_int_tensor("cu_seqlens", cu_seqlens, (None,))
        if batch != 1 or cu_seqlens.shape[0] < 2:
            raise ShapeError(
                f"cu_seqlens holds the offsets of at least one sequence in one batch row: got {cu_seqlens.shape[0]} "
                f"offsets and batch {batch}"
            )
    if length is not None and left_padding is not None:
        check_lengths("left_padding", left_padding.tolist(), length, are_offsets=False)
    if length is not None and cu_seqlens is not None:
        check_lengths("cu_seqlens", cu_seqlens.tolist(), length, are_offsets=True)


def check_lengths(name: str, values: Sequence[int], total: int, *, are_offsets: bool) -> None:
    """Raises ``ShapeError`` unless offsets rise or stay the same from 0 to the total, or other numbers lie
    in that range.
    """
    if are_offsets:
        if values[0] != 0 or values[-1] != total or any(a > b for a, b in pairwise(values)):
            raise ShapeError(
                f"{name} must rise or stay the same from 0 to the length {total}, one entry per sequence end, got "
                f"{values[:8]}"
            )
    elif values and (min(values) < 0 or max(values) > total):
        raise ShapeError(f"{name} must lie in [0, {total}], got {min(values)} to {max(values)}")


_TYPE_WORDS = {int: "an int", float: "a number", str: "a text", bool: "a bool"}


def _is_of(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, UnionType):
        return any(_is_of(value, arg) for arg in args)
    if origin is Literal:
        return isinstance(value, str)  # which ones is for the owner's check, which names the nearest
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_is_of(entry, args[0]) for entry in value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, hint)


def check_field_types(config: Any, prefix: str = "") -> None:
    """Raises ``ConfigError`` unless each field of a dataclass has a value of the type that is declared for
    it.

    Args:
        config: a dataclass. Tuples of declared entries of one type may be lists; a ``float`` may be an int.
        prefix: of the names in the message, such as ``"task."``.
    """
    for name, hint in typing.get_type_hints(type(config)).items():
        if typing.get_origin(hint) is not typing.ClassVar and not _is_of(value := getattr(config, name), hint):
            words = _TYPE_WORDS.get(hint, str(getattr(hint, "__name__", hint) if isinstance(hint, type) else hint))
            raise ConfigError(f"{prefix}{name} must be {words}, got {describe(value)}")


def check_device(name: str, value: Any) -> torch.device:
    """The device of that name; raises ``ConfigError`` where there is none on this machine."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (TypeError, ValueError, RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{name} must be a device of this machine, got {describe(value)}: {shortened(reason)}"
        ) from None
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
