"""The trials of a sweep: Optuna proposes their values, ``SuccessiveHalving`` stops the worse ones, the
journal records their status.

Importing this needs Optuna. Optuna's storage is not used: after an interruption it gets the history from the
journal, in the order of the trials, and proposes what it would have proposed without the interruption.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from structattn.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    ShapeError,
    TrainingDivergedError,
    in_words,
)
from structattn.extras import install_command
from structattn.progress import progress_bar
from structattn.seeds import derive_seed
from structattn_lab.records.sweep import Parameter, Status, Trial
from structattn_lab.runner.base import Listener, Runner
from structattn_lab.runner.job import Job
from structattn_lab.sweep.halving import SuccessiveHalving
from structattn_lab.sweep.plan import OVER, Journal, SweepPlan
from structattn_lab.training.build import empty_model

try:
    import optuna
except ImportError as error:
    raise MissingDependencyError(f"sweeps need Optuna: {install_command('sweep')} brings it ({error})") from error

NOT_FINITE = "the validation score is not finite"


def run_trials(plan: SweepPlan, journal: Journal, *, runner: Runner, show_progress: bool) -> None:
    """Runs the trials of a plan that are not finished in the journal; returns when all are.

    Args:
        plan: what to search.
        journal: the record, which is updated.
        runner: what trains the models.
        show_progress: a bar of trials.
    """
    with closing(_Trials(plan, journal, show_progress)) as trials:
        runner.run(trials.jobs(), trials)


@dataclass(kw_only=True)
class _Trial:
    """A trial that runs.

    Attributes:
        number: of the sweep.
        proposal: its Optuna trial.
        seen: the step of its last score before an interruption.
        started, seconds_before: start time in this process, and the seconds before an interruption.
        score: the last one.
        stopped: whether it was asked to stop.
    """

    number: int
    proposal: Any
    seen: int
    started: float
    seconds_before: float
    score: float = math.inf
    stopped: bool = False


class _Trials(Listener):
    """Makes the jobs of a sweep, and records their events."""

    def __init__(self, plan: SweepPlan, journal: Journal, show_progress: bool) -> None:
        self._plan, self._journal = plan, journal
        self._halving = SuccessiveHalving(grace=plan.grace, longest=plan.longest) if plan.scheduler == "asha" else None
        self._space = {parameter.name: _distribution(parameter) for parameter in plan.parameters}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        seed = derive_seed("sweep", plan.seed, 0) % 2**32
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        self._running: dict[str, _Trial] = {}
        records = journal.trials()
        self._begun = list(self._replay(records))
        self._next = 1 + max((record.number for record in records), default=0)
        over = len(records) - len(self._begun)
        tried = [record.params for record in records]
        self._left = [values for values in plan.combinations if values not in tried]
        self._new = len(self._left) if plan.combinations else plan.trials - len(records)
        self._best = math.inf
        self._bar = progress_bar(
            total=max(plan.num_trials, over), initial=over, unit="trial", desc="trials", show=show_progress
        )

    def close(self) -> None:
        """Closes the bar, with its last state."""
        self._bar.close()

    def _replay(self, records: Sequence[Trial]) -> Iterator[tuple[Trial, Any]]:
        """Gives earlier trials to Optuna and ASHA; returns the unfinished ones with their Optuna trials."""
        for record in records:
            for step, score in record.history:
                if self._halving is not None:
                    self._halving.stops(record.number, step, _or_worst(score))
            proposal = self._study.ask(self._space)
            if proposal.params != record.params:  # several ran at the same time, and ended in another order
                self._study.tell(proposal, state=optuna.trial.TrialState.FAIL)
                self._study.enqueue_trial(record.params)
                proposal = self._study.ask(self._space)
            if record.status in OVER:
                self._study.tell(proposal, _or_worst(record.score))
            else:
                yield record, proposal

    def jobs(self) -> Iterator[Job]:
        """Interrupted and crashed trials, then new ones: the combinations that are left, or values that are
        proposed when there is room for them.
        """
        for record, proposal in self._begun:
            yield from self._begin(record.number, proposal)
        for number in range(self._next, self._next + self._new):
            if self._left:
                self._study.enqueue_trial(self._left[number - self._next])
            yield from self._begin(number, self._study.ask(self._space))

    def _begin(self, number: int, proposal: Any) -> Iterator[Job]:
        """The job of a trial, unless its values do not fit together."""
        begun = self._journal.begin(number, proposal.params)
        trial = _Trial(
            number=number,
            proposal=proposal,
            seen=max((step for step, _ in begun.history), default=0),
            started=time.perf_counter(),
            seconds_before=begun.seconds,
        )
        try:
            job = self._plan.job(self._journal.run_folder(number), proposal.params)
        except ConfigError as error:
            self._end(trial, "failed", message=str(error))
        else:
            self._running[job.folder.name] = trial
            yield job

    def evaluated(self, job: Job, entry: dict[str, float]) -> bool:
        trial = self._running[job.folder.name]
        step = int(entry["step"])
        # It was not stopped before an interruption, and is not stopped at its end.
        if not trial.seen < step < job.training.steps:
            return True
        trial.score = entry[f"validation_{job.made_task.metric}"]
        finite_score = trial.score if math.isfinite(trial.score) else None
        trial.stopped = self._halving is not None and self._halving.stops(trial.number, step, _or_worst(finite_score))
        # With the score, the decision: after an interruption the trial does not go on.
        decision = {"status": "stopped"} if trial.stopped and finite_score is not None else {}
        self._journal.update(
            trial.number,
            score=finite_score,
            step=step,
            seconds=self._seconds(trial),
            entry=(step, finite_score),
            **decision,
        )
        return not trial.stopped

    def ended(self, job: Job, error: Exception | None) -> None:
        trial = self._running.pop(job.folder.name)
        if isinstance(error, TrainingDivergedError):
            self._end(trial, "diverged", message=str(error))
        elif isinstance(error, (ConfigError, ShapeError, DataError)):
            self._end(trial, "failed", message=str(error))
        elif error is not None:
            self._end(trial, "crashed", message=in_words(error))
        elif trial.stopped:
            self._end(trial, "stopped", trial.score)
        else:
            record = job.record()
            assert record is not None  # it finished now
            assert record.progress is not None
            progress = record.progress
            task = job.made_task
            model = empty_model(task, job.spec, job.training.parametrization)
            count = sum(p.numel() for p in model.parameters() if p.requires_grad)
            score = progress.final_validation_score(task.metric, job.training.patience)
            self._end(trial, "finished", score, step=progress.step, num_params=count)

    def _end(self, trial: _Trial, status: Status, score: float = math.nan, **more: Any) -> None:
        """Records the end of a trial; one that finished without a score diverged."""
        finite_score = score if math.isfinite(score) else None
        if finite_score is None and status in ("finished", "stopped"):
            status, more["message"] = "diverged", NOT_FINITE
        self._journal.update(trial.number, status=status, score=finite_score, seconds=self._seconds(trial), **more)
        if status == "crashed":
            self._study.tell(trial.proposal, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial.proposal, _or_worst(finite_score))
        if status == "finished":
            self._best = min(self._best, score)
            self._bar.set_postfix(best=f"{self._best:.5g}", refresh=False)
        self._bar.update()

    def _seconds(self, trial: _Trial) -> float:
        return trial.seconds_before + time.perf_counter() - trial.started


def _or_worst(score: float | None) -> float:
    """For Optuna and ASHA: a missing score counts as the worst, so that they avoid such values."""
    return score if score is not None and math.isfinite(score) else math.inf


def _distribution(parameter: Parameter) -> Any:
    if parameter.choices:
        return optuna.distributions.CategoricalDistribution(parameter.choices)
    whole = isinstance(parameter.low, int)
    kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    return kind(parameter.low, parameter.high, log=parameter.log)
