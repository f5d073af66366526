"""What goes wrong in one process is one clear error in every process, before any key travels."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, counted
from torch.distributed.device_mesh import DeviceMesh

import structattn as sa
from structattn.errors import CommunicationError, ConfigError, ShapeError, StructAttnError

LAYOUT = sa.LevelLayout((4, 2, 2), (16, 8, 4))


def odd_one(mesh: DeviceMesh, change: dict[str, Any]) -> StructAttnError | None:
    """A call that process 1 makes in another way; the error that it gives, once no key has travelled."""
    given: dict[str, Any] = {
        "layout": LAYOUT,
        "order": "contiguous",
        "heads": 2,
        "groups": 1,
        "value_dim": 3,
        "dtype": torch.float32,
    }
    tokens, grad = {"q": 5, "k": 5, "v": 5}, False
    options: dict[str, Any] = {}
    if mesh.get_local_rank() == 1:
        for name, value in change.items():
            if name in tokens:
                tokens[name] = value
            elif name == "grad":
                grad = value
            else:
                (given if name in given else options)[name] = value
    heads, dim = {"q": given["heads"], "k": given["groups"], "v": given["groups"]}, {"v": given["value_dim"]}
    q, k, v = (
        torch.randn(1, heads[x], tokens[x], dim.get(x, 8), dtype=given["dtype"], requires_grad=grad) for x in "qkv"
    )
    if "mask" in options:
        q = options.pop("mask")
    attention = sa.parallel.context_parallel(given["layout"], mesh, order=given["order"])
    with counted() as sent:
        try:
            attention(q, k, v, **options)
        except StructAttnError as error:
            assert sent["all_to_all_single"] == []
            return error
    return None


CHANGES = {
    "heads": ({"heads": 4}, r"the shape of q is \[1, 2, \"tokens\", 8\] in process 0, 2; \[1, 4, .*\] in process 1"),
    "values": ({"value_dim": 4}, "the shape of v"),
    "dtype": ({"dtype": torch.float64}, 'the dtype of q is "torch.float32" in process 0, 2; "torch.float64"'),
    "layout": (
        {"layout": sa.LevelLayout((4, 2, 2), (16, 8, 2))},
        r"layout is .*16, 8, 4.* 0, 2; .*16, 8, 2.* 1 \(counted",
    ),
    "order": ({"order": "head-tail"}, 'order is "contiguous" in process 0, 2; "head-tail" in process 1'),
    "no layout": ({"layout": None}, "layout is"),
    "causal": ({"is_causal": False}, "is_causal is true in process 0, 2; false in process 1"),
    "window": ({"window": 3}, "window is null"),
    "scale": ({"scale": 0.5}, "scale is null in process 0, 2; 0.5 in process 1"),
    "softcap": ({"softcap": 2}, "softcap"),
    "slopes": ({"alibi_slopes": torch.ones(2)}, "alibi_slopes"),
    "sinks": ({"sinks": torch.ones(2)}, "sinks is false"),
    "packed": ({"cu_seqlens": torch.tensor([0, 4, 15])}, "cu_seqlens is null"),
    "gradients": ({"grad": True}, "whether a backward pass will follow is false in process 0, 2; true in process 1"),
}


@pytest.mark.parametrize(("change", "match"), CHANGES.values(), ids=CHANGES.keys())
def test_processes_that_differ(cluster: Cluster, change: dict[str, Any], match: str) -> None:
    errors = cluster.run(3, odd_one, change)
    for error in errors:
        assert isinstance(error, ConfigError)
        with pytest.raises(ConfigError, match=f"all processes must make the same call, .*{match}"):
            raise error


WRONG = {
    "keys": ({"k": 4, "v": 4}, ShapeError, "queries and keys of the same tokens: got 5 and 4"),
    "values": ({"v": 4}, ShapeError, "k has 5 positions but v has 4"),
    "scale": ({"scale": float("nan")}, ConfigError, "scale"),
    "packed": ({"cu_seqlens": torch.tensor([0.0, 15.0])}, ShapeError, "cu_seqlens must be"),
    "no tensor": ({"mask": None}, ConfigError | ShapeError, "q must be a"),
    "sinks": ({"sinks": torch.ones(3)}, ShapeError, "sinks must have one"),
}


@pytest.mark.parametrize(("change", "kind", "match"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_in_one_process(cluster: Cluster, change: dict[str, Any], kind: Any, match: str) -> None:
    errors = cluster.run(3, odd_one, change)
    for index, error in enumerate(errors):
        if index == 1:
            assert isinstance(error, kind)
        else:
            assert isinstance(error, ConfigError)
            assert "nothing was computed, since the call of process 1 of 3 (counted from 0) is wrong" in str(error)
        with pytest.raises(StructAttnError, match=match):
            raise error


def wrong_total(mesh: DeviceMesh) -> None:
    q = torch.randn(1, 2, 5, 8)
    sa.parallel.context_parallel(LAYOUT, mesh)(q, q, q, cu_seqlens=torch.tensor([0, 5]))


def test_boundaries_of_all_tokens(cluster: Cluster) -> None:
    for error in cluster.run(3, wrong_total):
        with pytest.raises(
            ShapeError, match=r"cu_seqlens must rise or stay the same from 0 to the length 15, .* got \[0, 5\]"
        ):
            raise error


def wrong_makings(mesh: DeviceMesh) -> bool:  # in all processes, which new meshes need
    for layout in (sa.GlobalWindowLayout((4, 4), 3), "mlr:4|4", 3):
        with pytest.raises(ConfigError, match="layout must be a LevelLayout, HeadLayouts or None"):
            sa.parallel.context_parallel(layout, mesh)
    with pytest.raises(ConfigError, match="a head of a divided sequence has a LevelLayout or None, got HeadLayouts"):
        sa.parallel.context_parallel(sa.HeadLayouts([None, sa.GlobalWindowLayout((4, 4), 3)]), mesh)
    heads = sa.parallel.context_parallel(sa.HeadLayouts([None] * 3), mesh)
    with pytest.raises(ShapeError, match="need 3 heads, one for each of the layouts, got 2"):
        heads(*torch.zeros(3, 1, 2, 4, 8))
    for other in (None, 3, dist.group.WORLD):
        with pytest.raises(ConfigError, match="mesh must be a torch.distributed.device_mesh.DeviceMesh"):
            sa.parallel.context_parallel(LAYOUT, other)
    flat = DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=("data", "context"))
    with pytest.raises(ConfigError, match=r"must have one dimension, got 2: take one of its"):
        sa.parallel.context_parallel(LAYOUT, flat)
    q = torch.randn(1, 2, 5, 8)
    assert sa.parallel.context_parallel(LAYOUT, flat["context"])(q, q, q).shape == q.shape
    first = DeviceMesh("cpu", [0])
    if mesh.get_local_rank():
        with pytest.raises(ConfigError, match=f"this process, {mesh.get_local_rank()}, is not one of the mesh"):
            sa.parallel.context_parallel(LAYOUT, first)
    meta = q.to("meta")
    with pytest.raises(StructAttnError, match="the mesh is for tensors on cpu, got q on meta"):
        sa.parallel.context_parallel(LAYOUT, mesh)(meta, meta, meta)
    return True


def test_wrong_layouts_meshes_and_devices(cluster: Cluster) -> None:
    assert cluster.run(4, wrong_makings) == [True] * 4


def ends_in_the_middle(mesh: DeviceMesh, how: signal.Signals, in_backward: bool) -> tuple[float, str]:
    """Process 1 gets a signal while the others wait for its keys; how long they wait, and what they say."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    attention = sa.parallel.context_parallel(LAYOUT, mesh)
    out = attention(q, q, q)
    if mesh.get_local_rank() == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), how)).start()
        time.sleep(1000)
    start = time.monotonic()
    try:
        out.sum().backward() if in_backward else attention(q, q, q)
    except CommunicationError as error:
        return time.monotonic() - start, str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.full
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_killed_process_ends_the_others(tmp_path, in_backward: bool) -> None:
    cluster = Cluster(3, tmp_path)
    for end in cluster.ends:
        end.send((3, ends_in_the_middle, (signal.SIGKILL, in_backward)))
    for index in (0, 2):
        assert cluster.ends[index].poll(30)
        waited, said = cluster.ends[index].recv()
        assert waited < 5
        assert f"process {index} of 3 (counted from 0) lost the others: one has ended, or has not answered" in said
        assert "\n" not in said
    cluster.close()


