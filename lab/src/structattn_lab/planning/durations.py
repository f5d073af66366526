"""How long presets take on this machine: counted steps and FLOPs, and the time of a few training steps,
measured.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import structattn
from structattn.errors import CheckpointError, StructAttnError
from structattn.files import cache_folder, write_atomic
from structattn.progress import doing
from structattn_lab.compare.grid import points_of
from structattn_lab.settings.recipe import Recipe
from structattn_lab.tasks.registry import TASKS, factory_of, presets_of, task_class
from structattn_lab.training.build import empty_model
from structattn_lab.training.run import TrainingRun
from structattn_lab.training.speed import matmul_rate
from structattn_lab.training.step import train_step

_PASSES = 3  # of a training step, in forward passes
_OF_PEAK = 0.25  # of the rate of matrix products, in the products of a model
_OTHER_SHARE = 0.2  # at least, of a step of a small model: what does not grow with its FLOPs
_EVALUATION = 1.15  # with evaluations, of the time of training
_PER_RUN_S, _PER_PRESET_S = 0.5, 8.0  # setting a run up; imports, baselines and the report
_MEASURED_S = 0.1  # of each model that is measured
_POINTS = 6  # of a grid
_KEPT_S = 86400.0  # estimates are made again after a day: a machine may be busy


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a training step by its forward FLOPs, ``other + FLOPs * per_flop``.

    Attributes:
        other: seconds.
        per_flop: seconds.
    """

    other: float
    per_flop: float

    def __call__(self, flops: float) -> float:
        return self.other + flops * self.per_flop


def measured_step(task_name: str) -> StepTime:
    """Trains two variants of the small preset of a task for a tenth of a second each.

    Raises:
        StructAttnError: the task cannot run here, such as without a library.
    """
    presets = presets_of(task_name)
    recipe = presets["demo" if "demo" in presets else "smoke"].recipe
    task = task_class(task_name)(recipe.task)
    seconds, flops = [], []
    for spec in recipe.attention[:2]:
        run = TrainingRun(task, spec, recipe.training, 0, Path())  # it writes nothing before its first checkpoint
        run.prepare_training()
        train_step(run)  # the first one is slower
        times: list[float] = []
        ends = time.perf_counter() + _MEASURED_S
        while not times or time.perf_counter() < ends:
            started = time.perf_counter()
            train_step(run)
            times.append(time.perf_counter() - started)
        seconds.append(statistics.median(times))
        flops.append(recipe.training.batch_size * task.flops(run.model))
    step, per_flop = statistics.fmean(seconds), _PASSES / (_OF_PEAK * matmul_rate(torch.device("cpu"), torch.float32))
    return StepTime(
        other=max(step - statistics.fmean(flops) * per_flop, _OTHER_SHARE * step),
        per_flop=per_flop,
    )


def estimated_seconds(task_name: str, recipe: Recipe, step: StepTime) -> float | None:
    """What a comparison with a recipe takes, one run after the other; ``None`` where its models need your
    data, or a library that is not here.

    Every variant counts as the first one, and of a large grid some points count for all.
    """
    batch, runs = recipe.training.batch_size, []
    try:
        tasks = factory_of(task_name)
        points = points_of(tasks, recipe)
        for point in points[:: -(-len(points) // _POINTS)]:
            task = tasks(point.recipe.task)
            flops = batch * task.flops(empty_model(task, recipe.attention[0], recipe.training.parametrization))
            steps = point.recipe.budgets[0] / flops if point.recipe.budgets else recipe.training.steps
            runs.append(steps * step(flops) * _EVALUATION + _PER_RUN_S)
    except StructAttnError:
        return None
    return _PER_PRESET_S + recipe.num_runs * statistics.fmean(runs)


def estimates() -> dict[str, dict[str, float | None]]:
    """The seconds of every preset by task, of all tasks; kept for a day in the cache folder of this machine.

    Cost: ten seconds; then none.
    """
    made_with = [structattn.__version__, torch.__version__, torch.get_num_threads(), sorted(TASKS)]
    path = None
    with contextlib.suppress(CheckpointError, OSError, ValueError, KeyError, TypeError):
        path = cache_folder() / "presets.json"
        kept = json.loads(path.read_text())
        if kept["made_with"] == made_with and 0 <= time.time() - path.stat().st_mtime < _KEPT_S:
            return dict(kept["seconds"])
    seconds: dict[str, dict[str, float | None]] = {}
    for task in TASKS:
        with doing(f"measuring training steps of {task}"):
            try:
                step = measured_step(task)
            except StructAttnError:
                seconds[task] = dict.fromkeys(presets_of(task))
                continue
            seconds[task] = {
                name: estimated_seconds(task, preset.recipe, step) for name, preset in presets_of(task).items()
            }
    if path is not None:
        with contextlib.suppress(CheckpointError):
            write_atomic(path, json.dumps({"made_with": made_with, "seconds": seconds}, indent=1))
    return seconds


def in_words(seconds: float) -> str:
    """A time in a few words, with one or two digits."""
    for size, unit in ((365 * 86400.0, "years"), (86400.0, "days"), (3600.0, "hours"), (60.0, "min"), (1.0, "s")):
        if seconds >= 1.5 * size or unit == "s":
            count = seconds / size
            return (
                f"{float(f'{count:.2g}'):g} {unit}"
                if count < 10
                else f"{round(count, -1 if count >= 30 else 0):,.0f} {unit}"
            )
    raise AssertionError
