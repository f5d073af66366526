"""Atomic writes of files, signed records that show whether they were changed, and the folder of what belongs
to a machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from structattn.errors import CheckpointError

TEMPORARY = ".tmp-"
_SIGNATURE = "signature"
_BLANK = "0" * 64  # in place of the signature while the hash is computed


def absolute(path: str) -> str:
    """The absolute path; an empty one stays empty."""
    return str(Path(path).expanduser().absolute()) if path else ""


def cache_folder() -> Path:
    """Where the package keeps what belongs to this machine: the folder that STRUCTATTN_CACHE names, else
    ``structattn`` in the user's cache.

    Raises:
        CheckpointError: there is no home folder, and neither XDG_CACHE_HOME nor STRUCTATTN_CACHE is set.
    """
    if named := os.environ.get("STRUCTATTN_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "structattn"
    except RuntimeError as error:
        raise CheckpointError(f"there is no cache folder ({error}): name one in STRUCTATTN_CACHE") from error


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name and renames it: a reader sees the old file or the new one, never
    an incomplete one.

    Raises:
        CheckpointError: the file cannot be written; the old one is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(temporary, data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(path: Path) -> None:
    """Waits until the disk has the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_folder(parent: Path) -> Path:
    """A new empty folder under a temporary name."""
    return Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=parent))


def remove_folder(path: Path) -> None:
    """Removes a folder; it gets a temporary name first, so that an incomplete folder never has its own name.
    What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        if not path.name.startswith(TEMPORARY):
            path = path.rename(temporary_folder(path.parent) / path.name).parent
        shutil.rmtree(path, ignore_errors=True)


def remove_temporary(folder: Path) -> None:
    """Removes the temporary files that killed writers left in a folder; only for its one writer."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def signed(record: dict[str, Any]) -> bytes:
    """A record as JSON with a last field ``signature``, the SHA-256 of all of its other bytes."""
    text = json.dumps({**record, _SIGNATURE: _BLANK}, indent=1).encode()
    head, _, tail = text.rpartition(_BLANK.encode())
    return head + hashlib.sha256(text).hexdigest().encode() + tail


def read_signed(path: Path, unsigned: Collection[str] = ()) -> dict[str, Any]:
    """The record of a file that holds what ``signed`` returned.

    Args:
        path: the file.
        unsigned: the fields of records from versions that did not sign them. A record without a signature
            that has other fields is refused.

    Raises:
        CheckpointError: the file is missing, unreadable, not such a record, or changed since it was written.
    """
    try:
        content = path.read_bytes()
        record = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8 is a ValueError as well
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(record).__name__}")
    signature = record.pop(_SIGNATURE, None)
    if signature is None and set(record) <= set(unsigned):
        return record
    if not _fits(content, signature):
        raise CheckpointError(f"{path} was changed since it was written: its signature does not fit its contents")
    return record


def _fits(content: bytes, signature: object) -> bool:
    if not isinstance(signature, str) or len(signature) != len(_BLANK):
        return False
    head, _, tail = content.rpartition(signature.encode(errors="replace"))
    return hashlib.sha256(head + _BLANK.encode() + tail).hexdigest() == signature
