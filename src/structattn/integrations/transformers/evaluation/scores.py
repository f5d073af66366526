"""What an evaluation of a cache says, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from structattn.errors import ConfigError


@dataclass(frozen=True)
class Estimate:
    """A mean over windows.

    Attributes:
        mean: over windows.
        low, high: its 95 % interval, by Student's t; infinite where there is only one window.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """That of independent numbers, one for each window."""
        count, mean = len(values), math.fsum(values) / len(values)
        if count == 1:
            return cls(mean, -math.inf, math.inf)
        error = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (count - 1) / count)
        half = student_t(count - 1) * error
        return cls(mean, mean - half, mean + half)


def student_t(freedom: int) -> float:
    """The t that a Student distribution exceeds in absolute value with probability 5 %.

    Args:
        freedom: degrees of freedom.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < 0.95 else (low, middle)
    return high


def _inside(t: float, freedom: int) -> float:
    """The probability of a Student distribution between -t and t."""
    angle = math.atan2(t, math.sqrt(freedom))
    is_odd, square = freedom % 2, math.cos(angle) ** 2
    term = total = math.cos(angle) if is_odd else 1.0
    for n in range(2 + is_odd, freedom, 2):
        term *= square * (n - 1) / n
        total += term
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * (total if freedom > 1 else 0))
    return math.sin(angle) * total


@dataclass(frozen=True)
class Recall:
    """How many answers of a task were right at a distance.

    Attributes:
        task, distance: see ``evaluate_cache``; tokens from the beginning of the needle to the end of the
            context.
        right, count: prompts of which every token of the answer was the most probable one, and all prompts.
    """

    task: str
    distance: int
    right: int
    count: int

    @property
    def share(self) -> float:
        """Of right answers, from 0 to 1."""
        return self.right / self.count


@dataclass(frozen=True)
class CacheScores:
    """What a model loses through a cache, and what the cache costs.

    Attributes:
        context_length: tokens of the prefill.
        num_steps: steps of one token that follow.
        losses: of each window, the mean over its steps, in nats per token.
        recall: by task and distance.
        nbytes: that the cache has allocated after the last step, with ``context_length + num_steps`` tokens;
            the largest of all windows.
        step_ms: milliseconds of a step, the median over all steps of all windows.
        prefill_ms: milliseconds of a prefill, the median over windows.
    """

    context_length: int
    num_steps: int
    losses: tuple[float, ...]
    recall: tuple[Recall, ...]
    nbytes: int
    step_ms: float
    prefill_ms: float

    @property
    def loss(self) -> Estimate:
        """Nats per token over windows."""
        return Estimate.of(self.losses)

    def loss_above(self, other: CacheScores) -> Estimate:
        """How much more is lost than through another cache, in nats per token, over the same windows: the
        interval is that of their differences, and far smaller than that of ``loss``.

        Raises:
            ConfigError: the windows are others.
        """
        kinds = [(x.context_length, x.num_steps, len(x.losses)) for x in (self, other)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"expected the same windows, got {kinds[0][2]} of {kinds[0][0]} and {kinds[0][1]} tokens and "
                f"{kinds[1][2]} of {kinds[1][0]} and {kinds[1][1]}: evaluate both caches with the same arguments"
            )
        return Estimate.of([a - b for a, b in zip(self.losses, other.losses, strict=True)])

    def recall_of(self, task: str | None = None) -> float:
        """The share of right answers over all distances, from 0 to 1.

        Args:
            task: its name. Default: all tasks.

        Raises:
            ConfigError: there are no prompts of this task.
        """
        rows = [x for x in self.recall if task in (None, x.task)]
        if not rows:
            known = ", ".join(dict.fromkeys(x.task for x in self.recall)) or "none"
            raise ConfigError(f"no recall of the task {task!r} was measured: expected one of {known}")
        return sum(x.right for x in rows) / sum(x.count for x in rows)
