"""Single training runs of a comparison or a sweep."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

from structattn.errors import CheckpointError, TrainingDivergedError
from structattn.files import read_signed, signed, write_atomic
from structattn.studies.tasks.base import Task
from structattn.studies.tasks.registry import shared_task
from structattn.studies.training.config import TrainingConfig
from structattn.studies.training.finished import is_finished, read_record
from structattn.studies.training.loop import TrainingResult, train

logger = logging.getLogger(__name__)
_SCORES = "scores.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train.

    Args:
        task_name: see ``tasks.registry.TASKS``.
        task: its settings.
        spec: attention variant.
        training: settings of the run.
        seed: of weights, data order and dropout.
        folder: of the run.
        may_diverge: a loss that is not finite is a result (of a sweep of learning rates) and no error.
    """

    task_name: str
    task: Any
    spec: str
    training: TrainingConfig
    seed: int
    folder: Path
    may_diverge: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.spec}, seed {self.seed}, learning rate {self.training.learning_rate:g}"

    @property
    def log(self) -> Path:
        """The file that gets what the run writes where it has a process of its own; removed if that is nothing."""
        return self.folder / "run.log"

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do but to read it."""
        return is_finished(self.folder)

    def run(
        self,
        *,
        resume: bool,
        show_progress: bool,
        on_steps: Callable[[int], None] | None = None,
        on_evaluation: Callable[[dict[str, float]], None] | None = None,
    ) -> TrainingResult | None:
        """Trains it, or returns what was trained before; ``None`` if it diverged and may. See ``train`` for the arguments."""
        task = shared_task(self.task_name, self.task)
        try:
            result = train(
                task,
                self.spec,
                self.training,
                seed=self.seed,
                run_dir=self.folder,
                resume=resume,
                show_progress=show_progress,
                on_steps=on_steps,
                on_evaluation=on_evaluation,
            )
        except TrainingDivergedError:
            if not self.may_diverge:
                raise
            logger.warning("%s diverged at learning rate %g", self.spec, self.training.learning_rate)
            return None
        finally:
            AcceleratorState._reset_state()  # which else has the precision of the first run of this process
            if self.training.compile:
                torch.compiler.reset()  # else the code of every run of this process would be looked through at each step
        self._finish(task, result)
        return result

    def _finish(self, task: Task, result: TrainingResult) -> None:
        """What is to be done with a trained model; nothing."""


@dataclass(frozen=True, kw_only=True)
class ScoredJob(Job):
    """One model to train and to score on the test split, in whichever process trains it.

    The scores are kept in ``scores.json`` beside the run, with the digest of the weights that they are of: a large model may take as long to
    score as a small one to train, and a comparison that was stopped does not do it again.
    """

    @property
    def is_done(self) -> bool:
        """See ``Job``."""
        try:
            return super().is_done and self._kept() is not None
        except CheckpointError:
            return False

    def _finish(self, task: Task, result: TrainingResult) -> None:
        """Scores it, unless that was done before."""
        if self._kept() is not None:
            return
        result.model.eval()
        metrics, details = task.scores(result.model, with_details=self.seed == 0)
        found = {"model_sha256": self._weights(), "metrics": metrics, "details": details}
        write_atomic(self.folder / _SCORES, signed(found))

    def scores(self) -> dict[str, Any]:
        """Of a finished run ``metrics``, the scores on the test split, and ``details`` (see ``Task.details``) of the first seed.

        Raises:
            CheckpointError: it was not run, or its weights are not those that were scored.
        """
        found = self._kept() if is_finished(self.folder) else None
        if found is None:
            raise CheckpointError(f"{self.folder / _SCORES} does not hold the scores of this run: give --resume")
        return found

    def _kept(self) -> dict[str, Any] | None:
        try:
            found = read_signed(self.folder / _SCORES, ("model_sha256", "metrics", "details"))
        except CheckpointError:
            return None  # never written, or damaged: scored again
        is_whole = isinstance(found.get("metrics"), dict) and isinstance(found.get("details"), dict)
        return found if is_whole and found.get("model_sha256") == self._weights() else None

    def _weights(self) -> str:
        """The digest of the weights that the run ended with."""
        return str(read_record(self.folder)["model_sha256"])


def kept_score(result: TrainingResult, patience: int | None, metric: str) -> float:
    """The validation score of the weights that a run ends with: the best ones under early stopping, else the last; infinite if it is not finite."""
    entries = [e for e in result.history if patience is None or e["step"] == result.best_step]
    score = entries[-1][f"validation_{metric}"] if entries else math.inf
    return float(score) if math.isfinite(score) else math.inf
