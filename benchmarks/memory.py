"""Peak memory of one call of a case.

On a CPU the growth of the resident set says it, in fresh processes: an old one holds freed memory that a call
would reuse unseen. Of equal calls it differs by up to half, since it depends on which freed memory the C
library can use again. So the peak of the tensors is counted too. On CUDA PyTorch's allocator counts.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import ROOT
from benchmarks.registry import Benchmark, Case, Group, Work
from structattn_lab.training.memory import peak_memory_bytes, reset_peak_memory

RESOLUTION = 2**20  # bytes; a smaller peak is not to be divided by
_PROCESSES = 3  # of whose resident sets the median is taken


class Peak(NamedTuple):
    """What one call needs at its highest point beyond its inputs, in bytes; results are counted.

    Attributes:
        resident: by which the memory of the process grows; on CUDA that of the allocator.
        tensors: that PyTorch has allocated and not freed; ``None`` on CUDA, where it is the same.
    """

    resident: int
    tensors: int | None


class MemoryMeasurementError(RuntimeError):
    """The process that should measure failed."""


def peak(bench: Benchmark, group: Group, case: Case, device: torch.device, dtype: torch.dtype) -> Peak:
    """The peak memory of one call.

    Args:
        bench, group, case: what is measured; on a CPU other processes make them again by their names.
        device, dtype: as for ``bench.groups``.

    Raises:
        MemoryMeasurementError: a process that measures failed.
    """
    if device.type == "cuda":
        return Peak(resident=growth(case.build()), tensors=None)
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-m", "benchmarks.memory_process", bench.name, device.type, name, group.name_of(case)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "CUDA_VISIBLE_DEVICES": "",  # the resident set is meant, not a GPU that happens to be there
    }
    found = []
    for _ in range(_PROCESSES):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            # Its last words may name paths of this machine, and go into a result: the type of the error
            # alone.
            words = done.stderr.strip().rpartition("\n")[2].partition(":")[0]
            raise MemoryMeasurementError(f"a process that measures ended with status {done.returncode} ({words})")
        found.append(Peak(**json.loads(done.stdout.splitlines()[-1])))
    return Peak(resident=int(statistics.median(one.resident for one in found)), tensors=found[0].tensors)


def growth(work: Work) -> int:
    """Bytes by which one call raises the peak above what is allocated before it."""
    gc.collect()
    _return_freed_memory()
    reset_peak_memory()
    before = peak_memory_bytes()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    after = peak_memory_bytes()
    del result  # it counts, so it must live until here
    return after - before


def tensor_growth(work: Work) -> int:
    """The most bytes that PyTorch has allocated on the CPU during one call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    del result
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        most = max(most, allocated)
    return most


def _return_freed_memory() -> None:
    """Gives freed memory back to the system, which would hide allocations; only glibc can be asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
