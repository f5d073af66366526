"""Builds structattn-native; its sdist has a copy of the C++ code, which is elsewhere in a clone."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

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


def build_sdist(sdist_directory: str, config_settings=None) -> str:
    """An sdist, with a copy of the C++ code."""
    if COPY.is_dir():  # it is made from an sdist
        return build_meta.build_sdist(sdist_directory, config_settings)
    COPY.mkdir()
    try:
        for path in SOURCES.iterdir():
            if path.suffix in (".cpp", ".h") or path.name == "compiler.py":
                shutil.copy2(path, COPY)
        return build_meta.build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(COPY)


def load_compiler() -> ModuleType:
    """``compiler.py`` of structattn, which need not be installed."""
    spec = importlib.util.spec_from_file_location("structattn_native_compiler", SOURCES / "compiler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
