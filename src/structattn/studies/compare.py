"""Compare attention variants on one task: same data, budget and tuning for each; a table, figures and a report at the end."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from structattn.checks import MAX_LENGTH
from structattn.errors import CheckpointError, ConfigError, TrainingDivergedError
from structattn.files import write_atomic
from structattn.progress import progress_bar, say
from structattn.studies.analysis.model_selection import search
from structattn.studies.analysis.scaling import scaling
from structattn.studies.budget import affordable_steps, flops_of
from structattn.studies.environment import hardware, versions
from structattn.studies.folders import Owner, opened
from structattn.studies.old_folders import comparison_record
from structattn.studies.recipe import Point, Recipe
from structattn.studies.report._common import fmt_flops
from structattn.studies.report.runs_csv import runs_csv
from structattn.studies.runner.base import Runner
from structattn.studies.runner.local import LocalRunner
from structattn.studies.runner.runs import Job, ScoredJob, kept_score
from structattn.studies.runner.train_all import train_all
from structattn.studies.settings import to_plain
from structattn.studies.tasks.base import Task
from structattn.studies.tasks.registry import shared_task
from structattn.studies.training.build import empty_model, spec_for
from structattn.studies.training.config import TrainingConfig

_FEWEST_STEPS = 8
# A comparison may be resumed with others: they name runs, each with a separate folder, or change no result.
_FREE = ("attention", "seeds", "learning_rates", "variants", "search", "widths", "budgets", "training.process_timeout")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison wrote.

    Attributes:
        results: what ``results.json`` holds.
        folder: where everything is.
        report: the self-contained HTML page.
    """

    results: dict[str, Any]
    folder: Path
    report: Path


def _slug(text: str) -> str:
    """Readable in a path, and different for different texts."""
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def run_folder(out: Path, spec: str, seed: int, learning_rate: float, variant: str = "", group: str = "runs") -> Path:
    """The folder of one run: different for different specs, seeds, learning rates and variants of the settings."""
    place = out / group / _slug(variant) if variant else out / group
    return place / _slug(spec) / f"seed-{seed}-lr-{learning_rate:g}"


def _check_models(recipe: Recipe, task: Task) -> None:
    """Builds every model once on the meta device, so that a wrong spec fails before hours of training."""
    specs = recipe.attention
    if not specs:
        raise ConfigError("give at least one attention spec to compare")
    if len({"".join(spec.split()) for spec in specs}) != len(specs):
        raise ConfigError(f"every attention spec once, got {', '.join(specs)}")
    for spec in specs:
        task.check_spec(spec)
        try:
            empty_model(task, spec, recipe.training.parametrization)
        except ConfigError as error:
            raise ConfigError(f"{spec!r} does not fit this model: {error}") from error


def _check_steps(parts: list[_Part]) -> None:
    """Counts the steps of every run, so that a budget that pays for too few fails before hours of training."""
    for part in parts:
        for recipe in (part.point.recipe, part.point.swept):
            for spec in recipe.attention:
                _training(part.task_name, recipe, spec)


def _kept_score(job: Job, metric: str) -> float:
    """The validation score of a run's weights; infinite where it diverged, which is tried again here: ask once for all who share it."""
    result = job.run(resume=True, show_progress=False)
    return kept_score(result, job.training.patience, metric) if result else math.inf


