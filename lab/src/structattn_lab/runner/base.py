"""The interface of runners, which run many jobs on this machine or a cluster, and of their listeners."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from structattn.errors import StructAttnError, TrainingFailedError, in_words
from structattn_lab.runner.job import Job

_STEPS_S = 0.2  # between two messages about steps


class Listener:
    """Receives events of jobs, in the process that started the runner. By default it only raises errors."""

    def stepped(self, job: Job, steps: int) -> None:
        """A job has finished a number of new steps."""

    def evaluated(self, job: Job, entry: dict[str, float]) -> bool:
        """A job has a new entry of its history, or one from before an interruption; returns whether the job
        continues. The job waits for the answer.
        """
        return True

    def ended(self, job: Job, error: Exception | None) -> None:
        """A job is done, was stopped by ``evaluated``, or failed. An error that is raised here ends the
        runner.
        """
        if error is not None:
            raise error


class Runner(Protocol):
    """Runs jobs at the same time: ``local.LocalRunner`` in processes of this machine, ``ray.RayRunner`` on a
    cluster.
    """

    def run(self, jobs: Iterable[Job], listener: Listener) -> None:
        """Runs jobs, each from its last checkpoint if it has one, and returns when all have ended.

        Args:
            jobs: a sequence, or a generator, which is asked for a job when there is room for one.
            listener: receives their events.

        Raises:
            Stopped: this process was asked to stop (see ``interrupt``). No job is started after that, and
                running jobs are stopped with a checkpoint.
            Exception: what ``listener.ended`` raised; the other jobs are stopped in the same way.
        """


class _EndedEarly(Exception):  # noqa: N818
    """The listener stopped a job."""


def run_job(
    job: Job, on_steps: Callable[[int], None] | None, on_evaluation: Callable[[dict[str, float]], bool]
) -> None:
    """Runs a job; ``on_evaluation`` returns whether it continues. Raises what the job raises."""

    def evaluated(entry: dict[str, float]) -> None:
        if not on_evaluation(entry):
            raise _EndedEarly

    with contextlib.suppress(_EndedEarly):
        job.run(resume=True, show_progress=False, on_steps=on_steps, on_evaluation=evaluated)


def run_in_worker(
    job: Job, on_steps: Callable[[int], None], on_evaluation: Callable[[dict[str, float]], bool]
) -> Exception | None:
    """Runs a job in a process of a runner; returns the error that it ended with, as one that can be sent to
    another process.

    Args:
        job: what is run.
        on_steps: called with new steps, a few times per second.
        on_evaluation: returns whether the job continues after an entry of its history.
    """
    waiting, sent = 0, time.monotonic()

    def count(steps: int) -> None:
        nonlocal waiting, sent
        waiting += steps
        if time.monotonic() - sent > _STEPS_S:
            on_steps(waiting)
            waiting, sent = 0, time.monotonic()

    try:
        run_job(job, count, on_evaluation)
    except Exception as error:
        traceback.print_exc()
        return _sendable(error)
    finally:
        on_steps(waiting)
    return None


def _sendable(error: Exception) -> Exception:
    if isinstance(error, StructAttnError):
        return type(error)(str(error))
    return TrainingFailedError(in_words(error))
