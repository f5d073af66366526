"""Benchmark "context-parallel": one causal call over a sequence that is divided among processes, against ring
attention.

Ring attention is the same code with one level: every process gets all dimensions of all earlier keys. Shards
are contiguous, or, where a variant says so, heads and tails (``order="head-tail"``). The processes are of
this machine and talk by gloo, so that a time is that of cores which they share, and of copies in memory; the
bytes between them are those of any network. This process is the last one of each group, which has the most
keys of contiguous shards: the peak memory is its.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.attention import layout_of, picked_rows, row_reference
from benchmarks.registry import Case, CaseUnavailableError, Check, Group, benchmark
from structattn.layout.levels import LevelLayout
from structattn.layout.shards import Order
from structattn.parallel import context_parallel

BASELINE = "one level (ring attention)"
HEAD_TAIL = ", head-tail"
LEVELS, SLIDING = "mlr 8x8 values", "sliding 8x8 values"
LABELS = (BASELINE, "one level" + HEAD_TAIL, "mlr 8x8", LEVELS, LEVELS + HEAD_TAIL, SLIDING, SLIDING + HEAD_TAIL)
LENGTHS = (8192, 32768)
PROCESSES = (2, 4)
HEADS, DIM = 1, 64
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all processes of a case know.

    Attributes:
        label, length, processes, backward: of the case.
        heads: H.
        dtype: of the tensors.
    """

    label: str
    length: int
    processes: int
    backward: bool
    heads: int
    dtype: torch.dtype

    @property
    def layout(self) -> LevelLayout:
        """What the case computes."""
        return layout_of(self.label.removesuffix(HEAD_TAIL), self.length, DIM)

    @property
    def order(self) -> Order:
        """Which tokens a process holds."""
        return "head-tail" if self.label.endswith(HEAD_TAIL) else "contiguous"

    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v and the cotangent of the whole sequence, the same in every process."""
        draw = torch.Generator().manual_seed(SEED)
        shape = (1, self.heads, self.length, DIM)
        return tuple(torch.randn(shape, generator=draw, dtype=self.dtype) for _ in range(4))


class Shard:
    """The tokens of one process, and its part of the work."""

    def __init__(self, setting: Setting, mesh: DeviceMesh) -> None:
        self._attend = context_parallel(setting.layout, mesh, order=setting.order)
        self.own = self._attend.positions(setting.length)
        *inputs, cotangent = (x[:, :, self.own] for x in setting.tensors())
        self._inputs = [x.requires_grad_(setting.backward) for x in inputs]
        self._cotangent = cotangent if setting.backward else None

    def run(self, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """The output of this process, and its gradients; of some rows of the whole sequence alone, if these
        are given.
        """
        if self._cotangent is None:
            with torch.no_grad():
                return (self._attend(*self._inputs),)
        cotangent = self._cotangent
        if rows is not None:
            cotangent = cotangent * torch.isin(self.own, rows)[:, None]
        out = self._attend(*self._inputs)
        return (out.detach(), *torch.autograd.grad(out, self._inputs, cotangent))


class Neighbors:
    """The other processes, which wait for what this one tells them."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [context.Pipe() for _ in range(count - 1)]
        self._ends: list[Connection] = [own for own, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(other, index, count, store, torch.get_num_threads()), daemon=True)
            for index, (_, other) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        self._count = count
        self.meshes = _joined(count - 1, count, store)

    def tell(self, processes: int, *words: Any) -> None:
        """Sends a task to those that are in the mesh of so many processes."""
        for end in self._ends[self._count - processes :]:
            end.send(words)

    def wait(self, processes: int) -> None:
        """Until all of them have done it."""
        for end in self._ends[self._count - processes :]:
            end.recv()

    def close(self) -> None:
        """Ends them, and leaves the group; new ones may be started afterwards."""
        atexit.unregister(self.close)
        neighbors.cache_clear()
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()
        dist.destroy_process_group()
        self._folder.cleanup()


