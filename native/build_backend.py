"""Builds structattn-native with setuptools, and compiles the C++ code against the PyTorch that is installed.

pip builds in an environment of its own, which hides the packages of the user's. PyTorch is found there
nevertheless: another one would be a large download, and the compiled code would not fit the user's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).parent
COPY = ROOT / "code"  # in an sdist
SOURCES = COPY if COPY.is_dir() else ROOT.parent / "src" / "structattn" / "ops" / "native"
OLDEST = (2, 11)  # the oldest PyTorch that structattn allows


@contextlib.contextmanager
def installed_packages() -> Iterator[None]:
    """Within it, the packages that this Python has outside the environment of the build can be imported as
    well.
    """
    command = [sys.executable, "-E", "-c", r"import sys; print(*sys.path, sep='\n')"]  # -E: without pip's PYTHONPATH
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    before = sys.path.copy()
    sys.path += [path for path in listed if path and path not in before]
    try:
        yield
    finally:
        sys.path[:] = before


def needs_torch() -> list[str]:
    """PyTorch, where there is none that structattn can use: in a new environment, or in one that is not a
    user's.
    """
    with installed_packages():
        try:
            found = metadata.version("torch")
        except metadata.PackageNotFoundError:
            found = "0.0"
    return [] if tuple(map(int, found.split(".")[:2])) >= OLDEST else [f"torch>={OLDEST[0]}.{OLDEST[1]}"]


def build_sdist(sdist_directory: str, config_settings=None) -> str:
    """An sdist, with a copy of the C++ code."""
    if COPY.is_dir():  # it is made from an sdist
        return build_meta.build_sdist(sdist_directory, config_settings)
    COPY.mkdir()
    try:
        for path in SOURCES.iterdir():
            if path.suffix in (".cpp", ".h") or path.name == "compiler.py":
                shutil.copy(path, COPY)
        return build_meta.build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(COPY)


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *needs_torch()]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *needs_torch()]


def load_compiler() -> ModuleType:
    """``compiler.py`` of structattn, which need not be installed."""
    spec = importlib.util.spec_from_file_location("structattn_native_compiler", SOURCES / "compiler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CompileCode(build_py):
    def run(self) -> None:
        super().run()
        folder = (ROOT if self.editable_mode else Path(self.build_lib)) / "structattn_native"
        for old in folder.glob("native-*.so"):
            old.unlink()
        with installed_packages():
            compiler = load_compiler()
            try:
                compiler.compile_to(folder / compiler.library_name())
            except compiler.CompilationError as error:
                raise CompileError(
                    f"{error}\nSo structattn-native is not installed. structattn works without it, only slower on a "
                    "CPU."
                ) from error
