"""Compare attention variants on one task: same data, budget and tuning for each; a table, figures and a report at the end."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from torch import nn

import structattn
from structattn.errors import CheckpointError, ConfigError, TrainingDivergedError
from structattn.experiments.recipe import Recipe
from structattn.experiments.recipes import task_entry
from structattn.experiments.runs import Job, train_all
from structattn.experiments.settings import apply_overrides, to_plain
from structattn.files import write_atomic
from structattn.layer_specs import LayerSpecs
from structattn.tasks.base import Task
from structattn.training.build import spec_for
from structattn.training.loop import TrainingResult


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


def open_folder(out: Path, resume: bool) -> None:
    """Creates the output folder and checks that it can be written and holds no other results.

    Raises:
        ConfigError: it cannot be written, or it has results and ``resume`` is off.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".write-test-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to the output folder {out}: {error.strerror or error}") from error
    if not resume and ((out / "results.json").exists() or (out / "runs").exists()):
        raise ConfigError(f"{out} already has results: give --resume to continue them, or another --out")


def hardware() -> dict[str, Any]:
    """The machine in words that matter for a timing: processor, cores, memory (GiB), device."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), flags=re.MULTILINE)
        model = names[0] if names else model
    cuda = torch.cuda.is_available()
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {
        "structattn": structattn.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def _check_models(recipe: Recipe, task: Task) -> None:
    """Builds every model once on the meta device, so that a wrong spec fails before hours of training."""
    specs = recipe.attention
    if not specs:
        raise ConfigError("give at least one attention spec to compare")
    if len(set(specs)) != len(specs):
        raise ConfigError(f"every attention spec once, got {', '.join(specs)}")
    for spec in specs:
        LayerSpecs.parse(spec)
        try:
            with torch.device("meta"):
                task.build_model(spec_for(spec, recipe.training.parametrization))
        except ConfigError as error:
            raise ConfigError(f"{spec!r} does not fit this model: {error}") from error


def _best_validation(result: TrainingResult | None, metric: str) -> float:
    """The lowest validation score; infinite where there is none."""
    scores = [entry[f"validation_{metric}"] for entry in result.history] if result else []
    return float(min((score for score in scores if math.isfinite(score)), default=math.inf))


@functools.cache
def _steps(task_name: str, recipe: Recipe, spec: str) -> int:
    """Training steps of a variant: those of the recipe, or as many as its compute pays for, and at least one."""
    steps = recipe.training.steps
    if recipe.budget == "steps" or spec == recipe.attention[0]:
        return steps
    task = task_entry(task_name).make(recipe.task)
    with torch.device("meta"):
        first, model = (
            task.build_model(spec_for(name, recipe.training.parametrization)) for name in (recipe.attention[0], spec)
        )
    left = sum(task.flops(first, step) for step in range(steps))
    for step in itertools.count():
        left -= task.flops(model, step)
        if left < 0:
            return max(step, recipe.training.warmup_steps + 1)
    raise AssertionError("compute is positive")


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A comparison under one variant of its settings."""

    task_name: str
    variant: str
    recipe: Recipe
    swept: Recipe
    out: Path

    def job(self, recipe: Recipe, spec: str, seed: int, rate: float, *, sweep: bool) -> Job:
        group = "sweep" if sweep and recipe.sweep_settings else "runs"
        training = dataclasses.replace(recipe.training, learning_rate=rate, steps=_steps(self.task_name, recipe, spec))
        return Job(
            task_name=self.task_name,
            task=recipe.task,
            spec=spec,
            training=training,
            seed=seed,
            folder=run_folder(self.out, spec, seed, rate, self.variant, group),
            may_diverge=sweep,
        )

    def sweep_jobs(self) -> dict[tuple[str, float], Job]:
        """Seed 0 of every spec at every learning rate to choose from; none if there is no choice."""
        rates = self.recipe.learning_rates
        if len(rates) < 2 and not self.recipe.sweep_settings:
            return {}
        return {
            (spec, rate): self.job(self.swept, spec, 0, rate, sweep=True)
            for spec in self.recipe.attention
            for rate in rates
        }

    def swept_scores(self, metric: str) -> dict[str, dict[float, float]]:
        """Validation scores by spec and learning rate, of jobs that were trained."""
        scores: dict[str, dict[float, float]] = {}
        for (spec, rate), job in self.sweep_jobs().items():
            result = job.run(resume=True, show_progress=False)
            scores.setdefault(spec, {})[rate] = _best_validation(result, metric)
        return scores

    def jobs(self, spec: str, rate: float) -> list[Job]:
        """All seeds of a spec at a learning rate."""
        return [self.job(self.recipe, spec, seed, rate, sweep=False) for seed in range(self.recipe.seeds)]


def _parts(task_name: str, recipe: Recipe, out: Path) -> list[_Part]:
    """One part for each variant of the settings, the recipe alone without any."""
    parts = []
    for variant in recipe.variants or ("",):
        changed = apply_overrides(dataclasses.replace(recipe, variants=()), tuple(variant.split()))
        swept = apply_overrides(changed, changed.sweep_settings)
        parts.append(_Part(task_name=task_name, variant=variant, recipe=changed, swept=swept, out=out))
    return parts


