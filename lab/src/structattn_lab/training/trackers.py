"""The curves of a run, in TensorBoard or another tracker that accelerate knows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structattn.errors import ConfigError, in_words
from structattn_lab.settings.trackers import NONE, TENSORBOARD

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run.

    Args:
        folder: of the run.
        project: the name under which runs are collected.
        name: of the run.
        step: the first one of this session.
        settings: by name; numbers and texts.
    """

    folder: Path
    project: str
    name: str
    step: int
    settings: dict[str, Any]


# The arguments of trackers besides the project: where they write, and how they name the run. The others have
# their own defaults.
_OPTIONS: dict[str, Callable[[TrackedRun], dict[str, Any]]] = {
    "wandb": lambda run: {"dir": str(run.folder), "name": run.name},
    "mlflow": lambda run: {"run_name": run.name},
    "swanlab": lambda run: {"logdir": str(run.folder / "swanlab"), "experiment_name": run.name},
    "trackio": lambda run: {"name": run.name},
    "dvclive": lambda run: {"dir": str(run.folder / "dvclive")},
}


class Curves:
    """The curves of a run.

    A tracker begins here, before training, but TensorBoard with its first point, so that a run that fails
    earlier leaves no files. One that fails later says so once, and the training goes on without it.

    Args:
        accelerator: of the run, with its tracker.
        tracker: its name, or ``"none"``.
        run: for the tracker.

    Raises:
        ConfigError: the tracker cannot begin, such as without a login.
    """

    def __init__(self, accelerator: Any, tracker: str, run: TrackedRun) -> None:
        self._accelerator, self._tracker, self._run = accelerator, tracker, run
        self._is_on = tracker != NONE and accelerator.is_main_process
        if self._is_on and tracker != TENSORBOARD:
            self._begin()

    def add(self, values: dict[str, float], step: int) -> None:
        """Adds a point to each of several curves."""
        if not self._is_on:
            return
        if not self._accelerator.trackers:
            self._begin()
        try:
            self._accelerator.log(values, step=step)
        except Exception as error:  # any error of a library that only records
            self._is_on = False
            logger.warning("%s failed, and records no more of this run: %s", self._tracker, in_words(error))

    def _begin(self) -> None:
        run, project, settings = self._run, self._run.project, self._run.settings
        options = _OPTIONS[self._tracker](run) if self._tracker in _OPTIONS else {}
        if self._tracker == TENSORBOARD:
            # Its project is a folder of the run. Earlier points from this step on, of a killed session, are
            # hidden.
            project, settings, options = TENSORBOARD, {}, {"purge_step": run.step}
        try:
            self._accelerator.init_trackers(project, settings or None, init_kwargs={self._tracker: options})
        except Exception as error:
            self._accelerator.trackers.clear()
            raise ConfigError(
                f"training.tracker={self._tracker} cannot begin: {in_words(error)}; correct its own settings, or "
                f"choose another or {NONE}"
            ) from error

    def close(self) -> None:
        """Writes the remaining points."""
        for tracker in self._accelerator.trackers:
            try:
                tracker.finish()
            except Exception as error:
                logger.warning("%s did not end well: %s", self._tracker, in_words(error))
