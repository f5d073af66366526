"""What earlier versions wrote otherwise, in the form of today: specs, records, settings and output folders.

Until 0.2 the spec of a baseline model was ``peer:NAME``, which is ``baseline:NAME`` today. Version 0.1.0
wrote no owner file into its output folders: their runs can be resumed. It did not sign its records, and kept
the progress of a run in the last checkpoint only. A field that is newer than a file has a default in the
dataclass that reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from structattn.files import absolute

_OLD, _NEW = "peer:", "baseline:"
_OLD_SPEC = re.compile(rf"{_OLD}(DLinear|NHITS|PatchTST|iTransformer)\b")  # no other models had the old form
# The fields of the records of version 0.1.0, which are not signed: of a run, its scores and its checkpoints,
# and of a corpus.
UNSIGNED_RUN = ("task", "data", "spec", "seed", "config", "task_config", "record", "model_sha256")
UNSIGNED_SCORES = ("model_sha256", "metrics", "details")
UNSIGNED_CHECKPOINT = ("format_version", "step", "files")
UNSIGNED_CORPUS = (
    "format",
    "settings",
    "tokenizer",
    "vocab_size",
    "dtype",
    "documents",
    "characters",
    "splits",
    "sha256",
)


def todays_spec(spec: str) -> str:
    """A spec in the form of today."""
    return _NEW + spec.removeprefix(_OLD) if spec.startswith(_OLD) else spec


def old_spec(spec: str) -> str:
    """A spec as versions before today's form wrote it."""
    return _OLD + spec.removeprefix(_NEW) if spec.startswith(_NEW) else spec


def with_todays_specs(data: Any) -> Any:
    """Plain data, such as a record or settings, with all specs in the form of today."""
    if isinstance(data, str):
        return todays_spec(data) if _OLD_SPEC.match(data) else data  # it may be the name of a column
    if isinstance(data, dict):
        return {with_todays_specs(name): with_todays_specs(value) for name, value in data.items()}
    if isinstance(data, list):
        return [with_todays_specs(value) for value in data]
    return data


def existing_folder(folder_of: Callable[[str], Path], spec: str) -> Path:
    """The folder of a spec; that of its old form where only that one is there.

    Args:
        folder_of: gives the folder of a spec.
        spec: in the form of today.
    """
    folder, old = folder_of(spec), folder_of(old_spec(spec))
    return old if old.exists() and not folder.exists() else folder


def is_same_setting(old: Any, value: Any) -> bool:
    """Whether a setting has a value; version 0.1.0 wrote paths as they were given."""
    return old == value or (isinstance(old, str) and absolute(old) == value)


def is_same_data(recorded: str | None, data_sha256: str) -> bool:
    """Whether a run is of these data; the first runs did not record theirs."""
    return recorded in (None, data_sha256)


def recorded_parametrization(config: Mapping[str, Any]) -> Any:
    """That of a run, from its settings; the first runs did not record it: there was only the standard one."""
    return config.get("parametrization", "standard")


def recorded_tokenizer(record: Mapping[str, Any]) -> Any:
    """The description of the tokenizer of a run; before there was a choice, tokens were characters."""
    return record.get("tokenizer", {"kind": "chars"})


def with_short_progress(run: dict[str, Any], shorten: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The data of the record of a run; in format 1 its progress has fields that only matter during the run.

    Args:
        run: the data.
        shorten: gives the progress without those fields.
    """
    progress = run.get("progress")
    if run.get("format_version", 1) == 1 and isinstance(progress, dict):
        return {**run, "progress": shorten(progress)}
    return run


def finished_progress(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The progress of a run from the state in its last checkpoint; ``None`` if it was not finished there."""
    progress = state.get("progress", {})
    return dict(progress) if progress.get("finished") else None


def _read(path: Path) -> dict[str, Any]:
    """A JSON file as a dict, an empty one where there is none that can be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def comparison_record(folder: Path, task: str) -> dict[str, Any] | None:
    """The settings of a finished comparison of a task, empty for an unfinished one; ``None`` if the folder
    holds no such comparison.
    """
    results = _read(folder / "results.json")
    if "rows" in results:
        return (
            dict(results["config"]) if results.get("task") == task and isinstance(results.get("config"), dict) else None
        )
    for group in ("runs", "sweep"):
        for state in (folder / group).glob("**/checkpoints/step-*/state.json"):
            settings = _read(state).get("settings")
            return {} if isinstance(settings, dict) and settings.get("task") == task else None
    return None


def run_record(folder: Path) -> dict[str, Any] | None:
    """Empty settings for a run, since its checkpoints hold them; ``None`` if the folder holds no run."""
    return {} if (folder / "checkpoints").is_dir() or (folder / "run.json").is_file() else None


def sweep_record(folder: Path) -> dict[str, Any] | None:
    """The settings of a sweep; ``None`` if the folder holds none."""
    return _read(folder / "sweep.json") or None
