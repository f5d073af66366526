"""The forecasting task: one column and several, ours and baseline models, on the same windows."""

import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from structattn.errors import ConfigError, DataError
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS
from structattn_lab.compare.grid import ModelCosts, points_of
from structattn_lab.data.series_file import read_columns
from structattn_lab.old_formats import with_todays_specs
from structattn_lab.settings.recipe import Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.forecast.baseline_models import BaselineModel, BaselineModelSpec
from structattn_lab.tasks.forecast.data import WindowedChannels
from structattn_lab.tasks.forecast.intervals import conformal_widths
from structattn_lab.tasks.forecast.task import (
    INTERVAL,
    ForecastConfig,
    ForecastTask,
    SeriesConfig,
)
from structattn_lab.tasks.registry import factory_of
from structattn_lab.training.identity import check_identity, identity_of
from structattn_lab.training.loop import train

_TRAINING = TrainingConfig(steps=4, batch_size=8, learning_rate=0.1)
BASELINE_MODELS = ["baseline:DLinear", "baseline:NHITS", "baseline:PatchTST", "baseline:iTransformer"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "three.csv"
    time = np.arange(400)
    daily = np.sin(time * 2 * np.pi / 24)
    frame = pd.DataFrame(
        {"a": daily + 0.1 * rng.normal(size=400), "b": 5 - 2 * daily, "c": 100 * daily + rng.normal(size=400)}
    )
    frame.insert(0, "t", pd.date_range("2020-01-01", periods=400, freq="h"))
    frame.to_csv(path, index=False)
    return str(path)


def make(table, target="*", **changes):
    settings = {"look_back": 48, "horizon": 12, "embed_dim": 16, "num_heads": 2, "num_layers": 1, "dropout": 0.0}
    return ForecastTask(ForecastConfig(data=SeriesConfig(path=table, time="t", target=target), **(settings | changes)))


def test_the_flops_of_an_example_are_those_of_all_its_columns(table):
    task = make(table)
    model = task.build_model("standard")
    assert ModelCosts.of(task, model).flops_per_example == 3 * model.flops_per_example()


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_windows_of_columns_are_those_of_each(table, split):
    several = WindowedChannels(read_columns(Path(table), "t", "*"), 48, 12)
    X, Y = several.windows(split)
    assert X.shape[1:] == (3, 48)
    assert Y.shape[1:] == (3, 12)
    for i, channel in enumerate(several.channels):
        x, y = channel.windows(split)
        assert torch.equal(X[:, i], x)
        assert torch.equal(Y[:, i], y)


def test_metrics_are_means_over_columns(table):
    together, alone = make(table), [make(table, name) for name in "abc"]
    torch.manual_seed(0)
    model = together.build_model("mlr:4|2|2").eval()
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)
    found, each = together.evaluate(model, "test"), [task.evaluate(model, "test") for task in alone]
    for name, value in found.items():
        assert value == pytest.approx(np.mean([metrics[name] for metrics in each]), rel=SAME_MODEL)
    for row, *rows in zip(together.baselines(), *(task.baselines() for task in alone), strict=True):
        assert row.metrics["mse"] == pytest.approx(np.mean([one.metrics["mse"] for one in rows]))
        assert row.validation == pytest.approx(np.mean([one.validation for one in rows]))
    assert together.flops(model) == 3 * alone[0].flops(model)
    assert together.tokens(model) == 3 * alone[0].tokens(model)
    details = together.details(model)
    assert list(details["error_by_column"]) == ["a", "b", "c"]
    assert np.mean(list(details["error_by_column"].values())) == pytest.approx(found["mse"], rel=SAME_MODEL)
    assert np.mean(details["error_by_lead"]) == pytest.approx(found["mse"], rel=SAME_MODEL)


def test_one_column_does_not_see_the_others(table):
    task = make(table)
    torch.manual_seed(0)
    model = task.build_model("standard").eval()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    window = task.batch(0, 0, 4)["window"]
    changed = window.clone()
    changed[:, 1] = torch.randn(4, 48)
    before, after = model(window), model(changed)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])
    assert torch.allclose(model(window[:, 0]), before[:, 0], atol=SIX_DIGITS)


def test_intervals_hold_their_share():
    rng = torch.Generator().manual_seed(0)
    forecast = torch.zeros(999, 2, 3)
    width = conformal_widths((forecast - torch.randn(forecast.shape, generator=rng)).abs(), [INTERVAL])[0]
    fresh = torch.randn(20000, 2, 3, generator=rng).abs()
    assert width.shape == (2, 3)
    assert (fresh <= width).float().mean().item() == pytest.approx(INTERVAL / 100, abs=0.03)


def test_details_have_intervals_around_the_forecast(table):
    task = make(table, "a")
    details = task.details(task.build_model("standard").eval())
    for example in details["examples"]:
        assert all(
            low < middle < high
            for low, middle, high in zip(example["low"], example["forecast"], example["high"], strict=True)
        )
    assert 0.3 < details["coverage"] < 1
    assert "error_by_column" not in details


