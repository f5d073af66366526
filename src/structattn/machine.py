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


_CPUINFO = Path("/proc/cpuinfo")
# What processors with products of 16-bit numbers call them there: x86, and 64-bit ARM.
_PRODUCTS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def has_products(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies numbers of a dtype, as Linux says; if not, they become float32 first,
    which takes longer than if they were. ``False`` where nothing says so.
    """
    if dtype not in _PRODUCTS:
        return True
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.+)$", _of_cpu(), flags=re.MULTILINE)
    return bool(lines) and not _PRODUCTS[dtype].isdisjoint(lines[0].split())


def _of_cpu() -> str:
    return _CPUINFO.read_text() if _CPUINFO.exists() else ""


def hardware() -> Hardware:
    """This machine."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _of_cpu(), flags=re.MULTILINE)
    model = names[0] if names else platform.processor() or platform.machine()
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
