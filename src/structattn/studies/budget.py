"""The cost of training steps in forward FLOPs, and the number of steps in a budget: in closed form, also for billions of steps."""

from __future__ import annotations

from torch import nn

from structattn.studies.tasks.base import Task


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
