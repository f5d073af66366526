"""Finds the compiled C++ code, loads it, and builds it on this machine."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import torch

from structattn.errors import BackendUnavailableError, CheckpointError
from structattn.extras import requirement
from structattn.files import cache_folder
from structattn.ops.native import compiler

_LOADED: set[Path] = set()  # by this process; at most one


def _library() -> Path:
    """Where the library is, or would be: in the user's cache, or below STRUCTATTN_CACHE."""
    return cache_folder() / compiler.library_name()


def _package() -> Path | None:
    """The folder of the package structattn-native, where it is installed with a library, for whatever
    machine.
    """
    spec = find_spec("structattn_native")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return folder if any(folder.glob("native-*.so")) else None


def _packaged() -> Path | None:
    """The library of the package structattn-native, if it was compiled for what runs here."""
    folder = _package()
    path = folder and folder / compiler.library_name()
    return path if path and path.exists() else None


@functools.cache
def why_not_here() -> str | None:
    """Loads the library, of the cache or else of the package structattn-native; the reason why it cannot be,
    or ``None``.
    """
    reason = None
    for find in (_library, _packaged):
        try:
            if (path := find()) is not None and path.exists():
                if _LOADED - {path}:  # its operators have the names of those that are there: the process would end
                    return f"its C++ code cannot be loaded: this process has that of {min(_LOADED)}; start a new one"
                torch.ops.load_library(path)
                _LOADED.add(path)
                return None
        except (OSError, RuntimeError) as error:  # without a home folder, or where the cache may not be read
            reason = reason or (
                f"its C++ code cannot be loaded ({error}): build it again, with STRUCTATTN_CACHE naming a folder of "
                "yours"
            )
    if reason is not None:
        return reason
    if _package() is not None and _packaged() is None:
        return (
            "the package structattn-native holds its C++ code for another version of PyTorch or of structattn, or for "
            "other vector instructions: run `structattn build-native` once, or "
            f"`pip install --force-reinstall --no-deps --no-cache-dir {requirement('structattn-native')}`"
        )
    return (
        "its C++ code is not built on this machine: run `structattn build-native` (or "
        "structattn.ops.build_native()) once"
    )


def build_native() -> Path:
    """Compiles the C++ code of ``backend="native"`` for this machine, unless that was done, and loads it.

    It makes attention with levels faster on a CPU; ``backend="auto"`` uses it from then on, in later
    processes too. Another version of PyTorch or of this library needs another build. It needs a compiler of
    C++20 (``c++``, or what CXX names; tried with g++ 12), and nothing else. Where the package
    structattn-native has the library for this machine, nothing is compiled.

    Returns:
        The library, in the user's cache (``~/.cache/structattn``, or the folder that STRUCTATTN_CACHE names),
        or in the package.

    Raises:
        BackendUnavailableError: there is no compiler, or it failed; the message ends with what it said.

    Cost: half a minute on one core.
    """
    packaged = _packaged()
    if packaged is not None and why_not_here() is None:
        return packaged
    try:
        path = _library()
    except CheckpointError as error:
        raise BackendUnavailableError(f"the C++ code has no place: {error}") from error
    if path.exists() and why_not_here() is None:
        return path
    try:
        compiler.compile_to(path)
    except compiler.CompilationError as error:
        raise BackendUnavailableError(str(error)) from error
    why_not_here.cache_clear()
    if (reason := why_not_here()) is not None:
        raise BackendUnavailableError(f"the C++ code was built, but {reason}")
    return path
