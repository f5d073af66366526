"""A grid of widths and budgets: its points, what their sweeps share, and the laws that its rows give."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_records import made_comparison, made_row

from structattn.cli import main
from structattn.errors import ConfigError
from structattn.typed_records import read_as
from structattn_lab.analysis import scaling_law
from structattn_lab.analysis.scaling_law import scaling_laws
from structattn_lab.compare.budgets import affordable_steps, flops_of, training_of
from structattn_lab.compare.grid import points_of
from structattn_lab.compare.pages import report
from structattn_lab.data.corpus import Characters
from structattn_lab.records import Row
from structattn_lab.records.common import to_json
from structattn_lab.records.comparison import GridPosition, Scaling
from structattn_lab.settings.overrides import apply_overrides
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.registry import presets_of, recipe_for, task_class
from structattn_lab.training.build import spec_for

TEXT = TaskFactory(task_class("text"))
BUDGETS = (1e12, 2e12, 4e12, 8e12, 16e12)


@pytest.fixture(autouse=True)
def _few_replicates(monkeypatch) -> None:
    """Intervals of 100 replicates: test_scaling_law.py has those of 1,000."""
    for interval in (scaling_law.law_intervals, scaling_law.compute_multiplier):
        monkeypatch.setitem(interval.__kwdefaults__, "replicates", 100)


def grid(*changes: str):
    return apply_overrides(recipe_for("text", "scaling"), changes)


def test_a_grid_has_every_variant_at_every_width_and_budget() -> None:
    recipe = grid("widths=64,128", "budgets=1e12,4e12")
    points = points_of(TEXT, recipe)
    expected = itertools.product(("learned positions", "RoPE"), (64, 128), (1e12, 4e12))
    assert [(p.position.setting, p.position.width, p.position.budget) for p in points] == list(expected)
    for point in points:
        task, place = point.recipe.task, point.position
        assert (task.embed_dim, task.embed_dim // task.num_heads) == (place.width, 64)
        assert task.rotary == ("low_far" if place.setting == "RoPE" else "")
        assert point.recipe.budgets == (place.budget,)
        assert f"task.embed_dim={place.width}" in point.settings.split()
        assert not point.recipe.widths
        assert not point.recipe.variants
    assert len({p.settings for p in points}) == 8
    # The small models that choose a learning rate differ only in the positions.
    assert {p.sweep_settings for p in points} == {"task.rotary=", "task.rotary=low_far"}
    assert {(p.swept.task.embed_dim, p.swept.budgets) for p in points} == {(64, (5e11,))}


def test_budgets_are_kept_to_the_last_digit() -> None:
    near = points_of(TEXT, grid("widths=64", "variants=", "budgets=1000001,1000002,1e12"))
    assert [point.recipe.budgets for point in near] == [(1000001.0,), (1000002.0,), (1e12,)]
    assert len({point.settings for point in near}) == 3
    assert near[-1].settings.endswith("budgets=1e+12")  # the short form names the folders of runs that there are


def test_a_recipe_without_a_grid_is_one_point() -> None:
    recipe = recipe_for("text", "smoke")
    (point,) = points_of(TEXT, recipe)
    assert point.recipe == recipe
    assert (point.settings, point.position) == ("", GridPosition())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("widths=64,64",), "widths must be unique"),
        (("widths=100",), "multiples of the head dimension, 64"),
        (("budgets=0",), "must be a finite number above 0"),
        (("budgets=inf",), "expected a finite number"),
        (("training.parametrization=standard", "sweep_settings=", "widths=64,128"), "muP only"),
        (("equal=tokens",), "tokens"),
        (("variants=a: task.rotary=,a: task.rotary=low_far",), "names must be unique"),
        (("variants=a: task.rotary= task.num_heads=2",), "task.num_heads=2 would be lost, since widths set it"),
        (("variants=a: budgets=1e12",), "budgets=1e12 would be lost"),
        (("variants=a: training.steps=9",), "training.steps=9 would be lost, since budgets set it"),
        (("variants=a: training.lr=0.1",), "training.lr=0.1 would be lost, since learning_rates set it"),
        (("variants=a: widths=64",), "widths=64 would be lost, since it is of the whole comparison"),
        (("budgets=()", "search=task.embed_dim=64"), "search: task.embed_dim=64 would be lost, since widths set it"),
        (("sweep_settings=training.lr=0.1",), "sweep_settings: training.lr=0.1 would be lost"),
        (("training.patience=3",), "set training.patience=none"),
        (("budgets=()", "widths=()", "sweep_settings=", "equal=compute", "training.patience=3"), "patience=none"),
    ],
)
def test_bad_grids_are_named(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grid(*changes)


def test_widths_of_models_without_any_are_refused(tmp_path: Path, capsys) -> None:
    arguments = ["compare", "nearest-neighbor", "--widths", "32", "64", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--set", "training.parametrization=mup"]) == 2
    assert "width" in capsys.readouterr().err


def row(spec: str, width: int, budget: float, losses: list[float]) -> Row:
    sizes = {"width": width, "budget": budget, "compute": 0.99 * budget, "num_params": width**2}
    return made_row(spec, *losses, validation=sum(losses) / len(losses), **sizes)


def law(budget: float, saved: float = 1.0) -> float:
    return 1.2 + 0.8 * (budget / saved / 4e12) ** -0.3


def rows(saved: float, noise: float = 0.0) -> list[Row]:
    """Standard attention, and a method that needs ``saved`` times its compute; the wider model is better from
    4e12 on.
    """
    found = []
    for budget, width in itertools.product(BUDGETS, (64, 128)):
        worse = 0.1 if (width == 128) != (budget >= 4e12) else 0.0
        wave = noise * math.sin(7 * math.log(budget))
        for spec, share in (("standard", 1.0), ("mlr:32|32", saved)):
            loss = law(budget, share) + worse
            found.append(row(spec, width, budget, [loss * (1 + wave), loss * (1 - wave)]))
    return found


def test_the_frontier_takes_the_best_width_and_the_saving_is_found() -> None:
    found = scaling_laws(rows(0.8), ("standard", "mlr:32|32"))
    assert found.baseline == "standard"
    standard, mlr = found.series
    assert [p.width for p in standard.frontier.points] == [64, 64, 128, 128, 128]
    assert mlr.frontier.multiplier.estimate == pytest.approx(0.8, rel=1e-3)
    assert mlr.frontier.multiplier.is_distinguishable
    assert standard.frontier.multiplier is None
    assert mlr.frontier.fit.exponent == pytest.approx(0.3, rel=0.02)
    assert [law.width for law in mlr.widths] == [64, 128]
    assert read_as(Scaling, json.loads(to_json(found)), "results.json") == found


def test_validation_chooses_the_width_and_the_test_does_not() -> None:
    """Of two widths that are equal but for noise, the lower test loss is luck."""
    specs = ("standard", "mlr:32|32")
    swapped = [replace(r, validation=2.0 if r.width == 64 else 1.0) for r in rows(0.8)]
    found = scaling_laws(swapped, specs)
    assert [p.width for p in found.series[0].frontier.points] == [128] * 5
    assert found.series[0].frontier.points[0].losses == next(r for r in swapped if r.width == 128).scores
    assert "chosen by validation;" in report(made_comparison(tuple(swapped), scaling=found)).tables[0].notes[0]
    before = made_comparison(tuple(swapped), scaling=scaling_laws(rows(0.8), specs))
    assert "on the test split by an earlier version" in report(before).tables[0].notes[0]
    unknown = [replace(swapped[0], validation=math.nan), *swapped[1:]]
    with pytest.raises(ConfigError, match="width 64 has no finite validation loss"):
        scaling_laws(unknown, specs)


def test_what_noise_hides_is_not_distinguishable() -> None:
    found = scaling_laws(rows(0.99, noise=0.01), ("standard", "mlr:32|32"))
    multiplier = found.series[1].frontier.multiplier
    assert not multiplier.is_distinguishable
    assert multiplier.interval[0] < 0.99 < multiplier.interval[1]


@pytest.mark.full
def test_intervals_of_few_seeds_contain_the_truth() -> None:
    """Of two seeds at three budgets, 19 times in 20."""
    rng, compute = np.random.default_rng(0), np.array([2e12, 6.3e12, 2e13])

    def measured(compute, share):
        return compute, [rng.normal(1.2 + (of * share / 1e12) ** -0.4, 0.01, 2) for of in compute]

    found = [
        scaling_law.compute_multiplier(measured(compute, 1.0), measured(compute, 1.25), replicates=300)
        for _ in range(150)
    ]
    contained = [low <= 0.8 <= high for low, high in (share.interval for share in found)]
    assert np.mean(contained) > 0.91


def test_without_three_budgets_nothing_is_fitted_and_without_spread_no_interval_is_given() -> None:
    two = [r for r in rows(0.8) if r.budget <= 2e12]
    assert all(s.frontier.fit is None for s in scaling_laws(two, ("standard",)).series)
    three = [replace(r, scores=r.scores[:1]) for r in rows(0.8) if r.budget <= 4e12]
    frontier = scaling_laws(three, ("standard", "mlr:32|32")).series[1].frontier
    assert frontier.fit is not None
    assert frontier.intervals is None
    assert frontier.multiplier.interval is None
    assert not frontier.multiplier.is_distinguishable


def test_settings_have_baselines_of_their_own() -> None:
    both = [replace(r, setting=name) for name, saved in (("near", 0.5), ("far", 2.0)) for r in rows(saved)]
    found = {(s.setting, s.spec): s.frontier for s in scaling_laws(both, ("standard", "mlr:32|32")).series}
    assert found["near", "mlr:32|32"].multiplier.estimate == pytest.approx(0.5, rel=1e-3)
    assert found["far", "mlr:32|32"].multiplier.estimate == pytest.approx(2.0, rel=1e-3)


def test_words_say_what_was_found() -> None:
    trained, specs = (made_row("standard", 1.0),), ("standard", "mlr:32|32")
    saved = report(made_comparison(trained, scaling=scaling_laws(rows(0.8), specs)))
    assert "With less compute than standard" in saved.verdict
    assert "0.80" in saved.tables[0].text()
    hidden = report(made_comparison(trained, scaling=scaling_laws(rows(0.99, noise=0.01), specs)))
    assert "Not distinguishable from standard in compute for the same loss (standard = 1): mlr:32|32" in hidden.verdict


TINY = [
    "task.context_length=16",
    "task.embed_dim=4",
    "task.num_heads=1",
    "task.num_layers=1",
    "task.eval_windows=4",
    "training.batch_size=2",
    "training.warmup_steps=2",
    "learning_rates=1e-3",
    "sweep_settings=",
    "seeds=1",
]


@pytest.mark.full
def test_a_grid_from_the_command_line(tmp_path: Path, capsys) -> None:
    settings = [part for change in TINY for part in ("--set", change)]
    command = ["compare", "text", "--preset", "scaling", *settings, "--attention", "standard", "mlr:2|2"]
    grid = ["--widths", "4", "8", "--budgets", "9e5", "1.3e6", "1.8e6", "--out", str(tmp_path / "out")]
    assert main([*command, *grid]) == 0
    printed = capsys.readouterr().out
    assert "RoPE" in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["rows"]) == 2 * 2 * 2 * 3
    for found in results["rows"]:
        # As many whole steps as the budget pays for.
        step = found["compute"] / found["steps"][0]
        assert found["compute"] <= found["budget"] < found["compute"] + step
        assert len(found["details"]["loss_by_position"]) == len(found["details"]["octaves"])
    assert results["scaling"]["series"][0]["frontier"]["fit"] is not None
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") >= 5
    names = {path.stem for path in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"loss-against-compute", "loss-by-position", "attention-by-distance", "ablation"} <= names

    assert main([*command, "--budgets", "10", "--out", str(tmp_path / "few")]) == 2
    assert "give a larger budget" in capsys.readouterr().err
    assert not (tmp_path / "few").exists()


@pytest.mark.parametrize("spec", ["standard", "mlr:16|16|16|16"])
def test_a_budget_of_any_size_is_counted_at_once(spec: str) -> None:
    (point, *_) = points_of(TEXT, grid("widths=64", "budgets=1e18"))
    training = training_of(TEXT, point.recipe, spec)
    with torch.device("meta"):
        model = point.recipe.task.build_model(spec_for(spec, "mup"), Characters())
    step = point.recipe.training.batch_size * model.flops_per_example()
    assert training.steps == pytest.approx(1e18 / step, abs=2)
    assert training.warmup_steps == 100


@pytest.mark.quick(preset=[name for name in presets_of("text") if not name.endswith("-gpu")])
@pytest.mark.parametrize("preset", presets_of("text"))
def test_every_preset_has_models_that_fit(preset: str) -> None:
    recipe = recipe_for("text", preset)
    point = points_of(TEXT, recipe)[-1]
    for settings in (point.recipe, point.swept):
        with torch.device("meta"):
            for spec in recipe.attention:
                text = spec_for(spec, settings.training.parametrization)
                model = settings.task.build_model(text, Characters())
                assert len(model.trunk.layers) == settings.task.num_layers


def test_steps_of_a_budget_by_counting() -> None:
    costs = [3, 5, 8]  # then 10 each

    class Growing:
        def flops(self, model, step=None):
            return costs[step] if step is not None and step < len(costs) else 10

    for budget in range(60):
        left, expected = budget, 0
        while (left := left - Growing().flops(None, expected)) >= 0:
            expected += 1
        assert affordable_steps(Growing(), None, budget) == expected
    assert affordable_steps(Growing(), None, 16 + 1e18) == 3 + 10**17  # at once


def test_a_warm_up_takes_no_more_compute_than_there_is() -> None:
    changes = ("training.steps=40", "training.warmup_steps=36", "equal=compute", "attention=window:4,bilinear-btt:2")
    recipe = apply_overrides(recipe_for("text", "smoke"), changes)
    trainings = [training_of(TEXT, recipe, spec) for spec in recipe.attention]
    task = TEXT(recipe.task)
    with torch.device("meta"):
        models = [task.build_model(spec) for spec in recipe.attention]
    first, other = (flops_of(task, m, training.steps) for m, training in zip(models, trainings, strict=True))
    assert trainings[0] == recipe.training
    assert trainings[1].warmup_steps < trainings[1].steps < 36
    assert first - task.flops(models[1]) < other <= first