def _joined(index: int, count: int, store: str) -> dict[int, DeviceMesh]:
    """The meshes of the last processes, by how many they are."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=count)
    return {n: DeviceMesh("cpu", list(range(count - n, count))) for n in PROCESSES if n <= count}


def _serve(end: Connection, index: int, count: int, store: str, threads: int) -> None:
    """What another process does: makes shards, and runs them together with the others."""
    torch.set_num_threads(threads)
    meshes, shards = _joined(index, count, store), {}
    while (words := end.recv()) is not None:
        setting, *rows = words
        if rows:
            shards[setting].run(*rows)
        else:  # also a second time, where its memory is measured
            shards[setting] = Shard(setting, meshes[setting.processes])
        end.send(None)
    dist.destroy_process_group()


@functools.cache
def neighbors() -> Neighbors:
    """The other processes, started at the first call."""
    if dist.is_available() and dist.is_initialized():
        raise CaseUnavailableError("this process is in a process group already")
    found = Neighbors(max(PROCESSES))
    atexit.register(found.close)
    return found


@dataclass(frozen=True)
class ContextParallelWork:
    """One call in all processes, of which this one is the last."""

    setting: Setting
    others: Neighbors
    shard: Shard

    @classmethod
    def of(cls, setting: Setting) -> ContextParallelWork:
        """Makes the shards."""
        others = neighbors()
        others.tell(setting.processes, setting)
        shard = Shard(setting, others.meshes[setting.processes])
        others.wait(setting.processes)
        return cls(setting, others, shard)

    def __call__(self, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """The output of this process, and its gradients, once all processes have theirs."""
        self.others.tell(self.setting.processes, self.setting, rows)
        found = self.shard.run(rows)
        self.others.wait(self.setting.processes)
        return found

    def check(self) -> Iterator[Check]:
        """Some rows of this process against float64, and the gradients of all its keys from a cotangent that
        is zero but in rows of all.
        """
        own, rows = self.shard.own, picked_rows(self.setting.length)
        q, k, v, cotangent = self.setting.tensors()
        out, *gradients = self(rows)
        exact = row_reference(q, k, v, self.setting.layout, rows, cotangent if gradients else None)
        yield out[:, :, torch.isin(own, rows)], exact[0][:, :, torch.isin(rows, own)]
        for actual, expected in zip(gradients, exact[1:], strict=True):
            yield actual, expected[:, :, own], True


def context_parallel_groups(
    dtype: torch.dtype, lengths: Iterable[int] = LENGTHS, processes: Iterable[int] = PROCESSES, heads: int = HEADS
) -> Iterator[Group]:
    """A group for each length and number of processes, forward and with gradients."""
    for length in lengths:
        for count in processes:
            for mode in ("forward", "forward+backward"):
                sizes = {"processes": count, "T": length, "H": heads, "D": DIM}
                yield Group(mode=mode, cases=tuple(_case(mode, label, sizes, dtype) for label in LABELS))


def _case(mode: str, label: str, sizes: dict[str, int], dtype: torch.dtype) -> Case:
    length, heads, backward = sizes["T"], sizes["H"], mode == "forward+backward"
    setting = Setting(
        label=label, length=length, processes=sizes["processes"], backward=backward, heads=heads, dtype=dtype
    )
    scores, values = setting.layout.score_flops(length), setting.layout.value_flops(length, DIM)
    sent = setting.layout.communication_bytes(
        length, setting.processes, order=setting.order, num_kv_heads=heads, value_dim=DIM, dtype=dtype
    )
    return Case(
        benchmark="context-parallel",
        label=label,
        sizes=sizes,
        build=lambda: ContextParallelWork.of(setting),
        flops=heads * (4 * scores + 3 * values if backward else scores + values),
        bytes=(2 if backward else 1) * 4 * heads * length * DIM * dtype.itemsize,
        is_baseline=label == BASELINE,
        measures_memory=backward,
        wire_bytes=sum(sent.forward) + (sum(sent.backward) if backward else 0),
    )


@benchmark(
    "context-parallel",
    "Causal attention over a sequence that processes of one machine divide, in contiguous shards or in heads and "
    "tails.",
    baseline=BASELINE,
    axis="T",
    quick={"cpu": (8192,)},
)
def context_parallel_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """CPU: B = 1, H = 1, T 8,192 and 32,768 on 2 and 4 processes. There is none on a GPU, which needs one for
    each process.
    """
    return context_parallel_groups(dtype) if device.type == "cpu" else iter(())
