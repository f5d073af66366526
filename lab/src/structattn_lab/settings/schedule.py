"""The learning-rate schedules."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "cosine", "wsd", "one-cycle"]


def learning_rate_at(step: int, schedule: Schedule, *, peak: float, steps: int, warmup_steps: int) -> float:
    """The learning rate of a step (0-based) of a training: a pure function, so that resuming needs no
    scheduler state.
    """
    if schedule == "one-cycle":
        rise = max(1, round(0.3 * steps))
        if step < rise:
            return peak * (0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * step / rise)))
        done = (step - rise) / max(1, steps - rise)
        return peak * (1e-4 + (1 - 1e-4) * 0.5 * (1 + math.cos(math.pi * done)))
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        return peak * min(1.0, (steps - step) / max(1, steps - round(0.75 * steps)))
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
