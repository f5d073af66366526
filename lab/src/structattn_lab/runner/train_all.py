"""Training the runs of a comparison, with one bar for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing

from structattn.errors import ConfigError, StructAttnError
from structattn.progress import progress_bar, say
from structattn_lab.runner.base import Listener, Runner
from structattn_lab.runner.job import Job


def train_all(jobs: Sequence[Job], *, runner: Runner, resume: bool, show_progress: bool) -> None:
    """Trains every job. After an interruption, call it again with ``resume`` to finish.

    Args:
        jobs: the runs.
        runner: what runs them.
        resume: whether folders may hold runs that were begun before.
        show_progress: a bar of steps.

    Raises:
        ConfigError: a folder holds a run while ``resume`` is off.
        StructAttnError: raised by a run. No other runs are started, and running ones are stopped with a
            checkpoint.
        Stopped: this process was asked to stop (see ``interrupt``), and so were the runs.
    """
    if not resume and any((job.folder / "checkpoints").exists() for job in jobs):
        raise ConfigError("some of these runs were begun before: resume them, or use another folder")
    left = [job for job in jobs if not job.is_done]  # the others are only read, elsewhere
    if left:
        with closing(_Bar(jobs, left, show_progress)) as bar:
            runner.run(left, bar)


class _Bar(Listener):
    """One bar for all runs: it counts their steps."""

    def __init__(self, jobs: Sequence[Job], left: Sequence[Job], show: bool) -> None:
        numbers: dict[str, int] = {}
        self._models = [numbers.setdefault(f"{job.spec} {job.task}", len(numbers) + 1) for job in jobs]
        self._ends = list(itertools.accumulate(job.training.steps for job in jobs))
        self._scores = jobs[0].is_scored
        self._over, self._steps = len(jobs) - len(left), self._ends[-1] - sum(job.training.steps for job in left)
        self._bar = progress_bar(total=self._ends[-1], initial=self._steps, unit="step", desc=self._text(), show=show)

    def close(self) -> None:
        """Closes the bar, with its last state."""
        self._bar.close()

    def stepped(self, job: Job, steps: int) -> None:
        self._steps += steps
        self._tell()

    def ended(self, job: Job, error: Exception | None) -> None:
        if isinstance(error, StructAttnError):
            log = f"; its log is {job.log}" if job.log.exists() and job.log.stat().st_size else ""
            raise type(error)(
                f"{job.name}: {error}{log}. The other runs are kept, and --resume continues them"
            ) from error
        super().ended(job, error)
        self._over += 1
        self._tell()

    def _tell(self) -> None:
        run = min(self._over, len(self._models) - 1)
        # Then the last runs are scored, which takes minutes on large data.
        trained = self._over <= run and self._steps in (self._ends[run], self._ends[-1])
        self._bar.update(self._steps - self._bar.n)
        say(self._bar, self._text() + (", scoring" if trained and self._scores else ""))

    def _text(self) -> str:
        run = min(self._over, len(self._models) - 1)
        return f"model {self._models[run]} of {max(self._models)}, run {run + 1} of {len(self._models)}"
