"""The trials of a sweep on Ray Tune, searched by Optuna and stopped early by ASHA. Importing this needs both.

Ray's and Optuna's own records of a sweep are pickles, and are not used: after an interruption both are told anew what the journal says.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment

from structattn.errors import ConfigError, DataError, MissingDependencyError, ShapeError, TrainingDivergedError
from structattn.progress import progress_bar
from structattn.seeds import derive_seed
from structattn.studies.runner.ray_cluster import connected, stopping, trials_stopped, work_in
from structattn.studies.runner.runs import kept_score
from structattn.studies.sweep.plan import REDUCTION, Journal, SweepPlan
from structattn.studies.sweep.space import Parameter
from structattn.studies.tasks.registry import shared_task

try:
    import optuna
    from ray import tune
    from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler
    from ray.tune.search.optuna import OptunaSearch
except ImportError as error:
    raise MissingDependencyError(
        f"sweeps need Ray Tune and Optuna: pip install 'structattn[sweep]' brings both ({error})"
    ) from error

NOT_FINITE = "the validation score is not finite"
_RETRIES = 2  # of a trial whose machine was lost; it goes on from its last checkpoint
_OVER = ("finished", "stopped", "diverged", "failed")
# No loggers of Ray's, and no progress of Ray's.
_RAY = {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}


def run_trials(plan: SweepPlan, journal: Journal, *, address: str, jobs: int | None, show_progress: bool) -> None:
    """Runs the trials of a plan that the journal does not know as over; returns when all are.

    Args:
        plan: what to search.
        journal: the record, which is kept up to date.
        address: of the cluster, see ``connected``.
        jobs: trials at the same time. Default: as many as there are GPUs, or without any, cores.
        show_progress: a bar of trials.

    Raises:
        ConfigError: nothing answers at the address.
    """
    records = journal.records()
    past = [record for record in records if record["status"] in _OVER]
    begun = [record for record in records if record["status"] not in _OVER]
    left = plan.trials - len(past)
    if left < 1:
        return
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    scheduler = _scheduler(plan, records)
    search = _Search(plan, journal, past, begun)
    ray_files = journal.folder.resolve() / "ray"
    with (
        connected(address) as resources,
        patch_environment(**_RAY),
        trials_stopped(ray_files / "stops"),
        progress_bar(total=plan.trials, initial=len(past), unit="trial", desc="trials", show=show_progress) as bar,
    ):
        needs, most = _shares(resources, jobs)
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_trial, plan=plan, folder=Path.cwd()), needs),
            tune_config=tune.TuneConfig(
                search_alg=search,
                scheduler=scheduler,
                num_samples=left,
                max_concurrent_trials=most,
                # Torch takes seconds to import. Processes are of one precision, see accelerate.
                reuse_actors=all(parameter.name != "training.precision" for parameter in plan.parameters),
            ),
            run_config=tune.RunConfig(
                storage_path=str(ray_files),
                failure_config=tune.FailureConfig(max_failures=_RETRIES),
                callbacks=[_Recorder(journal, bar, {record["number"]: record["seconds"] for record in begun})],
                verbose=0,
            ),
        )
        tuner.fit()
    shutil.rmtree(ray_files, ignore_errors=True)


def _shares(resources: dict[str, float], jobs: int | None) -> tuple[dict[str, float], int]:
    """What one trial takes, and how many run at the same time."""
    cores, gpus = resources.get("CPU", 1), resources.get("GPU", 0)
    most = jobs or max(1, int(gpus or cores))
    needs = {"cpu": 1.0 if most <= cores else cores / most}
    if gpus >= 1:
        needs["gpu"] = min(1.0, gpus / most)
    return needs, most


def _scheduler(plan: SweepPlan, past: Sequence[dict[str, Any]]) -> Any:
    """ASHA as it was: it is told every score of the trials before, and does not look at them again."""
    if plan.scheduler == "none":
        return FIFOScheduler()
    scheduler = AsyncHyperBandScheduler(
        time_attr="step",
        metric="score",
        mode="min",
        max_t=plan.longest,
        grace_period=plan.grace,
        reduction_factor=REDUCTION,
        stop_last_trials=False,
    )
    for record in past:
        trial = _Past(trial_id=f"past-{record['number']}")
        scheduler.on_trial_add(None, trial)
        for step, score in record["history"]:
            scheduler.on_trial_result(None, trial, {"step": step, "score": _told(score)})
    return scheduler


@dataclass(frozen=True)
class _Past:
    """All that the scheduler looks at in a trial."""

    trial_id: str


def _told(score: float | None) -> float:
    """For the search and the scheduler: no score is the worst, so that they keep away from it."""
    return math.inf if score is None else score


def _distribution(parameter: Parameter) -> Any:
    if parameter.choices:
        return optuna.distributions.CategoricalDistribution(parameter.choices)
    whole = isinstance(parameter.low, int)
    kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    return kind(parameter.low, parameter.high, log=parameter.log)


class _Search(OptunaSearch):  # type: ignore[misc]
    """Optuna's search, which gives every trial a number, writes it down before it begins, and continues interrupted ones first."""

    def __init__(
        self, plan: SweepPlan, journal: Journal, past: list[dict[str, Any]], begun: list[dict[str, Any]]
    ) -> None:
        # Another seed after an interruption, or the search would draw again what it has drawn before.
        seed = derive_seed("sweep", plan.seed, len(past) + len(begun)) % 2**32
        super().__init__(
            {parameter.name: _distribution(parameter) for parameter in plan.parameters},
            metric="score",
            mode="min",
            points_to_evaluate=[record["params"] for record in begun],
            sampler=optuna.samplers.TPESampler(seed=seed),
        )
        self._journal, self._begun = journal, list(begun)
        self._next = 1 + max((record["number"] for record in (*past, *begun)), default=0)
        for record in past:
            self.add_evaluated_point(record["params"], _told(record["score"]))

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        values = super().suggest(trial_id)
        if values is None:
            return None
        seen = 0
        if self._begun:
            record = self._begun.pop(0)
            number, values = record["number"], record["params"]
            seen = max((step for step, _ in record["history"]), default=0)
        else:
            number, self._next = self._next, self._next + 1
        self._journal.begin(number, values)
        return {"number": number, "values": values, "seen": seen}


