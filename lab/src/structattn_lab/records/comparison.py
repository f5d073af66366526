"""The record of a comparison, ``results.json``: its rows, its baselines, and their scaling laws or model
selection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from structattn.checks import check_path
from structattn_lab.records.common import RESULTS, Json, ResultRecord, read_file


@dataclass(frozen=True, kw_only=True)
class GridPosition:
    """The position of a row in the grid of a recipe.

    Attributes:
        variant: the name of the grid point; ``None`` where there is only one.
        group: the grid point without the searched settings.
        searched: its setting of the search.
        setting: the varied settings other than width, budget and search.
        width, budget: ``None`` where the recipe does not vary them.
    """

    variant: str | None = None
    group: str | None = None
    searched: str | None = None
    setting: str | None = None
    width: int | None = None
    budget: float | None = None


def position_of(row: GridPosition) -> GridPosition:
    """Only the position, of a row."""
    return GridPosition(**{field.name: getattr(row, field.name) for field in fields(GridPosition)})


@dataclass(frozen=True, kw_only=True)
class TriedRate:
    """A learning rate of a sweep, and the final validation score with it; ``None`` where the run diverged."""

    learning_rate: float
    score: float | None


@dataclass(frozen=True, kw_only=True)
class RateSweep:
    """How the learning rate of a row was chosen.

    Attributes:
        settings: in which the runs of the sweep differ from the others.
        runs: one for each rate, with seed 0.
    """

    settings: tuple[str, ...]
    runs: tuple[TriedRate, ...]


@dataclass(frozen=True, kw_only=True)
class Row(GridPosition):
    """An attention variant at a point of the grid: scores on the test split, and costs.

    Attributes:
        spec: of the attention.
        score, score_std: mean and standard deviation of ``scores``; no deviation with one seed.
        scores: of the deciding metric, one for each seed.
        validation: mean over seeds of the final validation scores.
        metrics: mean over seeds, by name.
        metrics_std: standard deviation over seeds, by name; empty with one seed.
        learning_rate, batch_size: of the training.
        sweep: how the rate was chosen; ``None`` where there was no choice.
        num_params: trainable ones.
        flops_per_example: of the forward pass, 2 per multiply-add.
        rank: the largest rank that the bilinear form of one head can have, where the model defines it.
        cache_numbers: in the key/value cache of one sequence at the context length, all layers; ``None``
            where the model has no cache.
        compute: forward FLOPs of all training examples, mean over seeds.
        seconds, steps_per_second, tokens_per_second, mfu: of the training, means over seeds.
        peak_memory_bytes: the largest.
        steps, best_steps, histories: of each seed, see ``Progress``.
        details: of the first seed, see ``Task.details``.
    """

    spec: str
    score: float
    score_std: float | None
    scores: tuple[float, ...]
    validation: float
    metrics: dict[str, float]
    metrics_std: dict[str, float] = field(default_factory=dict)
    learning_rate: float
    batch_size: int
    sweep: RateSweep | None = None
    num_params: int
    flops_per_example: int
    compute: float
    seconds: float
    steps_per_second: float
    tokens_per_second: float
    mfu: float
    peak_memory_bytes: int
    steps: tuple[int, ...]
    best_steps: tuple[int, ...]
    rank: int | None
    cache_numbers: int | None = None
    histories: tuple[tuple[dict[str, float], ...], ...]
    details: Json


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A method without attention.

    Attributes:
        name, note: of the method, and how it works.
        metrics: on the test split, by name.
        validation: the deciding metric on the validation split; ``None`` where the method has none.
        details: data for the figures of the task: lists and numbers only, by the names that ``Task.details``
            gives them.
    """

    name: str
    metrics: dict[str, float]
    note: str
    validation: float | None = None
    details: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BaselineRow(GridPosition, Baseline):
    """A baseline, a method without attention, at a point of the grid."""


