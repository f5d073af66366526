"""The GPU command, rehearsed on a CPU: rows are done once, and what crashes or hangs ends only its own
row.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the package

from benchmarks.gpu import __main__ as command  # noqa: E402
from benchmarks.gpu import parts, tile, worker  # noqa: E402
from benchmarks.gpu.results import reproduction  # noqa: E402
from benchmarks.gpu.rows import Row, Settings  # noqa: E402
from benchmarks.sdpa import TRIALS, fastest_sdpa  # noqa: E402
from benchmarks.timing import CpuClock, WrongResultError  # noqa: E402

from structattn.errors import ConfigError  # noqa: E402
from structattn.parallel.partial_attention import PartialAttention  # noqa: E402
from structattn.testing.tolerances import assert_close  # noqa: E402

pytest.importorskip("triton", reason="triton is not installed")

from structattn.ops.triton import config  # noqa: E402
from structattn.ops.triton.tile_table import TileEntry, read_tiles  # noqa: E402

runs = pytest.mark.skipif(not config.INTERPRETED, reason="a rehearsal needs Triton's interpreter")


def rehearsal(folder: Path) -> Settings:
    return Settings(rehearse=True, folder=folder)


def row_named(name: str, folder: Path) -> Row:
    (row,) = (row for row in parts.all_rows(rehearsal(folder)) if row.name == name)
    return row


def fail(error: Exception) -> Callable[[], dict]:
    def run() -> dict:
        raise error

    return run


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, forked_workers: None) -> list[Row]:
    """Rows that end in every way, in place of the real ones."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))

    def row(name: str, run: Callable[[], dict], rank: int = 0, limit_s: float = 60.0, alone: bool = False) -> Row:
        return Row(name=name, rank=rank, limit_s=limit_s, run=run, alone=alone)

    made = [
        row("check/a/right/float32", lambda: {"error": 0.1, "share of tolerance": 0.5, "code": "triton"}),
        row("check/a/(wrong)/float32", fail(WrongResultError("the error is 0.5"))),
        row("check/a/ends/float32", lambda: os._exit(3)),
        row("check/a/hangs/float32", lambda: time.sleep(600), limit_s=0.2),
        row("check/a/broken/float32", fail(RuntimeError("CUDA error: an illegal memory access"))),
        row("check/a/last/float32", lambda: {"error": 0.2, "share of tolerance": 0.9, "code": "triton"}, alone=True),
    ]
    for module in (parts, worker, command):
        monkeypatch.setattr(module, "all_rows", lambda settings: made)
    monkeypatch.setattr("benchmarks.gpu.driver.START_S", 0.0)
    return made


def run(out: Path, only: str = "", jobs: int = 1, minutes: float = 5.0) -> str:
    return command.run(minutes=minutes, out=out, only=only, rehearse=True, jobs=jobs)


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_that_crash_or_hang_end_no_other(rows: list[Row], tmp_path: Path, jobs: int, capsys) -> None:
    text = run(tmp_path, jobs=jobs)
    (path,) = tmp_path.glob("*-gpu-rehearsal.json")
    found = json.loads(path.read_text())["rows"]
    assert {name.split("/")[2]: row["status"] for name, row in found.items()} == {
        "right": "ok",
        "(wrong)": "wrong",
        "ends": "crash",
        "hangs": "timeout",
        "broken": "error",
        "last": "ok",
    }
    assert "exit code 3" in found["check/a/ends/float32"]["message"]
    assert "an illegal memory access" in found["check/a/broken/float32"]["message"]
    assert "| check | 6 | 2 | 4 | 0 | 0 |" in text.splitlines()[-1]
    assert "--only '^check/a/\\(wrong\\)/float32$'" in text
    assert path.with_suffix(".md").read_text().count("--only") == 4
    # A second call does what failed again, and nothing else.
    capsys.readouterr()
    run(tmp_path, only="right|wrong|last")
    lines = [line for line in capsys.readouterr().out.splitlines() if " s  check" in line]
    assert [line.split(" s  ")[1] for line in lines] == ["check/a/(wrong)/float32"]


def test_without_a_folder_nothing_is_kept(rows: list[Row], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "| check | 1 | 1 | 0 | 0 | 0 |" in command.run(minutes=5, out=None, only="right", rehearse=True, jobs=1)
    assert list(tmp_path.iterdir()) == []


def test_no_row_starts_after_the_time(rows: list[Row], tmp_path: Path) -> None:
    """What only the end of the run stopped is not done."""
    text = run(tmp_path, only="hangs|last", minutes=0.15 / 60)
    assert "| check | 2 | 0 | 0 | 0 | 2 |" in text


def test_a_command_repeats_exactly_one_row(tmp_path: Path) -> None:
    settings = rehearsal(tmp_path)
    for row in parts.all_rows(settings)[::11]:
        *_, option, pattern = shlex.split(reproduction(row.name, settings))
        assert option == "--only"
        assert [found.name for found in parts.chosen_rows(settings, pattern)] == [row.name]


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="matches no row"):
        run(tmp_path / "a", only="nothing")
    with pytest.raises(ConfigError, match="no regular expression"):
        run(tmp_path / "b", only="(")
    with pytest.raises(ConfigError, match="--minutes"):
        run(tmp_path / "c", minutes=-1)
    (tmp_path / "2026-01-01-gpu-rehearsal.json").write_text("{}")
    with pytest.raises(ConfigError, match="give --out a folder that is empty"):
        run(tmp_path)


