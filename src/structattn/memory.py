"""How much memory there is, so that sizes which no machine holds are named before memory is asked for."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import torch

from structattn.errors import ConfigError

_SMALL = 2**28  # bytes that are taken without a look at the machine
_MOST_BYTES = 2**63 - 1  # torch counts no more, not even on the meta device


def physical_memory() -> int | None:
    """Bytes of memory of this machine, ``None`` where the system does not say."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def free_memory() -> int | None:
    """Bytes that this process can still take on the CPU, swap included; ``None`` where the system does not
    say.
    """
    free = physical_memory()
    with contextlib.suppress(OSError):
        found = re.findall(r"^(?:MemAvailable|SwapFree):\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free = 1024 * sum(map(int, found)) if len(found) == 2 else free
    with contextlib.suppress(ImportError, OSError):
        import resource  # there is none on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            free = limit if free is None else min(free, limit)
    return free


def check_memory(what: str, numbers: int, dtype: torch.dtype | None = None) -> None:
    """Raises ``ConfigError`` where memory on the default device cannot hold this number of values.

    Linux often grants memory that there is not, and ends the process that then writes to it.

    Args:
        what: what they are, in the plural.
        numbers: how many.
        dtype: default ``None``: that of new parameters.
    """
    nbytes = numbers * (torch.get_default_dtype() if dtype is None else dtype).itemsize
    if nbytes <= _SMALL:
        return
    if nbytes > _MOST_BYTES:
        raise ConfigError(f"{what} need {nbytes:,} bytes, more than any machine has: choose smaller sizes")
    if torch.get_default_device().type == "cpu" and (free := free_memory()) is not None and nbytes > free:
        raise ConfigError(f"{what} need {nbytes:,} bytes, and this machine has {free:,} left: choose smaller sizes")
