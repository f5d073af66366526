"""Checkpoints: tensors as safetensors, the rest as JSON, every file hashed, the folder renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from structattn.errors import CheckpointError
from structattn.files import TEMPORARY, write_synced

FORMAT_VERSION = 1
_PREFIX = "step-"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds: the step, groups of tensors by name, and plain data."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_checkpoint(
    root: Path, step: int, *, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], keep: int = 2
) -> Path:
    """Writes ``root/step-00000123`` at once and completely, or not at all.

    Args:
        root: folder of the checkpoints of one run, created.
        step: number of finished steps.
        tensors: groups of tensors, one safetensors file each.
        state: plain JSON data.
        keep: how many of the newest checkpoints stay.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: it cannot be written (disk full, no permission); earlier checkpoints are untouched.
    """
    final = root / f"{_PREFIX}{step:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(f"{TEMPORARY}*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=root))
        files = {
            f"{name}.safetensors": save({k: t.detach().cpu().contiguous() for k, t in group.items()})
            for name, group in tensors.items()
        }
        files["state.json"] = json.dumps(state).encode()
        listing = {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()
        }
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": listing}
        for name, data in files.items():
            write_synced(temporary / name, data)
        write_synced(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        _sync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.replace(final)
        _sync_folder(root)
        for old in sorted(root.glob(f"{_PREFIX}*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write a checkpoint to {root}: {error.strerror or error}; the checkpoints before it are untouched"
        ) from error
    return final


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint folder below ``root``, or ``None``."""
    found = sorted(root.glob(f"{_PREFIX}*")) if root.is_dir() else []
    return found[-1] if found else None


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint after verifying the size and hash of every file. Nothing is unpickled.

    Raises:
        CheckpointError: a file is missing, extra, truncated or changed, or the format is of another version.
    """
    remedy = f"delete {path} to resume from the checkpoint before it"
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        version, listing, step = manifest["format_version"], manifest["files"], int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no readable manifest.json ({error}); {remedy}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: expected format version {FORMAT_VERSION}, got {version}; {remedy}")
    present = {file.name for file in path.iterdir()} - {"manifest.json"}
    if present != set(listing):
        raise CheckpointError(f"{path}: expected files {sorted(listing)}, got {sorted(present)}; {remedy}")
    tensors: dict[str, dict[str, Tensor]] = {}
    state: dict[str, Any] = {}
    for name, entry in listing.items():
        data = (path / name).read_bytes()
        if len(data) != entry["size"]:
            raise CheckpointError(
                f"{path / name} is truncated or longer: expected {entry['size']} bytes, got {len(data)}; {remedy}"
            )
        digest = hashlib.sha256(data).hexdigest()
        if digest != entry["sha256"]:
            raise CheckpointError(
                f"{path / name} was changed: expected sha256 {entry['sha256'][:12]}, got {digest[:12]}; {remedy}"
            )
        try:
            if name == "state.json":
                state = json.loads(data)
            else:
                tensors[name.removesuffix(".safetensors")] = load(data)
        except (ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}; {remedy}") from error
    return Checkpoint(step=step, tensors=tensors, state=state)