@dataclass(frozen=True)
class PowerLaw:
    """L(C) = irreducible + coefficient (C / reference)^-exponent.

    Attributes:
        irreducible: the loss at infinite compute.
        coefficient: the loss above it at ``reference``.
        exponent: how fast that decreases.
        reference: FLOPs; the geometric mean of the fitted ones.
    """

    irreducible: float
    coefficient: float
    exponent: float
    reference: float

    def loss(self, compute: float) -> float:
        """The loss at that many FLOPs."""
        return self.irreducible + self.coefficient * (compute / self.reference) ** -self.exponent

    def compute(self, loss: float) -> float:
        """The FLOPs at which the loss is reached; infinite where it never is."""
        if loss <= self.irreducible or self.coefficient <= 0:
            return math.inf
        return float(self.reference * (self.coefficient / (loss - self.irreducible)) ** (1 / self.exponent))


@dataclass(frozen=True, kw_only=True)
class LawPoint:
    """The losses of all seeds at one width and budget."""

    width: int | None
    budget: float
    compute: float
    num_params: int
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ComputeShare:
    """The compute that a method needs for the baseline's losses, as a share of the baseline's.

    Attributes:
        estimate: the share.
        interval: of 95 %; ``None`` where the spread is unknown.
        losses: the range over which it is averaged: those that both reached.
        is_distinguishable: whether the interval excludes 1.
    """

    estimate: float
    interval: tuple[float, float] | None
    losses: tuple[float, float]
    is_distinguishable: bool


@dataclass(frozen=True, kw_only=True)
class Law:
    """Loss against compute at one width, or at the best width of every budget.

    Attributes:
        width: ``None`` for the best one of every budget.
        points: by budget.
        fit: ``None`` with fewer than three budgets.
        intervals: of 95 %, of ``irreducible``, ``coefficient`` and ``exponent``; ``None`` where neither seeds
            nor points are more than the fit needs.
        multiplier: ``None`` for the baseline, without a fit, or where the two reach no common loss.
    """

    width: int | None = None
    points: tuple[LawPoint, ...]
    fit: PowerLaw | None
    intervals: dict[str, tuple[float, float]] | None
    multiplier: ComputeShare | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """The laws of an attention variant under one setting: over the best width of every budget, and at each
    width.
    """

    setting: str | None
    spec: str
    frontier: Law
    widths: tuple[Law, ...]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling laws, and the spec that is their baseline."""

    baseline: str
    series: tuple[Series, ...]


@dataclass(frozen=True, kw_only=True)
class CriticalDifferences:
    """Critical differences of means over seeds from the lowest one: larger ones are not explained by the
    seeds.

    Attributes:
        level: of confidence, for all pairs together.
        seeds: the fewest of a method.
        best: the index of the lowest mean.
        differences: from it, one for each method.
    """

    level: float
    seeds: int
    best: int
    differences: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting of a search that validation chose for each method of a group.

    Attributes:
        group: its name; ``None`` where there is only one.
        rows, baselines: indices into the rows and baselines of the comparison.
        critical_differences: between the chosen rows; ``None`` with one seed or one method.
    """

    group: str | None
    rows: tuple[int, ...]
    baselines: tuple[int, ...]
    critical_differences: CriticalDifferences | None


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord(ResultRecord):
    """A comparison of attention variants: ``results.json``, from which figures and report can be drawn again.

    Attributes:
        task, question: the task, and the question that the comparison answers.
        metric, metric_label: the deciding metric, by name and in words; lower is better.
        preset: as it was begun.
        seeds: of the runs.
        config: the recipe.
        data: the data in words.
        meanings: every spec in words.
        axis_labels: of the values and steps of the data, for figures.
        rows: one for each spec at each point of the grid.
        baselines: one for each baseline at each point of the grid.
        scaling: where the recipe has budgets.
        search: where the recipe has a search.
    """

    task: str
    metric: str
    metric_label: str
    question: str
    seeds: tuple[int, ...]
    config: Json
    data: dict[str, str] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    axis_labels: dict[str, str] = field(default_factory=dict)
    rows: tuple[Row, ...]
    scaling: Scaling | None = None
    baselines: tuple[BaselineRow, ...]
    search: tuple[Choice, ...] | None = None
    preset: str = ""


def read_comparison(folder: str | Path) -> ComparisonRecord:
    """The record of a comparison's folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: it was written by a newer version.
    """
    return read_file(ComparisonRecord, check_path("folder", folder) / RESULTS)
