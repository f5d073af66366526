"""Read a finished run back: its task, and its model with the trained weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from structattn.checks import check_path
from structattn.errors import CheckpointError, ConfigError, DataError, NotRegisteredError
from structattn.models.language_model import LanguageModel
from structattn.typed_records import read_as
from structattn_lab.data.corpus import Tokenizer
from structattn_lab.data.plain_text import is_there
from structattn_lab.old_formats import is_same_data, recorded_parametrization
from structattn_lab.records.run import RunRecord
from structattn_lab.tasks.base import Task, TextModel
from structattn_lab.tasks.registry import task_class
from structattn_lab.training.build import spec_for
from structattn_lab.training.finished import FinishedRun, read_finished, read_record

M = TypeVar("M", bound=nn.Module)

# Settings, none larger than the number of weights.
_SIZES = ("num_layers", "embed_dim", "num_heads", "head_dim", "mlp_dim", "dim")


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a finished run, in eval mode with its trained weights, and its task, spec and seed."""

    task: Task
    spec: str
    seed: int
    model: nn.Module


def load_run(folder: str | Path, data_path: str | Path | None = None) -> TrainedModel:
    """The run that ``structattn train`` (or a comparison) finished in ``folder``.

    Args:
        folder: of the run.
        data_path: current location of its training data. Default: the location at training time.

    Raises:
        CheckpointError: the folder has no finished run, or its files are damaged or do not belong together.
        DataError: the training data are missing or have changed.
        ConfigError: ``data_path`` is given for a task without user data.
    """
    folder = check_path("folder", folder)
    run = read_finished(folder)
    record = run.record
    with reading_run(folder):
        kind = task_class(record.task)
        config = record.task_config
        old_path = kind.data_path(config)
    if data_path is not None:
        if old_path is None:
            raise ConfigError(f"the run in {folder} was trained on data of the package: leave --data (data_path) out")
        config = kind.with_data_path(config, str(data_path))
    elif old_path is not None and not is_there(old_path):
        raise DataError(
            f"the run in {folder} was trained on {old_path}, which is not there: put it back, or give its new location "
            "with --data (data_path)"
        )
    with reading_run(folder):
        task = kind(read_as(kind.config_class, config, f"the run in {folder} is damaged"))
        if not is_same_data(record.data, task.data_sha256):
            raise DataError(
                f"the data have changed since the run in {folder} was trained, so that a score would be meaningless: "
                "restore them, or give their new location with --data"
            )
        model = trained_model(folder, run, task.build_model)
        return TrainedModel(task=task, spec=record.spec, seed=record.seed, model=model)


def load_language_model(folder: Path) -> LanguageModel:
    """The model of a finished run of language modelling, in eval mode; the text that it was trained on is not
    needed.

    Raises:
        CheckpointError: as ``load_run``.
        ConfigError: the run is of a task whose models generate no text.
    """
    run = read_finished(folder)
    model = _text_model(folder, run.record)
    with reading_run(folder):
        return trained_model(folder, run, model.build)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a finished run of language modelling.

    Raises:
        CheckpointError, ConfigError: as ``load_language_model``.
    """
    return _text_model(folder, read_record(folder)).tokenizer


def _text_model(folder: Path, record: RunRecord) -> TextModel:
    with reading_run(folder):
        model = task_class(record.task).text_model(record.task_config, record.record)
    if model is None:
        raise ConfigError(
            f"{folder} is a run of {record.task}, which is not a language model: train one with 'structattn train text'"
        )
    return model


@contextmanager
def reading_run(folder: Path) -> Iterator[None]:
    """A context in which read errors mean that the run is damaged, unless it needs what is not installed or
    imported here.
    """
    try:
        yield
    except NotRegisteredError as error:
        raise NotRegisteredError(f"the run in {folder} cannot be read here: {error.reason}") from error
    except (CheckpointError, DataError):
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the run in {folder} is damaged: {error}; train it again") from error


def trained_model(folder: Path, run: FinishedRun, build: Callable[[str], M]) -> M:
    """The model of a run with its weights, in eval mode.

    Raises:
        CheckpointError: its weights are not those of this model; a model that is too large takes no memory
            before.
    """
    record, most = run.record, sum(weight.numel() for weight in run.weights.values())
    sizes = {name: size for name in _SIZES if isinstance(size := record.task_config.get(name), int)}
    too_large = {name: size for name, size in sizes.items() if size > most}
    if not too_large and sizes.get("num_layers", 1) * sizes.get("embed_dim", 1) > most:
        too_large = {"num_layers": sizes["num_layers"]}
    for name, size in too_large.items():
        raise CheckpointError(
            f"the run in {folder} is damaged: {name} = {size:,} in its run.json is too large for its weights, {most:,} "
            "numbers; train it again"
        )
    spec = spec_for(record.spec, recorded_parametrization(record.config))
    with torch.device("meta"):
        size = sum(tensor.numel() for tensor in build(spec).state_dict().values())
    if size != most:
        raise CheckpointError(
            f"the run in {folder} is damaged: its run.json is of a model of {size:,} numbers, its weights are "
            f"{most:,}; train it again"
        )
    model = build(spec)
    model.load_state_dict(run.weights, strict=True)
    return model.eval()
