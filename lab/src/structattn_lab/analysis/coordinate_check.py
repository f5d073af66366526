"""Checks of muP: activation sizes against width after a few steps, and the best learning rate against
width.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from structattn.checks import check_int, check_number
from structattn.errors import ConfigError
from structattn_lab.analysis.coordinate_models import (
    QUANTITIES,
    Growing,
    Parametrization,
    Probe,
    SmallProblem,
    optimizer_for,
    train_step,
)
from structattn_lab.records.mup import Coordinates, LargestSlope, Transfer
from structattn_lab.settings.recipe import MOST_RUNS

STRUCTURES = (
    "standard",
    "bilinear-btt:1",
    "bilinear-btt:2",
    "bilinear-mlr:4|2|1|1",
    "mlr:4|2|1|1",
    "bilinear-kronecker",
)
Tick = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Settings of both checks.

    Args:
        structures: attention specs; ranks are read as proportions (see ``Growing``).
        widths: of the coordinate check.
        record_steps: after which training steps sizes are measured; the last one ends the training.
        learning_rate: of the coordinate check, that of matrices with ``base_width`` inputs.
        base_width: the fan-in at which muP and the standard parametrisation use the same rate for matrices.
        seeds: draws of the initial weights at the largest width; the data are the same. Smaller models differ
            more between draws and cost less: ``draws`` gives their number.
        transfer_widths: of the transfer check; empty to leave it out.
        transfer_rates: learning rates tried, at ``base_width``.
        transfer_steps: training steps of one run of it.
        transfer_seeds: draws of the initial weights, whose losses are averaged.
        transfer_structures: the structures that it is run for.
        problem: model and data.

    Raises:
        ConfigError: fewer than two widths, an unknown structure, or one that does not exist at a width.
    """

    structures: tuple[str, ...] = STRUCTURES
    widths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    record_steps: tuple[int, ...] = (1, 2, 4, 8)
    learning_rate: float = 0.001
    base_width: int = 64
    seeds: int = 4
    transfer_widths: tuple[int, ...] = (32, 64, 128, 256)
    transfer_rates: tuple[float, ...] = tuple(2.0**-k for k in range(11, 3, -1))
    transfer_steps: int = 40
    transfer_seeds: int = 2
    transfer_structures: tuple[str, ...] = ("standard", "bilinear-btt:1", "mlr:4|2|1|1")
    problem: SmallProblem = field(default_factory=SmallProblem)

    def __post_init__(self) -> None:
        for name in ("widths", "transfer_widths", "record_steps", "transfer_rates"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        for name in ("widths", "transfer_widths"):
            found = getattr(self, name)
            if len(found) == 1 or not (found or name == "transfer_widths"):
                raise ConfigError(f"{name}: a check compares at least two different ones, got {list(found)}")
        if not self.structures or len(set(self.structures)) != len(self.structures):
            raise ConfigError(
                f"give at least one structure, without repetition; got {', '.join(self.structures) or 'none'}"
            )
        if not self.record_steps or self.record_steps[0] < 1:
            raise ConfigError(f"sizes are measured after increasing steps 1, 2, ..., got {list(self.record_steps)}")
        for name in ("base_width", "transfer_steps"):
            check_int(name, getattr(self, name), minimum=1)
        for name in ("seeds", "transfer_seeds"):
            check_int(name, getattr(self, name), minimum=1, maximum=MOST_RUNS)
        check_number("learning_rate", self.learning_rate, above=0)
        for number, rate in enumerate(self.transfer_rates, start=1):
            check_number(f"transfer_rates: rate {number}", rate, above=0)
        if self.transfer_widths and len(self.transfer_rates) < 2:
            raise ConfigError("the transfer check compares at least two learning rates")
        for text in self.structures:
            for width in {*self.widths, *self.transfer_widths}:
                _check_exists(self.problem, text, width)

    def draws(self, width: int) -> int:
        """Draws of the initial weights at a width: ``seeds`` times the ratio of the largest width to it, at
        most 8 times as many.
        """
        return self.seeds * max(1, min(8, self.widths[-1] // width))

    @property
    def transferred(self) -> tuple[str, ...]:
        """The structures of the transfer check."""
        return tuple(text for text in self.structures if self.transfer_widths and text in self.transfer_structures)


@functools.cache
def _check_exists(problem: SmallProblem, structure: str, width: int) -> None:
    problem.empty(Growing.parse(structure), width, "mup")


QUICK = CheckConfig(
    structures=("standard", "bilinear-btt:1"),
    widths=(64, 128, 256),
    transfer_widths=(32, 64, 128),
    transfer_rates=tuple(2.0**-k for k in range(10, 3, -1)),
    transfer_steps=24,
    transfer_seeds=1,
    transfer_structures=("standard",),
)


def log_slope(widths: Sequence[int], sizes: Sequence[float]) -> float | None:
    """The least-squares slope of log size against log width; ``None`` where a size is zero or not finite."""
    if not all(0 < size < math.inf for size in sizes):
        return None
    return statistics.linear_regression([math.log(w) for w in widths], [math.log(s) for s in sizes]).slope


def large_end(widths: Sequence[int]) -> int:
    """How many of the widths, the largest ones, a slope is fitted to: half of them, but at least three."""
    return min(len(widths), max(3, math.ceil(len(widths) / 2)))


def _mean(values: Sequence[float]) -> float:
    """The geometric mean; zero if one is zero, and infinite if one is NaN."""
    if not all(math.isfinite(value) for value in values):
        return math.inf
    return statistics.geometric_mean(values) if all(values) else 0.0


def cost(width: int, steps: int) -> int:
    """The share of a run in the progress bar: a training step costs about the square of its width and some
    overhead.
    """
    return steps * (width**2 + 128**2)


def _no_tick(_: int) -> None:
    """What ``tick`` is without a progress bar."""


def coordinate_check(
    structure: str, parametrization: Parametrization, config: CheckConfig, tick: Tick = _no_tick
) -> Coordinates:
    """Trains at every width for a few steps on one batch and measures activation sizes (see ``QUANTITIES``).

    Args:
        structure: an attention spec; ranks are read as proportions.
        parametrization: ``"mup"`` or ``"standard"``.
        config: the other settings.
        tick: called after every run, with its share of the progress bar.

    Returns:
        ``Coordinates``.

    Cost: the last record step times draws training steps at every width.
    """
    grown, problem = Growing.parse(structure), config.problem
    batch, held_out = problem.batch("coordinates"), problem.batch("held out")
    steps = (0, *config.record_steps)
    found: dict[str, dict[int, list[list[float]]]] = {}
    for width in config.widths:
        for seed in range(config.draws(width)):
            model = problem.build(grown, width, parametrization, seed)
            optimizer = optimizer_for(model, parametrization, config.learning_rate, config.base_width)
            probe = Probe(model, held_out)
            for step in range(steps[-1] + 1):
                if step:
                    train_step(model, optimizer, batch)
                if step in steps:
                    for name, size in probe.sizes().items():
                        runs = found.setdefault(name, {}).setdefault(step, [])
                        if seed == 0:
                            runs.append([])
                        runs[-1].append(size)
            tick(cost(width, steps[-1]))
    last = large_end(config.widths)
    means = {name: {step: [_mean(v) for v in runs] for step, runs in steps.items()} for name, steps in found.items()}
    slopes = {
        name: {step: log_slope(config.widths[-last:], sizes[-last:]) for step, sizes in by_step.items()}
        for name, by_step in means.items()
    }
    candidates = [
        (abs(slope), slope, name, step)
        for name in QUANTITIES
        for step, slope in slopes[name].items()
        if step and slope is not None
    ]
    _, slope, quantity, step = max(candidates, default=(0.0, 0.0, "", 0))
    return Coordinates(
        structure=structure,
        parametrization=parametrization,
        widths=config.widths,
        specs=tuple(str(grown.at(width, problem.num_heads)) for width in config.widths),
        slope_widths=config.widths[-last:],
        sizes=_plain(means),
        by_seed=_plain(found),
        slopes=_plain(slopes),
        largest=LargestSlope(slope=slope, quantity=quantity, step=step) if candidates else None,
    )


def _plain(value: Any) -> Any:
    """Numbers as a record holds them: keys as text, and ``None`` for infinity and NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_plain(item) for item in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def transfer_check(
    structure: str, parametrization: Parametrization, config: CheckConfig, tick: Tick = _no_tick
) -> Transfer:
    """Trains at every width with every learning rate on the same two batches in turn, so that a few steps are
    enough to learn.

    Args:
        structure, parametrization, config, tick: see ``coordinate_check``.

    Returns:
        ``Transfer``.

    Cost: ``transfer_steps`` times widths, rates and seeds training steps.
    """
    grown, problem = Growing.parse(structure), config.problem
    batches = [problem.batch("transfer", index) for index in range(2)]
    tail = max(1, config.transfer_steps // 5)
    losses: list[list[float]] = []
    for width in config.transfer_widths:
        losses.append([])
        for rate in config.transfer_rates:
            scores = []
            for seed in range(config.transfer_seeds):
                model = problem.build(grown, width, parametrization, seed)
                optimizer = optimizer_for(model, parametrization, rate, config.base_width)
                history: list[float] = []
                for step in range(config.transfer_steps):
                    history.append(train_step(model, optimizer, batches[step % len(batches)]))
                    if not math.isfinite(history[-1]):
                        break
                scores.append(statistics.fmean(history[-tail:]))
                tick(cost(width, config.transfer_steps))
            losses[-1].append(statistics.fmean(scores))
    best: list[float | None] = []
    for row in losses:
        finite = [(loss, rate) for loss, rate in zip(row, config.transfer_rates, strict=True) if math.isfinite(loss)]
        best.append(min(finite)[1] if finite else None)
    known = [rate for rate in best if rate is not None]
    return Transfer(
        structure=structure,
        parametrization=parametrization,
        widths=config.transfer_widths,
        rates=config.transfer_rates,
        losses=_plain(losses),
        best_rates=tuple(best),
        spread=math.log2(max(known) / min(known)) if known else None,
    )
