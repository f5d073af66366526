"""The benchmarks run, compare before they time, and write what they promise; no test here asserts a time."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the package

from benchmarks import linear, report, run, timing  # noqa: E402
from benchmarks.registry import Group  # noqa: E402
from structattn import StructuredLinear  # noqa: E402

CPU, FLOAT32 = torch.device("cpu"), torch.float32


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    """One call per sample, on one thread, whatever other programs do: times do not matter here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.CpuClock, "sample_ms", 1e-6)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("results")
    run.main(["linear", "--only", "E=256,", "--repeats", "2", "--patience", "0", "--out", str(folder)])
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def result(files: list[Path]) -> dict[str, Any]:
    return json.loads(files[0].read_text())


def test_every_variant_is_present_in_both_modes(result: dict[str, Any]) -> None:
    expected = {
        (mode, label) for mode in ("forward", "forward+backward") for label in (linear.BASELINE, *linear.STRUCTURES)
    }
    assert {(row["mode"], row["label"]) for row in result["rows"]} == expected
    assert len(result["rows"]) == len(expected)


def test_numbers_are_finite_and_positive(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        numbers = [value for value in row.values() if isinstance(value, float)] + row["samples_ms"]
        assert len(row["samples_ms"]) == 2
        assert all(math.isfinite(value) and value >= 0 for value in numbers), row
        assert row["min_ms"] <= row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] <= row["max_ms"]
    assert all(value > 0 for value in result["ceilings"].values())


def test_the_baseline_is_compared_with_itself(result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if row["is_baseline"]]
    assert [row["speedup"] for row in rows] == [1, 1]
    assert [row["flop_ratio"] for row in rows] == [1, 1]


def test_counts(result: dict[str, Any]) -> None:
    rows = {(row["mode"], row["label"]): row for row in result["rows"]}
    forward, both = rows["forward", "btt:1"], rows["forward+backward", "btt:1"]
    assert forward["flop_ratio"] == both["flop_ratio"] == 8  # 256 * 256 / (2 * 256 * 16)
    assert forward["flops"] == 1024 * 2 * 2 * 256 * 16
    assert both["flops"] == 3 * forward["flops"]
    assert forward["bytes"] == 4 * (2 * 1024 * 256 + 2 * 256 * 16)
    assert both["bytes"] == 2 * forward["bytes"]


def test_the_files_are_dated_and_name_nothing_of_this_machine(files: list[Path], result: dict[str, Any]) -> None:
    stem = f"{result['date']}-linear-cpu-float32"
    assert [path.name for path in files] == [f"{stem}.json", f"{stem}.md"]
    for path in files:
        text = path.read_text()
        assert "python -m benchmarks.run linear --device cpu --dtype float32 --repeats 2 --only E=256," in text
        assert str(ROOT) not in text
        assert str(path.parent) not in text
        assert str(Path.home()) not in text
    table = files[1].read_text()
    assert all(label.replace("|", "\\|") in table for label in linear.STRUCTURES)


class WrongOutput(StructuredLinear):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class WrongGradient(StructuredLinear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return 2 * out - out.detach()


@pytest.mark.parametrize(("wrong", "mode"), [(WrongOutput, "forward"), (WrongGradient, "forward+backward")])
def test_a_wrong_variant_raises(wrong: type[StructuredLinear], mode: str) -> None:
    def measure(kind: type[StructuredLinear]) -> None:
        groups = linear.linear_groups(CPU, FLOAT32, widths=[64], tokens=9)
        group = next(found for g in groups if g.mode == mode and (found := run.selected(g, "/btt:1")))
        layer = kind(64, 64, "btt:1", bias=False)
        work = linear.linear_work(layer, 64, 9, backward=mode == "forward+backward")
        changed = replace(group.cases[1], build=lambda: work)
        timing.measure_group(
            Group(mode=mode, cases=(group.baseline, changed)),
            dtype=FLOAT32,
            clock=timing.CpuClock(),
            repeats=1,
            patience_s=0,
        )

    measure(StructuredLinear)
    with pytest.raises(timing.WrongResultError, match=r"E=64,tokens=9/btt:1: relative errors"):
        measure(wrong)


def test_a_group_has_one_baseline() -> None:
    cases = next(iter(linear.linear_groups(CPU, FLOAT32, widths=[64]))).cases
    with pytest.raises(ValueError, match="exactly one baseline"):
        Group(mode="forward", cases=cases[1:])
    with pytest.raises(ValueError, match="must differ"):
        Group(mode="forward", cases=(*cases, cases[1]))


@pytest.mark.parametrize(
    ("speedups", "start"),
    [([0.5, 2, 3], 128), ([2, 0.5, 3], 256), ([2, 3, 1], None), ([1.5, 2, 3], 64)],
)
def test_the_crossover_is_where_the_variant_stays_faster(speedups: list[float], start: int | None) -> None:
    sizes = [64, 128, 256]
    rows = [
        {"mode": "forward", "label": "a", "is_baseline": False, "sizes": {"E": E, "tokens": 9}, "speedup": speedup}
        for E, speedup in zip(sizes, speedups, strict=True)
    ]
    (found,) = report.crossovers(rows, "E")
    assert found == {"mode": "forward", "label": "a", "sizes": {"tokens": 9}, "start": start, "largest": 256}


def test_disturbed_results_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> tuple[list[int], int]:
        return timing.undisturbed(lambda: next(results), 2, timing.CpuClock(), patience_s=60)

    monkeypatch.setattr(timing, "wait_until_quiet", lambda threads, patience_s: 25)
    verdicts, results = iter([True, False, True, False]), iter(range(4))
    monkeypatch.setattr(timing.Watch, "disturbed", lambda self, threads: next(verdicts))
    assert measured() == ([1, 3], 0)
    verdicts, results = iter([True, False, True, True]), iter(range(4))
    assert measured() == ([1, 0], 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda(tmp_path: Path) -> None:
    run.main(["linear", "--device", "cuda", "--only", "E=256,.*btt:1", "--repeats", "2", "--out", str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 2
