"""Single training runs of a comparison: what they are, and doing many of them, one process for each core if asked."""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from structattn.checks import check_int
from structattn.errors import CheckpointError, ConfigError, TrainingDivergedError
from structattn.files import read_signed, signed, write_atomic
from structattn.progress import progress_bar, say
from structattn.studies import interrupt
from structattn.studies.runner.workers import Work, run_all
from structattn.studies.tasks.base import Task
from structattn.studies.tasks.registry import shared_task
from structattn.studies.training.config import TrainingConfig
from structattn.studies.training.finished import is_finished, read_record
from structattn.studies.training.loop import TrainingResult, train
from structattn.studies.training.processes import end_with_parent

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


class TrainAll(Protocol):
    """Trains many jobs: ``train_all`` with its workers, or ``ray_runs.train_all_with_ray`` with its cluster."""

    def __call__(self, jobs: Sequence[Job], *, resume: bool, show_progress: bool) -> None:
        """Returns when all are trained."""
        ...


# Of a worker process: the steps done of each run, which the parent reads. Each has one writer, so there is no lock, which a killed process
# could hold for ever.
_steps_done: Any = None


def _in_worker(job: Job, number: int) -> None:
    def count(steps: int) -> None:
        _steps_done[number] += steps

    job.run(resume=True, show_progress=False, on_steps=count)


def begin_worker(threads: int, steps_done: Any) -> None:
    """Prepares a worker process: its share of the cores, a counter of steps, and no life after its parent."""
    global _steps_done
    end_with_parent()
    _steps_done = steps_done
    torch.set_num_threads(threads)


def train_all(jobs: Sequence[Job], *, workers: int = 1, resume: bool, show_progress: bool) -> None:
    """Trains every job, ``workers`` at a time, each in a process of its own with its share of the cores.

    With one worker they are trained here, one after the other. What is left to do after an interruption is done by calling it
    again with ``resume``.

    Raises:
        ConfigError: fewer than one worker, or a folder that holds a run while ``resume`` is off.
        StructAttnError: what a run raised. No others are begun, those that run are stopped with a checkpoint.
        Stopped: this process was asked to stop (see ``interrupt``), and so were the workers.
    """
    check_int("jobs", workers, minimum=1)
    if not jobs:
        return
    if workers == 1 or len(jobs) < 2:
        steps = 0
        with _Bar(jobs, show_progress) as bar:
            for number, job in enumerate(jobs):
                interrupt.check()

                def count(new: int, number: int = number) -> None:
                    nonlocal steps
                    steps += new
                    bar.tell(number, steps)

                job.run(resume=resume, show_progress=False, on_steps=count)
        return
    if not resume and any((job.folder / "checkpoints").exists() for job in jobs):
        raise ConfigError("some of these runs were begun before: resume them, or use another folder")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    left = [job for job in jobs if not job.is_done]  # a finished run is only read, here
    steps = sum(job.training.steps for job in jobs if job not in left)
    done = multiprocessing.get_context("spawn").RawArray("q", max(1, len(left)))
    begin = partial(begin_worker, max(1, cores // workers), done)
    works = [
        Work(run=partial(_in_worker, job, number), name=job.name, log=job.folder / "run.log")
        for number, job in enumerate(left)
    ]
    with _Bar(jobs, show_progress) as bar:
        over = len(jobs) - len(left)
        run_all(works, workers=workers, begin=begin, on_tick=lambda runs: bar.tell(over + runs, steps + sum(done)))
        bar.tell(len(jobs), steps + sum(done))


class _Bar:
    """One bar for all runs: it counts their steps."""

    def __init__(self, jobs: Sequence[Job], show: bool) -> None:
        numbers: dict[str, int] = {}
        self._models = [numbers.setdefault(f"{job.spec} {job.task}", len(numbers) + 1) for job in jobs]
        self._ends = list(itertools.accumulate(job.training.steps for job in jobs))
        self._scores = isinstance(jobs[0], ScoredJob)
        self._bar = progress_bar(total=self._ends[-1], unit="step", desc=self._text(0), show=show)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tell(self, runs: int, steps: int) -> None:
        """How many runs are over, and how many steps in all are done."""
        run = min(runs, len(self._models) - 1)
        # Then a run, or the last few, are scored: on much data that takes minutes.
        trained = runs <= run and steps in (self._ends[run], self._ends[-1])
        self._bar.update(steps - self._bar.n)
        say(self._bar, self._text(run) + (", scoring" if trained and self._scores else ""))

    def _text(self, run: int) -> str:
        return f"model {self._models[run]} of {max(self._models)}, run {run + 1} of {len(self._models)}"
