"""Modules by the names that they had until 0.2: ``structattn.studies.tasks.base`` is ``structattn_lab.tasks.base``.

Packages with a task, and modules in ``STRUCTATTN_IMPORT``, may still import them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OLD = "structattn.studies"


class _Renamed(MetaPathFinder, Loader):
    """Gives the module of today for an old name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == _OLD or name.startswith(f"{_OLD}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module("structattn_lab" + spec.name.removeprefix(_OLD))

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its own name."""


def add_old_names() -> None:
    """Makes the old names importable; more than once is as good as once."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.append(_Renamed())
