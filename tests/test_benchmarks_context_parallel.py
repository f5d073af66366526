"""The benchmark of context parallelism: all variants are right in processes that it starts, and what it says
of their bytes is what the layouts count.
"""

import multiprocessing

import pytest
import torch
from benchmarks import context_parallel as bench

from structattn.testing.tolerances import FORWARD, GRADIENT, relative_error


@pytest.mark.full
def test_results_are_right_and_bytes_are_counted(monkeypatch) -> None:
    monkeypatch.setattr(bench, "PROCESSES", (2,))
    before = set(multiprocessing.active_children())  # of other tests
    forward, backward = bench.context_parallel_groups(torch.float32, lengths=[256], processes=[2], heads=2)
    sent = {case.label: case.wire_bytes for case in forward.cases}
    assert sent[bench.BASELINE] == 2 * 128 * 128 * 4  # heads, keys, dimensions of key and value, bytes
    assert sent["mlr 8x8"] == sent[bench.BASELINE] * 9 / 16
    assert sent["mlr 8x8 values"] == sent[bench.BASELINE] / 8
    assert sent["one level, head-tail"] == 2 * sent[bench.BASELINE]
    assert (
        sent["mlr 8x8 values, head-tail"] == 2 * sent["mlr 8x8 values"] + 2 * 64 * 16 * 4 * 2
    )  # of level 2 both halves
    assert {case.label: case.wire_bytes for case in backward.cases} == {label: 2 * n for label, n in sent.items()}
    try:
        for group in (forward, backward):
            for case in group.cases:
                case.build()()  # as where memory is measured: the same case is built again
                for actual, expected, *is_gradient in case.build().check():
                    assert relative_error(actual, expected) <= (GRADIENT if is_gradient else FORWARD)[torch.float32]
    finally:
        bench.neighbors().close()
    assert not torch.distributed.is_initialized()
    assert set(multiprocessing.active_children()) <= before