def test_names_are_unique_and_a_gpu_has_each_dtype(tmp_path: Path) -> None:
    for rehearse in (False, True):
        names = [row.name for row in parts.all_rows(Settings(rehearse=rehearse, folder=tmp_path))]
        assert len(names) == len(set(names))
        kinds = {name.rpartition("/")[2] for name in names if name.startswith("check")}
        assert kinds == {"float16", "float32", *([] if rehearse else ["bfloat16"])}
    ranks = [row.rank for row in parts.all_rows(Settings(rehearse=False, folder=tmp_path))]
    assert ranks == sorted(ranks)


@runs
def test_a_check_sees_a_wrong_kernel(tmp_path: Path, monkeypatch) -> None:
    settings = rehearsal(tmp_path)
    row = row_named("check/forward/1 level, D=64/float32", tmp_path)
    found = worker.outcome(row, settings)
    assert found["status"] == "ok"
    assert found["code"] == "triton"
    assert 0 < found["share of tolerance"] <= 1
    from structattn.ops.triton import backend

    right = backend.forward
    monkeypatch.setattr(backend, "forward", lambda *tensors: [1.01 * x for x in right(*tensors)])
    found = worker.outcome(row, settings)
    assert found["status"] == "wrong"
    assert "out 1.0e-02 (at most 1e-05), lse 1.0e-02" in found["message"]


def measured(**changes: object) -> dict:
    row = {"kernel": "forward", "itemsize": 2, "dim": 64, "levels": 8, "values": False, "own": 128, "walk": 64}
    row |= {"num_warps": 8, "num_stages": 3, "is_rule": False, "capability": [9, 0], "median_ms": 2.0}
    return row | changes


def test_the_fastest_tiles_make_the_table(tmp_path: Path) -> None:
    rows = [
        measured(is_rule=True),
        measured(own=64, median_ms=1.0),
        measured(own=256, median_ms=3.0),
        measured(kernel="decode", median_ms=1.0),  # nothing to compare with
        measured(capability=[8, 9], own=32, walk=32, median_ms=0.1),
        measured(capability=[8, 9], own=16, median_ms=0.2),
    ]
    (tmp_path / "tiles.json").write_text(tile.table(rows).to_json())
    shape = {"kernel": "forward", "itemsize": 2, "dim": 64, "levels": 8, "values": False, "num_warps": 8}
    assert read_tiles(tmp_path / "tiles.json").entries == {
        (8, 9): (TileEntry(**shape, own=32, walk=32, num_stages=3),),
        (9, 0): (TileEntry(**shape, own=64, walk=64, num_stages=3),),
    }
    before = config.tiles_in_use()
    with suppress(ZeroDivisionError), tile.tiles_of(tile.table(rows)):
        assert config.tiles_in_use() is not before
        raise ZeroDivisionError
    assert config.tiles_in_use() is before  # the next row of the process takes the tiles of the package again
    assert tile.gains(rows[:3]) == [
        {
            "kernel": "forward",
            "shape": "16 bit, D=64, 8 levels",
            "tiles": "own=64 walk=64 num_warps=8 num_stages=3",
            "median_ms": 1.0,
            "gain": 2.0,
            "tried": 3,
        }
    ]


def test_the_fastest_kernel_of_pytorch_is_named() -> None:
    q, k, v = (torch.randn(1, 2, 30, 16, requires_grad=True) for _ in range(3))

    class Clock(CpuClock):
        """The second kernel is the fastest."""

        calls = 0

        def time_ms(self, call, inner, prepare=None) -> float:
            call()
            self.calls += 1
            return 1.0 if self.calls > 1 + TRIALS else 2.0

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)
    attend, name = fastest_sdpa(q, k, v, is_causal=True, backward=True, clock=Clock(), backends=backends)
    assert name == "SDPA, MATH"
    assert_close(attend(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    with pytest.raises(RuntimeError, match="none of .'CUDNN_ATTENTION'. can run here"):
        fastest_sdpa(q, k, v, is_causal=True, backward=False, clock=CpuClock(), backends=backends[2:])


@pytest.mark.parametrize("name", ["8 levels, D=64", "packed"])
def test_attention_over_a_divided_sequence_is_checked(name: str, tmp_path: Path, monkeypatch) -> None:
    row = row_named(f"check/divided/{name}/float32", tmp_path)
    assert worker.outcome(row, rehearsal(tmp_path))["status"] == "ok"
    right = PartialAttention.forward
    monkeypatch.setattr(PartialAttention, "forward", lambda *arguments: tuple(1.01 * x for x in right(*arguments)))
    assert worker.outcome(row, rehearsal(tmp_path))["status"] == "wrong"


def test_a_text_that_is_missing_ends_the_command_before_any_row(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        command.main(["--rehearse", "--out", str(tmp_path / "new"), "--text", str(tmp_path / "missing.txt")])
    assert "--text: there is no" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.full
@runs
def test_a_rehearsal_of_the_whole_command(tmp_path: Path, capsys) -> None:
    """Real rows in real processes; every kernel has its tiles searched."""
    only = r"check/[a-z]*/(window|everything, sliding)/float16|tile/|speed/.*/mlr 8|train/.*RoPE"
    command.main(["--rehearse", "--out", str(tmp_path), "--only", only, "--jobs", "2", "--minutes", "9"])
    last = capsys.readouterr().out.splitlines()[-4:]
    assert "| check | 8 | 8 | 0 | 0 | 0 |" in last
    assert "| speed | 11 | 11 | 0 | 0 | 0 |" in last
    assert "| train | 1 | 1 | 0 | 0 | 0 |" in last
    assert "| tile | 10 | 10 | 0 | 0 | 0 |" in last
    entries = read_tiles(tmp_path / "tiles.json").entries[tile.NO_CAPABILITY]
    assert {entry.kernel for entry in entries} == set(tile.CANDIDATES)
    assert torch.cuda.is_available() is False