@pytest.mark.parametrize("spec", BASELINE_MODELS)
def test_baseline_models_take_our_windows(table, spec):
    task = make(table)
    task.check_spec(spec)
    torch.manual_seed(3)
    model = task.build_model(spec).eval()
    window = task.batch(0, 0, 4)["window"]
    out = model(window)
    assert out.shape == (4, 3, 12)
    assert task.loss(model, task.batch(0, 0, 4), 0).isfinite()
    assert model.flops_per_example() > 0
    # Only iTransformer mixes the columns.
    changed = window.clone()
    changed[:, 1] += torch.randn(4, 48)
    assert torch.allclose(model(changed)[:, 0], out[:, 0], atol=SAME_MODEL) == (not model.mixes_channels)


@pytest.mark.parametrize("spec", ["baseline:DLinear", "baseline:PatchTST,n_heads=2"])
def test_baseline_models_are_drawn_from_the_seed_of_the_run(table, spec):
    task = make(table)

    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in task.build_model(spec).parameters()])

    state = random.getstate()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert random.getstate() == state


def test_a_baseline_model_is_trained_and_resumed_as_ours_are(table, tmp_path):
    task = make(table)
    config = TrainingConfig(steps=6, batch_size=8, learning_rate=1e-3, eval_every=2, patience=5, checkpoint_every=2)
    whole = train(task, "baseline:PatchTST", config, seed=0, run_dir=tmp_path / "run", show_progress=False)
    again = train(task, "baseline:PatchTST", config, seed=0, run_dir=tmp_path / "run", resume=True, show_progress=False)
    assert whole.progress.history == again.progress.history
    assert task.evaluate(whole.model.eval(), "test") == task.evaluate(again.model.eval(), "test")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("baseline:DLiner", "did you mean 'DLinear'"),
        ("peer:DLiner", "did you mean 'DLinear'"),
        ("baseline:DLinear,window", "expected key=value, got 'window'"),
        ("baseline:DLinear,window=x y", "expected a Python number, text or list, got 'x y'"),
    ],
)
def test_unknown_baseline_models(spec, message):
    with pytest.raises(ConfigError, match=message):
        BaselineModelSpec.parse(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("baseline:DLinear,moving_window=3", "no setting 'moving_window'"),
        ("baseline:PatchTST,n_heads=3", "does not take these settings"),
    ],
)
def test_settings_that_a_baseline_model_does_not_take(spec, message):
    with pytest.raises(ConfigError, match=message):
        BaselineModel(BaselineModelSpec.parse(spec), look_back=48, horizon=12, num_channels=1)


def test_the_settings_of_a_baseline_model_may_be_lists():
    spec = BaselineModelSpec.parse("baseline:NHITS,n_freq_downsample=[4, 2, 1],dropout_prob_theta=0.1")
    assert dict(spec.settings) == {"n_freq_downsample": [4, 2, 1], "dropout_prob_theta": 0.1}


def test_the_old_form_of_a_baseline_model_is_read(table):
    assert BaselineModelSpec.parse("peer:NHITS") == BaselineModelSpec.parse("baseline:NHITS")
    task = make(table)
    recipe = Recipe(task=task.config, training=_TRAINING, attention=("standard", "peer:PatchTST,n_heads=2"))
    assert recipe.attention == ("standard", "baseline:PatchTST,n_heads=2")
    today = identity_of(task, "baseline:DLinear", recipe.training, 0)
    assert identity_of(task, "peer:DLinear", recipe.training, 0) == today
    check_identity(today | {"spec": "peer:DLinear"}, today, task, Path("run"))


def test_the_old_form_is_read_in_records_and_nowhere_else():
    record = {"rows": [{"spec": "peer:DLinear"}, {"spec": "mlr:2|2"}], "meanings": {"peer:DLinear": "a model"}}
    columns = {"target": "peer:load"}
    assert with_todays_specs(record | columns) == {
        "rows": [{"spec": "baseline:DLinear"}, {"spec": "mlr:2|2"}],
        "meanings": {"baseline:DLinear": "a model"},
        **columns,
    }


def test_the_run_folder_of_an_old_comparison_is_continued(table, tmp_path):
    recipe = Recipe(task=make(table).config, training=_TRAINING, attention=("baseline:DLinear",))
    (point,) = points_of(factory_of("forecast"), recipe)
    today = point.run_folder(tmp_path, "baseline:DLinear", 0, 0.1)
    old = point.run_folder(tmp_path, "peer:DLinear", 0, 0.1)
    assert old != today
    old.mkdir(parents=True)
    assert point.run_folder(tmp_path, "baseline:DLinear", 0, 0.1) == old
    today.mkdir(parents=True)
    assert point.run_folder(tmp_path, "baseline:DLinear", 0, 0.1) == today


def test_attention_specs_are_no_baseline_models(table):
    assert BaselineModelSpec.parse("mlr:8|8") is None
    with pytest.raises(ConfigError):
        make(table, "a").check_spec("mlr:")
    with pytest.raises(DataError, match="a target column 'A', got a file without it"):
        make(table, "A")
