"""The runs of a comparison on the machines of a Ray cluster, through Ray Tune."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from structattn.errors import ConfigError, TrainingFailedError
from structattn.studies.runner.ray_cluster import connected, import_ray, stopping, trials_stopped, work_in
from structattn.studies.runner.runs import Job

_RETRIES = 2  # of a run whose machine was lost; it goes on from its last checkpoint


def train_all_with_ray(jobs: Sequence[Job], *, address: str, resume: bool, show_progress: bool) -> None:
    """Trains every job as a trial of Ray Tune, as many at a time as the cluster has cores, or GPUs where it has any.

    The folders of the runs must be on a file system that all machines share: checkpoints and results are written there as on one
    machine, and what is left to do after an interruption is done by calling it again with ``resume``.

    Args:
        jobs: the runs.
        address: of the cluster, see ``connected``.
        resume: whether folders may hold runs that were begun before.
        show_progress: Ray Tune's table of trials.

    Raises:
        MissingDependencyError: without Ray Tune.
        ConfigError: nothing answers at the address, or a folder holds a run while ``resume`` is off.
        TrainingFailedError: trials failed; the others were finished.
    """
    _, tune = import_ray()
    if not resume and any((job.folder / "checkpoints").exists() for job in jobs):
        raise ConfigError("some of these runs were begun before: resume them, or use another folder")
    if not jobs:
        return
    jobs = [dataclasses.replace(job, folder=job.folder.resolve()) for job in jobs]  # workers have folders of their own
    with connected(address) as resources, trials_stopped(_stops(jobs)):
        _fit(tune, resources, jobs, show_progress)


def _fit(tune: Any, resources: dict[str, float], jobs: Sequence[Job], show_progress: bool) -> None:
    needs: dict[str, float] = {"cpu": 1}
    if resources.get("GPU", 0) >= 1:
        needs["gpu"] = 1
    records = _common_folder(jobs) / "ray"
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(_trial, jobs=list(jobs), folder=Path.cwd()), needs),
        param_space={"index": tune.grid_search(list(range(len(jobs))))},
        run_config=tune.RunConfig(
            storage_path=str(records),
            failure_config=tune.FailureConfig(max_failures=_RETRIES),
            verbose=1 if show_progress else 0,
        ),
    )
    results = tuner.fit()
    failed = [(jobs[found.config["index"]], found.error) for found in results if found.error is not None]
    if failed:
        job, error = failed[0]
        reason = str(error).strip().splitlines()[-1]
        raise TrainingFailedError(
            f"{len(failed)} of {len(jobs)} runs failed, the first of {job.spec} in {job.folder}: {reason}. Finished ones are "
            "kept: mend the cause and give --resume"
        )


def _trial(config: dict[str, Any], jobs: Sequence[Job], folder: Path) -> None:
    """One run, in a process of Ray's."""
    work_in(folder)
    with stopping(_stops(jobs), str(config["index"])):
        jobs[config["index"]].run(resume=True, show_progress=False)


def _stops(jobs: Sequence[Job]) -> Path:
    return _common_folder(jobs) / "ray" / "stops"


def _common_folder(jobs: Sequence[Job]) -> Path:
    """The folder that holds the runs: that of the comparison, or one inside."""
    parents = [set(job.folder.parents) for job in jobs]
    return max(set.intersection(*parents), key=lambda folder: len(folder.parts))
