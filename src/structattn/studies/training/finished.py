"""What a finished run is on disk: ``run.json``, signed, and ``model.safetensors``, whose digest it holds. Reading it changes no file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from structattn.errors import CheckpointError
from structattn.files import read_signed, signed, write_atomic

RECORD, WEIGHTS = "run.json", "model.safetensors"
# Version 0.1.0 did not sign its records and kept the progress in the last checkpoint only.
_UNSIGNED = ("task", "data", "spec", "seed", "config", "task_config", "record", "model_sha256")


@dataclass(frozen=True)
class FinishedRun:
    """The record of a finished run and its weights.

    Attributes:
        record: task, spec, seed, settings, and since 0.2 the progress.
        weights: by name, on the CPU.
    """

    record: dict[str, Any]
    weights: dict[str, Tensor]


def is_finished(folder: Path) -> bool:
    """Whether a run was finished in a folder; its files may be damaged since."""
    return (folder / RECORD).is_file()


def write_finished(folder: Path, record: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Writes the weights and then the record, which makes the run a finished one.

    Raises:
        CheckpointError: a file cannot be written.
    """
    content = save(weights)
    write_atomic(folder / WEIGHTS, content)
    write_atomic(folder / RECORD, signed({**record, "model_sha256": hashlib.sha256(content).hexdigest()}))


def _why_not_finished(folder: Path) -> str:
    """What a folder without a finished run is, and what to do with it."""
    if not folder.exists():
        return "there is no such folder"
    inside = sorted(path.parent for path in folder.glob(f"runs/**/{RECORD}"))
    if inside:
        return f"it is a comparison of {len(inside)} runs: name one of them, such as {inside[0]}"
    if (folder / "checkpoints").is_dir():
        return f"its training was interrupted: finish it with the command that started it, --resume and --out {folder}"
    return f"expected {RECORD} and {WEIGHTS}, which structattn train writes"


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a finished run.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not is_finished(folder):
        raise CheckpointError(f"{folder} holds no finished run: {_why_not_finished(folder)}")
    record = read_signed(folder / RECORD, _UNSIGNED)
    if not isinstance(record.get("model_sha256"), str):
        raise CheckpointError(f"{folder / RECORD} is no record of a run: it has no model_sha256")
    return record


def read_finished(folder: Path) -> FinishedRun:
    """A finished run, verified.

    Raises:
        CheckpointError: there is none, or a file of it is missing or has changed since it was written.
    """
    record, path = read_record(folder), folder / WEIGHTS
    try:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest != record["model_sha256"]:
            raise CheckpointError(
                f"{path} was changed since it was written: expected sha256 {record['model_sha256'][:12]}, got "
                f"{digest[:12]}; the run is damaged, train it again"
            )
        return FinishedRun(record, load(content))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
