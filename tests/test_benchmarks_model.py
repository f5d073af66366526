"""The benchmark of a whole model: its steps are right, and its counted bytes are the caches'."""

import pytest
import torch

from benchmarks import model as bench
from structattn.testing.tolerances import FORWARD, relative_error

SHAPE = bench.ModelShape(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2)


def test_steps_are_right_and_bytes_are_counted() -> None:
    (group,) = bench.model_groups(torch.device("cpu"), torch.float32, shape=SHAPE, lengths=(40,), batches=(2,))
    sizes = {}
    for case in group.cases:
        work = case.build()
        first = work()
        work.prepare()
        assert torch.equal(work(), first)
        assert first.shape == (2, 1, bench.VOCABULARY)
        for actual, expected in work.check():
            assert relative_error(actual, expected) <= FORWARD[torch.float32]
        weights = sum(p.numel() for p in work.model.parameters()) - work.model.embedding.weight.numel()
        assert case.bytes == 4 * weights + work.cache_nbytes
        sizes[case.label] = work.cache_nbytes
    assert sizes["mlr 8 levels, values"] < sizes["mlr 8 levels"] < sizes["plain cache"]


def test_the_largest_batch_is_counted(capsys) -> None:
    bench.main(["--device", "cpu", "--memory-gib", "80"])
    lines = {line[:24].strip(): int(line.split()[-2]) for line in capsys.readouterr().out.splitlines()[1:]}
    # 32 layers x 2 x 8 heads x 128 numbers of 2 bytes are 128 KiB per token, and there are 5.9 billion weights.
    weights = 2 * (32 * (2.5 + 8) * 4096**2 + 2 * 32_000 * 4096)
    assert lines["plain cache"] == int((80 * 2**30 - weights) / (32768 * 131072))
    assert lines["mlr 8 levels, values"] == pytest.approx(4 * lines["plain cache"], abs=4)
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu"])
