"""Settings from a file: ``--config``, and the ``config.yaml`` of every run, which repeats it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from structattn.cli import main
from structattn.errors import ConfigError
from structattn_lab.settings.config_file import ConfigFile
from structattn_lab.settings.overrides import with_changes
from structattn_lab.tasks.registry import recipe_for

SMALL = """
task.dim: 8
task.num_points: 4
task.num_heads: 2
task.eval_examples: 8
training:
  steps: 3
  batch_size: 4
"""


def recipe_of(path: Path, task: str = "nearest-neighbor") -> object:
    file = ConfigFile.read(path)
    with file.reading():
        return with_changes(recipe_for(task, "default"), file.changes(without=("preset", "attention", "seed")))


def write(tmp_path: Path, text: str, name: str = "a.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_yaml_and_toml_say_what_set_says(tmp_path) -> None:
    from structattn_lab.settings.overrides import apply_overrides

    expected = apply_overrides(
        recipe_for("nearest-neighbor", "default"),
        ("training.steps=5", "training.learning_rate=1e-3", "training.betas=0.8,0.9", "task.qk_norm=false"),
    )
    yaml_text = "training: {steps: 5, lr: 1e-3}\ntraining.betas: [0.8, 0.9]\ntask.qk_norm: false\n"
    toml_text = "task.qk_norm = false\n[training]\nsteps = 5\nlearning_rate = 1e-3\nbetas = [0.8, 0.9]\n"
    for name, text in (("a.yaml", yaml_text), ("b.yml", yaml_text), ("c.toml", toml_text)):
        assert recipe_of(write(tmp_path, text, name)) == expected


def test_the_command_line_goes_before_the_file_and_the_file_before_the_preset(tmp_path) -> None:
    path = write(tmp_path, f"task.name: nearest-neighbor\nattention: mlr:2|2\nseed: 3\n{SMALL}")
    for more, expected in (([], ("mlr:2|2", 3, 3)), (["--set", "training.steps=2", "--seed", "1"], ("mlr:2|2", 1, 2))):
        out = tmp_path / f"run{len(more)}"
        assert main(["train", "--config", str(path), *more, "--out", str(out)]) == 0
        record = json.loads((out / "run.json").read_text())
        text = (out / "config.yaml").read_text()
        found = yaml.safe_load(text)
        assert (found["attention"], found["seed"], found["training.steps"]) == expected
        assert record["seed"] == expected[1] if "seed" in record else True


def test_the_config_of_a_run_repeats_it(tmp_path, capsys) -> None:
    path = write(tmp_path, SMALL)
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["train", "nearest-neighbor", "--config", str(path), "--attention", "mlr:2|2", "--seed", "5"]
    assert main([*words, "--out", str(first)]) == 0
    assert main(["train", "--config", str(first / "config.yaml"), "--out", str(second)]) == 0
    assert (first / "config.yaml").read_text() == (second / "config.yaml").read_text()
    capsys.readouterr()
    printed = []
    for out in (first, second):
        assert main(["evaluate", str(out)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_the_config_of_a_comparison_repeats_it(tmp_path) -> None:
    path = write(tmp_path, f"attention: [standard, 'mlr:2|2']\nseeds: 1\n{SMALL}")
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["compare", "nearest-neighbor", "--config", str(path), "--out", str(first)]) == 0
    assert main(["compare", "--config", str(first / "config.yaml"), "--out", str(second)]) == 0
    scores = [
        [row["scores"] for row in json.loads((out / "results.json").read_text())["rows"]] for out in (first, second)
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2
    assert main(["compare", "--config", str(first / "config.yaml"), "--out", str(second), "--resume"]) == 0


def test_the_config_of_a_comparison_that_cannot_go_on_stays(tmp_path, capsys) -> None:
    """The first spec decides the compute of the others, whose runs are of another compute then."""
    path, out = (
        write(tmp_path, f"attention: [standard, 'bilinear-btt:1']\nequal: compute\nseeds: 1\n{SMALL}"),
        tmp_path / "o",
    )
    command = ["compare", "nearest-neighbor", "--config", str(path), "--out", str(out)]
    assert main(command) == 0
    before = (out / "config.yaml").read_bytes()
    assert main([*command, "--resume", "--attention", "bilinear-btt:1", "standard"]) == 2
    assert "steps" in capsys.readouterr().err
    assert (out / "config.yaml").read_bytes() == before
    assert main([*command, "--resume", "--seeds", "2"]) == 0
    assert "seeds: 2" in (out / "config.yaml").read_text()


def test_a_setting_of_a_file_that_the_preset_replaces_is_named(tmp_path, capsys) -> None:
    path = write(tmp_path, "training.learning_rate: 0.1\n")
    assert (
        main(
            [
                "compare",
                "icl-regression",
                "--preset",
                "bottleneck",
                "--config",
                str(path),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    assert f"{path}: training.learning_rate would be lost, since learning_rates set it" in capsys.readouterr().err
    command = ["compare", "text", "--config", str(path), "--set", "learning_rates=0.1,0.2", "--budgets", "1e40"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert "give a smaller budget" in capsys.readouterr().err  # the command line goes before the file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("training.step: 5\n", "line 1: unknown setting 'training.step': did you mean 'training.steps'"),
        ("\ntraining:\n  steps: many\n", "line 3: training.steps: expected a whole number, got 'many'"),
        ("training: [\n", "line 2"),
        ("a: b: c\n", "line 1"),
        ("training.steps: 5\ntraining:\n  steps: 6\n", "'training.steps' is given twice"),
        ("training.steps: !!python/object:os.system x\n", "expected plain values, got the tag"),
        ("[1, 2]\n", "expected settings, such as"),
        ("training.steps: {a: 1}\n", "'training.steps' has no fields|unknown setting"),
        ("training.steps: [[1]]\n", "expected a list of single values"),
        ("x: &a {y: *a}\n", "two places|unknown"),
        ("training.steps: 2026-11-25\n", "expected a whole number, got '2026-11-25'"),
        ("training: 5\n", "is a section"),
        ("---\na: 1\n---\nb: 2\n", "expected one document, got 2"),
    ],
)
def test_mistakes_of_a_file_are_named_with_their_line(tmp_path, capsys, text, message) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        recipe_of(path)
    assert main(["train", "nearest-neighbor", "--config", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "a.yaml" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_named(tmp_path, capsys) -> None:
    path = write(tmp_path, f"task.name: text\n{SMALL}")
    for words, message in (
        (["train", "nearest-neighbor", "--config", str(path)], "is of the task text, not of nearest-neighbor"),
        (["train", "--config", str(write(tmp_path, SMALL, "b.yaml"))], "expected TASK"),
        (["train", "--config", str(tmp_path / "none.yaml")], "none.yaml"),
        (["train", "--config", str(write(tmp_path, SMALL, "c.json"))], "ends with .yaml, .yml or .toml"),
        (["train", "nearest-neighbor", "--config", str(write(tmp_path, "a = [\n", "d.toml"))], "d.toml"),
        (
            ["train", "nearest-neighbor", "--config", str(write(tmp_path, "seeds: 3\n", "e.yaml"))],
            "belongs to structattn compare",
        ),
    ):
        assert main([*words, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    (tmp_path / "f.yaml").write_bytes(b"\xff\xfe")
    assert main(["train", "--config", str(tmp_path / "f.yaml")]) == 2
    assert "expected text in UTF-8" in capsys.readouterr().err
