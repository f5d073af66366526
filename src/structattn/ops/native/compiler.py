"""How the C++ code is compiled, for which CPUs, and the name of what is compiled.

Builds of packages load this file by its path where structattn and PyTorch may not be installed: it imports
the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_FOLDER = Path(__file__).parent
SOURCE = _FOLDER / "attention.cpp"
BESIDE = _FOLDER  # where `pip install -e .` keeps the library of a clone
# How the names of folders begin in which a build is made.
_UNFINISHED = ".tmp-native-"
# The longest time of a build.
_LONGEST_S = 3600.0
_OPTIMIZED = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden")
# A library for each set of vector instructions, which decide how long a vector is; the widest first.
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
INSTRUCTIONS = {
    "amx_bf16": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),  # products of blocks of such pairs
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),  # products of pairs of bfloat16 numbers
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "baseline": (),  # what every CPU of its kind has: SSE2, NEON
}
# By their names in /proc/cpuinfo.
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512_NAMES = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} | _AVX2
_NEEDED = {
    "amx_bf16": {"amx_tile", "amx_bf16", "avx512_bf16"} | _AVX512_NAMES,
    "avx512_bf16": {"avx512_bf16"} | _AVX512_NAMES,
    "avx512": _AVX512_NAMES,
    "avx2": _AVX2,
    "baseline": set[str](),
}
# The request of a process for the tile registers of AMX: the number of the system call on x86-64, and its two
# arguments, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA.
_ASK_FOR_TILES = (158, 0x1023, 18)
# The library has the functions that PyTorch's own library exports. Its name is all that the linker is told of
# that, so that compiling needs no PyTorch; nothing is exported, and nothing says where PyTorch is.
_TORCH = "libtorch_cpu.so"
_EXPORTS = "{ local: *; };\n"
_LINUX = ("-Wl,-z,noexecstack", "-Wl,-z,relro,-z,now", "-Wl,--build-id=none", "-Wl,--version-script=exports", "-s")


class CompilationError(Exception):
    """There is no compiler, it failed, or the library cannot be written."""


def flags(instructions: str) -> list[str]:
    """For a compiler with the options of gcc."""
    links = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else _LINUX
    return [*_OPTIMIZED, *INSTRUCTIONS[instructions], *links]


def _may_use_tiles() -> bool:
    """Asks Linux to let this process use the tile registers of AMX, and says whether it does. To ask again
    changes nothing. Containers and older kernels refuse what the CPU has.
    """
    try:
        return ctypes.CDLL(None).syscall(*map(ctypes.c_long, _ASK_FOR_TILES)) == 0
    except (OSError, AttributeError):  # a Python that is linked statically has no C library to call
        return False


def instructions_here() -> list[str]:
    """The names in ``INSTRUCTIONS`` that this machine can run, the widest first. Where the CPU has AMX, this
    process may use it from then on.
    """
    found: set[str] = set()
    if platform.machine() == "x86_64" and sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:  # noqa: PTH123
            found.update(next((line for line in lines if line.startswith("flags")), "").split())
    here = [name for name, needed in _NEEDED.items() if needed <= found]
    return here if "amx_bf16" not in here or _may_use_tiles() else [name for name in here if name != "amx_bf16"]


def sources() -> list[Path]:
    """All files that are compiled."""
    return sorted(path for path in _FOLDER.iterdir() if path.suffix in (".cpp", ".h"))


def library_name(instructions: str) -> str:
    """The file name of the library, which depends on all that decides what is built."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    digest.update(" ".join([*flags(instructions), sys.platform, platform.machine()]).encode())
    return f"native_{instructions}_{digest.hexdigest()[:16]}.so"


def compiler() -> str:
    """The command of the compiler.

    Raises:
        CompilationError: it is not there.
    """
    command = os.environ.get("CXX") or "c++"
    if shutil.which(command) is None:
        raise CompilationError(
            f"the C++ code cannot be built: there is no compiler {command!r}; install g++ or clang, or name one in CXX"
        )
    return command


def _run(command: list[str], folder: Path, made: str) -> None:
    """Runs a compiler in a folder, where it makes a file."""
    process = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, errors="replace")
    if process.returncode == 0 and (folder / made).exists():
        return
    status, output = process.returncode, process.stderr or process.stdout
    ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    wrote = "" if status else " and wrote no library"
    words = f"It said: {output.strip()[-2000:]}" if output.strip() else "It said nothing"
    raise CompilationError(
        f"the C++ code cannot be built: the compiler {command[0]} {ended}{wrote}; name another in CXX, such as g++ "
        f"12 or later. {words}"
    )


def compile_in(folder: Path, *instructions: str) -> None:
    """Compiles libraries in a folder, in place of older ones.

    Raises:
        CompilationError: see ``compile_to``.
    """
    names = {library_name(each): each for each in instructions}
    for old in folder.glob("native_*.so"):
        if old.name not in names:
            old.unlink()
    for name, each in names.items():
        if not (folder / name).exists():
            compile_to(folder / name, each)


def compile_to(path: Path, instructions: str) -> None:
    """Compiles the library for some instructions; the file appears when it is complete. The same compiler
    makes the same bytes.

    Raises:
        CompilationError: there is no compiler, it failed, or the file cannot be written; the message says
            which.
    """
    command = compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for unfinished in path.parent.glob(f"{_UNFINISHED}*"):  # by a build that was ended
            with contextlib.suppress(FileNotFoundError):  # another process has just ended its own
                if time.time() - unfinished.stat().st_mtime > _LONGEST_S:
                    shutil.rmtree(unfinished, ignore_errors=True)
        # Another process may build at the same time.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_UNFINISHED) as name:
            folder = Path(name)
            links: list[str] = []
            if sys.platform != "darwin":
                (folder / "empty.cpp").touch()
                (folder / "exports").write_text(_EXPORTS)
                _run([command, "-shared", "-fPIC", f"-Wl,-soname,{_TORCH}", "empty.cpp", "-o", _TORCH], folder, _TORCH)
                links = ["-Wl,--no-as-needed", _TORCH]
            _run([command, *flags(instructions), str(SOURCE), "-o", path.name, *links], folder, path.name)
            (folder / path.name).replace(path)
    except OSError as error:
        raise CompilationError(f"the C++ code cannot be kept in {path.parent}: {error}") from error
