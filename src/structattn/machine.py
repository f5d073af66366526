"""This machine: what a timing depends on."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

import structattn
from structattn.memory import physical_memory


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine of a run, as far as a timing depends on it.

    Attributes:
        cpu, device: names of the processor and of the accelerator, or ``"cpu"``.
        cores, threads: of the machine, and those that PyTorch uses.
        memory_gib: physical memory.
    """

    cpu: str
    cores: int | None
    threads: int | None = None
    memory_gib: float | None
    device: str


def hardware() -> Hardware:
    """This machine."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), flags=re.MULTILINE)
        model = names[0] if names else model
    cuda = torch.cuda.is_available()
    memory = physical_memory()
    return Hardware(
        cpu=model,
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        memory_gib=None if memory is None else round(memory / 2**30, 1),
        device=torch.cuda.get_device_name() if cuda else "cpu",
    )


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {
        "structattn": structattn.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
