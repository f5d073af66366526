"""Files that are written at once and completely, or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from structattn.errors import CheckpointError

TEMPORARY = ".tmp-"


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file under a temporary name and renames it: a reader sees the old file or the new one, never a part.

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
