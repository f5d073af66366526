"""The speed of a run: tokens per second, and model FLOPs utilisation (MFU) relative to measured matrix
products.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH = 0.01  # seconds of one product; larger ones are hardly faster
_SECONDS_PER_SIZE = 0.04


def wait_for_device(device: torch.device) -> None:
    """Waits until the device has finished all work; returns at once on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of square matrix products on this device, measured: the best of several sizes, with the threads
    that torch uses now.

    The upper bound of a training step of only large products; measured, not from a datasheet. Measured once
    for each device, dtype and number of threads of a process: about a tenth of a second to half a second.
    """
    return _measured_rate(device, dtype, torch.get_num_threads())


@functools.cache
def _measured_rate(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    best = 0.0
    for size in _SIZES:
        a = torch.ones(size, size, device=device, dtype=dtype)
        out = a @ a  # the first product of a size is slower
        wait_for_device(device)
        shortest, ends = float("inf"), time.perf_counter() + _SECONDS_PER_SIZE
        while time.perf_counter() < ends:
            started = time.perf_counter()
            torch.mm(a, a, out=out)
            wait_for_device(device)
            shortest = min(shortest, time.perf_counter() - started)
        best = max(best, 2 * size**3 / shortest)
        if shortest > _LONG_ENOUGH:
            break
    return best


@dataclass
class SpeedMeter:
    """Counts tokens, FLOPs and seconds of training steps, without the time between ``stop`` and ``start``.

    Args:
        peak: FLOP/s of all processes together, see ``matmul_rate``.
        passes: FLOPs of a training step that the hardware does, over those of its forward passes: 3 (the
            backward pass counts twice), 4 where activations are computed again.
        clock: seconds. Default: ``time.perf_counter``.

    Source: Chowdhery et al. 2022 (PaLM), appendix B, for MFU and HFU.
    """

    peak: float
    passes: int = 3
    clock: Callable[[], float] = time.perf_counter
    _tokens: int = field(default=0, init=False)
    _flops: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)
    _started: float | None = field(default=None, init=False)

    def start(self) -> None:
        """Training starts or continues."""
        self._started = self.clock()

    def count(self, tokens: int, flops: int) -> None:
        """Adds a step: its tokens and forward FLOPs, over all processes."""
        self._tokens += tokens
        self._flops += flops

    def stop(self) -> None:
        """Training pauses; the device must have done its work."""
        if self._started is not None:
            self._seconds += self.clock() - self._started
            self._started = None

    def read(self) -> dict[str, float]:
        """The counts since the last reading; call ``stop`` first: ``seconds``, ``tokens_per_second``, ``mfu``
        = 3 x forward FLOPs / (seconds x peak), and ``hfu``, the same with all FLOPs that the hardware did.
        All 0 without steps.
        """
        seconds = self._seconds
        tokens, flops = (self._tokens / seconds, self._flops / seconds / self.peak) if seconds > 0 else (0.0, 0.0)
        self._tokens, self._flops, self._seconds = 0, 0, 0.0
        return {"seconds": seconds, "tokens_per_second": tokens, "mfu": 3 * flops, "hfu": self.passes * flops}
