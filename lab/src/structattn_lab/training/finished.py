"""Files of a finished run: ``run.json``, signed, and ``model.safetensors``, whose digest it holds. Reading
them changes no file.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from structattn.errors import CheckpointError
from structattn.files import read_signed, signed, write_atomic
from structattn.typed_records import read_as
from structattn_lab.old_formats import UNSIGNED_RUN, finished_progress
from structattn_lab.records.run import Progress, RunRecord, read_run, without_state
from structattn_lab.training.checkpoint import load_latest

RECORD, WEIGHTS = "run.json", "model.safetensors"


@dataclass(frozen=True)
class FinishedRun:
    """The record of a finished run and its weights, by name, on the CPU."""

    record: RunRecord
    weights: dict[str, Tensor]


def is_finished(folder: Path) -> bool:
    """Whether a run was finished in a folder; its files may be damaged since."""
    return (folder / RECORD).is_file()


def write_finished(folder: Path, record: RunRecord, weights: dict[str, Tensor], files: dict[str, bytes]) -> None:
    """Writes the weights, the files of ``Task.run_files``, and then the record with the digest of the
    weights, which marks the run as finished.

    Raises:
        CheckpointError: a file cannot be written.
    """
    content = save(weights)
    write_atomic(folder / WEIGHTS, content)
    for name, more in files.items():
        write_atomic(folder / name, more)
    record = replace(record, model_sha256=hashlib.sha256(content).hexdigest())
    write_atomic(folder / RECORD, signed(asdict(record)))


def _why_not_finished(folder: Path) -> str:
    """Why a folder holds no finished run, and what to do."""
    if not folder.exists():
        return "there is no such folder"
    inside = sorted(path.parent for path in folder.glob(f"runs/**/{RECORD}"))
    if inside:
        return f"it is a comparison of {len(inside)} runs: name one of them, such as {inside[0]}"
    if (folder / "checkpoints").is_dir():
        return f"its training was interrupted: finish it with the command that started it, --resume and --out {folder}"
    return f"expected {RECORD} and {WEIGHTS}, which structattn train writes"


def read_record(folder: Path) -> RunRecord:
    """The record of a finished run.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not is_finished(folder):
        raise CheckpointError(f"{folder} holds no finished run: {_why_not_finished(folder)}")
    return read_run(read_signed(folder / RECORD, UNSIGNED_RUN), str(folder / RECORD))


def progress_of(record: RunRecord, folder: Path) -> Progress | None:
    """The progress of a finished run; for version 0.1.0 from the last checkpoint, ``None`` if that is
    missing.

    Raises:
        CheckpointError: all checkpoints of such a run are damaged.
    """
    if record.progress is not None:
        return record.progress
    checkpoint = load_latest(folder / "checkpoints")
    progress = finished_progress(checkpoint.state) if checkpoint else None
    return None if progress is None else read_as(Progress, without_state(progress), str(folder / "checkpoints"))


def read_finished(folder: Path) -> FinishedRun:
    """A finished run, verified.

    Raises:
        CheckpointError: there is none, or a file of it is missing or has changed since it was written.
    """
    record, path = read_record(folder), folder / WEIGHTS
    try:
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest != record.model_sha256:
            raise CheckpointError(
                f"{path} was changed since it was written: expected sha256 {record.model_sha256[:12]}, got "
                f"{digest[:12]}; the run is damaged, train it again"
            )
        return FinishedRun(record, load(content))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
