"""Measuring: correctness first, then all variants of a group in turn in one process, and the two ceilings of
the machine.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from benchmarks.machine import Watch, wait_until_quiet
from benchmarks.registry import CachingWork, CaseUnavailableError, Group, Work
from structattn.errors import StructAttnError
from structattn.testing.tolerances import FORWARD, GRADIENT, relative_error

T = TypeVar("T")
SEED = 0
WARM_UPS = 3
QUEUED = 40  # overwrites of 256 MiB: 3 ms on the fastest GPUs


class WrongResultError(StructAttnError, RuntimeError):
    """A variant does not compute what it should: its time would mean nothing."""


class Clock(Protocol):
    """Times calls on one device.

    Attributes:
        sample_ms: how long one sample lasts at least, by repeating the call.
        threads: cores that must be free for a time to be right.
    """

    sample_ms: float
    threads: int

    def time_ms(self, call: Callable[[], object], inner: int, prepare: Callable[[], object] | None = None) -> float:
        """Milliseconds of one call, the mean of ``inner`` calls; ``prepare`` comes before each and is not
        timed.
        """
        ...


class CpuClock:
    """Wall time. Caches stay as the previous call left them, as they would in a model."""

    sample_ms = 10.0  # long enough for the timer, and for a repeat to be watched (``machine.Watch``)

    def __init__(self) -> None:
        self.threads = torch.get_num_threads()

    def time_ms(self, call: Callable[[], object], inner: int, prepare: Callable[[], object] | None = None) -> float:
        if prepare is None:
            start = time.perf_counter()
            for _ in range(inner):
                call()
            return (time.perf_counter() - start) * 1e3 / inner
        total = 0.0
        for _ in range(inner):
            prepare()
            start = time.perf_counter()
            call()
            total += time.perf_counter() - start
        return total * 1e3 / inner


class CudaClock:
    """Time between two events around each call, with the L2 cache overwritten before it.

    The calls are queued without waiting, so that the launch of one overlaps the overwriting before it; a call
    of many small kernels is still bound by its launches, as it is for a user.

    Args:
        device: the GPU.
        overwrites: how often the cache is overwritten. With ``QUEUED`` that takes longer than all launches of
            a call, so that the time of its kernels alone is taken.
    """

    sample_ms = 10.0
    threads = 1  # the one that launches kernels

    def __init__(self, device: torch.device, overwrites: int = 1) -> None:
        self._overwrites = overwrites
        size = max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 2**28)
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def time_ms(self, call: Callable[[], object], inner: int, prepare: Callable[[], object] | None = None) -> float:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(inner)]
        torch.cuda.synchronize()
        for start, end in pairs:
            if prepare is not None:
                prepare()
            for _ in range(self._overwrites):
                self._flush.fill_(1)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.fmean(start.elapsed_time(end) for start, end in pairs)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps Python's garbage collector out of the times."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The best rates that this machine showed, in this run, in this dtype.

    Attributes:
        flops_per_s: of a large matrix product.
        bytes_per_s: of a large copy, counting the bytes read and the bytes written.
    """

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, flops: int, bytes_moved: int) -> float:
        """No version of a call runs much faster than this."""
        return 1e3 * max(flops / self.flops_per_s, bytes_moved / self.bytes_per_s)


def undisturbed(
    measure: Callable[[], T],
    count: int,
    clock: Clock,
    *,
    patience_s: float,
    on_kept: Callable[[], object] = lambda: None,
) -> tuple[list[T], int]:
    """Measures until ``count`` results came while no other process took the cores that were needed.

    Whether one is measured again depends on what others did alone, never on the result.

    Returns:
        ``count`` results, and how many of them are disturbed after all, since it would have cost more than
        ``patience_s`` of measuring again and of waiting for a quiet machine.
    """
    kept: list[T] = []
    spoilt: list[T] = []
    lost_s = 0.0
    while len(kept) < count and (lost_s < patience_s or len(kept) + len(spoilt) < count):
        start, watch = time.perf_counter(), Watch()
        result = measure()
        if not watch.disturbed(clock.threads):
            kept.append(result)
            on_kept()
            continue
        spoilt.append(result)
        lost_s += time.perf_counter() - start
        lost_s += wait_until_quiet(clock.threads, patience_s - lost_s)
    missing = count - len(kept)
    for _ in range(missing):
        on_kept()
    return kept + spoilt[:missing], missing


def measure_ceilings(device: torch.device, dtype: torch.dtype, clock: Clock, *, repeats: int = 4) -> Ceilings:
    """The fastest of ``repeats`` calls each, since a ceiling is what is possible; the driver asks after every
    group.
    """
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    part = torch.randint(-100, 100, (2**24,), dtype=torch.int8, device=device)
    source = part.repeat(32 if device.type == "cuda" else 16)
    target = torch.zeros_like(source)

    def fastest_s(call: Callable[[], object]) -> float:
        return min(clock.time_ms(call, 1) for _ in range(repeats)) / 1e3

    with no_collection():
        matmul, copy = fastest_s(lambda: a @ b.t()), fastest_s(lambda: target.copy_(source))
    return Ceilings(flops_per_s=2 * n**3 / matmul, bytes_per_s=2 * source.numel() / copy)