def _chosen(part: _Part, spec: str, scores: dict[str, dict[float, float]]) -> float:
    """The learning rate of a spec: the best of its sweep, or the one there is."""
    rates = scores.get(spec)
    if not rates:
        return (part.recipe.learning_rates or (part.recipe.training.learning_rate,))[0]
    best = min(rates, key=lambda rate: rates[rate])
    if not math.isfinite(rates[best]):
        raise TrainingDivergedError(
            f"{spec}: every learning rate of the sweep diverged ({', '.join(f'{rate:g}' for rate in rates)}); try lower ones"
        )
    return best


def _row(part: _Part, task: Task, spec: str, rate: float, sweep: dict[float, float] | None) -> dict[str, Any]:
    """One row of ``results.json``: scores on the test split, and costs."""
    results = [job.run(resume=True, show_progress=False) for job in part.jobs(spec, rate)]
    runs = [result for result in results if result is not None]
    model: Any = runs[0].model
    metrics = []
    for result in runs:
        result.model.eval()
        metrics.append(task.evaluate(result.model, "test"))
    scores = [m[task.metric] for m in metrics]
    return {
        "spec": spec,
        "variant": part.variant or None,
        "score": statistics.fmean(scores),
        "score_std": statistics.stdev(scores) if len(scores) > 1 else None,
        "scores": scores,
        "metrics": {name: statistics.fmean(m[name] for m in metrics) for name in metrics[0]},
        "learning_rate": rate,
        "sweep": None
        if sweep is None
        else {
            "settings": list(part.recipe.sweep_settings),
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
        "peak_memory_bytes": max(result.peak_memory_bytes for result in runs),
        "steps": [result.steps for result in runs],
        "best_steps": [result.best_step for result in runs],
        "rank": model.score_rank() if isinstance(model, HasScoreRank) else None,
        "histories": [result.history for result in runs],
        "details": task.details(model),
    }


def _baselines(part: _Part, task: Task) -> list[dict[str, Any]]:
    extra = task.baseline_details()
    return [
        {**dataclasses.asdict(row), "variant": part.variant or None, "details": extra.get(row.name, {})}
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
    out: Path,
    *,
    preset: str = "default",
    command: str = "",
    resume: bool = False,
    jobs: int = 1,
    show_progress: bool = True,
) -> Comparison:
    """Trains every attention spec of a recipe and writes ``results.json``, figures (PNG, SVG) and ``report.html``.

    Args:
        task_name: see ``recipes.TASKS``.
        recipe: settings.
        out: output folder, created; each run has a folder below ``runs/``.
        preset: its name, for the record.
        command: the command line, for the record.
        resume: continue the unfinished runs of ``out`` and keep the finished ones.
        jobs: models trained at the same time, each in a process with its share of the cores. Small models leave most of a core's
            threads idle, so one process per core is then the fastest. Default 1.
        show_progress: a progress bar per run; with several jobs one for all.

    Returns:
        ``Comparison``.

    Raises:
        ConfigError: unknown names, specs that do not fit, or an unusable folder, before anything is trained.
        CheckpointError: ``resume`` meets checkpoints of other settings or damaged ones.

    Cost: the training of ``len(attention) * (seeds + len(learning_rates) - 1)`` models; where the sweep has settings of its own
    (smaller models), of ``len(attention) * seeds`` models and as many small ones as learning rates; all of it for each variant.
    """
    from structattn.reports.figures import draw_figures  # matplotlib is optional: only a comparison needs it
    from structattn.reports.html import write_report

    parts = _parts(task_name, recipe, out)
    tasks = [task_entry(task_name).make(part.recipe.task) for part in parts]
    for part, task in zip(parts, tasks, strict=True):
        _check_models(part.recipe, task)
        _check_models(part.swept, task_entry(task_name).make(part.swept.task))
    open_folder(out, resume)
    metric = tasks[0].metric
    sweeps = [job for part in parts for job in part.sweep_jobs().values()]
    train_all(sweeps, workers=jobs, resume=resume, show_progress=show_progress)
    scores = [part.swept_scores(metric) for part in parts]
    chosen = [
        {spec: _chosen(part, spec, found) for spec in part.recipe.attention}
        for part, found in zip(parts, scores, strict=True)
    ]
    done = {job.folder for job in sweeps}
    left = [
        job
        for part, rates in zip(parts, chosen, strict=True)
        for spec in part.recipe.attention
        for job in part.jobs(spec, rates[spec])
    ]
    train_all([job for job in left if job.folder not in done], workers=jobs, resume=resume, show_progress=show_progress)
    rows = [
        _row(part, task, spec, rates[spec], found.get(spec))
        for part, task, rates, found in zip(parts, tasks, chosen, scores, strict=True)
        for spec in part.recipe.attention
    ]
    task = tasks[0]
    results = {
        "task": task.name,
        "metric": task.metric,
        "metric_label": task.metric_label,
        "question": task.question,
        "command": command,
        "preset": preset,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seeds": list(range(recipe.seeds)),
        "config": json.loads(json.dumps(to_plain(recipe))),
        "versions": versions(),
        "hardware": hardware(),
        "axis_labels": task.axis_labels(),
        "rows": rows,
        "baselines": [row for part, task in zip(parts, tasks, strict=True) for row in _baselines(part, task)],
    }
    try:
        write_atomic(out / "results.json", json.dumps(results, indent=1))
        figures = draw_figures(results, out / "figures")
        report = write_report(results, figures, out / "report.html")
    except OSError as error:
        raise CheckpointError(f"could not write the results to {out}: {error.strerror or error}") from error
    return Comparison(results=results, folder=out, report=report)
