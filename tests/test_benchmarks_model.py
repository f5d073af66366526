"""The benchmark of a whole model: its steps are right, its counted bytes and tokens are real, and so is what
a step saves.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from benchmarks import model as bench
from benchmarks import report, timing, training
from benchmarks.gpu import results as gpu_results
from benchmarks.registry import Check

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


class ScriptedClock(timing.CpuClock):
    """Clock whose calls of a variant take the given milliseconds, in turn."""

    def __init__(self, script) -> None:
        super().__init__()
        self._left = {label: iter(times) for label, times in script.items()}

    def time_ms(self, call, inner, prepare=None) -> float:
        return next(self._left[call.label])


class Labelled:
    def __init__(self, label: str) -> None:
        self.label = label

    def __call__(self) -> None: ...

    def check(self) -> list[Check]:
        return [(torch.ones(1), torch.ones(1))]


def measured_steps():
    """Rows of training steps of which one variant saves FLOPs and time, one saves FLOPs only, and one takes
    more of both.
    """
    (group,) = training.training_groups(
        torch.device("cpu"), torch.float32, baseline="SDPA", shape=SHAPE_TRAINED, lengths=(512,), tokens=2**20
    )
    script = {
        "SDPA": (400.0, 100.0, 90.0),
        "mlr 8 levels, values": (390.0, 70.0, 65.0),
        "mlr 4 levels": (410.0, 97.0, 96.0),
        "bilinear-btt:1": (2400.0, 2100.0, 2000.0),
    }
    cases = tuple(replace(c, build=partial(Labelled, c.label)) for c in group.cases if c.label in script)
    clock = ScriptedClock({label: (1.0,) * timing.WARM_UPS + times for label, times in script.items()})
    group = replace(group, cases=cases)
    return timing.measure_group(group, dtype=torch.float32, clock=clock, repeats=3, patience_s=0)


def test_what_a_step_saves_is_the_baseline_less_the_variant() -> None:
    rows = {row["label"]: row for row in measured_steps()}
    for row in rows.values():
        assert row["flops_saved"] == rows["SDPA"]["flops"] - row["flops"]
    # The median of the differences: the slow first repeat is slow for all.
    assert {label: row["ms_saved"] for label, row in rows.items()} == {
        "SDPA": 0,
        "mlr 8 levels, values": 25,
        "mlr 4 levels": -6,
        "bilinear-btt:1": -2000,
    }
    assert rows["mlr 8 levels, values"]["flops_saved"] > rows["mlr 4 levels"]["flops_saved"] > 0
    assert rows["bilinear-btt:1"]["flops_saved"] < 0


def test_both_savings_are_next_to_each_other_in_the_tables() -> None:
    rows = measured_steps()
    result = {"rows": [row | {"times_floor": 1.0} for row in rows], "axis": "S", "baseline": "SDPA"}
    text = report.mode_table(result, "training step")
    assert "| GFLOP saved | ms saved | tokens/s |" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| bilinear-btt:1"))
    assert line.split(" | ")[-3:-1] == [report.number(rows[-1]["flops_saved"] / 1e9), "-2,000"]
    # A file of before has none of the two, and its table neither.
    old = [
        {key: value for key, value in row.items() if key not in ("flops_saved", "ms_saved")} for row in result["rows"]
    ]
    assert "saved" not in report.mode_table(result | {"rows": old}, "training step")
    assert report.optional_cells(old[1], gpu_results.SPEED_COLUMNS)[:2] == ["", ""]


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (-0.0123, "-0.0123"), (-99.94, "-99.9"), (-1234.5, "-1,234"), (-1e-5, "-0.000010")]
)
def test_numbers_below_zero_are_written_as_those_above(value: float, text: str) -> None:
    assert report.number(value) == text
    assert value == 0 or report.number(-value) == text.removeprefix("-")


def test_the_largest_batch_is_counted(capsys) -> None:
    bench.main(["--device", "cpu", "--memory-gib", "80"])
    lines = {line[:24].strip(): int(line.split()[-2]) for line in capsys.readouterr().out.splitlines()[1:]}
    # 32 layers x 2 x 8 heads x 128 numbers of 2 bytes are 128 KiB per token, and there are 5.9 billion
    # weights.
    weights = 2 * (32 * (2.5 + 8) * 4096**2 + 2 * 32_000 * 4096)
    assert lines[bench.BASELINE] == int((80 * 2**30 - weights) / (32768 * 131072))
    assert lines["mlr 8 levels, values"] == pytest.approx(4 * lines[bench.BASELINE], abs=4)
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu"])
