"""One training run of a comparison or a sweep, as a value that any process can run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

from structattn.errors import CheckpointError, TrainingDivergedError
from structattn.files import read_signed, remove_temporary, signed, write_atomic
from structattn.typed_records import read_as
from structattn_lab.old_formats import UNSIGNED_SCORES
from structattn_lab.records.run import RunRecord, ScoreRecord
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.base import Task
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.training.finished import WEIGHTS, is_finished, progress_of, read_record
from structattn_lab.training.identity import check_identity, identity_of
from structattn_lab.training.loop import TrainingResult, train

logger = logging.getLogger(__name__)
_SCORES = "scores.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train, and to score on the test split where a comparison needs it, in whichever process
    trains it.

    Scores are kept in ``scores.json`` in the folder of the run, with the digest of the weights: a large model
    may take as long to score as a small one to train, and a resumed comparison does not score it again.

    Args:
        tasks: makes the task.
        task: its settings.
        spec: attention variant.
        training: settings of the run.
        seed: of weights, data order and dropout.
        folder: of the run.
        is_scored: whether it is scored.
        may_diverge: a loss that is not finite is a result (of a sweep of learning rates), not an error.
    """

    tasks: TaskFactory
    task: Any
    spec: str
    training: TrainingConfig
    seed: int
    folder: Path
    is_scored: bool = False
    may_diverge: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.spec}, seed {self.seed}, learning rate {self.training.learning_rate:g}"

    @property
    def log(self) -> Path:
        """The file for the output of the run where it has its own process; removed if it is empty."""
        return self.folder / "run.log"

    @property
    def made_task(self) -> Task:
        """The task itself, which all runs with its settings share."""
        return self.tasks(self.task)

    def record(self) -> RunRecord | None:
        """The record of the run, if it is finished; one file is read, and none is changed.

        Raises:
            CheckpointError: the folder holds a run of other settings or data.
        """
        if not (is_finished(self.folder) and (self.folder / WEIGHTS).is_file()):
            return None
        try:
            record = read_record(self.folder)
            progress = progress_of(record, self.folder)
        except CheckpointError:
            return None  # damaged: ``run`` says so, and makes it again from a checkpoint if it can
        if progress is None:
            return None
        task = self.made_task
        check_identity(asdict(record), identity_of(task, self.spec, self.training, self.seed), task, self.folder)
        return replace(record, progress=progress)

    @property
    def is_done(self) -> bool:
        """Whether it only has to be read; raises ``CheckpointError`` as ``record``."""
        record = self.record()
        return record is not None and not (self.is_scored and self.scores(record) is None)

    def run(
        self,
        *,
        resume: bool,
        show_progress: bool,
        on_steps: Callable[[int], None] | None = None,
        on_evaluation: Callable[[dict[str, float]], None] | None = None,
    ) -> TrainingResult | None:
        """Trains it, or returns what was trained before; ``None`` if it diverged and may. See ``train`` for
        the arguments.
        """
        task = self.made_task
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
            AcceleratorState._reset_state()  # otherwise it has the precision of the first run of this process
            if self.training.compile:
                torch.compiler.reset()  # otherwise the code of every run of this process would be searched at each step
        if self.is_scored:
            self._score(task, result)
        return result

    def _score(self, task: Task, result: TrainingResult) -> None:
        """Scores it, unless that was done before."""
        record = read_record(self.folder)
        if self.scores(record) is not None:
            return
        result.model.eval()
        metrics, details = task.scores(result.model, with_details=self.seed == 0)
        scores = ScoreRecord(model_sha256=record.model_sha256, metrics=metrics, details=details)
        remove_temporary(self.folder)  # of a call that was killed here
        write_atomic(self.folder / _SCORES, signed(asdict(scores)))

    def scores(self, record: RunRecord) -> ScoreRecord | None:
        """The scores of a run on the test split; ``None`` if it was not scored, or with other weights, or the
        file is damaged: then ``run`` scores it."""
        path = self.folder / _SCORES
        try:
            scores = read_as(ScoreRecord, read_signed(path, UNSIGNED_SCORES), str(path))
        except CheckpointError:
            return None
        return scores if scores.model_sha256 == record.model_sha256 else None
