"""Spans that are cut into rectangles: every visible pair once, and the results of one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from calls import Case, in_one_process, in_this_process, joined
from cluster import Cluster
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import structattn as sa
from structattn.layout.shards import Shards
from structattn.parallel import rectangles
from structattn.testing.tolerances import assert_close

LAYOUTS = {
    "sliding": sa.LevelLayout.sliding((3, 2, 2, 1), (None, 23, 9, 3), "variance", (1, 2, 2, 3)),
    "bounded": sa.LevelLayout.sliding((4, 4), (17, 6)),
    "blocks": sa.LevelLayout((3, 2, 2, 1), (64, 32, 16, 4)),
    "one level": sa.LevelLayout((8,), (64,)),
}


@given(
    layout=st.sampled_from(list(LAYOUTS.values())),
    lengths=st.lists(st.integers(0, 25), min_size=2, max_size=4).filter(any),
    window=st.sampled_from([None, None, 1, 14]),
    is_causal=st.booleans(),
    divides_bands=st.booleans(),
)
def test_every_visible_pair_is_in_one_rectangle(layout, lengths, window, is_causal, divides_bands) -> None:
    T, shards = sum(lengths), tuple(range(len(lengths)))
    call = Shards(
        layout=layout,
        lengths=tuple(lengths),
        holders=shards,
        seqlens=(0, T),
        batch=1,
        is_causal=is_causal,
        window=window,
    )
    with mock.patch.object(rectangles, "LEAF", 4):
        rectangles.rectangles_of.cache_clear()
        for shard in shards:
            for span in call.arriving(shard):
                seen = set()
                for rectangle in rectangles.rectangles_of(layout, span, window, divides_bands=divides_bands):
                    rows = range(span.first_query + rectangle.queries[0], span.first_query + rectangle.queries[1])
                    columns = range(span.first_key + rectangle.keys[0], span.first_key + rectangle.keys[1])
                    assert not divides_bands or rectangle.is_uniform or layout.windows is None or len(rows) <= 4
                    for i in rows:
                        for j in columns:
                            is_visible = window is None or abs(i - j) < window
                            levels = layout.shared_levels(i, j) if is_visible else 0
                            assert levels == rectangle.level if rectangle.is_uniform else levels <= rectangle.level
                            assert (i, j) not in seen
                            seen.add((i, j))
                queries = range(span.first_query, span.first_query + span.queries[1] - span.queries[0])
                for i in queries:
                    for j in range(span.first_key, span.first_key + span.tokens[1] - span.tokens[0]):
                        if (window is None or abs(i - j) < window) and layout.shared_levels(i, j):
                            assert (i, j) in seen
    rectangles.rectangles_of.cache_clear()


def cut(mesh: DeviceMesh, case: Case) -> Any:
    """As ``in_this_process``, with every span cut, as where there is a fused kernel; and whether there were
    spans.
    """
    rectangles.rectangles_of.cache_clear()
    with (
        mock.patch.object(rectangles, "LEAF", 4),
        mock.patch("structattn.parallel.partial_attention.has_fused", return_value=True) as asked,
    ):
        found = in_this_process(mesh, case)
    rectangles.rectangles_of.cache_clear()
    return found, asked.called


CASES = {
    "sliding": Case(layout=LAYOUTS["sliding"], lengths=(17, 20), heads=4, groups=2),
    "not causal": Case(layout=LAYOUTS["sliding"], lengths=(30, 30), batch=2, options={"is_causal": False}),
    "window, softcap": Case(layout=LAYOUTS["blocks"], lengths=(32, 32), options={"window": 29, "softcap": 0.7}),
    "heads and tails": Case(layout=LAYOUTS["bounded"], lengths=(33, 20), order="head-tail", options={"scale": 0.4}),
    "float32": Case(layout=LAYOUTS["sliding"], lengths=(50, 60), order="head-tail", dtype=torch.float32),
    "bfloat16": Case(layout=LAYOUTS["sliding"], lengths=(50, 60), heads=4, groups=2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cut_spans_equal_one_process(cluster: Cluster, case: Case) -> None:
    found = cluster.run(2, cut, case)
    for result in found:
        if isinstance(result, Exception):
            raise result
    assert found[1][1]
    expected, actual = in_one_process(case), joined(case, [result for result, _ in found])
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])
    for a, b in zip(actual[2:], expected[2:], strict=True):
        assert_close(a, b, gradient=True)
