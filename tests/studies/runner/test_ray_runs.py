"""Runs through Ray Tune: the same numbers as here, and clear words without it."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from structattn.cli import main
from structattn.errors import MissingDependencyError, TrainingFailedError
from structattn.studies.runner.ray_runs import train_all_with_ray
from structattn.studies.runner.runs import Job
from structattn.studies.tasks.nearest_neighbor.task import NearestNeighborConfig
from structattn.studies.training.config import TrainingConfig

SMALL = [
    part
    for change in (
        "task.dim=8",
        "task.num_points=4",
        "task.num_heads=2",
        "task.eval_examples=16",
        "training.steps=4",
        "training.batch_size=4",
        "training.eval_every=2",
    )
    for part in ("--set", change)
]


def test_without_ray_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"structattn\[sweep\]"):
        train_all_with_ray([], address="local", resume=False, show_progress=False)


def test_processes_and_a_cluster_exclude_each_other(tmp_path: Path, capsys) -> None:
    out = ["--out", str(tmp_path / "out"), "--jobs", "2", "--ray-address", "local"]
    assert main(["compare", "nearest-neighbor", *SMALL, *out]) == 2
    assert "--jobs" in capsys.readouterr().err


def test_a_cluster_gives_the_numbers_of_this_machine(tmp_path: Path, capsys) -> None:
    pytest.importorskip("ray.tune")
    command = ["compare", "nearest-neighbor", *SMALL, "--attention", "standard", "bilinear-btt:1"]
    assert main([*command, "--out", str(tmp_path / "here")]) == 0
    assert main([*command, "--out", str(tmp_path / "there"), "--ray-address", "local"]) == 0
    here, there = (json.loads((tmp_path / name / "results.json").read_text())["rows"] for name in ("here", "there"))
    assert [row["scores"] for row in there] == [pytest.approx(row["scores"], rel=1e-5) for row in here]


def test_failed_trials_are_named(tmp_path: Path) -> None:
    pytest.importorskip("ray.tune")
    job = Job(
        task_name="nearest-neighbor",
        task=NearestNeighborConfig(dim=8, num_points=4, num_heads=2, eval_examples=16),
        spec="mlr:3|3",  # does not fit
        training=TrainingConfig(steps=2, batch_size=4, learning_rate=1e-3),
        seed=0,
        folder=tmp_path / "runs" / "bad",
    )
    with pytest.raises(TrainingFailedError, match="mlr:3"):
        train_all_with_ray([job], address="local", resume=False, show_progress=False)
    assert not importlib.import_module("ray").is_initialized()
