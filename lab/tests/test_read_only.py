"""Finished runs and comparisons are read-only: whatever reads them again changes no file, and no model is
built to read a record.
"""

import hashlib
import shutil
import stat
from collections import Counter
from pathlib import Path

import pytest

from structattn.cli import main
from structattn_lab.compare import pages
from structattn_lab.compare.pages import write_pages
from structattn_lab.records import read_comparison
from structattn_lab.runner import job
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborTask
from structattn_lab.training import loop

SMALL = [
    part
    for change in (
        *("task.dim=8", "task.num_points=4", "task.num_heads=2", "task.eval_examples=16", "training.batch_size=2"),
        *("training.steps=4", "training.eval_every=2", "training.checkpoint_every=2", "training.warmup_steps=0"),
    )
    for part in ("--set", change)
]
TRAIN = ["train", "nearest-neighbor", *SMALL, "--attention", "standard"]
COMPARE = ["compare", "nearest-neighbor", *SMALL, "--attention", "standard", "bilinear-btt:1", "--seeds", "2"]
# One rate diverges: a run that is not finished is not tried again either.
COMPARE += ["--set", "learning_rates=1e-2,1e30"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert main([*TRAIN, "--out", str(folder / "run")]) == 0
    assert main([*COMPARE, "--out", str(folder / "comparison")]) == 0
    return folder


@pytest.fixture
def unchanged(finished: Path):
    """Makes everything read-only, and compares it afterwards, since the owner of a process may write there
    nevertheless.
    """
    paths = [finished, *finished.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    before = contents(finished)
    yield finished
    assert contents(finished) == before
    for path, mode in modes.items():
        path.chmod(mode)


def contents(folder: Path) -> dict[str, tuple]:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *folder.rglob("*")]
    }


def test_a_finished_comparison_is_read_by_its_records_only(unchanged: Path, monkeypatch, capsys) -> None:
    opened: Counter[Path] = Counter()
    read_record = job.read_record

    def read(folder: Path):
        opened[folder] += 1
        return read_record(folder)

    monkeypatch.setattr(job, "read_record", read)
    monkeypatch.setattr(loop, "TrainingRun", lambda *_: pytest.fail("a model was built"))
    monkeypatch.setattr(NearestNeighborTask, "baselines", lambda *_: pytest.fail("baselines were computed"))
    out = unchanged / "comparison"
    for _ in range(2):
        assert main([*COMPARE, "--out", str(out), "--resume"]) == 0
        printed = capsys.readouterr().out
        assert "standard" in printed
        assert str(out / "report.html") in printed
    record = read_comparison(out)
    assert len(opened) == sum(len(row.scores) for row in record.rows) == 4
    assert set(opened.values()) == {2}  # once each time


def test_finished_runs_are_evaluated_and_trained_no_further(unchanged: Path, capsys) -> None:
    run = unchanged / "run"
    assert main(["evaluate", str(run)]) == 0
    scored = capsys.readouterr().out.splitlines()[-1]
    assert main([*TRAIN, "--out", str(run), "--resume"]) == 0
    assert scored in capsys.readouterr().out
    for record in sorted((unchanged / "comparison" / "runs").rglob("run.json")):
        assert main(["evaluate", str(record.parent)]) == 0


def test_a_report_is_drawn_again_from_the_results_alone(unchanged: Path, tmp_path: Path) -> None:
    shutil.copyfile(unchanged / "comparison" / "results.json", tmp_path / "results.json")
    page = write_pages(read_comparison(tmp_path), tmp_path)
    assert page.read_bytes() == (unchanged / "comparison" / "report.html").read_bytes()
    figures = {path.name: path.read_bytes() for path in (unchanged / "comparison" / "figures").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()} == figures


def test_only_what_is_missing_of_a_comparison_is_made_again(finished: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "comparison"
    shutil.copytree(finished / "comparison", out)
    shutil.rmtree(out / "figures")
    (out / "report.html").unlink()
    first = next((out / "runs").rglob("seed-1*"))
    before = contents(out)
    command = [*COMPARE, "--out", str(out), "--resume"]
    assert main(command) == 0
    after = contents(out)
    assert after["results.json"] == before["results.json"]
    assert after["report.html"][2] == contents(finished)["comparison/report.html"][2]
    assert (out / "figures").is_dir()
    # A run that is gone, or its weights, is made again, with the same result; a damaged record is written
    # again.
    weights = (first / "model.safetensors").read_bytes()
    rows = read_comparison(out).rows
    (first / "model.safetensors").unlink()
    monkeypatch.setattr(
        pages, "write_pages", lambda record, folder, task: folder / "report.html"
    )  # as before: it takes seconds
    assert main(command) == 0
    assert (first / "model.safetensors").read_bytes() == weights
    shutil.rmtree(first)
    assert main(command) == 0
    assert (first / "model.safetensors").read_bytes() == weights
    (out / "results.json").write_text("{")
    assert main(command) == 0
    assert [row.scores for row in read_comparison(out).rows] == [row.scores for row in rows]
