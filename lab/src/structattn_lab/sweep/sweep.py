"""Hyperparameter sweeps: many runs with settings that Optuna proposes, a report, and the command line of the
best.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from structattn.errors import CheckpointError, TrainingFailedError
from structattn.files import remove_temporary
from structattn_lab.old_formats import sweep_record
from structattn_lab.records.common import RESULTS, Results, read_file
from structattn_lab.records.environment import origin
from structattn_lab.records.sweep import BestTrial, Scheduler, SweepRecord, Trial
from structattn_lab.runner.base import Runner
from structattn_lab.runner.local import LocalRunner
from structattn_lab.runs.folders import Owner, finished_in, opened
from structattn_lab.settings.training import WITHOUT_EFFECT
from structattn_lab.sweep.halving import REDUCTION
from structattn_lab.sweep.plan import OVER, Journal, SweepPlan
from structattn_lab.tasks.base import Task
from structattn_lab.training.build import empty_model


def sweep(
    plan: SweepPlan,
    out: Path | None = None,
    *,
    runner: Runner | None = None,
    command: str = "",
    resume: bool = False,
    show_progress: bool = True,
    on_open: Callable[[Path], None] | None = None,
) -> Results[SweepRecord]:
    """Runs the trials of a plan and writes ``results.json``, figures (PNG, SVG) and ``report.html``.

    Trials are compared on the validation split, by the score of their final weights; only the best finished
    trial is scored on the test split. A run equals that of ``structattn train`` with the same settings.

    Args:
        plan: what is varied.
        out: output folder, created. Default: see ``folders.opened``.
        runner: what trains the models. Default: ``LocalRunner(None)``, one process for each GPU, or without
            any, each core.
        command: the command line, for the record.
        resume: continue the sweep in the folder: finished trials are kept, interrupted ones continue from
            their last checkpoint. The number of trials may be larger than before. A finished sweep is only
            read.
        show_progress: a bar of trials.
        on_open: called with the output folder before anything is trained.

    Raises:
        MissingDependencyError: without Optuna.
        ConfigError: an unusable folder, ``resume`` with another plan than before, or a model that no
            parameter changes and that does not fit.
        CheckpointError: the record of an interrupted sweep cannot be read, or the results cannot be written.
        TrainingFailedError: no trial finished; the report gives the status of each.

    Cost: training at most ``plan.num_trials`` models, and one or two seconds for each to start.
    """
    # Optuna is optional, and so is matplotlib: only sweeps need both.
    from structattn_lab.report.sweep import report
    from structattn_lab.report.writer import write_results
    from structattn_lab.sweep.trials import run_trials

    plan = replace(plan)  # with separate tasks: the data may have changed since another sweep
    task = plan.tasks(plan.settings.task)
    identity = plan.identity()
    identity["settings"] |= task.identity(identity["settings"]["task"])
    free = tuple(f"settings.training.{name}" for name in WITHOUT_EFFECT)
    owner = Owner(command="sweep", task=plan.task_name, settings=identity, free=free, recorded=sweep_record)
    out, finished = finished_in(out, owner, resume=resume, read=lambda folder: _finished(folder, plan))
    if finished is not None:
        return _checked(finished)
    if all(parameter.name.startswith("training.") for parameter in plan.parameters):
        # All trials train this model: if it does not fit, none would run.
        empty_model(task, plan.attention, plan.settings.training.parametrization)
    with opened(out, owner, resume=resume, on_open=on_open) as folder:
        for left in folder.glob("runs/trial-*"):
            remove_temporary(left)  # of a call that was killed
        journal = Journal(folder.resolve())  # workers have other working folders
        run_trials(plan, journal, runner=runner or LocalRunner(None), show_progress=show_progress)
        record = _record(plan, task, journal, command)
        results = write_results(record, report(record), folder)
    return _checked(results)


def _finished(folder: Path, plan: SweepPlan) -> Results[SweepRecord] | None:
    """The results of a finished sweep, else ``None``."""
    try:
        results = Results(record=read_file(SweepRecord, folder / RESULTS), folder=folder)
        trials = Journal(folder).trials()
    except CheckpointError:
        return None
    is_done = len(trials) >= plan.num_trials and all(trial.status in OVER for trial in trials)
    is_written = results.record.trials == trials and results.report.is_file()
    return results if is_done and is_written else None


def _checked(results: Results[SweepRecord]) -> Results[SweepRecord]:
    """Raises ``TrainingFailedError`` unless a trial ran to its end."""
    if results.record.best is None:
        trials = results.record.trials
        reasons = [f"trial {trial.number} {trial.status}: {trial.message}" for trial in trials]
        raise TrainingFailedError(f"none of {len(trials)} trials ran to its end, see {results.report}. {reasons[0]}")
    return results


def _record(plan: SweepPlan, task: Task, journal: Journal, command: str) -> SweepRecord:
    trials = journal.trials()
    scheduler = None
    if plan.scheduler != "none":
        scheduler = Scheduler(name=plan.scheduler, grace_period=plan.grace, reduction=REDUCTION)
    return SweepRecord(
        **origin(command),
        task=plan.task_name,
        metric=task.metric,
        metric_label=task.metric_label,
        preset=plan.preset,
        seed=plan.seed,
        attention=plan.attention,
        scheduler=scheduler,
        parameters=plan.parameters,
        config=plan.identity()["settings"],
        trials=trials,
        seconds=sum(trial.seconds for trial in trials),
        best=_best(plan, journal, trials),
    )


def _best(plan: SweepPlan, journal: Journal, trials: tuple[Trial, ...]) -> BestTrial | None:
    """The trial with the lowest validation score among those that ran to their end, its scores on the test
    split, and its command line.
    """
    finished = [(trial.score, trial) for trial in trials if trial.status == "finished" and trial.score is not None]
    if not finished:
        return None
    score, best = min(finished, key=lambda pair: pair[0])
    job = plan.job(journal.run_folder(best.number), best.params)
    result = job.run(resume=True, show_progress=False)
    assert result is not None  # it finished
    return BestTrial(
        number=best.number,
        params=best.params,
        score=score,
        median=statistics.median(score for score, _ in finished),
        test=job.made_task.evaluate(result.model.eval(), "test"),
        command=plan.command(best.params),
    )
