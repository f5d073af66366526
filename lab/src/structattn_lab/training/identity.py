"""The identity of a run: task, data, spec, seed and settings. A folder is only resumed and read as the same
run.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from structattn.errors import CheckpointError
from structattn_lab.old_formats import is_same_data, todays_spec, with_todays_specs
from structattn_lab.settings.training import WITHOUT_EFFECT, TrainingConfig
from structattn_lab.tasks.base import Task


def identity_of(task: Task, spec: str, config: TrainingConfig, seed: int) -> dict[str, Any]:
    """The identity of a run, as plain data."""
    identity = {
        "task": task.name,
        "data": task.data_sha256,
        "spec": todays_spec(spec),
        "seed": seed,
        "config": _lasting(dataclasses.asdict(config)),
        "task_config": dataclasses.asdict(task.config),
    }
    return dict(json.loads(json.dumps(identity)))


def check_identity(saved: dict[str, Any], wanted: dict[str, Any], task: Task, folder: Path) -> None:
    """Raises ``CheckpointError`` unless a folder holds the expected run.

    Args:
        saved: the identity in the folder, perhaps with other entries.
        wanted: the identity of the run.
        task: of the run.
        folder: for the message.
    """
    saved = with_todays_specs(saved)
    # A setting that is newer than the checkpoint had its default value then.
    config = _default_settings() | _lasting(saved.get("config", {}))
    if not is_same_data(saved.get("data"), wanted["data"]):
        raise CheckpointError(
            f"the data have changed since the run in {folder} was started: restore them, or use another folder"
        )
    identity: dict[str, Any] = {name: saved.get(name) for name in wanted} | {"config": config, "data": wanted["data"]}
    path = task.data_path(wanted["task_config"])
    if saved.get("data") and path is not None:  # the same data may have been moved
        identity["task_config"] = task.with_data_path(identity["task_config"], path)
    _check_settings(identity, wanted, str(folder))


def _default_settings() -> dict[str, Any]:
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(TrainingConfig)
        if field.default is not dataclasses.MISSING
    }
    return _lasting(json.loads(json.dumps(defaults)))


def _lasting(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that a result depends on, which must be the same when a run is resumed."""
    return {name: value for name, value in config.items() if name not in WITHOUT_EFFECT}


def _check_settings(saved: dict[str, Any], current: dict[str, Any], where: str, path: str = "") -> None:
    for key in sorted(set(saved) | set(current)):
        old, new = saved.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            _check_settings(old, new, where, f"{path}{key}.")
        elif old != new:
            raise CheckpointError(
                f"the run in {where} was started with {path}{key} = {old!r}, now {new!r}: resume with the same "
                "settings, or use another folder"
            )
