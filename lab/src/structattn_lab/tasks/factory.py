"""Makes the tasks of a comparison or a sweep."""

from __future__ import annotations

import functools
from typing import Any

from structattn_lab.tasks.base import Task

_MOST = 32  # tasks with different settings that are kept


class TaskFactory:
    """Makes the task of settings, once for all runs that share them: reading its data may take minutes.

    Sent to another process, it is the class alone: that process makes its own tasks.

    Args:
        kind: the class of the task.
    """

    def __init__(self, kind: type[Task]) -> None:
        self.kind = kind
        self._made = functools.lru_cache(maxsize=_MOST)(kind)

    @property
    def name(self) -> str:
        """Of the task, in the registry."""
        return self.kind.name

    def __call__(self, config: Any) -> Task:
        """The task of settings, which are hashable."""
        return self._made(config)

    def __reduce__(self) -> tuple[type[TaskFactory], tuple[type[Task]]]:
        return TaskFactory, (self.kind,)
