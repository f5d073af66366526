"""A task as commands hand it on: what makes it of its settings, and what it adds to reports."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from structattn_lab.report.task_report import TaskReport
from structattn_lab.tasks.base import Task

_MOST = 32  # tasks with different settings that are kept


class TaskFactory:
    """Makes the task of settings, once for all runs that share them: reading its data may take minutes.

    Sent to another process, it has only the class and the package: that process makes its own tasks.

    Args:
        kind: the class of the task.
        package: the full name of its package. Default: it adds nothing to reports.
    """

    def __init__(self, kind: type[Task], package: str | None = None) -> None:
        self.kind, self.package = kind, package
        self._made = functools.lru_cache(maxsize=_MOST)(kind)

    @property
    def name(self) -> str:
        """Of the task, in the registry."""
        return self.kind.name

    def __call__(self, config: Any) -> Task:
        """The task of settings, which are hashable."""
        return self._made(config)

    @property
    def report(self) -> TaskReport:
        """What the task adds to reports, from the module ``figures`` of its package, if there is one."""
        module = None
        if self.package is not None and find_spec(f"{self.package}.figures") is not None:
            module = import_module(f"{self.package}.figures")
        return TaskReport(
            figures=getattr(module, "FIGURES", {}),
            tables=getattr(module, "TABLES", {}),
            name_of=getattr(module, "name_of", str),
            verdict=getattr(module, "verdict", None),
            baselines_title=self.kind.baselines_title,
            baselines_note=self.kind.baselines_note,
            no_skill_score=self.kind.no_skill_score,
        )

    def __reduce__(self) -> tuple[type[TaskFactory], tuple[type[Task], str | None]]:
        return TaskFactory, (self.kind, self.package)
