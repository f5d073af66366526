"""The grid of a recipe: the points at which everything is compared, and the runs at each of them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from structattn.errors import ConfigError
from structattn_lab.compare.budgets import training_of
from structattn_lab.old_formats import existing_folder
from structattn_lab.records.comparison import GridPosition
from structattn_lab.report.numbers import fmt_flops
from structattn_lab.runner.job import Job
from structattn_lab.settings.overrides import Change, apply_overrides, with_changes
from structattn_lab.settings.recipe import Recipe, Variation
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.base import Task
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.training.build import empty_model

_AS_IT_IS = Variation(name="", changes={})


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """The cost of a model: its trainable parameters and the forward FLOPs of one example; where they are
    known, the rank of a head's score and the numbers in the key/value cache of one sequence at the context
    length."""

    num_params: int
    flops_per_example: int
    rank: int | None
    cache_numbers: int | None

    @classmethod
    def of(cls, task: Task, model: nn.Module) -> ModelCosts:
        """Counted on the structure of a model of a task, which may be on the meta device."""
        return cls(
            num_params=sum(p.numel() for p in model.parameters() if p.requires_grad),
            flops_per_example=task.flops(model),
            rank=model.score_rank() if hasattr(model, "score_rank") else None,  # type: ignore[operator]
            cache_numbers=model.cache_numbers() if hasattr(model, "cache_numbers") else None,  # type: ignore[operator]
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """A recipe of a task at one of its variants, widths and budgets, with one of the settings that are
    searched.

    Attributes:
        tasks: makes its task.
        training_of: the training of a spec under a recipe; points share what was counted for it.
        position: the point in words, for tables.
        recipe: the settings there.
        settings: their differences from those of the whole recipe as one text, used in folder names.
        swept: the settings of the runs that choose a learning rate.
        sweep_settings: as ``settings``, for those runs: points with equal ``sweep_settings`` share them.
    """

    tasks: TaskFactory
    training_of: Callable[[Recipe, str], TrainingConfig]
    position: GridPosition
    recipe: Recipe
    settings: str
    swept: Recipe
    sweep_settings: str

    def models(self) -> dict[str, ModelCosts]:
        """Builds every model once on the meta device, so that a wrong spec fails before hours of training;
        returns the cost of each.
        """
        self._built(self.swept)
        return self._built(self.recipe)

    def _built(self, recipe: Recipe) -> dict[str, ModelCosts]:
        specs, task = recipe.attention, self.tasks(recipe.task)
        if not specs:
            raise ConfigError("give at least one attention spec to compare")
        if len({"".join(spec.split()) for spec in specs}) != len(specs):
            raise ConfigError(f"specs must be unique, got {', '.join(specs)}")
        costs = {}
        for spec in specs:
            task.check_spec(spec)
            try:
                costs[spec] = ModelCosts.of(task, empty_model(task, spec, recipe.training.parametrization))
            except ConfigError as error:
                raise ConfigError(f"{spec!r} does not fit this model: {error}") from error
            self.training_of(recipe, spec)  # a budget that pays for too few steps
        return costs

    def sweep_jobs(self, out: Path) -> list[Job]:
        """Seed 0 of every spec at every learning rate to choose from; none if there is no choice."""
        recipe = self.recipe
        if len(recipe.learning_rates) < 2 and not recipe.sweep_settings:
            return []
        group, settings = ("sweep", self.sweep_settings) if recipe.sweep_settings else ("runs", self.settings)
        return [
            self._job(self.swept, spec, 0, rate, out / group, settings, may_diverge=True)
            for spec in recipe.attention
            for rate in recipe.learning_rates
        ]

    def jobs(self, out: Path, spec: str, rate: float) -> list[Job]:
        """All seeds of a spec at a learning rate, to be scored."""
        return [
            self._job(self.recipe, spec, seed, rate, out / "runs", self.settings, is_scored=True)
            for seed in range(self.recipe.seeds)
        ]

    def _job(
        self, recipe: Recipe, spec: str, seed: int, rate: float, group: Path, settings: str, **options: Any
    ) -> Job:
        return Job(
            tasks=self.tasks,
            task=recipe.task,
            spec=spec,
            training=replace(self.training_of(recipe, spec), learning_rate=rate),
            seed=seed,
            folder=_run_folder(group, settings, spec, seed, rate),
            **options,
        )

    def run_folder(self, out: Path, spec: str, seed: int, rate: float) -> Path:
        """Where the run of a row is: it differs for different specs, seeds, learning rates and settings."""
        return _run_folder(out / "runs", self.settings, spec, seed, rate)

    def baselines_folder(self, out: Path) -> Path:
        """Where the files of the baselines are."""
        return _below(out / "baselines", self.settings)


def points_of(tasks: TaskFactory, recipe: Recipe) -> list[Point]:
    """Everything under which the attention variants are compared: variants x widths x budgets x search, in
    that order; at least one point.
    """
    axes = itertools.product(
        [Variation.parse(text) for text in recipe.variants] or [_AS_IT_IS],
        recipe.widths or (None,),
        recipe.budgets or (None,),
        [Variation.parse(text) for text in recipe.search] or [_AS_IT_IS],
    )
    point = functools.partial(_point, tasks, functools.cache(functools.partial(training_of, tasks)), recipe)
    return [point(*axis) for axis in axes]


def _point(
    tasks: TaskFactory,
    training_of: Callable[[Recipe, str], TrainingConfig],
    recipe: Recipe,
    variant: Variation,
    width: int | None,
    budget: float | None,
    searched: Variation,
) -> Point:
    sizes = []
    if width is not None:
        sizes = [Change.of("task.embed_dim", width), Change.of("task.num_heads", width // recipe.head_dim())]
    if budget is not None:
        sizes.append(Change.of("budgets", (budget,)))
    changes = {**variant.changes, **searched.changes, **{str(change): change for change in sizes}}
    single = replace(recipe, variants=(), search=(), widths=(), budgets=())
    changed = with_changes(single, changes.values())
    replaced = {Change.parse(text).name for text in recipe.sweep_settings}
    words = (variant.name, f"E = {width}" if width else "", f"{fmt_flops(budget)} FLOPs" if budget else "")
    group = ", ".join(filter(None, words))
    return Point(
        tasks=tasks,
        training_of=training_of,
        position=GridPosition(
            variant=", ".join(filter(None, (group, searched.name))) or None,
            group=group or None,
            searched=searched.name or None,
            setting=variant.name or None,
            width=width,
            budget=budget,
        ),
        recipe=changed,
        settings=" ".join(changes),
        swept=apply_overrides(changed, recipe.sweep_settings),
        sweep_settings=" ".join(text for text, change in changes.items() if change.name not in replaced),
    )


def _below(group: Path, settings: str) -> Path:
    return group / _slug(settings) if settings else group


def _run_folder(group: Path, settings: str, spec: str, seed: int, rate: float) -> Path:
    def folder(name: str) -> Path:
        return _below(group, settings) / _slug(name) / f"seed-{seed}-lr-{rate:g}"

    return existing_folder(folder, spec)


def _slug(text: str) -> str:
    """Readable in a path, and different for different texts."""
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
