"""The benchmarks run, compare before they time, and write what they promise; no test here asserts a time."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the package

from benchmarks import attention, decode, figure, linear, memory, report, run, step, timing  # noqa: E402
from benchmarks.registry import BENCHMARKS, CaseUnavailableError, Group  # noqa: E402

from structattn import LevelLayout, StructuredLinear, cli, extras, structured_attention  # noqa: E402
from structattn.errors import ConfigError  # noqa: E402
from structattn.testing.tolerances import SAME_MODEL, assert_close  # noqa: E402

CPU, FLOAT32 = torch.device("cpu"), torch.float32


@contextmanager
def _quick_clock() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.CpuClock, "sample_ms", 1e-6)
        patch.setattr(run, "measure_ceilings", partial(timing.measure_ceilings, repeats=1))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    """One call per sample, on one thread, whatever other programs do: times do not matter here."""
    with _quick_clock():
        yield


@pytest.fixture(scope="session")  # it takes 7 s, and a module may be left and entered again
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("results")
    with _quick_clock():
        run.main(["linear", "--only", "E=256,", "--repeats", "2", "--patience", "0", "--out", str(folder)])
    assert (folder / "owner.json").is_file()
    return sorted(path for path in folder.iterdir() if path.name.startswith("20"))


@pytest.fixture(scope="module")
def result(files: list[Path]) -> dict[str, Any]:
    return json.loads(files[0].read_text())


@pytest.mark.full
def test_every_variant_is_present_in_both_modes(result: dict[str, Any]) -> None:
    expected = {
        (mode, label) for mode in ("forward", "forward+backward") for label in (linear.BASELINE, *linear.STRUCTURES)
    }
    assert {(row["mode"], row["label"]) for row in result["rows"]} == expected
    assert len(result["rows"]) == len(expected)


@pytest.mark.full
def test_numbers_are_finite_and_positive(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        numbers = [value for value in row.values() if isinstance(value, float)] + row["samples_ms"]
        assert len(row["samples_ms"]) == 2
        assert all(math.isfinite(value) for value in numbers), row
        assert all(value >= 0 for name, value in row.items() if isinstance(value, float) and name != "ms_saved"), row
        assert row["min_ms"] <= row["p20_ms"] <= row["median_ms"] <= row["p80_ms"] <= row["max_ms"]
    assert all(value > 0 for value in result["ceilings"].values())


@pytest.mark.full
def test_the_baseline_is_compared_with_itself(result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if row["is_baseline"]]
    assert [row["speedup"] for row in rows] == [1, 1]
    assert [row["flop_ratio"] for row in rows] == [1, 1]
    assert [(row["flops_saved"], row["ms_saved"]) for row in rows] == [(0, 0), (0, 0)]


@pytest.mark.full
def test_counts(result: dict[str, Any]) -> None:
    rows = {(row["mode"], row["label"]): row for row in result["rows"]}
    forward, both = rows["forward", "btt:1"], rows["forward+backward", "btt:1"]
    assert forward["flop_ratio"] == both["flop_ratio"] == 8  # 256 * 256 / (2 * 256 * 16)
    assert forward["flops"] == 1024 * 2 * 2 * 256 * 16
    assert both["flops"] == 3 * forward["flops"]
    assert forward["bytes"] == 4 * (2 * 1024 * 256 + 2 * 256 * 16)
    assert both["bytes"] == 2 * forward["bytes"]


@pytest.mark.full
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


def _attention_group(mode: str, dim: int = 64, length: int = 128) -> Group:
    groups = attention.attention_groups(CPU, FLOAT32, lengths=[length], heads=2)
    group = next(g for g in groups if g.mode == mode and g.sizes["D"] == dim)
    others = (attention.FLEX, attention.ONNX)  # which compiles long, and which may not be here
    return replace(group, cases=tuple(case for case in group.cases if case.label not in others))


@pytest.mark.quick(dim=[64])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
def test_every_attention_is_right(mode: str, dim: int) -> None:
    group = _attention_group(mode, dim)
    rows = timing.measure_group(group, dtype=FLOAT32, clock=timing.CpuClock(), repeats=1, patience_s=0)
    labels = {attention.BASELINE, *attention.LAYOUTS[dim], *([attention.DENSE] if dim == 64 else [])}
    assert {row["label"] for row in rows} == labels
    # "native" where STRUCTATTN_CACHE has the C++ code.
    assert {row["code"] for row in rows} in ({"", "blocked"}, {"", "native"})


def test_counts_of_attention() -> None:
    pairs = 128 * 129 // 2
    forward = {case.label: case for case in _attention_group("forward").cases}
    both = {case.label: case for case in _attention_group("forward+backward").cases}
    layout = LevelLayout.halving((8,) * 8, 128)
    assert forward[attention.BASELINE].flops == 2 * 4 * 64 * pairs
    assert both[attention.BASELINE].flops == 2 * 14 * 64 * pairs
    assert both["mlr 8x8"].flops == 2 * (4 * layout.score_flops(128) + 3 * 2 * 64 * pairs)
    assert forward["mlr 8x8"].bytes == 4 * 4 * 2 * 128 * 64
    assert both["mlr 8x8"].bytes == 2 * forward["mlr 8x8"].bytes


def test_attention_on_cuda_is_planned() -> None:
    groups = list(attention.attention_groups(torch.device("cuda"), torch.bfloat16))
    assert {group.mode for group in groups} == {"forward", "forward+backward", "decode"}
    assert {g.sizes["T"] for g in groups if g.mode != "decode"} == set(attention.LENGTHS["cuda"])
    assert all(case.flops > 0 and case.bytes > 0 for group in groups for case in group.cases)
    decode = next(g for g in groups if g.mode == "decode" and g.sizes["T"] == 65536)
    keys = LevelLayout.halving((8,) * 8, 65536).key_cache_size(65536)
    assert decode.sizes == {"T": 65536, "B": 16, "H": 16, "D": 64}
    assert next(c for c in decode.cases if c.label == "mlr 8x8").flops == 16 * 16 * 2 * (keys + 64 * 65536)
    assert attention.DENSE not in {case.label for case in decode.cases}


@pytest.mark.parametrize("queries", [48, 1])
@pytest.mark.parametrize("value_ranks", [None, (2, 2, 4)])
def test_the_reference_of_rows_is_the_definition(value_ranks: tuple[int, ...] | None, queries: int) -> None:
    torch.manual_seed(0)
    layout = LevelLayout.halving((4, 2, 2), 48, value_ranks=value_ranks)
    q, k, v = (torch.randn(2, 2, n, 8, dtype=torch.float64, requires_grad=True) for n in (queries, 48, 48))
    rows = torch.arange(0, queries, 3)
    cotangent = torch.zeros_like(q)
    cotangent[:, :, rows] = torch.randn(2, 2, len(rows), 8, dtype=torch.float64)
    out = structured_attention(q, k, v, layout, backend="reference")
    expected = (out[:, :, rows], *torch.autograd.grad(out, (q, k, v), cotangent))
    found = attention.row_reference(q, k, v, layout, rows, cotangent)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def _grown(x: Tensor) -> Tensor:
    """The same numbers with a gradient that is 1 % too large."""
    return 1.01 * x - 0.01 * x.detach()


def _without_a_row(out: Tensor) -> Tensor:
    """The same numbers, but one row that no check picks gives no gradient."""
    return torch.cat((out[:, :, :9], out[:, :, 9:10].detach(), out[:, :, 10:]), dim=2)


WRONG_ATTENTION = {
    "out": lambda attend: lambda q, k, v: 1.01 * attend(q, k, v),
    "dq": lambda attend: lambda q, k, v: attend(_grown(q), k, v),
    "dk": lambda attend: lambda q, k, v: attend(q, _grown(k), v),
    "dv": lambda attend: lambda q, k, v: attend(q, k, _grown(v)),
    "a row": lambda attend: lambda q, k, v: _without_a_row(attend(q, k, v)),
}


@pytest.mark.parametrize("label", [attention.BASELINE, "mlr 8x8", "mlr 8x8 values"])
@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("wrong", WRONG_ATTENTION)
def test_a_wrong_attention_raises(wrong: str, is_full: bool, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHECKED_ROWS", 5)
    monkeypatch.setattr(attention, "CHECKED_SCORES", 2**24 if is_full else 0)
    assert 9 not in attention.picked_rows(128)
    torch.manual_seed(0)
    work = attention.attention_work(
        label, batch=1, heads=2, queries=128, keys=128, dim=64, backward=True, device=CPU, dtype=FLOAT32
    )
    assert timing.checked_error("right", work, FLOAT32) < 5e-5
    changed = replace(work, attend=WRONG_ATTENTION[wrong](work.attend))
    with pytest.raises(timing.WrongResultError):
        timing.checked_error("wrong", changed, FLOAT32)


def test_causal_blocks_are_the_causal_mask() -> None:
    mask = attention.causal_block_mask(512, CPU)
    assert torch.equal(mask.to_dense()[0, 0], torch.ones(4, 4, dtype=torch.int32).tril())
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.flatten().tolist() == [0, 1, 2, 3]


def test_a_variant_that_cannot_run_is_left_out() -> None:
    def build() -> attention.AttentionWork:
        raise CaseUnavailableError("no compiler")

    group = _attention_group("forward", 128)
    broken = replace(group, cases=(group.cases[0], replace(group.cases[1], build=build)))
    left_out: list[str] = []
    rows = timing.measure_group(
        broken, dtype=FLOAT32, clock=timing.CpuClock(), repeats=1, patience_s=0, left_out=left_out
    )
    assert [row["label"] for row in rows] == [attention.BASELINE]
    assert left_out == ["attention/forward/T=128,B=1,H=2,D=128/one level: no compiler"]


@pytest.mark.full
def test_peak_memory_is_that_of_one_call() -> None:
    bench = BENCHMARKS["attention"]
    group = next(iter(run.chosen_groups(bench, CPU, FLOAT32, only="forward/T=512,.*D=64/dense")))
    (case,) = (case for case in group.cases if case.label == attention.DENSE)
    scores = 4 * 512 * 512 * 4
    found = memory.peak(bench, group, case, CPU, FLOAT32)
    assert scores < found.resident < 20 * scores
    assert found.tensors is not None
    assert scores < found.tensors < 4 * scores


def test_the_peak_of_tensors_counts_what_is_there_at_once() -> None:
    def work() -> torch.Tensor:
        for _ in range(3):  # one is freed before the next is there
            torch.zeros(2**20, dtype=torch.uint8)
        pair = [torch.zeros(2**20, dtype=torch.uint8) for _ in range(2)]
        return torch.cat(pair)

    assert memory.tensor_growth(work) == 4 * 2**20


def test_quick_takes_the_registered_sizes() -> None:
    for name, sizes in (("attention", {512, 2048}), ("linear", {256, 1024})):
        bench = BENCHMARKS[name]
        groups = run.chosen_groups(bench, CPU, FLOAT32, quick=True)
        assert {group.sizes[bench.axis] for group in groups} == sizes
    groups = run.chosen_groups(BENCHMARKS["decode"], CPU, FLOAT32, quick=True)
    assert [(group.sizes["S"], group.sizes["B"]) for group in groups] == [(1024, 1), (16384, 1)]
    with pytest.raises(ConfigError, match="matches no case of attention with --quick"):
        run.chosen_groups(BENCHMARKS["attention"], CPU, FLOAT32, only="T=1024", quick=True)
    with pytest.raises(ConfigError, match="no regular expression"):
        run.chosen_groups(BENCHMARKS["attention"], CPU, FLOAT32, only="(")


@pytest.mark.full
def test_a_run_with_memory_has_a_figure_and_exponents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peaks = {attention.BASELINE: 4 * 2**20, "mlr 8x8": 10 * 2**20}
    monkeypatch.setattr(memory, "peak", lambda *names: memory.Peak(peaks[names[2].label], peaks[names[2].label] // 2))
    monkeypatch.setattr(run, "measure_ceilings", lambda *_: timing.Ceilings(flops_per_s=1e9, bytes_per_s=1e9))
    monkeypatch.setattr(attention, "MEMORY_LENGTHS", (256,))
    bench = replace(
        BENCHMARKS["attention"],
        groups=lambda device, dtype: attention.attention_groups(device, dtype, lengths=(128, 256, 512), heads=1),
        fit=(128, 512),
    )
    only = f"D=64/({attention.BASELINE}|mlr 8x8)$"
    result = run.run(bench, device="cpu", dtype="float32", repeats=1, only=only, patience_s=0)
    assert {row["peak_ratio"] for row in result["rows"] if "peak_ratio" in row} == {1, 2.5}
    assert {row["points"] for row in result["exponents"]} == {3}
    paths = report.write(result, tmp_path)
    assert [path.suffix for path in paths] == [".json", ".md", ".png"]
    assert sorted(paths) == sorted(tmp_path.iterdir())
    assert paths[2].read_bytes().startswith(b"\x89PNG\r\n")
    text = paths[1].read_text()
    assert "| peak MiB | of the baseline's | peak of tensors MiB | of the baseline's tensors |" in text
    assert "| 10 | 2.5 | 5 | 2.5 |" in text
    assert "## Exponent" in text
    assert "Code blocked: mlr 8x8" in text
    peaks[attention.BASELINE] = memory.RESOLUTION - 1
    result = run.run(bench, device="cpu", dtype="float32", repeats=1, only=only, patience_s=0)
    assert not any("peak_ratio" in row for row in result["rows"])
    assert "| peak MiB | peak of tensors MiB |" in report.markdown(result)
    assert report.write(result | {"quick": True}, tmp_path)[0].stem.endswith("-quick")


@pytest.mark.full
def test_a_result_without_memory_looks_as_before(files: list[Path], result: dict[str, Any]) -> None:
    text = files[1].read_text()
    assert "| times the floor | GFLOP saved | ms saved |\n" in text
    assert "peak" not in text
    assert "Exponent" not in text
    assert figure.png(result) is None  # one width


def test_the_exponent_of_a_power_law() -> None:
    rows = [
        {"mode": "forward", "label": "a", "is_baseline": False, "sizes": {"T": T}, "median_ms": 3 * T**1.5}
        for T in (512, 2048, 4096, 8192)
    ]
    rows[0]["median_ms"] = 1  # outside of the range
    (found,) = report.exponents(rows, "T", (2048, 16384))
    assert found["exponent"] == pytest.approx(1.5)
    assert found["points"] == 3
    assert report.exponents(rows[:3], "T", (2048, 16384)) == []


def test_prepare_comes_before_every_call_and_is_not_timed() -> None:
    calls: list[str] = []

    def prepare() -> None:
        calls.append("prepare")
        time.sleep(0.05)

    assert timing.CpuClock().time_ms(lambda: calls.append("call"), 3, prepare) < 50
    assert calls == ["prepare", "call"] * 3


def test_decoding_is_planned() -> None:
    for device in ("cpu", "cuda"):
        groups = list(BENCHMARKS["decode"].groups(torch.device(device), FLOAT32))
        assert [(group.sizes["B"], group.sizes["S"]) for group in groups] == [
            (batch, 2**power) for batch in (1, 8) for power in range(10, 17)
        ]
        labels = {decode.BASELINE, decode.CAT, decode.OURS, decode.PLAIN_LEVEL, decode.GROWING, *attention.LAYOUTS[64]}
        labels |= {*decode.STORAGES, decode.STREAMING, decode.HALF}
        assert all({case.label for case in group.cases} == labels for group in groups[:-1])
        assert {case.label for case in groups[-1].cases} == labels - {decode.CAT}


def _decoding(label: str, length: int, batch: int = 2, heads: int = 3) -> tuple[decode.Case, decode.DecodeWork]:
    (group,) = decode.decode_groups(CPU, FLOAT32, lengths=[length], batches=[batch], heads=heads)
    case = next(case for case in group.cases if case.label == label)
    work = case.build()
    work.prepare()
    work()
    return case, work


@pytest.mark.parametrize(
    ("label", "keys", "values"),
    [
        (decode.BASELINE, [64 * 1024], [64 * 1024]),
        (decode.CAT, [64 * 1024], [64 * 1024]),
        (decode.PLAIN_LEVEL, [64 * 1024], [64 * 1024]),
        ("mlr 8x8", [8 * 1024 // 2**level for level in range(8)], [64 * 1024]),
        ("mlr 8x8 values", [8 * 1024 // 2**level for level in range(8)], [8 * 1024 // 2**level for level in range(8)]),
        (
            "mlr 32|8|6|4|4|4|4|2",
            [rank * 1024 // 2**level for level, rank in enumerate((32, 8, 6, 4, 4, 4, 4, 2))],
            [64 * 1024],
        ),
    ],
)
def test_counts_of_decoding(label: str, keys: list[int], values: list[int]) -> None:
    case, work = _decoding(label, 1024)
    assert case.flops == 2 * 3 * 2 * (sum(keys) + sum(values))  # batch, heads, multiply and add
    assert work.cache_nbytes == 2 * 3 * 4 * (sum(keys) + sum(values))
    copied = work.cache_nbytes if label == decode.CAT else 0
    assert case.bytes == work.cache_nbytes + copied + 2 * 3 * 4 * 2 * 64
    if isinstance(work.cache, decode.LevelsCache):
        assert work.cache.cache.length == 1024
        assert work.cache.cache.key_nbytes == 2 * 3 * 4 * sum(keys)


@pytest.mark.parametrize("label", [*decode.STORAGES, decode.STREAMING])
def test_steps_of_few_bits_and_few_tokens_are_right(label: str) -> None:
    case, work = _decoding(label, 1024)
    for out, expected in work.check():
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert work.cache_nbytes < 0.55 * 2 * 3 * 2 * 4 * 64 * 1024
    assert case.bytes < 0.4 * 2 * 3 * 2 * 4 * 64 * 1024


def test_what_a_growing_cache_allocates_is_rounded_up_to_pages() -> None:
    _, work = _decoding(decode.GROWING, 1536)
    kept = (8 + 64) * 2048 + sum(8 * 1536 // 2**level for level in range(1, 8))  # blocks are not rounded up
    assert work.cache_nbytes == 2 * 3 * 4 * kept


def test_the_factors_of_eight_equal_levels() -> None:
    plain, levels, values = (_decoding(x, 1024)[1] for x in (decode.BASELINE, "mlr 8x8", "mlr 8x8 values"))
    assert isinstance(levels.cache, decode.LevelsCache)
    assert plain.cache_nbytes / 2 / levels.cache.cache.key_nbytes == pytest.approx(4, abs=0.05)
    assert plain.cache_nbytes / levels.cache_nbytes == pytest.approx(1.6, abs=0.05)
    assert plain.cache_nbytes / values.cache_nbytes == pytest.approx(4, abs=0.05)


class _Wrong:
    """A cache with one method replaced."""

    def __init__(self, cache: decode.Cache, **methods: Callable[..., Any]) -> None:
        self.cache, self.nbytes = cache, cache.nbytes
        self.attend, self.forget = methods.get("attend", cache.attend), methods.get("forget", cache.forget)


WRONG_CACHES: dict[str, Callable[[decode.Cache], _Wrong]] = {
    "output": lambda cache: _Wrong(cache, attend=lambda q, k, v: 1.01 * cache.attend(q, k, v)),
    "new key": lambda cache: _Wrong(cache, attend=lambda q, k, v: cache.attend(q, -k, v)),
    "new value": lambda cache: _Wrong(cache, attend=lambda q, k, v: cache.attend(q, k, -v)),
    "never forgets": lambda cache: _Wrong(cache, forget=lambda: None),
}


@pytest.mark.parametrize("label", ["mlr 8x8", "mlr 8x8 values", decode.PLAIN_LEVEL, decode.GROWING])
@pytest.mark.parametrize("wrong", WRONG_CACHES)
def test_a_wrong_cache_raises(wrong: str, label: str) -> None:
    _, work = _decoding(label, 128)
    assert timing.checked_error("right", work, FLOAT32) < 1e-5
    with pytest.raises(timing.WrongResultError):
        timing.checked_error("wrong", replace(work, cache=WRONG_CACHES[wrong](work.cache)), FLOAT32)


def test_another_layout_is_wrong() -> None:
    work = decode.decode_work("mlr 8x8", batch=1, length=128, heads=2, device=CPU, dtype=FLOAT32)
    with pytest.raises(timing.WrongResultError):
        timing.checked_error("wrong", replace(work, layout=decode.decode_layout(decode.BASELINE, 128)), FLOAT32)


def test_the_reference_of_decoding_is_the_definition() -> None:
    q, k, v = (x.double() for x in decode.tokens(2, 3, 128, CPU, FLOAT32))
    for label in ("mlr 8x8 values", decode.BASELINE):
        layout = decode.decode_layout(label, 128)
        expected = structured_attention(q, k, v, layout, is_causal=True, backend="reference")
        assert_close(decode.reference(2, 3, 128, layout, CPU, FLOAT32), expected)


@pytest.mark.full
def test_a_run_of_decoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "peak", lambda *_: memory.Peak(4 * 2**20, None))
    monkeypatch.setattr(run, "measure_ceilings", lambda *_: timing.Ceilings(flops_per_s=1e9, bytes_per_s=1e9))
    monkeypatch.setattr(decode, "MEMORY_LENGTHS", (256,))
    bench = replace(
        BENCHMARKS["decode"],
        groups=lambda device, dtype: decode.decode_groups(
            device, dtype, lengths=(128, 256, 512), batches=(1, 2), heads=1
        ),
    )
    result = run.run(bench, device="cpu", dtype="float32", repeats=1, patience_s=0)
    labels = {decode.BASELINE, decode.CAT, decode.OURS, decode.PLAIN_LEVEL, decode.GROWING, *attention.LAYOUTS[64]}
    labels |= {*decode.STORAGES, decode.STREAMING}
    assert Counter(row["label"] for row in result["rows"]) == dict.fromkeys(labels, 2 * 3)
    for row in result["rows"]:
        cached = row["sizes"]["B"] * row["sizes"]["S"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["sizes"]["B"] / row["median_ms"])
        assert row["cache_bytes_per_token"] == row["cache_bytes"] / cached
        assert row["cache_ratio"] == pytest.approx(512 / row["cache_bytes_per_token"])  # 2 * 64 * 4 bytes
        assert ("peak_bytes" in row) == (cached == 256 and row["sizes"]["B"] == 1)
    paths = report.write(result, tmp_path)
    assert [path.suffix for path in paths] == [".json", ".md", ".png"]
    head = next(line for line in paths[1].read_text().splitlines() if line.startswith("| variant | S | B |"))
    assert "| tokens/s | cache bytes per token | times smaller | peak MiB |" in head


def test_steps_are_planned() -> None:
    groups = list(BENCHMARKS["step"].groups(CPU, FLOAT32))
    assert [(group.mode, group.sizes["E"], group.sizes["T"]) for group in groups] == [
        (mode, *size) for size in ((64, 64), (16, 24)) for mode in ("eager", "compiled")
    ]
    plain = {step.BASELINE, step.MULTIHEAD}
    ours = {"standard", "standard:1", "bilinear-btt:1", "bilinear-btt:2", "bilinear-mlr"}
    assert all({case.label for case in group.cases} == plain | ours for group in groups)
    for group in groups:
        flops = {case.label: case.flops for case in group.cases}
        assert flops[step.BASELINE] == flops["standard"] < flops["bilinear-btt:1"] < flops["bilinear-btt:2"]


SMALL_STEP = step.StepShape(embed_dim=16, num_layers=1, dim=2, num_points=3, ranks="1|1")


def test_steps_are_right_and_the_same_each_time() -> None:
    (group,) = step.step_groups(CPU, FLOAT32, shapes=[SMALL_STEP], modes=["eager"])
    for case in group.cases:
        work = case.build()
        assert timing.checked_error(case.label, work, FLOAT32) < 5e-5
        losses = []
        for _ in range(2):
            work.prepare()
            losses.append([float(work()), float(work())])
        assert losses[0][0] == pytest.approx(losses[1][0], rel=SAME_MODEL)
        # A layer norm of one or two features has gradients that are rounding, and AdamW's first step is their
        # sign.
        assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-2)
        assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-3)  # weights moved


def test_a_wrong_step_raises() -> None:
    model, batch = step.build_model("bilinear-btt:1", SMALL_STEP), step.prompts(SMALL_STEP, CPU, FLOAT32)
    work = step.StepWork(model, step.loss, batch, is_compiled=False)
    right = work.loss
    work.loss = lambda xs, ys: 1.01 * right(xs, ys)
    with pytest.raises(timing.WrongResultError):
        timing.checked_error("wrong", work, FLOAT32)
    work.loss = lambda xs, ys: right(xs, ys).detach() + 0 * work.model.read_out.weight.sum()
    with pytest.raises(ValueError, match="no gradient in .*read_in"):
        timing.checked_error("wrong", work, FLOAT32)


@pytest.mark.full
def test_a_compiled_step_is_right() -> None:
    (group,) = step.step_groups(CPU, FLOAT32, shapes=[SMALL_STEP], modes=["compiled"])
    built = {case.label: case.build() for case in group.cases if case.label in ("standard", "bilinear-btt:1")}
    for label, work in built.items():  # the second one did not push the first one out
        assert timing.checked_error(label, work, FLOAT32) < 5e-5


@pytest.mark.full
def test_the_command_runs_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "linear", "--quick", "--only", "forward/E=256,.*btt:1$", "--repeats", "1", "--patience", "0"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    assert "# linear, cpu, float32" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir() if "-quick" not in path.name) == ["owner.json"]
    (tmp_path / "owner.json").unlink()
    (tmp_path / "mine.txt").write_text("mine")
    assert cli.main([*words, "--out", str(tmp_path)]) == 2
    assert "'mine.txt'" in capsys.readouterr().err
    command = json.loads(next(tmp_path.glob("*-quick.json")).read_text())["command"]
    assert command.startswith("python -m benchmarks.run linear")
    assert "--quick" in command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lineal"], "did you mean 'linear'"),
        (["linear", "--only", "nothing"], "matches no case"),
        (["linear", "--repeats", "0"], "at least 1"),
        (["linear", "--dtype", "float23"], "did you mean 'float32'"),
        (["linear", "--device", "tpu"], "Known: 'cpu', 'cuda'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_a_checkout_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "structattn" / "extras.py"))
    assert cli.main(["bench", "attention"]) == 2
    error = capsys.readouterr().err
    assert "clone it" in error
    assert "pip install -e" in error
    assert error.count("\n") == 1


def test_info_says_what_auto_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (plain,) = (line for line in lines if line.startswith("  1 level, T = 4096"))
    assert "scaled_dot_product_attention: one level" in plain
    assert sum(line.startswith("  8 levels, T = ") for line in lines) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", ["linear/.*E=256,.*btt:1", "attention/.*/T=4096,.*(mlr|Flex)", "attention/decode", "decode/.*S=1024"]
)
def test_cuda(name: str, tmp_path: Path) -> None:
    words = [name.partition("/")[0], "--device", "cuda", "--dtype", "bfloat16", "--only", name, "--repeats", "2"]
    run.main([*words, "--out", str(tmp_path)])
    assert len(list(tmp_path.glob("*-cuda-*"))) == 2


def test_the_command_names_every_benchmark(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())  # without the breaks of lines
    assert f"{','.join(sorted(BENCHMARKS)[:-1])}or{max(BENCHMARKS)}." in shown


def test_results_go_to_a_new_folder_below_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run", lambda *_, **__: {})

    def write(result: dict, folder: Path) -> tuple[Path, ...]:
        (folder / "2026-01-01-call.json").write_text("{}")
        return (folder / "2026-01-01-call.json",)

    monkeypatch.setattr(run.report, "write", write)
    opened: list[Path] = []
    _, (path,) = run.run_and_write("call", on_open=opened.append)
    assert path.parent == opened[0]
    assert path.parent.parent == Path("runs")
    assert path.parent.name.startswith("bench-call-")
    run.run_and_write("call", out=Path("mine"))
    run.run_and_write("decode", out=Path("mine"))  # several benchmarks share a folder
