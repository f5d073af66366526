"""Builds the C++ code on this machine, and loads what was built."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from structattn.errors import BackendUnavailableError, CheckpointError
from structattn.files import cache_folder

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "attention.cpp"
_OPTIMIZED = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-std=c++20", "-fPIC", "-shared")
# The vector instructions that PyTorch itself uses here, by its name for them: a cache that several machines share has a library for each.
_INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
    "AVX512": (  # without -DCPU_CAPABILITY_AVX2: the headers would define reductions twice
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
        *("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    ),
}


def _flags() -> list[str]:
    """For a compiler with the options of gcc."""
    return [
        *_OPTIMIZED,
        *_INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ("-DCPU_CAPABILITY=DEFAULT",)),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]),
    ]


def _library() -> Path:
    """Where the library is, or would be: in the user's cache, or below STRUCTATTN_CACHE, named by all that decides what is built."""
    digest = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    digest.update(" ".join([torch.__version__, *_flags(), sys.platform, platform.machine()]).encode())
    return cache_folder() / f"native-{digest.hexdigest()[:16]}.so"


@functools.cache
def why_not_here() -> str | None:
    """Loads the library; the reason why it cannot be, or ``None``."""
    try:
        path = _library()
        if not path.exists():
            return "its C++ code is not built on this machine: run `structattn build-native` (or structattn.ops.build_native()) once"
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:  # without a home folder, or where the cache may not be read
        return (
            f"its C++ code cannot be loaded ({error}): build it again, with STRUCTATTN_CACHE naming a folder of yours"
        )
    return None


def build_native() -> Path:
    """Compiles the C++ code of ``backend="native"`` for this machine, unless that was done, and loads it.

    It makes attention with levels faster on a CPU; ``backend="auto"`` uses it from then on, in later processes too. Another
    version of PyTorch or of this library needs another build. It needs a compiler of C++20 (``c++``, or what CXX
    names; tried with g++ 12), and nothing else.

    Returns:
        The library, in the user's cache (``~/.cache/structattn``, or the folder that STRUCTATTN_CACHE names).

    Raises:
        BackendUnavailableError: there is no compiler, or it failed; the message ends with what it said.

    Cost: half a minute on one core.
    """
    try:
        path = _library()
    except CheckpointError as error:
        raise BackendUnavailableError(f"the C++ code has no place: {error}") from error
    if path.exists() and why_not_here() is None:
        return path
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise BackendUnavailableError(
            f"the C++ code cannot be built: there is no compiler {compiler!r}; install g++ or clang, or name one in CXX"
        )
    home = Path(torch.__file__).parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # another process may build at the same time
            made = Path(folder) / path.name
            links = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
            subprocess.run(
                [compiler, *_flags(), f"-I{home / 'include'}", str(_SOURCE), "-o", str(made), *links],
                check=True,
                capture_output=True,
                text=True,
            )
            made.replace(path)
    except subprocess.CalledProcessError as error:
        raise BackendUnavailableError(
            f"the C++ code cannot be built: {compiler} says\n{error.stderr[-2000:]}"
        ) from error
    except OSError as error:
        raise BackendUnavailableError(f"the C++ code cannot be kept in {path.parent}: {error}") from error
    why_not_here.cache_clear()
    if (reason := why_not_here()) is not None:
        raise BackendUnavailableError(f"the C++ code was built, but {reason}")
    return path
