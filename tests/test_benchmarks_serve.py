"""The benchmark of a server: the tokens of all variants are right, in pools of one size."""

import importlib.util

import pytest
import torch
from benchmarks import serve as bench
from benchmarks import storm

from structattn import serve
from structattn.testing.tolerances import FORWARD, relative_error

SHAPE = bench.ModelShape(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_tokens_are_right_and_pools_are_of_one_size(monkeypatch) -> None:
    monkeypatch.setattr(bench, "NEW", 3)
    (group,) = bench.serve_groups(torch.device("cpu"), torch.float32, shape=SHAPE, lengths=[40], requests=5)
    assert {case.label for case in group.cases} == set(bench.specs(SHAPE))
    flops = {case.label: case.flops for case in group.cases}
    assert flops["mlr 8 levels, values"] < flops["mlr 8 levels"] < flops["one level"] == flops[bench.BASELINE]
    for case in group.cases:
        if case.label in (bench.BASELINE, "mlr 8 levels, values"):
            work = case.build()
            assert work.cache_nbytes == 4 * 64 * (2 * 16 * 4)  # four requests of two pages of 32 tokens
            for actual, expected in work.check():
                assert relative_error(actual, expected) <= FORWARD[torch.float32]


@pytest.mark.full
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in serve._LIBRARIES), reason="needs the extra serve"
)
def test_a_storm_leaves_no_page_behind(capsys) -> None:
    assert storm.main(["--minutes", "0.1", "--growth", "1"]) == 0
    assert " 0 wrong, 0 failed" in capsys.readouterr().out
