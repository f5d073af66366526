"""The benchmark of a whole model: its steps are right, and its counted bytes and tokens are real."""

import pytest
import torch

from benchmarks import model as bench
from benchmarks import training
from structattn.testing.tolerances import FORWARD, assert_close, relative_error

SHAPE_TRAINED = bench.ModelShape(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=2)
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
    assert sizes["mlr 8 levels, values"] < sizes["mlr 8 levels"] < sizes[bench.BASELINE]


@pytest.mark.parametrize("length", [16, training.MOST_DENSE * 2])
def test_training_steps_are_right_and_tokens_are_counted(length) -> None:
    (group,) = training.training_groups(
        torch.device("cpu"), torch.float32, baseline="SDPA", shape=SHAPE_TRAINED, lengths=(length,), tokens=2 * length
    )
    for case in group.cases:
        work = case.build()
        assert [x.shape for x in work.batch] == [(2, length)] * 2
        for actual, expected, *is_gradient in work.check():
            assert_close(actual, expected, gradient=bool(is_gradient))
        assert case.tokens == 2 * length
    flops = {case.label: case.flops for case in group.cases}
    assert flops["mlr 8 levels, values"] < flops["mlr 8 levels"] < flops["standard"] == flops["SDPA"]


def test_the_largest_batch_is_counted(capsys) -> None:
    bench.main(["--device", "cpu", "--memory-gib", "80"])
    lines = {line[:24].strip(): int(line.split()[-2]) for line in capsys.readouterr().out.splitlines()[1:]}
    # 32 layers x 2 x 8 heads x 128 numbers of 2 bytes are 128 KiB per token, and there are 5.9 billion weights.
    weights = 2 * (32 * (2.5 + 8) * 4096**2 + 2 * 32_000 * 4096)
    assert lines[bench.BASELINE] == int((80 * 2**30 - weights) / (32768 * 131072))
    assert lines["mlr 8 levels, values"] == pytest.approx(4 * lines[bench.BASELINE], abs=4)
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu"])
