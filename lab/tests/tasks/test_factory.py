"""What makes tasks: once for each of their settings, in each process; and what a comparison says of its
runs.
"""

import pickle
from dataclasses import replace

import pytest

from structattn.cli import main
from structattn_lab.compare import comparison
from structattn_lab.compare.comparison import compare
from structattn_lab.settings.overrides import apply_overrides
from structattn_lab.tasks import registry
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborConfig, NearestNeighborTask
from structattn_lab.training.finished import read_record

CONFIG = NearestNeighborConfig(dim=8, num_points=4, num_heads=2, eval_examples=16)


def test_a_task_is_made_once_for_its_settings() -> None:
    tasks = TaskFactory(NearestNeighborTask)
    assert tasks.name == "nearest-neighbor"
    assert tasks(CONFIG) is tasks(replace(CONFIG))
    assert tasks(replace(CONFIG, dim=16)) is not tasks(CONFIG)
    assert TaskFactory(NearestNeighborTask)(CONFIG) is not tasks(CONFIG)  # the data may have changed


def test_another_process_makes_its_own_tasks() -> None:
    tasks = TaskFactory(NearestNeighborTask)
    made = tasks(CONFIG)
    sent = pickle.dumps(tasks)
    assert len(sent) < 200
    received = pickle.loads(sent)
    assert received.kind is NearestNeighborTask
    assert received(CONFIG) is not made


def test_what_a_task_adds_to_reports_comes_from_its_package() -> None:
    tasks = registry.factory_of("nearest-neighbor")
    assert pickle.loads(pickle.dumps(tasks)).report == tasks.report
    assert list(tasks.report.figures) == ["error-against-rank"]
    assert tasks.report.no_skill_score == 1.0
    assert not TaskFactory(NearestNeighborTask).report.figures


def test_the_command_looks_its_task_up_once(tmp_path, monkeypatch) -> None:
    looked_up = []

    def factory_of(name: str) -> TaskFactory:
        looked_up.append(name)
        return TaskFactory(registry.task_class(name), registry.TASKS[name])

    monkeypatch.setattr(registry, "factory_of", factory_of)
    words = [
        "--preset",
        "smoke",
        "--attention",
        "standard",
        "--set",
        "training.steps=2",
        "--set",
        "learning_rates=1e-3",
    ]
    assert main(["compare", "nearest-neighbor", *words, "--out", str(tmp_path / "out")]) == 0
    assert looked_up == ["nearest-neighbor"]
    assert (tmp_path / "out" / "figures" / "error-against-rank.png").is_file()


@pytest.mark.full
def test_a_comparison_says_where_its_runs_are(tmp_path) -> None:
    changes = ("training.steps=2", "seeds=2", "attention=standard,bilinear-btt:1", "learning_rates=0.001,0.002")
    recipe = apply_overrides(registry.recipe_for("nearest-neighbor", "smoke"), changes)
    done = compare("nearest-neighbor", recipe, tmp_path / "out", show_progress=False)
    for row, folders in zip(done.record.rows, done.runs, strict=True):
        records = [read_record(folder) for folder in folders]
        assert [(record.spec, record.seed) for record in records] == [(row.spec, 0), (row.spec, 1)]
        assert {record.config["learning_rate"] for record in records} == {row.learning_rate}
    again = compare("nearest-neighbor", recipe, tmp_path / "out", resume=True, show_progress=False)
    assert again == done
    (tmp_path / "out" / "report.html").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "train_all", pytest.fail)
        assert compare("nearest-neighbor", recipe, tmp_path / "out", resume=True, show_progress=False) == done
