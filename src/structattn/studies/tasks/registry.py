"""Recipes: for each task, named settings with the attention variants they compare and what they cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from structattn.errors import ConfigError, nearest_name
from structattn.studies.recipe import Preset, Recipe
from structattn.studies.tasks.base import Task
from structattn.studies.tasks.chronos.presets import CHRONOS_PRESETS
from structattn.studies.tasks.chronos.task import ChronosConfig, ChronosTask
from structattn.studies.tasks.forecast.presets import FORECAST_PRESETS
from structattn.studies.tasks.forecast.task import ForecastConfig, ForecastTask
from structattn.studies.tasks.icl_regression.presets import ICL_PRESETS
from structattn.studies.tasks.icl_regression.task import ICLRegressionConfig, ICLRegressionTask
from structattn.studies.tasks.nearest_neighbor.task import NearestNeighborConfig, NearestNeighborTask
from structattn.studies.tasks.text.presets import TEXT_PRESETS
from structattn.studies.tasks.text.task import TextConfig, TextTask
from structattn.studies.training.config import TrainingConfig

_NEAREST = TrainingConfig(
    steps=1000,
    batch_size=256,
    learning_rate=2e-2,
    schedule="one-cycle",
    betas=(0.9, 0.999),
    eval_every=100,
    checkpoint_every=250,
)
_NEAREST_SPECS = ("standard", "standard:1", "bilinear-btt:1", "bilinear-mlr:4|2|1|1", "bilinear-mlr:1|1|1|5")


def _nearest(seeds: int, specs: tuple[str, ...] = _NEAREST_SPECS) -> Recipe:
    return Recipe(task=NearestNeighborConfig(), training=_NEAREST, attention=specs, seeds=seeds)


@dataclass(frozen=True)
class TaskEntry:
    """A task by name: how to make it, the class of its settings, its presets, and the settings that name a user's own data.

    Args:
        data: setting by command-line option, such as ``{"target": "task.data.target"}``.
    """

    make: type[Any]
    config: type
    presets: dict[str, Preset]
    data: dict[str, str] = field(default_factory=dict)


TASKS: dict[str, TaskEntry] = {
    "nearest-neighbor": TaskEntry(
        NearestNeighborTask,
        NearestNeighborConfig,
        {
            "default": Preset(_nearest(1), "d = 64, 16 points, five variants, one seed"),
            "demo": Preset(_nearest(1), "the same"),
            "smoke": Preset(
                replace(_nearest(1, _NEAREST_SPECS[:3]), training=replace(_NEAREST, steps=100)),
                "the same with three variants and 100 steps: shows that it trains, not what it learns",
            ),
            "ranks": Preset(
                _nearest(
                    3,
                    (
                        "standard",
                        "standard:4",
                        "standard:2",
                        "standard:1",
                        *_NEAREST_SPECS[2:],
                        "bilinear-mlr:2|2|2|2",
                        "bilinear-btt:2",
                    ),
                ),
                "error against rank, nine variants, three seeds",
            ),
        },
    ),
    "forecast": TaskEntry(
        ForecastTask,
        ForecastConfig,
        FORECAST_PRESETS,
        {"data": "task.data.path", "time": "task.data.time", "target": "task.data.target"},
    ),
    "icl-regression": TaskEntry(ICLRegressionTask, ICLRegressionConfig, ICL_PRESETS),
    "text": TaskEntry(
        TextTask,
        TextConfig,
        TEXT_PRESETS,
        {"data": "task.data"},
    ),
    "chronos": TaskEntry(ChronosTask, ChronosConfig, CHRONOS_PRESETS, {"data": "task.checkpoint"}),
}


def task_entry(name: str) -> TaskEntry:
    """The entry of a task; raises ``ConfigError`` with the nearest name."""
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}: {nearest_name(name, TASKS)}")
    return TASKS[name]


@functools.lru_cache(maxsize=2)
def shared_task(name: str, config: Any) -> Task:
    """The task of settings, made once for all runs of a comparison: reading its data may take minutes."""
    task: Task = task_entry(name).make(config)
    return task


def recipe_for(task: str, preset: str) -> Recipe:
    """The recipe of a preset; raises ``ConfigError`` with the nearest name."""
    presets = task_entry(task).presets
    if preset not in presets:
        raise ConfigError(f"unknown preset {preset!r} of {task}: {nearest_name(preset, presets)}")
    return presets[preset].recipe
