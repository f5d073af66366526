"""Peak memory of a run: of the GPU where there is one, else resident memory of the process."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path

import torch


def reset_peak_memory() -> None:
    """Starts a new measurement; without a GPU only on Linux: elsewhere the peak is that of the whole
    process.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes() -> int:
    """The most memory that was used since ``reset_peak_memory``."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.exists():
        match = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), flags=re.MULTILINE)
        if match:
            return int(match.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
