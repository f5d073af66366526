"""Finds the compiled C++ code, loads it, and builds it on this machine."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from structattn.errors import BackendUnavailableError, CheckpointError, ConfigError, StructAttnWarning
from structattn.files import cache_folder
from structattn.ops.checks import is_eager
from structattn.ops.native import compiler

_LOADED: set[Path] = set()  # by this process; at most one
_VARIABLE = "STRUCTATTN_CPU"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def instructions() -> str | None:
    """The vector instructions whose library is used here: the widest of this CPU, or what STRUCTATTN_CPU
    names; ``None`` where that is "none".

    Raises:
        ConfigError: STRUCTATTN_CPU names others, or some that this CPU does not have.
    """
    here = compiler.instructions_here()
    named = os.environ.get(_VARIABLE, "").strip().lower()
    if named == "none":
        return None
    if not named:
        return here[0]
    if named not in here:
        what = "this CPU does not have them" if named in compiler.INSTRUCTIONS else "there is no such name"
        raise ConfigError(f"{_VARIABLE} must be one of {', '.join(here)} or none here, got {named!r}: {what}")
    return named


@functools.cache
def has_vectors() -> bool:
    """Whether the library of this machine is compiled for more than what every CPU of its kind has, where
    short calls and numbers of 16 bits are slow.

    Raises:
        ConfigError: see ``instructions``.
    """
    chosen = instructions()
    return chosen is not None and bool(compiler.INSTRUCTIONS[chosen])


def _package() -> Path | None:
    """The folder of the package structattn-native, where it is installed with a library, for whatever
    machine.
    """
    spec = find_spec("structattn_native")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder if any(folder.glob("native_*.so")) else None


def _built(name: str) -> Path:
    """Where ``build_native`` keeps a library: in the user's cache, or below STRUCTATTN_CACHE."""
    return cache_folder() / name


def _places(name: str) -> Iterator[Path]:
    """Where a library may be: in the package structattn-native, where the installation of a clone has
    compiled it, or in the cache.
    """
    if (package := _package()) is not None:
        yield package / name
    yield compiler.BESIDE / name
    yield _built(name)


@functools.cache
def why_not_here() -> str | None:
    """Loads the library; the reason why it cannot be, or ``None``.

    Raises:
        ConfigError: see ``instructions``.
    """
    if (chosen := instructions()) is None:
        return f"{_VARIABLE} is none"
    reason = None
    try:
        for path in _places(compiler.library_name(chosen)):
            if not path.exists():
                continue
            if _LOADED - {path}:  # its operators have the names of those that are there: the process would end
                return f"its C++ code cannot be loaded: this process has that of {min(_LOADED)}; start a new one"
            try:
                torch.ops.load_library(path)
            except OSError as error:
                reason = reason or f"its C++ code cannot be loaded ({error})"
                continue
            _LOADED.add(path)
            return None
    except (OSError, RuntimeError) as error:  # without a home folder, or where the cache may not be read
        reason = reason or f"its C++ code cannot be loaded ({error})"
    if reason is not None:
        return f"{reason}: build it again, with STRUCTATTN_CACHE naming a folder of yours"
    if _package() is not None:
        return (
            f"the package structattn-native is of another version of structattn, or has no library for {chosen}: "
            f"install the one of this version, or run `structattn build-native` once, which needs a C++ compiler"
        )
    return (
        "its C++ code is not built on this machine: run `structattn build-native` (or "
        "structattn.ops.build_native()) once, which needs a C++ compiler, or install the package structattn-native"
    )


def is_here(x: Tensor) -> bool:
    """Whether the C++ code is there for a tensor, and nothing traces or counts what is done to it."""
    return x.dtype in _DTYPES and x.is_cpu and is_eager(x) and why_not_here() is None


@functools.cache
def warn_that_it_lacks() -> None:
    """Says once that a CPU computes without the compiled code what it could compute with it, and how to
    change that; nothing where the user has said "none".
    """
    if instructions() is not None:
        warnings.warn(
            "attention runs without structattn's compiled code and takes up to twice the time on this CPU: "
            f"{why_not_here()}. STRUCTATTN_CPU=none silences this",
            StructAttnWarning,
            stacklevel=2,
        )


def build_native() -> Path:
    """Compiles the C++ code of ``backend="native"`` for this machine, unless that was done, and loads it.

    It makes attention with levels faster on a CPU; ``backend="auto"`` uses it from then on, in later
    processes too. Any PyTorch from 2.11 on can load it; another version of this library needs another build.
    It needs a compiler of C++20 (``c++``, or what CXX names; tried with g++ 12), and nothing else. Where the
    package structattn-native has the library for this machine, nothing is compiled.

    Returns:
        The library, in the user's cache (``~/.cache/structattn``, or the folder that STRUCTATTN_CACHE names),
        or in the package.

    Raises:
        BackendUnavailableError: there is no compiler, or it failed; the message ends with what it said.
        ConfigError: STRUCTATTN_CPU names what this CPU does not have.

    Cost: a quarter of a minute on one core.
    """
    if why_not_here() is None:
        return min(_LOADED)
    if (chosen := instructions()) is None:
        raise BackendUnavailableError(f"{_VARIABLE} is none: unset it, or let it name vector instructions")
    try:
        path = _built(compiler.library_name(chosen))
        compiler.compile_to(path, chosen)
    except CheckpointError as error:
        raise BackendUnavailableError(f"the C++ code has no place: {error}") from error
    except compiler.CompilationError as error:
        raise BackendUnavailableError(str(error)) from error
    why_not_here.cache_clear()
    if (reason := why_not_here()) is not None:
        raise BackendUnavailableError(f"the C++ code was built, but {reason}")
    return path
