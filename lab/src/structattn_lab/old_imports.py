"""Modules by the names that they had until 0.2: ``structattn.studies.tasks.base`` is
``structattn_lab.tasks.base``.

Packages with a task, and modules in ``STRUCTATTN_IMPORT``, may still import them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OLD, _NEW = "structattn.studies", "structattn_lab"
# What moved, by its name below `structattn.studies`. All else has the same name below `structattn_lab`.
# Where several modules are named, the contents of the old one are divided among them.
MOVED: dict[str, tuple[str, ...]] = {
    "analysis.coordinate_check": ("analysis.coordinate_check", "compare.mup_check"),
    "analysis.fits": ("analysis.fits", "compare.matrix_fits"),
    "analysis.matrix_examples": ("compare.matrix_examples",),
    "budgets": ("compare.budgets",),
    "cache_sizes": ("tasks.cache_sizes",),
    "compare": ("compare.comparison",),
    "config_file": ("settings.config_file",),
    "decode_time": ("tasks.decode_time",),
    "durations": ("planning.durations",),
    "environment": ("records.environment",),
    "evaluate": ("training.evaluate",),
    "folders": ("runs.folders",),
    "forecast": ("inference.forecast",),
    "generate": ("inference.generate",),
    "grid": ("compare.grid",),
    "interrupt": ("runs.interrupt",),
    "listings": ("cli.listings",),
    "octaves": ("tasks.octaves",),
    "old_folders": ("old_formats",),
    "recipe": ("settings.recipe",),
    "report.page": ("report.page", "report.report"),
    "report.pages": ("compare.pages",),
    "settings": ("settings.overrides",),
    "tasks.forecast.choice": ("inference.forecast_choice",),
    "tasks.uptraining.card": ("compare.model_card",),
    "tied": ("tasks.tied",),
    "training.config": ("settings.training",),
    "training.schedule": ("settings.schedule",),
    "training.trackers": ("training.trackers", "settings.trackers"),
    "uptrain": ("compare.uptrain",),
}


class _Divided(ModuleType):
    """An old module whose contents are in several modules of today, which are imported as they are needed."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for module in map(importlib.import_module, _todays_names(self.__name__)):
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _todays_names(name: str) -> list[str]:
    """The full names of the modules that an old one is today."""
    inside = name.removeprefix(_OLD).lstrip(".")
    return [f"{_NEW}.{today}".rstrip(".") for today in MOVED.get(inside, (inside,))]


class _Renamed(MetaPathFinder, Loader):
    """Gives the module of today for an old name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _OLD:
            return ModuleSpec(name, self, is_package=True)
        return ModuleSpec(name, self) if name.startswith(f"{_OLD}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == _OLD:  # a module of its own: importing a module sets an attribute of its package
            return ModuleType(_OLD)
        names = _todays_names(spec.name)
        if len(names) > 1:
            return _Divided(spec.name)
        try:
            module = importlib.import_module(names[0])
        except ModuleNotFoundError as error:
            if error.name != names[0]:
                raise
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name) from error
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its name of today, which it keeps."""
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state


def add_old_names() -> None:
    """Makes the old names importable; more than once is as good as once."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        # The first: others would import the files of a package a second time, below its old name.
        sys.meta_path.insert(0, _Renamed())
