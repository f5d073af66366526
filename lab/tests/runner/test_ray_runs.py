"""Runs through Ray: the same numbers as here, and clear words without it."""

import json
import sys
from pathlib import Path

import pytest

from structattn.cli import main
from structattn.errors import ConfigError, MissingDependencyError
from structattn.testing.tolerances import SAME_MODEL
from structattn_lab.runner.job import Job
from structattn_lab.runner.ray import RayRunner, connected
from structattn_lab.runner.train_all import train_all
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborConfig, NearestNeighborTask

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
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[ray\]"):
        RayRunner("local")


def test_processes_and_a_cluster_exclude_each_other(tmp_path: Path, capsys) -> None:
    out = ["--out", str(tmp_path / "out"), "--jobs", "2", "--ray-address", "local"]
    assert main(["compare", "nearest-neighbor", *SMALL, *out]) == 2
    assert "--jobs" in capsys.readouterr().err


def test_an_address_where_nothing_answers_is_an_error_at_once() -> None:
    pytest.importorskip("ray")
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "nonsense"):
        with pytest.raises(ConfigError, match="expected a Ray cluster"), connected(address):
            pass


@pytest.fixture(scope="module")
def ray():
    """One instance for the tests of this file."""
    pytest.importorskip("ray")
    with connected("local"):
        yield


def rows(folder: Path, of: str) -> list[dict]:
    return json.loads((folder / "results.json").read_text())[of]


@pytest.mark.full
def test_a_cluster_gives_the_numbers_of_this_machine(ray, tmp_path: Path, capsys) -> None:
    command = ["compare", "nearest-neighbor", *SMALL, "--attention", "standard", "bilinear-btt:1"]
    sweep = ["sweep", "nearest-neighbor", *SMALL, "--trials", "3", "--jobs", "1", "--set", "training.eval_every=1"]
    sweep += ["--param", "training.lr=log:1e-3:1e-1", "--grace-period", "1"]
    there = ["--ray-address", "local"]
    for words, of in ((command, "rows"), (sweep, "trials")):
        out = tmp_path / of
        assert main([*words, "--out", str(out / "here")]) == 0
        assert main([*words, *there, "--out", str(out / "there")]) == 0
        for name in ("params", "scores", "score", "steps", "step", "status"):
            found = [[row.get(name) for row in rows(out / place, of)] for place in ("here", "there")]
            numbers = name.startswith("score")
            for a, b in zip(*found, strict=True):
                assert b == (pytest.approx(a, rel=SAME_MODEL) if numbers and a is not None else a)


@pytest.mark.full
def test_failed_jobs_are_named(ray, tmp_path: Path) -> None:
    job = Job(
        tasks=TaskFactory(NearestNeighborTask),
        task=NearestNeighborConfig(dim=8, num_points=4, num_heads=2, eval_examples=16),
        spec="mlr:3|3",  # does not fit
        training=TrainingConfig(steps=2, batch_size=4, learning_rate=1e-3),
        seed=0,
        folder=tmp_path / "runs" / "bad",
    )
    with pytest.raises(ConfigError, match="mlr:3"):
        train_all([job], runner=RayRunner("local"), resume=False, show_progress=False)
