"""A search: what is trained, what validation chooses, which differences are beyond seed noise, and the
page.
"""

import csv
import itertools
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from made_records import made_baseline, made_row
from scipy.stats import tukey_hsd

from structattn.cli import main
from structattn.errors import ConfigError
from structattn_lab.analysis.model_selection import critical_differences, search
from structattn_lab.compare.grid import points_of
from structattn_lab.records import Row
from structattn_lab.settings.overrides import apply_overrides
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.registry import recipe_for, task_class


def test_every_setting_is_a_point_and_rates_are_chosen_at_each() -> None:
    recipe = recipe_for("forecast", "ett")
    points = points_of(TaskFactory(task_class("forecast")), recipe)
    horizons, look_backs = (96, 192, 336), (96, 336, 512, 1024, 2048)
    expected = list(itertools.product(("OT", "*"), horizons, look_backs))
    places = [(p.recipe.task.data.target, p.recipe.task.horizon, p.recipe.task.look_back) for p in points]
    assert places == expected
    assert [p.position.searched for p in points[:5]] == [f"look-back={n}" for n in look_backs]
    assert not any(p.recipe.search or p.recipe.variants for p in points)
    assert len({p.settings for p in points}) == len({p.sweep_settings for p in points}) == 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("budgets=1e12",), "exclude each other"),
        (("variants=a: task.look_back=24",), "task.look_back=24 would be lost"),
        (("variants=a: training.lr=0.2", "search=training.learning_rate=0.1"), "training.lr=0.2 would be lost"),
        (("search=task.look_back=24,task.look_back=24",), "search must be unique"),
    ],
)
def test_searches_that_make_no_sense(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(recipe_for("forecast", "ett-short"), changes)


def row(spec: str, searched: str, validation: float, *scores: float, group: str | None = None) -> Row:
    return made_row(spec, *scores, group=group, searched=searched, validation=validation)


def test_validation_chooses_and_the_test_does_not() -> None:
    rows = [
        row("a", "x=1", 0.5, 0.10),
        row("b", "x=1", 0.3, 0.20),
        row("a", "x=2", 0.4, 0.90),
        row("b", "x=2", 0.6, 0.05),
        row("a", "x=1", 0.1, 0.70, group="other"),
    ]
    baselines = [
        made_baseline("ridge", searched="x=1", validation=0.3),
        made_baseline("ridge", searched="x=2", validation=0.2),
        made_baseline("rule", searched="x=1"),
        made_baseline("rule", searched="x=2"),
    ]
    found = search(rows, baselines)
    assert [(one.group, one.rows, one.baselines) for one in found] == [
        (None, (2, 1), (1, 2)),
        ("other", (4,), ()),
    ]
    assert found[0].critical_differences is None


@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 10, 5)])
def test_critical_differences_are_games_and_howells(sizes: tuple[int, ...]) -> None:
    """A method that is just so far from the lowest has p = 0.05 in SciPy's test, whatever the spread of a
    third.
    """
    generator = np.random.default_rng(0)
    scores = [
        list(generator.normal(i, spread, n)) for i, (spread, n) in enumerate(zip((0.1, 3.0, 1.0), sizes, strict=True))
    ]
    lowest = statistics.fmean(scores[0])
    found = critical_differences(scores)
    assert found is not None
    assert (found.level, found.seeds, found.best, found.differences[0]) == (0.95, 3, 0, 0.0)
    for i in (1, 2):
        shift = lowest + found.differences[i] - statistics.fmean(scores[i])
        moved = [[score + shift for score in own] if j == i else own for j, own in enumerate(scores)]
        p = tukey_hsd(*moved, equal_var=False).pvalue[0, i]
        assert p == pytest.approx(0.05, abs=1e-6)


def test_critical_differences_without_spread_or_seeds() -> None:
    assert critical_differences([[1.0], [2.0]]) is None
    assert critical_differences([[1.0, 2.0]]) is None
    found = critical_differences([[2.0, 2.0], [1.0, 1.0], [3.0, 4.0]])
    assert found is not None
    assert found.best == 1
    assert found.differences[:2] == (0.0, 0.0)
    assert found.differences[2] > 0


@pytest.mark.full
def test_a_search_from_the_command_line(tmp_path: Path, capsys) -> None:
    small = (
        "task.embed_dim=8", "task.num_layers=1", "task.patch_length=8", "training.steps=4", "training.warmup_steps=1",
        "training.eval_every=2", "training.batch_size=8", "learning_rates=1e-3",
        "variants=h=6: task.horizon=6,h=12: task.horizon=12",
        "search=look-back=24: task.look_back=24,look-back=48: task.look_back=48",
    )  # fmt: skip
    path = tmp_path / "own.csv"
    lines = [f"2020-01-{1 + h // 24:02d} {h % 24:02d}:00,{math.sin(h / 4) + h % 7 / 9}" for h in range(500)]
    path.write_text("\n".join(["when,load", *lines]) + "\n")
    out = tmp_path / "out"
    arguments = ["compare", "forecast", "--preset", "ett", "--data", str(path), "--time", "when", "--target", "load"]
    arguments += ["--attention", "standard", "mlr:2|2", "--seeds", "1", "--out", str(out)]
    arguments += [part for change in small for part in ("--set", change)]
    assert main(arguments) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert len(results["rows"]) == 8
    assert len(results["search"]) == 2
    for choice in results["search"]:
        for place in choice["rows"]:
            rivals = [
                r
                for r in results["rows"]
                if (r["spec"], r["group"]) == (results["rows"][place]["spec"], choice["group"])
            ]
            assert results["rows"][place]["validation"] == min(r["validation"] for r in rivals)
    # The weights that count are those of the best validation.
    for one in results["rows"]:
        best = statistics.fmean(min(e["validation_mse"] for e in history) for history in one["histories"])
        assert one["validation"] == pytest.approx(best)
    with (out / "runs.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    trained = [line for line in lines if line["seed"]]
    columns = ("attention", "setting", "searched", "seed")
    assert [(*(line[name] for name in columns), float(line["mse"])) for line in trained] == [
        (one["spec"], one["setting"], one["searched"], str(seed), score)
        for one in results["rows"]
        for seed, score in enumerate(one["scores"])
    ]
    assert len(lines) - len(trained) == len(results["baselines"])
    page = (out / "report.html").read_text()
    for words in (
        "h=6: ",
        "beyond seed noise",
        "critical difference",
        "look-back=24",
        "ridge regression",
        "Every setting: h=12",
    ):
        assert words in printed + page
    assert {path.stem for path in (out / "figures").glob("*.png")} == {
        "error-against-setting", "examples", "error-by-lead", "examples-2", "error-by-lead-2",
    }  # fmt: skip
    again = json.loads((out / "results.json").read_text())
    assert main([*arguments, "--resume"]) == 0
    after = json.loads((out / "results.json").read_text())
    assert [r["scores"] for r in after["rows"]] == [r["scores"] for r in again["rows"]]
    assert after["search"] == again["search"]
