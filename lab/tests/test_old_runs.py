"""Files that older versions wrote are read, with the numbers of then; see README.md."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from old_files.archives import unpacked

from structattn.cli import main
from structattn.testing.tolerances import ANOTHER_ORDER, SIX_DIGITS
from structattn_lab.compare.pages import write_pages
from structattn_lab.data.corpus import Corpus
from structattn_lab.old_formats import todays_spec
from structattn_lab.records import read_comparison
from structattn_lab.records.common import read_file
from structattn_lab.records.fits import FitsRecord
from structattn_lab.records.mup import MupRecord
from structattn_lab.records.sweep import SweepRecord
from structattn_lab.training.finished import progress_of, read_finished

TASKS = ("nearest-neighbor", "text", "forecast", "icl-regression", "chronos")


@pytest.fixture(
    scope="module",
    params=[pytest.param("before-the-lab"), pytest.param("0.1.0"), pytest.param("0.2.0.dev0", marks=pytest.mark.full)],
)
def old(request, tmp_path_factory) -> Path:
    return unpacked(request.param, tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def newest(tmp_path_factory) -> Path:
    return unpacked("before-the-lab", tmp_path_factory.mktemp("old"))


def expected(old: Path) -> dict:
    return json.loads((old / "expected.json").read_text())


def numbers(lines: list[str]) -> dict[str, float]:
    """By name, of the lines ``test NAME NUMBER``."""
    return {line.split()[1]: float(line.split()[2]) for line in lines if line.startswith("test ")}


def plain(results: Path) -> dict:
    return json.loads(results.read_text())


@pytest.mark.parametrize("task", TASKS)
def test_a_run_is_scored_as_before(task: str, old: Path, capsys) -> None:
    if task == "chronos":
        pytest.importorskip("chronos")
    assert main(["evaluate", str(old / "runs" / task)]) == 0
    found, before = numbers(capsys.readouterr().out.splitlines()), numbers(expected(old)[task])
    # A divergence of 1e-5 is a sum of float32 numbers that nearly cancel: 1e-8 of it is rounding.
    assert found == pytest.approx(before, rel=ANOTHER_ORDER, abs=1e-7)
    assert found


@pytest.mark.parametrize("task", ["recall", "uptraining"])
def test_a_run_of_a_newer_task_is_scored_as_before(task: str, newest: Path, capsys) -> None:
    test_a_run_is_scored_as_before(task, newest, capsys)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mean", ["old-mean", "--preset", "smoke"]),
        ("decay", ["text", "--preset", "smoke", "--set", "training.steps=2", "--attention", "old-decay:0.1"]),
    ],
)
@pytest.mark.full
def test_packages_of_then_are_found_by_their_entry_points(name: str, words: list[str], newest: Path, tmp_path) -> None:
    """In a new process, as after their installation: they import names that are old now."""
    path = os.pathsep.join([str(newest / "packages"), *sys.path])
    command = [sys.executable, "-m", "structattn", "compare", *words, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [[row["spec"], row["score"]] for row in plain(tmp_path / "out/results.json")["rows"]]
    before = json.loads((newest / "packages.json").read_text())[name]
    if name == "mean":
        assert rows == [[spec, pytest.approx(score, rel=ANOTHER_ORDER)] for spec, score in before]
    else:  # fewer steps
        assert [spec for spec, _ in rows] == [spec for spec, _ in before]


def test_a_text_is_generated_as_before(old: Path, capsys) -> None:
    assert main(["generate", str(old / "runs/text"), "--prompt", "The ", "--max-new-tokens", "8", "--seed", "4"]) == 0
    before = expected(old)["generate"]  # 0.1.0 did not repeat the prompt
    assert capsys.readouterr().out.removeprefix("The ") == before.removeprefix("The ")


def test_the_progress_of_a_run_is_known(old: Path) -> None:
    run = old / "runs/nearest-neighbor"
    progress = progress_of(read_finished(run).record, run)
    assert progress is not None
    assert [entry["step"] for entry in progress.history] == [2, 4]


def test_an_interrupted_run_is_continued_to_the_same_weights(old: Path, tmp_path: Path) -> None:
    shutil.copytree(old / "interrupted", tmp_path / "run")
    record = read_finished(old / "runs/nearest-neighbor").record
    changes = [f"task.{name}={value}" for name, value in record.task_config.items() if name != "qk_norm"]
    changes += [f"training.{name}={record.config[name]}" for name in ("batch_size", "steps", "eval_every")]
    changes += ["training.checkpoint_every=2", "training.warmup_steps=0"]
    words = [word for change in changes for word in ("--set", change)]
    command = ["train", "nearest-neighbor", *words, "--attention", record.spec, "--resume", "--out"]
    assert main([*command, str(tmp_path / "run")]) == 0
    found, before = read_finished(tmp_path / "run"), read_finished(old / "runs/nearest-neighbor")
    for name, weight in before.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=SIX_DIGITS)


def test_a_comparison_is_read_drawn_and_continued(old: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "comparison"
    shutil.copytree(old / "comparison", out)
    before = plain(out / "results.json")
    record = read_comparison(out)
    assert [row.spec for row in record.rows] == [row["spec"] for row in before["rows"]]
    assert [list(row.scores) for row in record.rows] == [row["scores"] for row in before["rows"]]
    assert [row.learning_rate for row in record.rows] == [row["learning_rate"] for row in before["rows"]]
    written = {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    command = ["compare", "nearest-neighbor", "--resume", "--out", str(out), "--seeds", "2"]
    command += ["--attention", *(row.spec for row in record.rows), "--set", "learning_rates=1e-3,1e-2"]
    changes = ["task.dim=4", "task.num_points=4", "task.num_heads=1", "task.eval_examples=16", "training.batch_size=2"]
    changes += ["training.steps=4", "training.eval_every=2", "training.checkpoint_every=2", "training.warmup_steps=0"]
    assert main([*command, *(word for change in changes for word in ("--set", change))]) == 0
    again = read_comparison(out)
    assert [row.scores for row in again.rows] == [row.scores for row in record.rows]
    assert (out / "report.html").is_file()
    assert {path: path.read_bytes() for path in written} == written  # no run was trained again


@pytest.mark.quick(name=["forecast"])
@pytest.mark.parametrize("name", ["scaling", "forecast"])
def test_the_results_of_comparisons_are_drawn(name: str, old: Path, tmp_path: Path) -> None:
    shutil.copyfile(old / "results" / f"{name}.json", tmp_path / "results.json")
    record, before = read_comparison(tmp_path), plain(tmp_path / "results.json")
    assert [(row.spec, row.score, row.num_params) for row in record.rows] == [
        (todays_spec(row["spec"]), row["score"], row["num_params"]) for row in before["rows"]
    ]
    assert [baseline.metrics for baseline in record.baselines] == [row["metrics"] for row in before["baselines"]]
    assert (record.scaling is not None) == (name == "scaling")
    assert write_pages(record, tmp_path).is_file()


def test_the_results_of_fits_and_of_a_mup_check_are_read(old: Path) -> None:
    fits, before = read_file(FitsRecord, old / "results/fit.json"), plain(old / "results/fit.json")
    found = [(row.structure, row.relative_error) for matrix in fits.matrices for row in matrix.rows]
    assert found == [
        (row["structure"], row["relative_error"]) for matrix in before["matrices"] for row in matrix["rows"]
    ]
    mup = read_file(MupRecord, old / "results/mup.json")
    before = plain(old / "results/mup.json")
    assert [(row.structure, row.parametrization) for row in mup.coordinates] == [
        (row["structure"], row["parametrization"]) for row in before["coordinates"]
    ]
    found = [list(map(list, row.losses)) for row in mup.transfers]
    assert found == [row["losses"] for row in before["transfers"]]


def test_a_sweep_is_read(old: Path) -> None:
    record, before = read_file(SweepRecord, old / "sweep/results.json"), plain(old / "sweep/results.json")
    assert [trial.score for trial in record.trials] == [trial["score"] for trial in before["trials"]]
    assert record.best is not None


@pytest.mark.parametrize("kind", ["chars", "bytes", "bpe"])
def test_a_corpus_is_read(kind: str, old: Path, capsys) -> None:
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    assert main(["data", "info", str(old / "corpora" / kind), "--verify"]) == 0
    corpus = Corpus(old / "corpora" / kind)
    texts = [corpus.tokenizer.decode(tokens.read(0, len(tokens)).tolist()) for tokens in corpus.splits.values()]
    books = [
        f"Book {number}.\n" + "".join(f"{i} is {i * number}\n" for i in range(8)) for number in range(6)
    ]  # as make.py writes them
    assert sorted(line for text in texts for line in text.splitlines()) == sorted("".join(books).splitlines())
