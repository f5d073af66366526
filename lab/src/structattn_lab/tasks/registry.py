"""The tasks by name. Adding one takes a folder and a line here."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from structattn import extensions
from structattn.errors import ConfigError, NotRegisteredError, StructAttnError, in_words, nearest_name
from structattn_lab.old_imports import add_old_names

if TYPE_CHECKING:  # the command line lists the names without importing PyTorch
    from structattn_lab.records.comparison import ComparisonRecord
    from structattn_lab.report.task_report import TaskReport
    from structattn_lab.settings.recipe import Preset, Recipe
    from structattn_lab.tasks.base import Task
    from structattn_lab.tasks.factory import TaskFactory

logger = logging.getLogger(__name__)
# The package of each task, imported at its first use. It has a documentation string, ``TASK``, a subclass of
# ``Task``, and ``PRESETS``, the ``Preset`` by name, among them "default" and "smoke". What a report adds for
# it is in its module ``figures``, if there is one: ``FIGURES`` and ``TABLES``, ``name_of``, where figures
# name its specs otherwise, and ``verdict``, where its results are said in other words.
TASKS: dict[str, str] = {
    "nearest-neighbor": "structattn_lab.tasks.nearest_neighbor",
    "forecast": "structattn_lab.tasks.forecast",
    "icl-regression": "structattn_lab.tasks.icl_regression",
    "text": "structattn_lab.tasks.text",
    "chronos": "structattn_lab.tasks.chronos",
    "uptraining": "structattn_lab.tasks.uptraining",
    "recall": "structattn_lab.tasks.recall",
}


def register_task(name: str, package: str) -> None:
    """Adds a task that another package defines, unless an entry point of the group ``structattn.tasks`` in
    its metadata does.

    Call it in the ``__init__`` of that package with ``__name__``, and name the package in
    ``STRUCTATTN_IMPORT``: every command and its worker processes then import it. (Worker processes import it
    with the settings of the task in any case.)

    Args:
        name: on the command line; that of the package's ``TASK``.
        package: the full name of the package, see ``TASKS``.

    Raises:
        ConfigError: another package has this name.
    """
    for what, given in (("name", name), ("package", package)):
        if not isinstance(given, str):
            raise ConfigError(f"the {what} of a task must be a text, got {given!r}")
    if TASKS.setdefault(name, package) != package:
        raise ConfigError(f"the task {name!r} is that of {TASKS[name]}: choose another name for the task of {package}")


add_old_names()
# Those of installed packages, which are imported at the first use of the task.
for _points in extensions.installed("structattn.tasks").values():
    try:
        register_task(_points[0].name, extensions.the_one("the task", _points).value)
    except ConfigError as _error:
        logger.warning("%s", _error)


def _package(name: str) -> Any:
    """The package of a task; raises ``ConfigError`` where there is none, or it cannot be imported."""
    if name not in TASKS:
        extensions.import_modules()
    if name not in TASKS:
        raise extensions.not_registered("task", name, TASKS)
    try:
        return import_module(TASKS[name])
    except StructAttnError:
        raise
    except Exception as error:
        if TASKS[name].startswith("structattn_lab."):
            raise
        raise NotRegisteredError(
            f"the task {name!r} cannot be imported from {TASKS[name]}: {in_words(error)}"
        ) from error


def usable_tasks() -> tuple[str, ...]:
    """The names of the tasks, without those of other packages that cannot be imported: a warning says why."""
    extensions.import_modules()
    usable = []
    for name in TASKS:
        try:
            _package(name)
        except ConfigError as error:
            logger.warning("%s", error)
        else:
            usable.append(name)
    return tuple(usable)


def task_class(name: str) -> type[Task]:
    """The class of a task; raises ``ConfigError`` with the nearest name."""
    kind: type[Task] = _package(name).TASK
    return kind


def presets_of(name: str) -> dict[str, Preset]:
    """The presets of a task by name; raises ``ConfigError`` with the nearest name of a task."""
    presets: dict[str, Preset] = _package(name).PRESETS
    return presets


def factory_of(name: str) -> TaskFactory:
    """What makes the tasks of a name, for a command that hands it on; raises ``ConfigError`` with the nearest
    name.
    """
    from structattn_lab.tasks.factory import TaskFactory

    return TaskFactory(task_class(name), TASKS[name])


def report_of(record: ComparisonRecord) -> TaskReport:
    """What the task of a record adds to its report: nothing, where the task is not installed."""
    from structattn_lab.report.task_report import TaskReport

    return factory_of(record.task).report if record.task in TASKS else TaskReport()


def about(name: str) -> str:
    """What a task is: the first sentence of its package's documentation string."""
    return " ".join(str(_package(name).__doc__).partition("\n\n")[0].split())


def recipe_for(task: str, preset: str) -> Recipe:
    """The recipe of a preset; raises ``ConfigError`` with the nearest name."""
    presets = presets_of(task)
    if preset not in presets:
        raise ConfigError(f"unknown preset {preset!r} of {task}: {nearest_name(preset, presets)}")
    return presets[preset].recipe
