"""The runs of a comparison at one point of its grid, with their folders and numbers of steps."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from structattn.checks import MAX_LENGTH
from structattn.errors import ConfigError
from structattn.studies.grid import Point
from structattn.studies.recipe import Recipe
from structattn.studies.runner.runs import Job, ScoredJob
from structattn.studies.tasks.base import Task
from structattn.studies.tasks.registry import shared_task
from structattn.studies.training.build import empty_model, spec_for
from structattn.studies.training.config import TrainingConfig

_FEWEST_STEPS = 8


@runtime_checkable
class HasScoreRank(Protocol):
    """A model whose score is a bilinear form of known rank."""

    def score_rank(self) -> int:
        """The largest rank that the bilinear form of one head can have."""


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """The cost of a model: its trainable parameters, the forward FLOPs of one example, and the rank of a head's score where it is known."""

    num_params: int
    flops_per_example: int
    rank: int | None

    @classmethod
    def of(cls, model: nn.Module) -> ModelCosts:
        """Counted on the structure of a model, which may be on the meta device."""
        return cls(
            num_params=sum(p.numel() for p in model.parameters() if p.requires_grad),
            flops_per_example=model.flops_per_example(),  # type: ignore[operator]
            rank=model.score_rank() if isinstance(model, HasScoreRank) else None,
        )


def _slug(text: str) -> str:
    """Readable in a path, and different for different texts."""
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def run_folder(out: Path, spec: str, seed: int, learning_rate: float, variant: str = "", group: str = "runs") -> Path:
    """The folder of one run: different for different specs, seeds, learning rates and variants of the settings."""
    place = out / group / _slug(variant) if variant else out / group
    return place / _slug(spec) / f"seed-{seed}-lr-{learning_rate:g}"


def flops_of(task: Task, model: nn.Module, steps: int) -> int:
    """Forward FLOPs of a number of steps with one example each; steps at the full size are one product, since there may be billions."""
    full, total = task.flops(model), 0
    for step in range(steps):
        if (cost := task.flops(model, step)) == full:
            return total + full * (steps - step)
        total += cost
    return total


def affordable_steps(task: Task, model: nn.Module, flops: float) -> int:
    """The number of steps in a budget of forward FLOPs, with one example per step.

    Examples may grow in training; once they are of the full size they stay so, and the rest is one division: small models on large
    budgets take billions of steps.
    """
    full, steps = task.flops(model), 0
    while (cost := task.flops(model, steps)) != full:
        if cost > flops:
            return steps
        flops -= cost
        steps += 1
    return steps + int(flops // full)


@functools.cache
def training_of(task_name: str, recipe: Recipe, spec: str) -> TrainingConfig:
    """The training of a variant: the recipe's steps, or as many as its compute pays for, and at least one."""
    training = recipe.training
    if not recipe.budgets and (recipe.equal == "steps" or spec == recipe.attention[0]):
        return training
    task = shared_task(task_name, recipe.task)
    with torch.device("meta"):
        first, model = (
            task.build_model(spec_for(name, training.parametrization)) for name in (recipe.attention[0], spec)
        )
    left = recipe.budgets[0] / training.batch_size if recipe.budgets else flops_of(task, first, training.steps)
    steps = affordable_steps(task, model, left)
    if steps > MAX_LENGTH:
        raise ConfigError(
            f"{left * training.batch_size:g} FLOPs pay for {steps:.2g} steps of {spec}: give a smaller budget"
        )
    if not recipe.budgets:
        return dataclasses.replace(training, steps=max(steps, training.warmup_steps + 1))
    if steps < _FEWEST_STEPS:
        raise ConfigError(
            f"a budget of {recipe.budgets[0]:g} FLOPs pays for {steps} steps of {spec} of {task.flops(model, 0) * training.batch_size:.2g} each, "
            f"and {_FEWEST_STEPS} are the fewest: give a larger budget, a smaller width or training.batch_size"
        )
    # In the shortest runs, the warm-up would take most steps.
    return dataclasses.replace(training, steps=steps, warmup_steps=min(training.warmup_steps, steps // 4))


@dataclass(frozen=True, kw_only=True)
class PointRuns:
    """The runs of a comparison at one point of its grid."""

    task_name: str
    point: Point
    out: Path

    def models(self) -> dict[str, ModelCosts]:
        """Builds every model once on the meta device, so that a wrong spec fails before hours of training; returns the cost of each."""
        self._built(self.point.swept)
        return self._built(self.point.recipe)

    def _built(self, recipe: Recipe) -> dict[str, ModelCosts]:
        specs, task = recipe.attention, shared_task(self.task_name, recipe.task)
        if not specs:
            raise ConfigError("give at least one attention spec to compare")
        if len({"".join(spec.split()) for spec in specs}) != len(specs):
            raise ConfigError(f"specs must be unique, got {', '.join(specs)}")
        found = {}
        for spec in specs:
            task.check_spec(spec)
            try:
                found[spec] = ModelCosts.of(empty_model(task, spec, recipe.training.parametrization))
            except ConfigError as error:
                raise ConfigError(f"{spec!r} does not fit this model: {error}") from error
            training_of(self.task_name, recipe, spec)  # a budget that pays for too few steps
        return found

    def _settings(self, recipe: Recipe, spec: str, seed: int, rate: float) -> dict[str, Any]:
        return {
            "task_name": self.task_name,
            "task": recipe.task,
            "spec": spec,
            "training": dataclasses.replace(training_of(self.task_name, recipe, spec), learning_rate=rate),
            "seed": seed,
        }

    def _sweep_job(self, spec: str, rate: float) -> Job:
        point = self.point
        apart = bool(point.recipe.sweep_settings)
        group, settings = ("sweep", point.sweep_settings) if apart else ("runs", point.settings)
        folder = run_folder(self.out, spec, 0, rate, settings, group)
        return Job(**self._settings(point.swept, spec, 0, rate), folder=folder, may_diverge=True)

    def sweep_jobs(self) -> dict[tuple[str, float], Job]:
        """Seed 0 of every spec at every learning rate to choose from; none if there is no choice."""
        recipe = self.point.recipe
        rates = recipe.learning_rates
        if len(rates) < 2 and not recipe.sweep_settings:
            return {}
        return {(spec, rate): self._sweep_job(spec, rate) for spec in recipe.attention for rate in rates}

    def swept_scores(self, swept: dict[Path, float]) -> dict[str, dict[float, float]]:
        """Validation scores by spec and learning rate, from those of all swept runs by folder."""
        scores: dict[str, dict[float, float]] = {}
        for (spec, rate), job in self.sweep_jobs().items():
            scores.setdefault(spec, {})[rate] = swept[job.folder]
        return scores

    def jobs(self, spec: str, rate: float) -> list[ScoredJob]:
        """All seeds of a spec at a learning rate."""
        recipe, settings = self.point.recipe, self.point.settings
        return [
            ScoredJob(
                **self._settings(recipe, spec, seed, rate), folder=run_folder(self.out, spec, seed, rate, settings)
            )
            for seed in range(recipe.seeds)
        ]
