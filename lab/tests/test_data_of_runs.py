"""Where the data of a run are: from other folders, after a move; and settings that are refused before
anything is trained.
"""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from structattn.cli import main
from structattn.errors import ConfigError, DataError
from structattn_lab.compare.comparison import compare
from structattn_lab.runner.local import LocalRunner
from structattn_lab.runs.folders import Owner
from structattn_lab.settings.overrides import apply_overrides
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborConfig, NearestNeighborTask
from structattn_lab.tasks.registry import TASKS, recipe_for, task_class
from structattn_lab.tasks.text.task import TextConfig, TextTask
from structattn_lab.training.evaluate import load_run
from structattn_lab.training.loop import train

TINY = ["context_length=8", "embed_dim=8", "num_layers=1", "num_heads=1", "eval_windows=2"]
SETTINGS = [f"--set=task.{setting}" for setting in TINY] + ["--set=training.steps=2", "--set=training.batch_size=2"]


def test_a_run_with_relative_data_is_evaluated_from_anywhere_and_after_a_move(tmp_path, monkeypatch, capsys) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    for folder in (here, away):
        folder.mkdir()
    (here / "my.txt").write_text("a line of text\n" * 40)
    monkeypatch.chdir(here)
    assert main(["train", "text", "--data", "my.txt", "--out", "run", *SETTINGS]) == 0
    record = json.loads((here / "run" / "run.json").read_text())
    assert record["task_config"]["data"] == str(here / "my.txt")
    monkeypatch.chdir(away)
    assert main(["evaluate", str(here / "run")]) == 0
    expected = capsys.readouterr().out
    (here / "my.txt").rename(away / "moved.txt")
    assert main(["evaluate", str(here / "run")]) == 2
    told = capsys.readouterr().err
    assert f"was trained on {here / 'my.txt'}, which is not there" in told
    assert "--data" in told
    assert main(["evaluate", str(here / "run"), "--data", "moved.txt"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] in expected
    moved = TextTask(TextConfig(**record["task_config"] | {"data": "moved.txt"}))
    training = TrainingConfig(**record["config"] | {"betas": tuple(record["config"]["betas"])})
    assert train(moved, "standard", training, seed=0, run_dir=here / "run", resume=True).progress.step == 2
    (away / "moved.txt").write_text("another line of text\n" * 40)
    with pytest.raises(DataError, match="the data have changed"):
        load_run(here / "run", away / "moved.txt")


def test_relative_data_of_version_0_1_0_are_the_same_data(tmp_path, monkeypatch) -> None:
    """It wrote paths as they were given: its runs continue from the same folder."""
    monkeypatch.chdir(tmp_path)
    owner = Owner(command="compare", task="text", settings={"task": asdict(TextConfig(data="my.txt"))})
    before = asdict(TextConfig())
    assert owner.differences({"task": before | {"data": "my.txt"}}) == []
    assert "task.data" in owner.differences({"task": before | {"data": "other.txt"}})[0]


def test_a_task_without_text_refuses_levels_of_text_before_it_trains(tmp_path) -> None:
    for name in TASKS:
        if name == "text":
            task_class(name).check_spec("mlr-text:4|2|1|1")
            continue
        for spec in ("mlr-text:4|2|1|1", "[standard,mlr-text:4|2|1|1]"):
            with pytest.raises(ConfigError, match=f"{name} has no text: use it with the task text"):
                task_class(name).check_spec(spec)
    recipe = apply_overrides(recipe_for("nearest-neighbor", "default"), ("attention=standard,mlr-text:4|2|1|1",))
    with pytest.raises(ConfigError, match="has no text"):
        compare("nearest-neighbor", recipe, tmp_path / "compared", show_progress=False)
    task = NearestNeighborTask(NearestNeighborConfig())
    with pytest.raises(ConfigError, match="has no text"):
        train(
            task,
            "mlr-text:4|2|1|1",
            TrainingConfig(steps=1, batch_size=2, learning_rate=0.1),
            seed=0,
            run_dir=tmp_path / "run",
            resume=False,
        )
    assert not (tmp_path / "compared").exists()


@pytest.mark.parametrize("jobs", ["0", "-3"])
def test_fewer_than_one_job_is_refused(tmp_path, capsys, jobs) -> None:
    out = tmp_path / "out"
    for words in (["compare", "nearest-neighbor"], ["sweep", "nearest-neighbor", "--param=training.steps=int:1:2"]):
        assert main([*words, "--jobs", jobs, "--out", str(out)]) == 2
        assert "jobs: expected a whole number of at least 1" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="jobs must be an int of at least 1"):
        LocalRunner(int(jobs))
    assert not out.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["data", "prepare", "text", "--source", "", "--out", "corpus"],
        ["data", "prepare", "text", "--source", "a.txt", "--out", ""],
        ["data", "info", ""],
        ["train", "text", "--data="],
        ["compare", "forecast", "--data", ""],
        ["compare", "forecast", "--set", "task.data.path="],
        ["compare", "nearest-neighbor", "--out", " "],
        ["evaluate", ""],
    ],
)
def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch, capsys, words) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text\n" * 100)
    assert main(words) == 2
    assert re.search("expected a file or a folder, got '|got an empty text", capsys.readouterr().err)
    assert os.listdir() == ["a.txt"]  # noqa: PTH208
