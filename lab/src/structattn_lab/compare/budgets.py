"""Training at equal compute: how many steps a budget of FLOPs pays for."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from structattn.checks import MAX_LENGTH
from structattn.errors import ConfigError
from structattn_lab.settings.recipe import Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.base import Task
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.training.build import spec_for

_FEWEST_STEPS = 8


def flops_of(task: Task, model: nn.Module, steps: int) -> int:
    """Forward FLOPs of a number of steps with one example each; steps at the full size are one product, since
    there may be billions.
    """
    full, total = task.flops(model), 0
    for step in range(steps):
        if (cost := task.flops(model, step)) == full:
            return total + full * (steps - step)
        total += cost
    return total


def affordable_steps(task: Task, model: nn.Module, flops: float) -> int:
    """The number of steps in a budget of forward FLOPs, with one example per step.

    Examples may grow in training; once they are of the full size they stay so, and the rest is one division:
    small models on large budgets take billions of steps.
    """
    full, steps = task.flops(model), 0
    while (cost := task.flops(model, steps)) != full:
        if cost > flops:
            return steps
        flops -= cost
        steps += 1
    return steps + int(flops // full)


def training_of(tasks: TaskFactory, recipe: Recipe, spec: str) -> TrainingConfig:
    """The training of a variant: the recipe's steps, or as many as its compute pays for, and at least one.

    Args:
        tasks: makes the task where steps are counted.
        recipe: of a point of the grid.
        spec: of the variant.
    """
    training = recipe.training
    if not recipe.budgets and (recipe.equal == "steps" or spec == recipe.attention[0]):
        return training
    task = tasks(recipe.task)
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
        return _with_steps(training, max(steps, 1), training.warmup_steps)
    if steps < _FEWEST_STEPS:
        raise ConfigError(
            f"a budget of {recipe.budgets[0]:g} FLOPs pays for {steps} steps of {spec} of "
            f"{task.flops(model, 0) * training.batch_size:.2g} each, "
            f"and {_FEWEST_STEPS} are the fewest: give a larger budget, a smaller width or training.batch_size"
        )
    return _with_steps(training, steps, steps // 4)  # in the shortest runs, the warm-up would take most steps


def _with_steps(training: TrainingConfig, steps: int, longest: int) -> TrainingConfig:
    """A training of so many steps, whose warm-up takes ``longest`` of them at most, and a quarter where it
    would take all.
    """
    warmup = min(training.warmup_steps, longest)
    return dataclasses.replace(training, steps=steps, warmup_steps=warmup if warmup < steps else steps // 4)
