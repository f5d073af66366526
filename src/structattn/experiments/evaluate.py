"""Read a finished run back: its task, its model with the trained weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
from safetensors.torch import load
from torch import nn

from structattn.errors import CheckpointError, ConfigError
from structattn.experiments.recipes import task_entry
from structattn.experiments.settings import from_plain
from structattn.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: the task, the spec, the seed, and the model in eval mode with its trained weights."""

    task: Task
    spec: str
    seed: int
    model: nn.Module


def load_run(folder: Path) -> Run:
    """The run that ``structattn train`` (or a comparison) finished in ``folder``.

    Raises:
        CheckpointError: the folder has no finished run, or its files are damaged or do not belong together.
    """
    record, weights = folder / "run.json", folder / "model.safetensors"
    if not record.is_file() or not weights.is_file():
        raise CheckpointError(
            f"{folder} holds no finished run: expected run.json and model.safetensors; finish it with "
            "'structattn train ... --resume'"
        )
    try:
        data = json.loads(record.read_text())
        content = weights.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest != data["model_sha256"]:
            raise CheckpointError(
                f"{weights} was changed since it was written: expected sha256 {data['model_sha256'][:12]}, got {digest[:12]}; "
                "the run is damaged, train it again"
            )
        entry = task_entry(data["task"])
        task = entry.make(from_plain(entry.config, data["task_config"]))
        model = task.build_model(data["spec"])
        model.load_state_dict(load(content), strict=True)
    except (
        json.JSONDecodeError,
        KeyError,
        TypeError,
        ConfigError,
        RuntimeError,
        safetensors.SafetensorError,
    ) as error:
        raise CheckpointError(f"the run in {folder} is damaged: {error}; train it again") from error
    return Run(task=task, spec=data["spec"], seed=data["seed"], model=model.eval())
