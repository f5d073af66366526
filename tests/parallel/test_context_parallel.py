"""Attention over a sharded sequence: outputs, gradients and bytes, against one process and against what the
layout counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from calls import Case, in_one_process, in_this_process, joined
from cluster import Cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import structattn as sa
from structattn.errors import DerivativeError
from structattn.layout.shards import checked_shards
from structattn.parallel.agreement import NUMBERS
from structattn.testing.tolerances import assert_close

BLOCKS = sa.LevelLayout((3, 2, 2, 1), (64, 32, 16, 4))
VALUES = sa.LevelLayout((3, 2, 2, 1), (64, 32, 16, 4), "paper", (2, 3, 1, 2))
SLIDING = sa.LevelLayout.sliding((3, 2, 2, 1), (None, 23, 9, 3), "mup", (1, 2, 2, 3))
SEGMENTS = sa.LevelLayout.from_boundaries((3, 3, 2), ((0, 17, 31, 40), (0, 5, 17, 23, 31, 36, 40)), "standard")
ROWS = sa.LevelLayout.from_boundaries(
    (3, 3, 2), [[(0,), (0, 17, 31), (0, 5, 17, 31, 36)], [(0,), (0, 30), (0, 11, 30, 44)]]
)
NEAR = sa.LevelLayout.sliding((8,), (6,), sink_tokens=3)
HEADS = sa.HeadLayouts([None, NEAR, BLOCKS, NEAR])


def check(cluster: Cluster, case: Case) -> None:
    """Output, log-sum-exp and gradients of one process, and the bytes that the layout counts."""
    found = cluster.run(len(case.lengths), in_this_process, case)
    for result in found:
        if isinstance(result, Exception):
            raise result
    expected, actual = in_one_process(case), joined(case, found)
    seen = expected[1].isfinite()
    assert torch.equal(actual[1].isfinite(), seen)
    assert_close(actual[0], expected[0])
    assert_close(actual[1][seen], expected[1][seen])
    for a, b in zip(actual[2:], expected[2:], strict=True):
        assert_close(a, b, gradient=True)
    world = len(case.lengths)
    groups = case.layout.groups if isinstance(case.layout, sa.HeadLayouts) else [(case.layout, range(case.groups))]
    counts = [
        (layout or sa.LevelLayout((case.dim,), (2**30,))).communication_bytes(
            sum(case.lengths),
            case.lengths,
            order=case.order,
            is_causal=case.options.get("is_causal", True),
            window=case.options.get("window"),
            cu_seqlens=case.options.get("cu_seqlens"),
            num_kv_heads=len(heads),
            value_dim=case.value_dim,
            batch_size=case.batch,
            dtype=case.dtype,
        )
        for layout, heads in groups
    ]
    counts = [each for each in counts if any(each.forward)]
    for process, (_, sent) in enumerate(found):
        assert sent["all_gather"] == [NUMBERS * 8 * (world - 1)]
        exchanged = [each.forward[process] for each in counts] + [each.backward[process] for each in reversed(counts)]
        assert sent["all_to_all_single"] == exchanged


CASES = {
    "blocks": Case(layout=BLOCKS, lengths=(16, 16, 16, 16)),
    "sink tokens": Case(layout=replace(SLIDING, sink_tokens=5), lengths=(3, 9, 20, 11), groups=2),
    "sink tokens, not causal": Case(
        layout=sa.LevelLayout.sliding((8,), (6,), sink_tokens=7), lengths=(4, 11, 20), options={"is_causal": False}
    ),
    "blocks, not causal": Case(layout=BLOCKS, lengths=(11, 0, 20, 6), options={"is_causal": False}),
    "plain": Case(layout=None, lengths=(7, 9), groups=2, value_dim=3),
    "plain, not causal": Case(layout=None, lengths=(7, 9, 1), options={"is_causal": False, "window": 6}),
    "values": Case(layout=VALUES, lengths=(13, 20, 7), batch=2, heads=4, groups=2),
    "values, not causal": Case(layout=VALUES, lengths=(30, 1, 2, 30), options={"is_causal": False, "window": 29}),
    "sliding": Case(layout=SLIDING, lengths=(12, 13, 12, 4), heads=4, groups=2),
    "sliding, not causal": Case(layout=SLIDING, lengths=(5, 30, 6), options={"is_causal": False}),
    "segments": Case(layout=SEGMENTS, lengths=(10, 10, 10, 10), options={"window": 14}),
    "segments of rows": Case(layout=ROWS, lengths=(9, 20, 16), batch=2, options={"is_causal": False}),
    "packed": Case(layout=VALUES, lengths=(9, 21, 13, 5), options={"cu_seqlens": [0, 4, 15, 16, 40, 48]}),
    "packed segments": Case(
        layout=ROWS, lengths=(9, 20, 16), options={"cu_seqlens": [0, 18, 45], "is_causal": False, "window": 13}
    ),
    "terms": Case(
        layout=BLOCKS,
        lengths=(9, 20, 16),
        batch=2,
        has_sinks=True,
        options={"softcap": 0.9, "alibi_slopes": [[0.5, -0.1], [0.0, 1.0]], "scale": 0.4},
    ),
    "slopes of whole blocks": Case(
        layout=BLOCKS, lengths=(16, 16, 16, 16), batch=2, options={"alibi_slopes": [[0.5, -0.1], [0.0, 1.0]]}
    ),
    "terms of sequences": Case(
        layout=SLIDING,
        lengths=(9, 20, 16),
        has_sinks=True,
        options={"softcap": 0.9, "alibi_slopes": [0.5, -0.1], "is_causal": False, "cu_seqlens": [0, 20, 45]},
    ),
    "head-tail": Case(layout=BLOCKS, lengths=(16, 16, 16, 16), order="head-tail"),
    "head-tail, values": Case(layout=VALUES, lengths=(13, 20, 7), order="head-tail", batch=2, heads=4, groups=2),
    "head-tail, not causal": Case(
        layout=SLIDING, lengths=(5, 1, 0, 30), order="head-tail", options={"is_causal": False}, dtype=torch.float32
    ),
    "head-tail, packed segments": Case(
        layout=ROWS, lengths=(9, 20, 16), order="head-tail", options={"cu_seqlens": [0, 18, 45], "window": 13}
    ),
    "head-tail, terms": Case(
        layout=SLIDING,
        lengths=(9, 20, 16),
        order="head-tail",
        has_sinks=True,
        options={"softcap": 0.9, "alibi_slopes": [0.5, -0.1], "scale": 0.4},
    ),
    "head-tail, one process": Case(layout=BLOCKS, lengths=(45,), order="head-tail"),
    "heads": Case(layout=HEADS, lengths=(13, 20, 7, 0), batch=2, heads=8, groups=4, value_dim=5),
    "heads, terms": Case(
        layout=HEADS,
        lengths=(9, 20, 16),
        order="head-tail",
        batch=2,
        heads=4,
        groups=4,
        has_sinks=True,
        options={"softcap": 0.9, "alibi_slopes": [[0.5, -0.1, 0.2, 0.1], [0.0, 1.0, 0.3, 0.2]], "window": 30},
    ),
    "heads, packed, not causal": Case(
        layout=sa.HeadLayouts([VALUES, NEAR, VALUES]),
        lengths=(9, 21, 13, 5),
        heads=6,
        groups=3,
        options={"cu_seqlens": [0, 4, 15, 16, 40, 48], "is_causal": False},
    ),
    "heads of one layout": Case(layout=sa.HeadLayouts([SLIDING] * 2), lengths=(9, 20, 16), heads=4, groups=2),
    "empty": Case(layout=BLOCKS, lengths=(0, 0, 5)),
    "one process": Case(layout=BLOCKS, lengths=(45,)),
    "nothing travels": Case(layout=VALUES, lengths=(16, 16), options={"cu_seqlens": [0, 5, 16, 32]}),
    "large scores": Case(layout=BLOCKS, lengths=(16, 16, 16, 16), size=300.0),
    "float32": Case(layout=VALUES, lengths=(40, 40, 41), batch=2, heads=4, groups=2, dtype=torch.float32),
    "bfloat16": Case(layout=VALUES, lengths=(40, 40, 41), heads=4, groups=2, dtype=torch.bfloat16),
    "float16": Case(layout=SLIDING, lengths=(40, 40, 41), heads=4, groups=2, dtype=torch.float16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_one_process(cluster: Cluster, case: Case) -> None:
    check(cluster, case)


@st.composite
def cases(draw) -> Case:
    lengths = tuple(draw(st.lists(st.integers(0, 25), min_size=1, max_size=8).filter(any)))
    T, options = sum(lengths), {}
    levels = draw(st.integers(1, 4))
    ranks = tuple(draw(st.lists(st.integers(1, 3), min_size=levels, max_size=levels)))
    value_ranks = draw(st.none() | st.just(tuple(reversed(ranks))))
    scaling = draw(st.sampled_from(["variance", "mup", "paper", "paper_sum", "standard"]))
    batch = draw(st.integers(1, 2))
    rows = batch
    if draw(st.booleans()):
        inner = sorted(draw(st.sets(st.integers(1, T - 1), max_size=4))) if T > 1 else []
        batch, options["cu_seqlens"] = 1, [0, *inner, T]
        rows = len(inner) + 1
    how = draw(st.sampled_from(["blocks", "windows", "segments"]))
    if how == "windows":
        windows = sorted(draw(st.lists(st.integers(1, T + 3), min_size=levels, max_size=levels)), reverse=True)
        unbounded = draw(st.integers(0, levels))
        layout = sa.LevelLayout.sliding(ranks, [None] * unbounded + windows[unbounded:], scaling, value_ranks)
    elif how == "blocks":
        sizes = [draw(st.integers(1, 20))]
        for _ in range(levels - 1):
            sizes.insert(0, sizes[0] * draw(st.sampled_from([1, 2, 2, 3])))
        layout = sa.LevelLayout(ranks, sizes, scaling, value_ranks)
    else:
        boundaries = []
        for _ in range(draw(st.sampled_from([1, rows]))):
            starts = [(0,)]
            for _ in range(levels - 1):
                starts.append(tuple(sorted({*starts[-1], *draw(st.lists(st.integers(1, T + 3), max_size=4))})))
            boundaries.append(starts)
        layout = sa.LevelLayout.from_boundaries(ranks, boundaries, scaling, value_ranks)
    layout = replace(layout, sink_tokens=draw(st.sampled_from([0, 0, 0, 2, 9])))
    groups, repeats = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    options |= {
        "is_causal": draw(st.booleans()),
        "window": draw(st.sampled_from([None, None, 1, 5, 40])),
        "scale": draw(st.sampled_from([None, None, 0.7, -0.2])),
        "softcap": draw(st.sampled_from([None, None, 0.5])),
    }
    if draw(st.booleans()):
        rows_of_slopes = draw(st.sampled_from([1, batch]))
        slopes = [[0.1 * (n - row) for n in range(groups * repeats)] for row in range(rows_of_slopes)]
        options["alibi_slopes"] = slopes if rows_of_slopes == batch else slopes[0]
    return Case(
        layout=layout,
        lengths=lengths,
        order=draw(st.sampled_from(["contiguous", "head-tail"])),
        batch=batch,
        heads=groups * repeats,
        groups=groups,
        dim=sum(ranks),
        value_dim=draw(st.integers(1, 5)) if value_ranks is None else sum(ranks),
        options=options,
        has_sinks=draw(st.booleans()),
        # A soft cap has no slope left at large scores: gradients would be rounding alone.
        size=draw(st.sampled_from([1.0, 1.0, 200.0])) if options["softcap"] is None else 1.0,
    )


@pytest.mark.full
@given(case=cases())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_call_equals_one_process(eight: Cluster, case: Case) -> None:
    check(eight, case)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_longer_sequences_equal_one_process(eight: Cluster, world: int, dtype: torch.dtype) -> None:
    """Rectangles of many tiles, shards that halve with the blocks and shards that do not."""
    for T in (1024, 1031):
        lengths = checked_shards(T, world)
        for layout in (
            sa.LevelLayout.halving((2,) * 4, 1024, "variance", (2,) * 4),
            sa.LevelLayout.sliding((2,) * 4, (None, 512, 256, 50), "variance", (2,) * 4),
        ):
            for order in ("contiguous", "head-tail"):
                check(eight, Case(layout=layout, lengths=lengths, order=order, heads=2, groups=1, dtype=dtype))
            check(eight, Case(layout=layout, lengths=lengths, dtype=dtype, options={"is_causal": False}))


def second_derivative(mesh: DeviceMesh) -> Any:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = sa.parallel.context_parallel(BLOCKS, mesh)(q, q, q)
    with pytest.raises(DerivativeError, match="first derivatives only"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    return True


def test_second_derivatives_raise(cluster: Cluster) -> None:
    assert cluster.run(2, second_derivative) == [True, True]


def around(mesh: DeviceMesh) -> Any:
    """Under autocast, in a compiled function and with activation checkpointing the results are the same
    numbers, or those of bfloat16.
    """
    torch.manual_seed(mesh.get_local_rank())
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    attention = sa.parallel.context_parallel(BLOCKS, mesh)
    out = attention(q, k, v)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(lambda *x: attention(*x), q, k, v, use_reentrant=False)
    assert torch.equal(again, out)
    for a, b in zip(torch.autograd.grad(again.square().sum(), (q, k, v)), grads, strict=True):
        assert torch.equal(a, b)
    compiled = torch.compile(lambda *x: attention(*x) * 2, backend="eager")
    assert torch.equal(compiled(q, k, v), out * 2)
    with torch.autocast("cpu", torch.bfloat16):
        half = attention(q, k, v)
    assert half.dtype == torch.bfloat16
    assert_close(half, out.bfloat16())
    with torch.no_grad():
        assert torch.equal(attention(q, k, v), out)
    return True


@pytest.mark.full
def test_checkpointing_compiling_and_autocast(cluster: Cluster) -> None:
    assert cluster.run(3, around) == [True] * 3
