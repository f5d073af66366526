"""What ends a command that fails: one line to standard error and an exit status, or the traceback of a fault
of ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from typing import Any

from structattn.errors import StructAttnError


def open_standard_streams() -> None:
    """Makes output safe before anything is computed.

    A closed stream (``>&-``) is opened on the null device, so that no data file takes its number; and a
    character that the encoding of the terminal lacks is replaced, so that a long run does not fail at its
    last line.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
        elif number > 0 and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class Messages:
    """Standard error that loses what cannot be written, such as to a full disk: a training run is worth more
    than its progress bar.

    Args:
        stream: where the messages go.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or does not."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is in the buffer, or does not."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def close_output() -> None:
    """Writes what is left in the buffer of standard output, or drops it if it cannot be written, so that
    Python does not try it at exit.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error is that nothing more can be written, or was caused by it."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or (error is not None and is_full_disk(error.__cause__))


def in_one_line(error: Exception) -> str | None:
    """What a user reads of an error, or ``None`` for a fault of ours, whose traceback is worth reporting."""
    if isinstance(error, StructAttnError):
        return " ".join(str(error).splitlines())
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, MemoryError) or ("memory" in first and isinstance(error, RuntimeError)):
        wanted = re.search(r"you tried to allocate (\d+) bytes|[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        size = ""
        if wanted is not None:
            size = f" (it asked for {int(wanted[1]) / 2**30:,.0f} GiB)" if wanted[1] else f" (it asked for {wanted[2]})"
        return f"out of memory{size}: choose smaller settings, such as a smaller batch, width or length"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or first or type(error).__name__}"
    if isinstance(error, UnicodeError):
        return f"text that is not in the expected encoding: {first}"
    if isinstance(error, RuntimeError):
        return f"{type(error).__name__}: {first}; --traceback shows where"
    return None
