"""Tasks by name: one from outside the package works in every command, and nothing but its folder knows its
name.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import structattn_lab
from structattn.cli import main
from structattn.errors import ConfigError
from structattn_lab.cli.listings import settings
from structattn_lab.tasks.registry import TASKS, about, recipe_for, register_task, task_class


@pytest.fixture
def mean() -> Iterator[str]:
    """A task outside of the package, registered by its import; forgotten after the test."""
    import mean_task

    yield mean_task.TASK.name
    forget()


def forget() -> None:
    TASKS.pop("mean", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mean_task"]:
        del sys.modules[name]


@pytest.mark.full
def test_a_task_from_outside_works_in_every_command(mean: str, tmp_path: Path, capsys) -> None:
    def printed(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    listed = printed("presets")
    assert "mean: The mean of points: a task outside of the package, as a user would write it." in listed
    assert "4 points of dimension 8" in listed
    assert "task.num_points" in printed("settings", mean)
    run, compared = str(tmp_path / "run"), tmp_path / "compared"
    trained = printed("train", mean, "--attention", "mlr:2|2", "--set", "task.num_points=6", "--out", run)
    assert trained.splitlines()[0] in printed("evaluate", run)
    printed("compare", mean, "--preset", "smoke", "--out", str(compared))
    results = json.loads((compared / "results.json").read_text())
    assert (results["task"], [row["spec"] for row in results["rows"]]) == ("mean", ["standard", "mlr:2|2"])
    assert (compared / "figures" / "error-by-coordinate.png").exists()
    page = (compared / "report.html").read_text()
    for words in ("Can attention average?", "Error by coordinate.", "The largest error of a coordinate", "1.25"):
        assert words in page


def test_a_worker_knows_the_task_of_the_settings_that_it_gets(mean: str) -> None:
    settings = pickle.dumps(recipe_for(mean, "default"))
    forget()  # as in a new process
    assert mean not in TASKS
    pickle.loads(settings)
    assert task_class(mean).name == mean


def test_a_task_of_an_installed_package_is_known_before_its_import(tmp_path: Path) -> None:
    metadata = tmp_path / "mean_task-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mean-task\nVersion: 1.0\n")
    # A name that is taken keeps its meaning.
    (metadata / "entry_points.txt").write_text("[structattn.tasks]\nmean = mean_task\ntext = mean_task\n")
    code = "from structattn_lab.tasks.registry import TASKS; print(TASKS['mean'], TASKS['text'])"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.split() == ["mean_task", "structattn_lab.tasks.text"], done.stderr
    assert "the task 'text' is that of structattn_lab.tasks.text: choose another name" in done.stderr


def test_a_name_is_given_once() -> None:
    register_task("text", TASKS["text"])  # again: a package may be imported twice
    with pytest.raises(ConfigError, match=r"the task 'text' is that of structattn_lab.tasks.text: choose another"):
        register_task("text", "mean_task")


# Constants that are the name of a task and mean something else, by file.
OTHER_MEANINGS = {
    ("cli/analysis.py", "text"),  # plan text: which kind of model
    ("cli/commands.py", "forecast"),  # the command
    ("cli/data.py", "text"),  # data prepare text: of what a corpus is
    ("compare/shrink.py", "text"),  # the usual name of a field
    ("data/corpus/preparation.py", "text"),  # the same, in the owner of a folder
    ("data/corpus/documents.py", "text"),  # the usual name of a field
    ("data/plain_text.py", "text"),  # what a file should hold, in messages
    ("settings/overrides.py", "text"),  # a type, in words
    ("old_imports.py", "forecast"),  # a module
    ("report/caches.py", "text"),  # a row of a table: what text was measured
    ("report/caches.py", "recall"),  # a name of a figure and a column
    ("report/figures/caches.py", "recall"),  # the same
    ("report/figures/examples.py", "forecast"),  # a field of an example
    ("tasks/chronos/task.py", "forecast"),  # the same, and a word of a seed
    ("tasks/uptraining/recall.py", "recall"),  # a word of a seed
}


# Files of public functions that are of one task only, by its name.
FUNCTIONS = {
    "inference/forecast.py": "forecast",
    "inference/forecast_choice.py": "forecast",
    "compare/uptrain.py": "uptraining",
    "compare/model_card.py": "uptraining",
}


def test_no_file_outside_of_its_folder_knows_a_task() -> None:
    root, found = Path(structattn_lab.__file__).parent, set()
    shared = {path.stem for path in (root / "tasks").glob("*.py")}
    for path in root.rglob("*.py"):
        place = path.relative_to(root)
        own = place.parts[1] if place.match("tasks/*/*.py") else FUNCTIONS.get(place.as_posix(), "")
        if place.as_posix() == "tasks/registry.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in TASKS and node.value.replace("-", "_") != own:
                found.add((place.as_posix(), node.value))
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [alias.name for alias in node.names]
                for name in [f"{getattr(node, 'module', None) or ''}.{name}".lstrip(".") for name in names]:
                    folder = name.removeprefix("structattn_lab.tasks.").partition(".")[0]
                    assert folder == name.partition(".")[0] or folder in {*shared, own}, f"{place} imports {name}"
    assert found == OTHER_MEANINGS


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_the_name_of_the_registry_and_a_documentation_string(name: str) -> None:
    task = task_class(name)
    assert task.name == name
    assert about(name).endswith(".")
    for name_of_option, option in task.data_options.items():
        assert name_of_option in ("data", "time", "target")
        assert f"--{name_of_option} for {option.about}" in settings(name, "default")
        value = task.config_class()
        for field in option.setting.split("."):
            value = getattr(value, field)


def test_the_names_are_known_before_anything_heavy_is_imported() -> None:
    code = "import sys; from structattn_lab.tasks.registry import TASKS; print(len(TASKS), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [str(len(TASKS)), "False"], done.stderr


@pytest.mark.parametrize(("name", "package"), [("x", 5), (5, "json"), (None, "json")])
def test_names_are_texts(name, package) -> None:
    with pytest.raises(ConfigError, match="of a task must be a text"):
        register_task(name, package)
