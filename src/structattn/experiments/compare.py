"""Compare attention variants on one task: same data, budget and tuning for each; a table, figures and a report at the end."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import os
import platform
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import structattn
from structattn.errors import CheckpointError, ConfigError
from structattn.experiments.recipes import Recipe, task_entry
from structattn.experiments.settings import to_plain
from structattn.files import write_atomic
from structattn.models.nearest_neighbor import NearestNeighborModel
from structattn.spec import parse_spec
from structattn.tasks.base import Task
from structattn.training.loop import TrainingResult, train

logger = logging.getLogger(__name__)


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


def run_folder(out: Path, spec: str, seed: int, learning_rate: float) -> Path:
    """The folder of one run: readable, and different for different specs, seeds and learning rates."""
    slug = re.sub(r"[^a-z0-9]+", "-", spec.lower()).strip("-")
    digest = hashlib.sha256(spec.encode()).hexdigest()[:6]
    return out / "runs" / f"{slug}-{digest}" / f"seed-{seed}-lr-{learning_rate:g}"


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


def _check_models(task: Task, specs: tuple[str, ...]) -> None:
    """Builds every model once on the meta device, so that a wrong spec fails before hours of training."""
    if not specs:
        raise ConfigError("give at least one attention spec to compare")
    if len(set(specs)) != len(specs):
        raise ConfigError(f"every attention spec once, got {', '.join(specs)}")
    for spec in specs:
        parse_spec(spec)
        try:
            with torch.device("meta"):
                task.build_model(spec)
        except ConfigError as error:
            raise ConfigError(f"{spec!r} does not fit this model: {error}") from error


def _validation(result: TrainingResult, metric: str) -> float:
    scores = [entry[f"validation_{metric}"] for entry in result.history]
    return float(min(scores))


def _runs(
    task: Task, spec: str, recipe: Recipe, out: Path, resume: bool, progress: bool
) -> Iterator[tuple[TrainingResult, float]]:
    """Trains one variant at all its seeds; yields each result with its learning rate."""

    def run(seed: int, rate: float) -> TrainingResult:
        config = dataclasses.replace(recipe.training, learning_rate=rate)
        folder = run_folder(out, spec, seed, rate)
        return train(task, spec, config, seed=seed, run_dir=folder, resume=resume, show_progress=progress)

    rates = recipe.learning_rates or (recipe.training.learning_rate,)
    first = {rate: run(0, rate) for rate in rates}
    best = min(rates, key=lambda rate: _validation(first[rate], task.metric))
    yield first[best], best
    for seed in range(1, recipe.seeds):
        yield run(seed, best), best


def _row(task: Task, spec: str, runs: list[tuple[TrainingResult, float]]) -> dict[str, Any]:
    """One row of ``results.json``: scores on the test split, and costs."""
    model: Any = runs[0][0].model
    metrics = []
    for result, _ in runs:
        result.model.eval()
        metrics.append(task.evaluate(result.model, "test"))
    scores = [m[task.metric] for m in metrics]
    results = [result for result, _ in runs]
    return {
        "spec": spec,
        "score": statistics.fmean(scores),
        "score_std": statistics.stdev(scores) if len(scores) > 1 else None,
        "scores": scores,
        "metrics": {name: statistics.fmean(m[name] for m in metrics) for name in metrics[0]},
        "learning_rate": runs[0][1],
        "num_params": count_parameters(model),
        "flops_per_example": model.flops_per_example(),
        "seconds": statistics.fmean(result.seconds for result in results),
        "peak_memory_bytes": max(result.peak_memory_bytes for result in results),
        "steps": [result.steps for result in results],
        "best_steps": [result.best_step for result in results],
        "rank": model.score_rank() if isinstance(model, NearestNeighborModel) else None,
        "histories": [result.history for result in results],
        "details": task.details(model),
    }


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
        show_progress: a progress bar per run.

    Returns:
        ``Comparison``.

    Raises:
        ConfigError: unknown names, specs that do not fit, or an unusable folder, before anything is trained.
        CheckpointError: ``resume`` meets checkpoints of other settings or damaged ones.

    Cost: the training of ``len(attention) * (seeds + len(learning_rates) - 1)`` models.
    """
    from structattn.reports.figures import draw_figures  # matplotlib is optional: only a comparison needs it
    from structattn.reports.html import write_report

    task = task_entry(task_name).make(recipe.task)
    _check_models(task, recipe.attention)
    open_folder(out, resume)
    rows = []
    for spec in recipe.attention:
        logger.info("training %s", spec)
        rows.append(_row(task, spec, list(_runs(task, spec, recipe, out, resume, show_progress))))
    extra = task.baseline_details()
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
        "baselines": [{**dataclasses.asdict(row), "details": extra.get(row.name, {})} for row in task.baselines()],
    }
    try:
        write_atomic(out / "results.json", json.dumps(results, indent=1))
        figures = draw_figures(results, out / "figures")
        report = write_report(results, figures, out / "report.html")
    except OSError as error:
        raise CheckpointError(f"could not write the results to {out}: {error.strerror or error}") from error
    return Comparison(results=results, folder=out, report=report)
