"""How the C++ code is compiled, and the name of what is compiled.

The build of the package structattn-native loads this file by its path where structattn may not be installed:
it imports PyTorch and the standard library only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
SOURCE = _FOLDER / "attention.cpp"
# How the names of folders begin in which a build is made.
_UNFINISHED = ".tmp-native-"
# The longest time of a build.
_LONGEST_S = 3600.0
_OPTIMIZED = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-std=c++20", "-fPIC", "-shared")
# The vector instructions that PyTorch itself uses here, by its name for them: a cache that several machines
# share has a library for each.
INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"),
    # Without -DCPU_CAPABILITY_AVX2: the headers would define reductions twice.
    "AVX512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
        *("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    ),
}


class CompilationError(Exception):
    """There is no compiler, it failed, or the library cannot be written."""


def flags() -> list[str]:
    """For a compiler with the options of gcc."""
    return [
        *_OPTIMIZED,
        *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ("-DCPU_CAPABILITY=DEFAULT",)),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]),
    ]


def sources() -> list[Path]:
    """All files that are compiled."""
    return sorted(_FOLDER.glob("*.[ch]*"))


def library_name() -> str:
    """The file name of the library, which depends on all that decides what is built."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    digest.update(" ".join([torch.__version__, *flags(), sys.platform, platform.machine()]).encode())
    return f"native-{digest.hexdigest()[:16]}.so"


def compile_to(path: Path) -> None:
    """Compiles the library for this machine and its PyTorch; the file appears when it is complete.

    Raises:
        CompilationError: there is no compiler, it failed, or the file cannot be written; the message says
            which.
    """
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise CompilationError(
            f"the C++ code cannot be built: there is no compiler {compiler!r}; install g++ or clang, or name one in CXX"
        )

    def failed(status: int, output: str) -> CompilationError:
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        wrote = "" if status else " and wrote no library"
        words = f"It said: {output.strip()[-2000:]}" if output.strip() else "It said nothing"
        return CompilationError(
            f"the C++ code cannot be built: the compiler {compiler} {ended}{wrote}; name another in CXX, such as g++ "
            f"12 or later. {words}"
        )

    home = Path(torch.__file__).parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for unfinished in path.parent.glob(f"{_UNFINISHED}*"):  # by a build that was ended
            if time.time() - unfinished.stat().st_mtime > _LONGEST_S:
                shutil.rmtree(unfinished, ignore_errors=True)
        # Another process may build at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as folder:
            library = Path(folder) / path.name
            links = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
            process = subprocess.run(
                [compiler, *flags(), f"-I{home / 'include'}", str(SOURCE), "-o", str(library), *links],
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
            )
            if process.returncode or not library.exists():
                raise failed(process.returncode, process.stderr or process.stdout)
            library.replace(path)
    except OSError as error:
        raise CompilationError(f"the C++ code cannot be kept in {path.parent}: {error}") from error