@functools.cache
def _training(task_name: str, recipe: Recipe, spec: str) -> TrainingConfig:
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
    # Of the shortest runs the warm-up would be most.
    return dataclasses.replace(training, steps=steps, warmup_steps=min(training.warmup_steps, steps // 4))


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A comparison at one point of its recipe."""

    task_name: str
    point: Point
    out: Path

    def _settings(self, recipe: Recipe, spec: str, seed: int, rate: float) -> dict[str, Any]:
        return {
            "task_name": self.task_name,
            "task": recipe.task,
            "spec": spec,
            "training": dataclasses.replace(_training(self.task_name, recipe, spec), learning_rate=rate),
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


def _chosen(part: _Part, spec: str, scores: dict[str, dict[float, float]]) -> float:
    """The learning rate of a spec: the best of its sweep, or the one there is."""
    rates = scores.get(spec)
    if not rates:
        recipe = part.point.recipe
        return (recipe.learning_rates or (recipe.training.learning_rate,))[0]
    best = min(rates, key=lambda rate: rates[rate])
    if not math.isfinite(rates[best]):
        raise TrainingDivergedError(
            f"{spec}: every learning rate of the sweep diverged ({', '.join(f'{rate:g}' for rate in rates)}); try lower ones"
        )
    return best


def _row(part: _Part, task: Task, spec: str, rate: float, sweep: dict[float, float] | None) -> dict[str, Any]:
    """One row of ``results.json``: scores on the test split, and costs."""
    jobs = part.jobs(spec, rate)
    results = [job.run(resume=True, show_progress=False) for job in jobs]
    runs = [result for result in results if result is not None]
    model: Any = runs[0].model
    found = [job.scores() for job in jobs]
    metrics = [scored["metrics"] for scored in found]
    scores = [m[task.metric] for m in metrics]
    return {
        "spec": spec,
        **_place(part.point),
        "score": statistics.fmean(scores),
        "score_std": statistics.stdev(scores) if len(scores) > 1 else None,
        "scores": scores,
        "validation": statistics.fmean(
            kept_score(result, part.point.recipe.training.patience, task.metric) for result in runs
        ),
        "metrics": {name: statistics.fmean(m[name] for m in metrics) for name in metrics[0]},
        "learning_rate": rate,
        "batch_size": part.point.recipe.training.batch_size,
        "sweep": None
        if sweep is None
        else {
            "settings": list(part.point.recipe.sweep_settings),
            "runs": [
                {"learning_rate": tried, "score": score if math.isfinite(score) else None}
                for tried, score in sweep.items()
            ],
        },
        "num_params": count_parameters(model),
        "flops_per_example": model.flops_per_example(),
        "compute": statistics.fmean(result.history[-1]["compute"] for result in runs),
        "seconds": statistics.fmean(result.seconds for result in runs),
        "steps_per_second": sum(result.steps for result in runs) / max(1e-9, sum(result.seconds for result in runs)),
        "tokens_per_second": statistics.fmean(result.tokens_per_second for result in runs),
        "mfu": statistics.fmean(result.mfu for result in runs),
        "peak_memory_bytes": max(result.peak_memory_bytes for result in runs),
        "steps": [result.steps for result in runs],
        "best_steps": [result.best_step for result in runs],
        "rank": model.score_rank() if isinstance(model, HasScoreRank) else None,
        "histories": [result.history for result in runs],
        "details": found[0]["details"],
    }


def _place(point: Point) -> dict[str, Any]:
    """Where in the recipe a row belongs.

    ``variant`` names the whole point, ``setting`` what is varied besides width, budget and search, ``searched`` which of the settings of a
    search it is, ``group`` the point without it.
    """
    sizes = [f"E = {point.width}" if point.width else "", f"{fmt_flops(point.budget)} FLOPs" if point.budget else ""]
    group = ", ".join(text for text in (point.variant, *sizes) if text)
    name = ", ".join(text for text in (group, point.searched) if text)
    return {
        "variant": name or None,
        "group": group or None,
        "searched": point.searched or None,
        "setting": point.variant or None,
        "width": point.width,
        "budget": point.budget,
    }


def _baselines(part: _Part, task: Task) -> list[dict[str, Any]]:
    extra = task.baseline_details()
    return [
        {**dataclasses.asdict(row), **_place(part.point), "details": extra.get(row.name, {})}
        for row in task.baselines()
    ]


@runtime_checkable
class HasScoreRank(Protocol):
    """A model whose score is a bilinear form of known rank."""

    def score_rank(self) -> int:
        """The largest rank that the bilinear form of one head can have."""
        ...


def count_parameters(model: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def compare(
    task_name: str,
    recipe: Recipe,
    out: Path | None = None,
    *,
    preset: str = "default",
    command: str = "",
    resume: bool = False,
    runner: Runner | None = None,
    show_progress: bool = True,
    on_open: Callable[[Path], None] | None = None,
) -> Comparison:
    """Trains every attention spec of a recipe and writes ``results.json``, figures (PNG, SVG) and ``report.html``.

    Args:
        task_name: see ``tasks.registry.TASKS``.
        recipe: settings.
        out: output folder, created; each run has a folder below ``runs/``. Default: see ``folders.opened``.
        preset: its name, for the record.
        command: the command line, for the record.
        resume: continue the unfinished runs of ``out`` and keep the finished ones. Settings that name separate runs may differ from before:
            specs, seeds, learning rates, variants, what is searched, widths and budgets.
        runner: what trains the models. Default: ``LocalRunner()``, one at a time. ``LocalRunner(2)`` trains two at the same time, each in a
            process with its share of the cores: small models leave most of a core's threads idle, so one process per core is then the
            fastest. ``RayRunner`` uses a cluster.
        show_progress: a progress bar per run; with several jobs one for all.
        on_open: is told the output folder before anything is trained.

    Returns:
        ``Comparison``.

    Raises:
        ConfigError: unknown names, specs that do not fit, or an unusable folder, such as one of other settings, before anything is
            trained.
        CheckpointError: ``resume`` meets checkpoints of other settings or damaged ones.

    Cost: the training of ``len(attention) * (seeds + len(learning_rates) - 1)`` models; where the sweep has settings of its own
    (smaller models), of ``len(attention) * seeds`` models and as many small ones as learning rates; all of it for each variant.
    """
    # matplotlib is optional: only a comparison needs it
    from structattn.studies.report.pages import write_pages

    shared_task.cache_clear()  # the data may have changed since another comparison
    parts = [_Part(task_name=task_name, point=point, out=Path()) for point in recipe.points()]
    tasks = [shared_task(task_name, part.point.recipe.task) for part in parts]
    for part, task in zip(parts, tasks, strict=True):
        _check_models(part.point.recipe, task)
        _check_models(part.point.swept, shared_task(task_name, part.point.swept.task))
    _check_steps(parts)
    owner = Owner(
        command="compare",
        task=task_name,
        settings={**to_plain(recipe), **tasks[0].identity(to_plain(recipe.task))},
        free=_FREE,
    )
    known = functools.partial(comparison_record, task=task_name)
    with opened(out, owner, resume=resume, record=known, on_open=on_open) as folder:
        placed = [dataclasses.replace(part, out=folder) for part in parts]
        results = _results(placed, tasks, recipe, runner or LocalRunner(), resume, show_progress)
        results |= {"command": command, "preset": preset}
        try:
            write_atomic(folder / "results.json", json.dumps(results, indent=1))
            write_atomic(folder / "runs.csv", runs_csv(results))
            report = write_pages(results, folder)
        except OSError as error:
            raise CheckpointError(f"could not write the results to {folder}: {error.strerror or error}") from error
    return Comparison(results=results, folder=folder, report=report)


def _results(
    parts: list[_Part], tasks: list[Task], recipe: Recipe, runner: Runner, resume: bool, show_progress: bool
) -> dict[str, Any]:
    """Trains what is left to train; what ``results.json`` holds of it."""
    metric = tasks[0].metric
    # Points that differ in nothing that their sweeps have share them.
    sweeps = list({job.folder: job for part in parts for job in part.sweep_jobs().values()}.values())
    train_all(sweeps, runner=runner, resume=resume, show_progress=show_progress)
    swept = {job.folder: _kept_score(job, metric) for job in sweeps}
    scores = [part.swept_scores(swept) for part in parts]
    chosen = [
        {spec: _chosen(part, spec, found) for spec in recipe.attention}
        for part, found in zip(parts, scores, strict=True)
    ]
    left = [
        job
        for part, rates in zip(parts, chosen, strict=True)
        for spec in recipe.attention
        for job in part.jobs(spec, rates[spec])
    ]
    # Some may have been trained by the sweep already: what is left of them is their scores.
    train_all(left, runner=runner, resume=True, show_progress=show_progress)
    rows, baselines = [], []
    with progress_bar(
        total=len(parts) * (len(recipe.attention) + 1), unit="row", show=show_progress, desc="table"
    ) as bar:
        for part, task, rates, found in zip(parts, tasks, chosen, scores, strict=True):
            for spec in recipe.attention:
                say(bar, f"table: {spec}")
                rows.append(_row(part, task, spec, rates[spec], found.get(spec)))
                bar.update()
            say(bar, "table: baselines")
            baselines += _baselines(part, task)
            bar.update()
    task = tasks[0]
    return {
        "task": task.name,
        "metric": task.metric,
        "metric_label": task.metric_label,
        "question": task.question,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seeds": list(range(recipe.seeds)),
        "config": json.loads(json.dumps(to_plain(recipe))),
        "versions": versions(),
        "hardware": hardware(),
        "data": task.data_summary(),
        "meanings": {spec: task.describe_spec(spec) for spec in recipe.attention},
        "axis_labels": task.axis_labels(),
        "rows": rows,
        "scaling": scaling(rows, recipe.attention) if recipe.budgets else None,
        "baselines": baselines,
        "search": search(rows, baselines) if recipe.search else None,
    }
