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
        module = importlib.import_module("structattn_lab" + spec.name.removeprefix(_OLD))
        spec.loader_state = module.__spec__  # the machinery replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed again: the module is that of today."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def add_old_names() -> None:
    """Makes the old names importable; more than once is as good as once."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Renamed())  # before the one that would load the files again, under the old name
