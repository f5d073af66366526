"""Which model or baseline forecasts: that of a run, or of one row of a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from structattn.errors import CheckpointError, ConfigError, DataError, nearest_name
from structattn.typed_records import read_as
from structattn_lab.compare.grid import Point, points_of
from structattn_lab.old_formats import old_spec
from structattn_lab.records.common import RESULTS
from structattn_lab.records.comparison import BaselineRow, ComparisonRecord, Row, position_of, read_comparison
from structattn_lab.runs.folders import OWNER
from structattn_lab.settings.recipe import Recipe
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.forecast.baselines import Ridge
from structattn_lab.tasks.forecast.future import BaselineForecaster, FutureForecaster, ModelForecaster
from structattn_lab.tasks.forecast.kept import FILE, Kept, read_kept
from structattn_lab.tasks.forecast.task import ForecastConfig, ForecastTask, build_forecaster
from structattn_lab.training.evaluate import load_run, reading_run, trained_model
from structattn_lab.training.finished import FinishedRun, progress_of, read_finished, read_record


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What forecasts.

    Attributes:
        name: its spec, or the name of the baseline.
        why: why it was taken.
        config: settings of its training.
        forecaster: itself.
        unlimited: rows of the same comparison whose horizon has no limit.
    """

    name: str
    why: str
    config: ForecastConfig
    forecaster: FutureForecaster
    unlimited: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    """A row of a comparison, and where it is in the grid."""

    name: str
    validation: float
    point: Point
    row: Row | BaselineRow

    @property
    def asks(self) -> tuple[Any, int]:
        """What is forecast, and how far ahead: validation errors are comparable where these are equal."""
        config: ForecastConfig = self.point.recipe.task
        return config.data, config.horizon


def choose(folder: Path, row: str | None, variant: str | None) -> Chosen:
    """What forecasts, of a run or a comparison; only records are read, and what is kept for forecasts.

    Args:
        folder: of a run, or of a comparison.
        row, variant: see ``structattn_lab.inference.forecast.forecast``.

    Raises:
        CheckpointError: it holds neither, or something is missing or damaged.
        ConfigError: another task, unknown names, or several settings whose validation errors cannot be
            compared.
    """
    is_comparison = (folder / RESULTS).is_file()
    command = _command(folder)
    if command == "compare" and not is_comparison:
        raise CheckpointError(
            f"the comparison in {folder} is not finished: finish it with the command that started it, --resume and "
            f"--out {folder}"
        )
    if command not in (None, "compare", "train"):
        raise CheckpointError(
            f"{folder} holds the results of structattn {command}: give the folder of a comparison or a run"
        )
    if is_comparison:
        return _of_comparison(folder, row, variant)
    record = read_record(folder)
    _check_task(folder, record.task)
    for name, value in (("row", row), ("variant", variant)):
        if value is not None:
            raise ConfigError(f"{folder} is a single run: leave --{name} out, or give the folder of a comparison")
    return _of_run(folder, f"the model of {folder}")