@pytest.mark.full
def test_a_stopped_process_ends_the_others_after_the_timeout(tmp_path) -> None:
    cluster = Cluster(3, tmp_path, seconds=4)
    for end in cluster.ends:
        end.send((3, ends_in_the_middle, (signal.SIGSTOP, False)))
    try:
        for index in (0, 2):
            assert cluster.ends[index].poll(30)
            waited, said = cluster.ends[index].recv()
            assert 3 < waited < 10
            assert "within the timeout of the process group, which init_process_group(timeout=...) sets" in said
    finally:
        os.kill(cluster.processes[1].pid, signal.SIGKILL)
        cluster.close()


def wrong_calls(mesh: DeviceMesh) -> bool:
    with pytest.raises(ConfigError, match="unknown order 'zigzag': known: 'contiguous', 'head-tail'"):
        sa.parallel.context_parallel(LAYOUT, mesh, order="zigzag")  # type: ignore[arg-type]
    attention = sa.parallel.context_parallel(LAYOUT, mesh, order="head-tail")
    assert attention.positions(7).tolist() == [[0, 1, 6], [2, 5], [3, 4]][mesh.get_local_rank()]
    with pytest.raises(ConfigError, match="tokens of each of 3 processes, got 2 numbers"):
        attention.positions([3, 4])
    with pytest.raises(ConfigError, match="num_positions must be an int of at least 1"):
        attention.positions(0)
    return True


def test_orders_and_positions(cluster: Cluster) -> None:
    assert cluster.run(3, wrong_calls) == [True] * 3
