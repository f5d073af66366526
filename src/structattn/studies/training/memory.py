"""Peak memory of a run."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path

import torch


class PeakMemory:
    """The largest memory used since ``start``: of the GPU where there is one, else resident memory of the process.

    On Linux the high-water mark is reset at ``start``; elsewhere it is that of the whole process.
    """

    def start(self) -> None:
        """Starts a new measurement."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Peak memory in bytes."""
        if torch.cuda.is_available():
            return int(torch.cuda.max_memory_allocated())
        status = Path("/proc/self/status")
        if status.exists():
            found = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), flags=re.MULTILINE)
            if found:
                return int(found.group(1)) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
