"""The origin of a result: when, with which command, on which machine, with which versions."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy
import torch

import structattn
from structattn.memory import physical_memory
from structattn.studies.records.common import Hardware


def origin(command: str) -> dict[str, Any]:
    """The fields of ``ResultRecord`` of a record that is made now."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": created, "command": command, "versions": versions(), "hardware": hardware()}


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
