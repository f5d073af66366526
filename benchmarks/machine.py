"""The machine of a run: what it is, what else it did, and which code ran; no paths, host or user names."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import structattn

ROOT = Path(__file__).resolve().parents[1]
SLACK = 0.3  # cores: /proc/stat counts in steps of 10 ms, and there is always some small work of the system


class Watch:
    """Says whether other processes, or other guests of a virtual machine, took cores since it was made.

    A call on several threads waits for the slowest at every step: a busy neighbour slows structures of many
    steps much more than one dense product, so that not even ratios within a repeat are right.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._others = _others_cpu_s()

    def disturbed(self, threads: int) -> bool:
        """Whether less than ``threads`` cores were left; never on systems without /proc/stat."""
        now = _others_cpu_s()
        if now is None or self._others is None:
            return False
        others = (now - self._others) / (time.perf_counter() - self._start)  # in cores
        return others > (os.cpu_count() or 1) - threads + SLACK


def wait_until_quiet(threads: int, patience_s: float) -> float:
    """Sleeps until ``threads`` cores are free, ``patience_s`` at most; returns the seconds."""
    start = time.perf_counter()
    while time.perf_counter() - start < patience_s:
        watch = Watch()
        time.sleep(0.5)
        if not watch.disturbed(threads):
            break
    return time.perf_counter() - start


def _others_cpu_s() -> float | None:
    """Seconds of CPU that everything but this process took since the start of the machine."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _wait, irq, soft_irq, steal = map(int, stat.read_text().split(maxsplit=9)[1:9])
    ticks = user + nice + system + irq + soft_irq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def hardware(device: torch.device) -> dict[str, Any]:
    """The processor, its cores, the threads in use and the memory; and the GPU if it is the one that is
    timed.
    """
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    found: dict[str, Any] = {
        "cpu": f"{model} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "sysconf"):  # not on Windows
        found["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
    return found


def versions(device: torch.device) -> dict[str, str]:
    """Of Python and of the packages that matter."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "structattn": structattn.__version__,
    }
    return found | ({"cuda": str(torch.version.cuda)} if device.type == "cuda" else {})


def commit() -> str:
    """The git commit, with a note if the code that ran is not exactly that one."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
        return git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # an unpacked source archive
        return "unknown"
