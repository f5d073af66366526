"""What earlier versions wrote otherwise, in the form of today: specs, and output folders.

Until 0.2 the spec of a baseline model was ``peer:NAME``, which is ``baseline:NAME`` today. Version 0.1.0
wrote no owner file into its output folders: their runs can be resumed. It did not sign the records of its
runs, and kept their progress in the last checkpoint only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_OLD, _NEW = "peer:", "baseline:"
_OLD_SPEC = re.compile(rf"{_OLD}(DLinear|NHITS|PatchTST|iTransformer)\b")  # no other models had the old form
# What the record of a run of version 0.1.0 has, which is not signed.
UNSIGNED_RUN = ("task", "data", "spec", "seed", "config", "task_config", "record", "model_sha256")


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
