"""Processes that make the same call together: started once, many calls each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import structattn as sa

SECONDS = 60  # for a collective, and for an answer
# One import for all processes.
PRELOADED = [
    "structattn.parallel.context",
    "structattn.parallel.tensor",
    "structattn.integrations.transformers",
    "transformers.models.llama.modeling_llama",
]


class Cluster:
    """Processes that share a gloo group over a file; ``run`` calls a function in the first of them."""

    def __init__(self, count: int, folder: Path, seconds: float = SECONDS) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.count = count
        pipes = [context.Pipe() for _ in range(count)]
        self.ends = [own for own, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(other, index, count, str(folder / "store"), seconds), daemon=True)
            for index, (_, other) in enumerate(pipes)
        ]
        for process, (_, other) in zip(self.processes, pipes, strict=True):
            process.start()
            other.close()

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of a mesh of the first ``world`` processes gives in each of them; what it raises is
        given too.
        """
        for end in self.ends[:world]:
            end.send((world, function, arguments))
        results = []
        for index, end in enumerate(self.ends[:world]):
            assert end.poll(2 * SECONDS), f"process {index} does not answer"
            results.append(end.recv())
        for index, result in enumerate(results):
            assert not (isinstance(result, tuple) and result and result[0] == "crash"), f"process {index}:\n{result[1]}"
        return results

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(end: Any, index: int, count: int, store: str, seconds: float) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=index, world_size=count, timeout=timedelta(seconds=seconds)
    )
    meshes = {world: DeviceMesh("cpu", list(range(world))) for world in range(1, count + 1)}
    while (task := end.recv()) is not None:
        world, function, arguments = task
        try:
            end.send(function(meshes[world], *arguments))
        except sa.errors.StructAttnError as error:
            end.send(error)
        except Exception:
            end.send(("crash", traceback.format_exc()))
    dist.destroy_process_group()


@contextlib.contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    """The bytes that this process sends to others in each collective; any other collective than the known
    ones fails.
    """
    sent: dict[str, list[int]] = {"all_to_all_single": [], "all_gather": []}
    original = {name: getattr(dist, name) for name in _COLLECTIVES}

    def all_to_all_single(output: Any, x: Any, output_sizes: Any, sizes: Any, group: Any, async_op: bool) -> Any:
        own = dist.get_rank(group)
        assert sizes[own] == output_sizes[own] == 0, "a process sends to itself"
        assert sum(sizes) == x.numel()
        sent["all_to_all_single"].append(x.numel() * x.element_size())
        return original["all_to_all_single"](output, x, output_sizes, sizes, group=group, async_op=async_op)

    def all_gather(outputs: Any, x: Any, group: Any) -> Any:
        sent["all_gather"].append(x.numel() * x.element_size() * (len(outputs) - 1))
        return original["all_gather"](outputs, x, group=group)

    def other(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("a collective that is not counted")

    for name in _COLLECTIVES:
        setattr(dist, name, other)
    dist.all_to_all_single, dist.all_gather = all_to_all_single, all_gather  # type: ignore[assignment]
    try:
        yield sent
    finally:
        for name, function in original.items():
            setattr(dist, name, function)


_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
