"""One safetensors file for tensors and, in its metadata, a record of all else, with a hash of both."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from structattn.checks import check_path, describe, quoted
from structattn.errors import CheckpointError
from structattn.files import write_atomic


def _digest(record: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(record.encode() + save(tensors)).hexdigest()


def tensor_bytes(key: str, record: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """The content of a file.

    Args:
        key: the name of the record in the metadata.
        record: plain data with a ``format_version``.
        tensors: contiguous, on the CPU.
    """
    text = json.dumps(record, sort_keys=True)
    return save(tensors, {key: text, "sha256": _digest(text, tensors)})


def write_tensors(path: Path, key: str, record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a file, completely or not at all; see ``tensor_bytes``.

    Raises:
        CheckpointError: it cannot be written; a file that was there is untouched.
    """
    write_atomic(path, tensor_bytes(key, record, tensors))


def read_tensors(
    path: str | Path, key: str, *, what: str, remedy: str, version: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What ``write_tensors`` wrote, verified.

    Args:
        key: the name of the record in the metadata.
        what: the kind of file, such as ``"cache"``, and
        remedy: what to do about one that was changed, for the messages.
        version: the format that the caller reads.

    Raises:
        ConfigError: the path is none.
        CheckpointError: the file is missing, truncated, changed, of another kind or of another version. What
            else is in the record is not checked.
    """
    path = check_path("path", path)
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        tensors = load(path.read_bytes())
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        SafetensorError,
    ) as error:  # a dtype that is none is a KeyError
        raise CheckpointError(f"cannot read the {what} {path}: {error}; it is missing or damaged") from error
    if key not in metadata:
        raise CheckpointError(f"{path} is not a {what} that structattn saved: its metadata has no {key!r}")
    text = metadata[key]
    if _digest(text, tensors) != metadata.get("sha256"):
        raise CheckpointError(f"{path} was changed since it was written: its hash does not fit; {remedy}")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the record of the {what} is no JSON: {error}; {remedy}") from error
    if not isinstance(record, dict) or record.get("format_version") != version:
        found = quoted(record.get("format_version")) if isinstance(record, dict) else describe(record)
        raise CheckpointError(f"{path}: expected a {what} of format version {version}, got {found}; {remedy}")
    return record, tensors
