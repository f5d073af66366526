"""The names of trackers: what draws the curves of a run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from structattn.checks import check_choice
from structattn.errors import MissingDependencyError

TENSORBOARD, NONE = "tensorboard", "none"


def check_tracker(name: str) -> None:
    """Raises ``ConfigError`` unless accelerate knows a tracker, and ``MissingDependencyError`` where it is
    not installed.
    """
    if name in (TENSORBOARD, NONE):  # importing accelerate takes seconds
        return
    tracking: Any = import_module("accelerate.tracking")
    check_choice("training.tracker", name, (NONE, *tracking.LOGGER_TYPE_TO_CLASS))
    # Trackers that a user registers with accelerate have no type here.
    if name in tracking.LoggerType.list() and name not in map(str, tracking.get_available_trackers()):
        raise MissingDependencyError(
            f"training.tracker={name}: {name} is not installed. pip install {name.replace('_', '-')}, or choose "
            f"another, such as {TENSORBOARD}"
        )
