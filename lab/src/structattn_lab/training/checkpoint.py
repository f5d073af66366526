"""Checkpoints: tensors as safetensors, the rest as JSON, every file hashed, the folder renamed into place.

A folder whose manifest and files fit together is a checkpoint, whatever its name is: a kill between any two
operations leaves the old one or the new one, in its place or under a temporary name, and both are found.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from structattn.errors import CheckpointError
from structattn.files import (
    TEMPORARY,
    read_signed,
    remove_folder,
    remove_temporary,
    signed,
    sync_folder,
    temporary_folder,
    write_synced,
)
from structattn_lab.old_formats import UNSIGNED_CHECKPOINT

logger = logging.getLogger(__name__)
FORMAT_VERSION = 1
_PREFIX = "step-"
_MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds: the step, groups of tensors by name, and plain data."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save_checkpoint(
    root: Path, step: int, *, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], keep: int = 2
) -> Path:
    """Writes ``root/step-00000123`` atomically.

    Args:
        root: folder of the checkpoints of one run, created.
        step: number of finished steps.
        tensors: groups of tensors, one safetensors file each.
        state: plain JSON data.
        keep: the number of newest checkpoints to keep.

    Raises:
        CheckpointError: it cannot be written (disk full, no permission); earlier checkpoints are untouched.
    """
    final = root / f"{_PREFIX}{step:08d}"
    temporary = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(f"{TEMPORARY}*"):
            if not _is_complete(stale):
                remove_folder(stale)
        temporary = temporary_folder(root)
        files = {
            f"{name}.safetensors": save({k: t.detach().cpu().contiguous() for k, t in group.items()})
            for name, group in tensors.items()
        }
        files["state.json"] = json.dumps(state).encode()
        listing = {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()
        }
        for name, data in files.items():
            write_synced(temporary / name, data)
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": listing}
        write_synced(temporary / _MANIFEST, signed(manifest))
        sync_folder(temporary)
        if final.exists():
            final.rename(temporary_folder(root) / final.name)  # until the next line, the new one is found where it is
        temporary.rename(final)
        sync_folder(root)
        remove_temporary(root)
        for old in sorted(root.glob(f"{_PREFIX}*"), key=_step, reverse=True)[keep:]:
            remove_folder(old)
    except OSError as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write a checkpoint to {root}: {error.strerror or error}; the checkpoints before it are untouched"
        ) from error
    return final


def _step(folder: Path) -> int:
    """The step of a folder by its name, or by its manifest if the name is temporary; -1 if unknown."""
    text = folder.name.removeprefix(_PREFIX)
    if folder.name.startswith(_PREFIX):
        return int(text) if text.isdecimal() else -1
    try:  # read once: a run in progress may rename the folder between two reads
        return int(_manifest(folder)["step"])
    except CheckpointError:
        return -1


def _newest_first(root: Path) -> list[Path]:
    """The checkpoints, also damaged ones; after that of a step the one with a temporary name, which a kill
    left there.
    """
    folders = [*root.glob(f"{_PREFIX}*"), *root.glob(f"{TEMPORARY}*")] if root.is_dir() else []
    steps = {folder: _step(folder) for folder in folders}
    return sorted((folder for folder in folders if steps[folder] >= 0), key=steps.__getitem__, reverse=True)


def has_checkpoints(root: Path) -> bool:
    """Whether there is any checkpoint below ``root``, damaged ones included."""
    return bool(_newest_first(root))


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint folder below ``root``, or ``None``; hashes are left to
    ``load_checkpoint``.
    """
    return next(filter(_is_complete, _newest_first(root)), None)


def load_latest(root: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint below ``root``, ``None`` if there are no checkpoints. A warning names
    damaged ones.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    damage = None
    for path in _newest_first(root):
        try:
            checkpoint = load_checkpoint(path)
        except CheckpointError as error:
            damage = damage or error
            continue
        if damage is not None:
            logger.warning("%s. Continuing from the checkpoint before it, %s", damage, path)
        return checkpoint
    if damage is not None:
        raise CheckpointError(f"{damage}. There is no other checkpoint: delete {root} to begin again") from damage
    return None


def _is_complete(path: Path) -> bool:
    try:
        _manifest(path)
    except CheckpointError:
        return False
    return True


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are there, of the right sizes; else raises
    ``CheckpointError``.
    """
    manifest = read_signed(path / _MANIFEST, UNSIGNED_CHECKPOINT)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: expected format version {FORMAT_VERSION}, got {version}")
    try:
        listing = {str(name): int(entry["size"]) for name, entry in manifest["files"].items()}
        int(manifest["step"])
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.name != _MANIFEST}
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / _MANIFEST} is not the manifest of a checkpoint: {error!r}") from error
    if sizes.keys() != listing.keys():
        raise CheckpointError(f"{path}: expected files {sorted(listing)}, got {sorted(sizes)}")
    for name, size in sizes.items():
        if size != listing[name]:
            raise CheckpointError(f"{path / name} is truncated or longer: expected {listing[name]} bytes, got {size}")
    return manifest


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint after verifying the size and hash of every file. Nothing is unpickled.

    Raises:
        CheckpointError: a file is missing, extra, truncated or changed, or the format is of another version.
    """
    manifest = _manifest(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    state: dict[str, Any] = {}
    for name, entry in manifest["files"].items():
        try:
            data = (path / name).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            if digest != entry["sha256"]:
                raise CheckpointError(
                    f"{path / name} was changed: expected sha256 {str(entry['sha256'])[:12]}, got {digest[:12]}"
                )
            if name == "state.json":
                state = dict(json.loads(data))
            else:
                tensors[name.removesuffix(".safetensors")] = load(data)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from error
    return Checkpoint(step=int(manifest["step"]), tensors=tensors, state=state)