class _Recorder(tune.Callback):  # type: ignore[misc]
    """Writes what becomes of every trial into the journal, as it becomes known."""

    def __init__(self, journal: Journal, bar: Any, before: dict[int, float]) -> None:
        self._journal, self._bar, self._before = journal, bar, before
        self._best = math.inf
        self._over: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bar": None}  # Ray pickles it with its own records

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        number = trial.config["number"]
        if number in self._over:
            return
        score, step = result["score"], result["step"]
        found = score if math.isfinite(score) else None
        self._journal.update(
            number,
            status=result["status"],
            score=found,
            step=step,
            seconds=self._before.get(number, 0.0) + result["seconds"],
            message=result["message"],
            num_params=result["num_params"],
            entry=[step, found] if result["status"] == "running" else None,
        )
        if result["status"] != "running":
            self._end(number, found)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        if number not in self._over:
            score = trial.last_result.get("score", math.inf)
            stopped = {"status": "stopped"} if math.isfinite(score) else {"status": "diverged", "message": NOT_FINITE}
            self._journal.update(number, **stopped)
            self._end(number, None)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        lines = str(trial.get_error() or "the process ended").strip().splitlines()
        self._journal.update(number, status="crashed", message=lines[-1])
        self._end(number, None)

    def _end(self, number: int, score: float | None) -> None:
        self._over.add(number)
        self._best = min(self._best, _told(score))
        if self._bar is not None:
            if math.isfinite(self._best):
                self._bar.set_postfix(best=f"{self._best:.5g}", refresh=False)
            self._bar.update()


def _trial(config: dict[str, Any], plan: SweepPlan, folder: Path) -> None:
    """One trial, in a process of Ray's."""
    started = time.perf_counter()

    def report(status: str, step: float, score: float, message: str = "", num_params: int | None = None) -> None:
        tune.report(
            {
                "status": status,
                "step": int(step),
                "score": score if math.isfinite(score) else math.inf,
                "seconds": time.perf_counter() - started,
                "message": message,
                "num_params": num_params,
            }
        )

    last = 0.0
    work_in(folder)
    try:
        job = plan.job(config["number"], config["values"])
        metric = shared_task(plan.task_name, job.task).metric

        def on_evaluation(entry: dict[str, float]) -> None:
            nonlocal last
            last = entry["step"]
            # Before an interruption it was not stopped, and at its end it is not any more.
            if config["seen"] < last < job.training.steps:
                report("running", last, entry[f"validation_{metric}"])

        assert plan.folder is not None  # the sweep opened one
        with stopping(plan.folder / "ray" / "stops", str(config["number"])):
            result = job.run(resume=True, show_progress=False, on_evaluation=on_evaluation)
        assert result is not None  # it may not diverge silently
        score = kept_score(result, job.training.patience, metric)
        count = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
        if math.isfinite(score):
            report("finished", result.steps, score, num_params=count)
        else:
            report("diverged", result.steps, score, NOT_FINITE, count)
    except TrainingDivergedError as error:
        report("diverged", last, math.inf, str(error))
    except (ConfigError, ShapeError, DataError) as error:
        report("failed", last, math.inf, str(error))
