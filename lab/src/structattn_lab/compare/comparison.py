"""Compares attention variants on one task with the same data, budget and tuning; writes a table, figures and
a report.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from structattn.errors import CheckpointError, TrainingDivergedError
from structattn.files import write_atomic
from structattn.models.language_model import LanguageModel
from structattn.progress import progress_bar, say
from structattn_lab.analysis.model_selection import search
from structattn_lab.analysis.scaling_law import scaling_laws
from structattn_lab.compare.grid import ModelCosts, Point, points_of
from structattn_lab.old_formats import comparison_record
from structattn_lab.records.common import RESULTS, Results, to_json
from structattn_lab.records.comparison import (
    BaselineRow,
    ComparisonRecord,
    RateSweep,
    Row,
    TriedRate,
    position_of,
    read_comparison,
)
from structattn_lab.records.environment import origin
from structattn_lab.records.run import Progress, ScoreRecord
from structattn_lab.report.runs_csv import runs_csv
from structattn_lab.runner.base import Runner
from structattn_lab.runner.job import Job
from structattn_lab.runner.local import LocalRunner
from structattn_lab.runner.train_all import train_all
from structattn_lab.runs.folders import Owner, finished_in, opened
from structattn_lab.settings.config_file import CONFIG, write_config
from structattn_lab.settings.overrides import fields_of
from structattn_lab.settings.recipe import Recipe
from structattn_lab.settings.training import WITHOUT_EFFECT
from structattn_lab.tasks.base import Task
from structattn_lab.tasks.decode_time import decode_times
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.registry import factory_of

# These may differ when a comparison is resumed: they name runs, each with a separate folder, or change no
# result.
FREE = (
    *("attention", "seeds", "learning_rates", "variants", "search", "widths", "budgets"),
    *(f"training.{name}" for name in WITHOUT_EFFECT),
)


def compare(
    task: str | TaskFactory,
    recipe: Recipe,
    out: Path | None = None,
    *,
    preset: str = "default",
    command: str = "",
    resume: bool = False,
    runner: Runner | None = None,
    show_progress: bool = True,
    on_open: Callable[[Path], None] | None = None,
    free: tuple[str, ...] = FREE,
) -> Results[ComparisonRecord]:
    """Trains every attention spec of a recipe and writes ``results.json``, figures (PNG, SVG) and
    ``report.html``.

    Args:
        task: its name, see ``tasks.registry.TASKS``; or what makes the tasks, for a caller that needs them
            afterwards.
        recipe: settings.
        out: output folder, created; each run has a folder below ``runs/``. Default: see ``folders.opened``.
        preset: its name, for the record.
        command: the command line, for the record.
        resume: continue the unfinished runs of ``out`` and read the records of the finished ones. Settings
            that name separate runs may differ from before: specs, seeds, learning rates, variants, what is
            searched, widths and budgets. A finished comparison is only read; if its report is missing, it is
            drawn again from ``results.json``.
        runner: what trains the models. Default: ``LocalRunner()``, one at a time. ``LocalRunner(2)`` trains
            two at the same time, each in a process with its share of the cores: small models leave most of a
            core's threads idle, so one process per core is then the fastest. ``RayRunner`` uses a cluster.
        show_progress: a progress bar per run; with several jobs one for all.
        on_open: called with the output folder before anything is trained.
        free: names of the settings that may differ from before with ``resume``. Default: those above, and
            those that change no result.

    Raises:
        ConfigError: unknown names, specs that do not fit, or an unusable folder, such as one with other
            settings, before anything is trained.
        CheckpointError: ``resume`` finds checkpoints with other settings or damaged ones.

    Cost: training ``len(attention) * (seeds + len(learning_rates) - 1)`` models; where the sweep has separate
    settings (smaller models), of ``len(attention) * seeds`` models and as many small ones as learning rates;
    all of it for each variant.
    """
    # matplotlib is optional: only a comparison needs it
    from structattn_lab.compare.pages import write_pages

    factory = factory_of(task) if isinstance(task, str) else task
    task_name = factory.name
    points = points_of(factory, recipe)
    tasks = [factory(point.recipe.task) for point in points]
    models = [point.models() for point in points]
    settings = asdict(recipe) | tasks[0].identity(asdict(recipe.task))
    recorded = partial(comparison_record, task=task_name)
    owner = Owner(command="compare", task=task_name, settings=settings, free=free, recorded=recorded)
    out, finished = finished_in(out, owner, resume=resume, read=lambda folder: _finished(folder, owner, points))
    if finished is not None and finished.report.is_file():
        return finished
    with opened(out, owner, resume=resume, on_open=on_open) as folder:
        if finished is not None:
            record, runs = finished.record, finished.runs
        else:
            config = _config(task_name, recipe, preset)
            if not (folder / CONFIG).exists():
                write_config(folder, "compare", config)
            rows, baselines, runs = _results(
                folder, points, models, tasks, runner or LocalRunner(), resume, show_progress
            )
            write_config(folder, "compare", config)  # runs that do not fit together would have raised
            record = _record(tasks[0], recipe, rows, baselines, command, preset)
        try:
            if finished is None:
                write_atomic(folder / RESULTS, to_json(record))
            write_atomic(folder / "runs.csv", runs_csv(record))
            write_pages(record, folder, factory.report)
        except OSError as error:
            raise CheckpointError(f"could not write the results to {folder}: {error.strerror or error}") from error
    return Results(record=record, folder=folder, runs=runs)


def _config(task_name: str, recipe: Recipe, preset: str) -> dict[str, Any]:
    """All that determines a comparison, by the names of ``--set`` and of options."""
    values = {name: value for name, _, value in fields_of(recipe)}
    inside = {name: value for name, value in values.items() if "." in name}
    return (
        {"task": task_name, "preset": preset} | {name: values[name] for name in values if name not in inside} | inside
    )


def _finished(folder: Path, owner: Owner, points: Sequence[Point]) -> Results[ComparisonRecord] | None:
    """The results of a comparison of the same settings whose runs are all finished; else ``None``."""
    try:
        record = read_comparison(folder)
    except CheckpointError:
        return None  # damaged: it is built again from the runs
    unset = {field.name: field.default for field in fields(Recipe) if field.name not in record.config}
    if record.task != owner.task or owner.differences(record.config | unset, free=False):
        return None
    asked = [(point, spec) for point in points for spec in point.recipe.attention]
    if [(point.position, spec) for point, spec in asked] != [(position_of(row), row.spec) for row in record.rows]:
        return None
    jobs = [point.jobs(folder, spec, row.learning_rate) for (point, spec), row in zip(asked, record.rows, strict=True)]
    if not all(job.is_done for of_row in jobs for job in of_row):
        return None
    return Results(record=record, folder=folder, runs=_folders(jobs))


def _folders(jobs: Sequence[Sequence[Job]]) -> tuple[tuple[Path, ...], ...]:
    """The folders of the runs of every row."""
    return tuple(tuple(job.folder for job in of_row) for of_row in jobs)


def _results(
    folder: Path,
    points: list[Point],
    models: list[dict[str, ModelCosts]],
    tasks: list[Task],
    runner: Runner,
    resume: bool,
    show_progress: bool,
) -> tuple[list[Row], list[BaselineRow], tuple[tuple[Path, ...], ...]]:
    """Trains the remaining runs; returns the rows of the attention variants and of the baselines, and the
    folders of each row's runs.
    """
    # Points whose sweeps have the same settings share them.
    sweeps = list({job.folder: job for point in points for job in point.sweep_jobs(folder)}.values())
    train_all(sweeps, runner=runner, resume=resume, show_progress=show_progress)
    swept = {job.folder: _swept_score(job, tasks[0].metric) for job in sweeps}
    scores = [_scores_by_rate(point.sweep_jobs(folder), swept) for point in points]
    jobs = [
        [point.jobs(folder, spec, _chosen(point.recipe, spec, rates.get(spec))) for spec in point.recipe.attention]
        for point, rates in zip(points, scores, strict=True)
    ]
    # Some may have been trained by the sweep already: only their scores are missing.
    left = [job for of_point in jobs for seeds in of_point for job in seeds]
    train_all(left, runner=runner, resume=True, show_progress=show_progress)
    rows, baselines = [], []
    total = len(points) + sum(map(len, jobs))
    with progress_bar(total=total, unit="row", show=show_progress, desc="table") as bar:
        for point, costs, task, of_point, rates in zip(points, models, tasks, jobs, scores, strict=True):
            say(bar, "table: time of decoding")
            times = _decode_times(task, costs)
            for seeds in of_point:
                spec = seeds[0].spec
                say(bar, f"table: {spec}")
                rows.append(_row(point, task, seeds, rates.get(spec), costs[spec], times.get(spec)))
                bar.update()
            say(bar, "table: baselines")
            baselines += [BaselineRow(**asdict(row), **asdict(point.position)) for row in task.baselines()]
            for name, content in task.baseline_files().items():
                write_atomic(point.baselines_folder(folder) / name, content)
            bar.update()
    return rows, baselines, _folders([seeds for of_point in jobs for seeds in of_point])


def _swept_score(job: Job, metric: str) -> float:
    """The final validation score of a run; infinite where it diverged, which leaves no record."""
    record = job.record()
    progress = record.progress if record else None
    return progress.final_validation_score(metric, job.training.patience) if progress else math.inf


def _scores_by_rate(jobs: Sequence[Job], scores: dict[Path, float]) -> dict[str, dict[float, float]]:
    """The scores of the sweep of a point, by spec and learning rate."""
    by_spec: dict[str, dict[float, float]] = {}
    for job in jobs:
        by_spec.setdefault(job.spec, {})[job.training.learning_rate] = scores[job.folder]
    return by_spec


def _chosen(recipe: Recipe, spec: str, scores: dict[float, float] | None) -> float:
    """The learning rate of a spec: the best of its sweep, or the only one."""
    if not scores:
        return (recipe.learning_rates or (recipe.training.learning_rate,))[0]
    best = min(scores, key=lambda rate: scores[rate])
    if not math.isfinite(scores[best]):
        raise TrainingDivergedError(
            f"{spec}: every learning rate of the sweep diverged ({', '.join(f'{rate:g}' for rate in scores)}); try "
            "lower ones"
        )
    return best


def _decode_times(task: Task, costs: dict[str, ModelCosts]) -> dict[str, float]:
    """The milliseconds of a decoding step by spec, where caches differ; all runs are finished, so that none
    of them disturbs it.
    """
    if len({cost.cache_numbers for cost in costs.values()}) < 2:
        return {}
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    models = {spec: task.build_model(spec).to(device) for spec in costs if costs[spec].cache_numbers is not None}
    return decode_times({spec: model for spec, model in models.items() if isinstance(model, LanguageModel)})


def _row(
    point: Point,
    task: Task,
    jobs: Sequence[Job],
    sweep: dict[float, float] | None,
    costs: ModelCosts,
    decoding: float | None,
) -> Row:
    """Scores on the test split, and costs, of the seeds of a spec."""
    spec, training = jobs[0].spec, jobs[0].training
    pairs = [_read(job) for job in jobs]
    done, scored = [progress for progress, _ in pairs], [record for _, record in pairs]
    scores = tuple(record.metrics[task.metric] for record in scored)
    seconds = sum(progress.seconds for progress in done)
    return Row(
        spec=spec,
        **asdict(point.position),
        score=statistics.fmean(scores),
        score_std=statistics.stdev(scores) if len(scores) > 1 else None,
        scores=scores,
        validation=statistics.fmean(
            progress.final_validation_score(task.metric, training.patience) for progress in done
        ),
        metrics={name: statistics.fmean(record.metrics[name] for record in scored) for name in scored[0].metrics},
        metrics_std=_deviations([record.metrics for record in scored]),
        learning_rate=training.learning_rate,
        batch_size=training.batch_size,
        sweep=None if sweep is None else _sweep(point.recipe.sweep_settings, sweep),
        **asdict(costs),
        compute=statistics.fmean(progress.history[-1]["compute"] for progress in done),
        seconds=seconds / len(done),
        steps_per_second=sum(progress.step for progress in done) / max(1e-9, seconds),
        tokens_per_second=statistics.fmean(progress.tokens_per_second for progress in done),
        mfu=statistics.fmean(progress.mfu for progress in done),
        peak_memory_bytes=max(progress.peak_memory_bytes for progress in done),
        steps=tuple(progress.step for progress in done),
        best_steps=tuple(progress.best_step for progress in done),
        histories=tuple(progress.history for progress in done),
        details=scored[0].details | ({} if decoding is None else {"decode_ms": decoding}),
    )


def _deviations(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """The standard deviation over seeds of each metric; with one seed of none."""
    if len(metrics) < 2:
        return {}
    return {name: statistics.stdev(of_seed[name] for of_seed in metrics) for name in metrics[0]}


def _read(job: Job) -> tuple[Progress, ScoreRecord]:
    """The progress and scores of a run."""
    record = job.record()
    scores = job.scores(record) if record else None
    if record is None or record.progress is None or scores is None:
        raise CheckpointError(f"the run in {job.folder} was changed while it was compared: give --resume")
    return record.progress, scores


def _sweep(settings: tuple[str, ...], scores: dict[float, float]) -> RateSweep:
    tried = ((rate, score if math.isfinite(score) else None) for rate, score in scores.items())
    return RateSweep(settings=settings, runs=tuple(TriedRate(learning_rate=rate, score=score) for rate, score in tried))


def _record(
    task: Task, recipe: Recipe, rows: list[Row], baselines: list[BaselineRow], command: str, preset: str
) -> ComparisonRecord:
    config: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return ComparisonRecord(
        **origin(command),
        task=task.name,
        metric=task.metric,
        metric_label=task.metric_label,
        question=task.question,
        seeds=tuple(range(recipe.seeds)),
        config=config,
        data=task.data_summary(),
        meanings={spec: task.describe_spec(spec) for spec in recipe.attention},
        axis_labels=task.axis_labels(),
        rows=tuple(rows),
        scaling=scaling_laws(rows, recipe.attention) if recipe.budgets else None,
        baselines=tuple(baselines),
        search=search(rows, baselines) if recipe.search else None,
        preset=preset,
    )