def checked_error(name: str, work: Work, dtype: torch.dtype) -> float:
    """The largest relative error of a work against its float64 reference.

    Raises:
        WrongResultError: one is above the tolerance of the dtype, or there was nothing to compare.
    """
    errors, is_right, forward = [], True, getattr(work, "tolerances", FORWARD)
    gradient = max(GRADIENT[dtype], forward[dtype])
    for actual, expected, *is_gradient in work.check():
        errors.append(relative_error(actual, expected))
        is_right = is_right and errors[-1] <= (gradient if any(is_gradient) else forward[dtype])
    if not errors or not is_right:
        limits = f"{forward[dtype]:.0e}, of gradients {gradient:.0e}"
        raise WrongResultError(f"{name}: relative errors {errors}, the tolerance of {dtype} is {limits}")
    return max(errors)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, by linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def measure_group(
    group: Group,
    *,
    dtype: torch.dtype,
    clock: Clock,
    repeats: int,
    patience_s: float,
    on_repeat: Callable[[], object] = lambda: None,
    left_out: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Checks every case, then times all of them in turn.

    Every repeat times each case once, in an order shuffled by a fixed seed: what else the machine does meets
    all alike, and the ratio to the baseline is taken within a repeat.

    Args:
        group: what is measured.
        dtype: of its tensors.
        clock: of its device.
        repeats: how often every case is timed.
        patience_s: as for ``undisturbed``.
        on_repeat: called after every repeat.
        left_out: gets a line for every variant that cannot run here.

    Returns:
        One row of results per case that can run, in the order of the group; ``disturbed`` is the second
        result of ``undisturbed``.

    Raises:
        WrongResultError: a case is wrong.
        CaseUnavailableError: the baseline cannot run.
    """
    torch.manual_seed(SEED)
    cases, works, prepares, errors, inners = [], [], [], [], []
    for case in group.cases:
        try:
            work = case.build()
        except CaseUnavailableError as error:
            if case.is_baseline:
                raise
            if left_out is not None:
                left_out.append(f"{group.name_of(case)}: {error}")
            continue
        cases.append(case)
        errors.append(checked_error(group.name_of(case), work, dtype))
        prepares.append(getattr(work, "prepare", None))
        warm_ms = min(clock.time_ms(work, 1, prepares[-1]) for _ in range(WARM_UPS))
        works.append(work)
        inners.append(max(1, math.ceil(clock.sample_ms / warm_ms)))
    order, shuffler = list(range(len(works))), random.Random(SEED)

    def repeat() -> list[float]:
        shuffler.shuffle(order)
        times = [0.0] * len(works)
        for i in order:
            times[i] = clock.time_ms(works[i], inners[i], prepares[i])
        return times

    with no_collection():
        results, disturbed = undisturbed(repeat, repeats, clock, patience_s=patience_s, on_kept=on_repeat)
    times = list(zip(*results, strict=True))
    base = times[cases.index(group.baseline)]
    rows = []
    for case, work, samples, inner, error in zip(cases, works, times, inners, errors, strict=True):
        ratios = [a / b for a, b in zip(base, samples, strict=True)]
        rows.append(
            {
                "mode": group.mode,
                "sizes": dict(case.sizes),
                "label": case.label,
                "is_baseline": case.is_baseline,
                "code": getattr(work, "code", ""),
                "flops": case.flops,
                "bytes": case.bytes,
                "flop_ratio": group.baseline.flops / case.flops,
                "flops_saved": group.baseline.flops - case.flops,
                "error": error,
                "median_ms": statistics.median(samples),
                "p20_ms": percentile(samples, 0.2),
                "p80_ms": percentile(samples, 0.8),
                "min_ms": min(samples),
                "max_ms": max(samples),
                "speedup": statistics.median(ratios),
                "speedup_p20": percentile(ratios, 0.2),
                "speedup_p80": percentile(ratios, 0.8),
                # Within a repeat, as the ratios: what slows a repeat slows both.
                "ms_saved": statistics.median(a - b for a, b in zip(base, samples, strict=True)),
                "calls_per_sample": inner,
                "disturbed": disturbed,
                "samples_ms": list(samples),
            }
        )
        if case.tokens is not None:
            rows[-1]["tokens_per_s"] = 1e3 * case.tokens / statistics.median(samples)
        if case.cached_tokens is not None:
            cache_bytes = cast(CachingWork, work).cache_nbytes
            rows[-1] |= {"cache_bytes": cache_bytes, "cache_bytes_per_token": cache_bytes / case.cached_tokens}
        if case.wire_bytes is not None:
            rows[-1] |= {
                "wire_bytes": case.wire_bytes,
                "wire_ratio": (group.baseline.wire_bytes or 0) / case.wire_bytes,
            }
    for row in rows:
        if "cache_bytes" in row:
            row["cache_ratio"] = rows[cases.index(group.baseline)]["cache_bytes"] / row["cache_bytes"]
    return rows
