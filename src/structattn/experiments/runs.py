"""Single training runs of a comparison: what they are, and doing many of them, one process for each core if asked."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from structattn.checks import check_int
from structattn.errors import CheckpointError, ConfigError, TrainingDivergedError
from structattn.experiments.recipes import task_entry
from structattn.files import write_atomic
from structattn.tasks.base import Task
from structattn.training.config import TrainingConfig
from structattn.training.loop import TrainingResult, train
from structattn.training.processes import end_with_parent

logger = logging.getLogger(__name__)
_SCORES = "scores.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train.

    Args:
        task_name: see ``recipes.TASKS``.
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

    def run(
        self,
        *,
        resume: bool,
        show_progress: bool,
        on_steps: Callable[[int], None] | None = None,
        on_evaluation: Callable[[dict[str, float]], None] | None = None,
    ) -> TrainingResult | None:
        """Trains it, or returns what was trained before; ``None`` if it diverged and may. See ``train`` for the arguments."""
        task = task_entry(self.task_name).make(self.task)
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

    def _finish(self, task: Task, result: TrainingResult) -> None:
        """Scores it, unless that was done before."""
        if self._kept() is not None:
            return
        result.model.eval()
        found = {
            "model_sha256": self._weights(),
            "metrics": task.evaluate(result.model, "test"),
            "details": task.details(result.model) if self.seed == 0 else {},
        }
        write_atomic(self.folder / _SCORES, json.dumps(found))

    def scores(self) -> dict[str, Any]:
        """Of a finished run ``metrics``, the scores on the test split, and ``details`` (see ``Task.details``) of the first seed.

        Raises:
            CheckpointError: it was not run, or its weights are not those that were scored.
        """
        found = self._kept()
        if found is None:
            raise CheckpointError(f"{self.folder / _SCORES} does not hold the scores of this run: give --resume")
        return found

    def _kept(self) -> dict[str, Any] | None:
        try:
            found = json.loads((self.folder / _SCORES).read_text())
            return found if found["model_sha256"] == self._weights() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # never written, or damaged: scored again

    def _weights(self) -> str:
        """The digest of the weights that the run ended with."""
        return str(json.loads((self.folder / "run.json").read_text())["model_sha256"])


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


# Of a worker process: steps done by all workers, which the parent reads.
_steps_done: Any = None


def _count(steps: int) -> None:
    with _steps_done.get_lock():
        _steps_done.value += steps


def _in_worker(job: Job) -> None:
    job.run(resume=True, show_progress=False, on_steps=_count)


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
        StructAttnError: what a run raised; the others are not started.
    """
    check_int("jobs", workers, minimum=1)
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            logger.info("training %s", job.spec)
            job.run(resume=resume, show_progress=show_progress)
        return
    if not resume and any((job.folder / "checkpoints").exists() for job in jobs):
        raise ConfigError("some of these runs were begun before: resume them, or use another folder")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    share = max(1, cores // workers)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker, initargs=(share, done))
    total = sum(job.training.steps for job in jobs)
    try:
        left = {pool.submit(_in_worker, job) for job in jobs}
        with tqdm(total=total, unit="step", disable=not show_progress) as bar:
            while left:
                bar.set_description_str(f"{len(jobs) - len(left)} of {len(jobs)} runs", refresh=False)
                finished, left = wait(left, timeout=1, return_when=FIRST_COMPLETED)
                bar.update(done.value - bar.n)
                for future in finished:
                    future.result()
            bar.set_description_str(f"{len(jobs)} of {len(jobs)} runs")
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
