"""Output folders of version 0.1.0, which wrote no owner file: their runs can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