def _command(folder: Path) -> str | None:
    """What wrote a folder, where it says so."""
    try:
        return str(json.loads((folder / OWNER).read_bytes())["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_task(folder: Path, task: str) -> None:
    if task != ForecastTask.name:
        raise ConfigError(
            f"{folder} is of the task {task}, and forecasts are those of the task {ForecastTask.name}: give the folder "
            f"of structattn compare {ForecastTask.name} or train {ForecastTask.name}"
        )


def _of_run(folder: Path, why: str, unlimited: tuple[str, ...] = ()) -> Chosen:
    run = read_finished(folder)
    with reading_run(folder):
        config = read_as(ForecastConfig, run.record.task_config, f"the run in {folder} is damaged")
    if (folder / FILE).is_file():
        forecaster = _model(folder, run, config, read_kept(folder / FILE))
    else:
        model, task = _from_training_data(folder)
        forecaster = ModelForecaster(task.kept_with_run(model), lambda: model)
    return Chosen(name=run.record.spec, why=why, config=config, forecaster=forecaster, unlimited=unlimited)


def _from_training_data(folder: Path) -> tuple[nn.Module, ForecastTask]:
    """Model and task of a run of a version that kept nothing for forecasts.

    Raises:
        DataError: its training data are gone or have changed.
    """
    try:
        trained = load_run(folder)
    except DataError as error:
        raise DataError(
            f"an earlier version made {folder}, and forecasts with it need its training data as they were: put them "
            f"back, or train again ({error})"
        ) from error
    assert isinstance(trained.task, ForecastTask)
    return trained.model, trained.task


def _model(folder: Path, run: FinishedRun, config: ForecastConfig, kept: Kept) -> ModelForecaster:
    def load() -> Any:
        with reading_run(folder):
            return trained_model(folder, run, lambda spec: build_forecaster(config, spec, len(kept.facts.columns)))

    return ModelForecaster(kept, load)


def _of_comparison(folder: Path, row: str | None, variant: str | None) -> Chosen:
    record = read_comparison(folder)
    _check_task(folder, record.task)
    candidates = _candidates(folder, record)
    best = _best(folder, _named(folder, _of_variant(folder, candidates, variant), row))
    names = dict.fromkeys(
        candidate.name
        for candidate in candidates
        if isinstance(candidate.row, BaselineRow) and candidate.name != Ridge.name
    )
    why = f"its validation {record.metric} is {best.validation:.3g}"
    if row is None:
        why = f"the lowest validation {record.metric} of the comparison, {best.validation:.3g}"
    if best.point.position.variant:
        why += f", at {best.point.position.variant}"
    if isinstance(best.row, Row):
        run, seed = _best_seed(folder, record, best.point, best.row)
        if len(record.seeds) > 1:
            why += f"; of its {len(record.seeds)} seeds, {seed} has the lowest"
        return _of_run(run, why, tuple(names))
    path = best.point.baselines_folder(folder) / FILE
    if path.is_file():
        kept = read_kept(path)
    else:
        first = next(other for other in record.rows if position_of(other) == best.point.position)
        run = best.point.run_folder(folder, first.spec, record.seeds[0], first.learning_rate)
        _, task = _from_training_data(run)
        kept = task.kept_with_baselines()
    return Chosen(
        name=best.name,
        why=why,
        config=best.point.recipe.task,
        forecaster=BaselineForecaster(kept, best.name),
        unlimited=tuple(names),
    )


def _candidates(folder: Path, record: ComparisonRecord) -> list[_Candidate]:
    where = f"{folder / RESULTS} is damaged"
    task = read_as(ForecastConfig, record.config.get("task"), where)
    recipe = read_as(Recipe, {**record.config, "task": task}, where)
    points = {point.position: point for point in points_of(TaskFactory(ForecastTask), recipe)}
    try:
        of_specs = [_Candidate(row.spec, row.validation, points[position_of(row)], row) for row in record.rows]
        return of_specs + [
            _Candidate(row.name, math.inf if row.validation is None else row.validation, points[position_of(row)], row)
            for row in record.baselines
        ]
    except KeyError as error:
        raise CheckpointError(f"{where}: no settings are those of {error}") from error


def _of_variant(folder: Path, candidates: Sequence[_Candidate], variant: str | None) -> list[_Candidate]:
    """Those of a variant: of one point of the grid, or of all that differ in the searched setting only."""
    if variant is None:
        return list(candidates)
    chosen = [
        candidate
        for candidate in candidates
        if variant in (candidate.point.position.variant, candidate.point.position.group)
    ]
    if not chosen:
        raise ConfigError(f"{folder} has no variant {variant!r}: {_known_variants(candidates, variant)}")
    return chosen


def _known_variants(candidates: Sequence[_Candidate], name: str) -> str:
    names = [candidate.point.position.group or candidate.point.position.variant for candidate in candidates]
    return nearest_name(name, {name for name in names if name is not None}) if any(names) else "it has only one"


def _named(folder: Path, candidates: Sequence[_Candidate], row: str | None) -> list[_Candidate]:
    """Those of a name, or that begin with it where there is no such name."""
    if row is None:
        return list(candidates)
    from structattn_lab.tasks.forecast.figures import name_of  # matplotlib is optional

    wanted = "".join(row.split()).lower()

    def names(candidate: _Candidate) -> tuple[str, ...]:
        return tuple(
            "".join(name.split()).lower()
            for name in (candidate.name, old_spec(candidate.name), name_of(candidate.name))
        )

    chosen = [candidate for candidate in candidates if wanted in names(candidate)]
    chosen = chosen or [
        candidate for candidate in candidates if wanted and any(name.startswith(wanted) for name in names(candidate))
    ]
    names_of_rows = dict.fromkeys(candidate.name for candidate in candidates)
    if not chosen:
        raise ConfigError(f"{folder} has no row {row!r}: {nearest_name(row, names_of_rows)}")
    several = dict.fromkeys(candidate.name for candidate in chosen)
    if len(several) > 1:
        raise ConfigError(
            f"{row!r} is the beginning of several rows, {', '.join(map(repr, several))}: give one of them"
        )
    return chosen


def _best(folder: Path, candidates: Sequence[_Candidate]) -> _Candidate:
    """The one with the lowest validation error."""
    if len({candidate.asks for candidate in candidates}) > 1:
        raise ConfigError(
            f"the comparison in {folder} forecasts other columns or horizons under each of its variants: name one with "
            f"--variant: {_known_variants(candidates, '')}"
        )
    return min(candidates, key=lambda candidate: candidate.validation)


def _best_seed(folder: Path, record: ComparisonRecord, point: Point, row: Row) -> tuple[Path, int]:
    """The run of a row with the lowest validation error, and its seed."""
    scores = []
    for seed in record.seeds:
        run = point.run_folder(folder, row.spec, seed, row.learning_rate)
        progress = progress_of(read_record(run), run)
        patience = point.recipe.training.patience
        score = math.inf if progress is None else progress.final_validation_score(record.metric, patience)
        scores.append((score, seed, run))
    _, seed, run = min(scores)
    return run, seed
