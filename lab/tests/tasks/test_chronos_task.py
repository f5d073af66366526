"""The Chronos task: synthetic series, scores against their definition, data that do not leak, training that
resumes and reloads.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from structattn.errors import ConfigError, ShapeError
from structattn.testing.tolerances import ANOTHER_ORDER
from structattn_lab.data.series_file import read_series
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.chronos.kernel_synth import covariance, kernel_bank, kernel_synth
from structattn_lab.tasks.chronos.scores import QUANTILES, forecast_scores, seasonal_forecast
from structattn_lab.tasks.chronos.task import ChronosConfig, ChronosTask
from structattn_lab.training.evaluate import load_run
from structattn_lab.training.loop import train

TINY = ChronosConfig(
    context_length=30,
    prediction_length=6,
    season=12,
    num_tokens=64,
    embed_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=24,
    num_layers=1,
    num_synthetic=6,
    eval_windows=4,
    forecasts=3,
    num_samples=4,
)


@pytest.fixture(scope="module")
def task():
    pytest.importorskip("chronos")
    return ChronosTask(TINY)


def test_every_kernel_is_a_covariance():
    times = torch.arange(30, dtype=torch.float64) / 30
    lag = times[:, None] - times
    assert len(kernel_bank(30)) < len(kernel_bank(400))  # longer series have room for longer periods
    for kernel in kernel_bank(30):
        matrix = kernel(times, lag)
        assert torch.equal(matrix, matrix.T)
        assert torch.linalg.eigvalsh(matrix).min() > -1e-9 * matrix.abs().max()
    found = [covariance(20, torch.Generator().manual_seed(seed)) for seed in range(30)]
    assert all(torch.linalg.eigvalsh(matrix).min() > -1e-9 * matrix.abs().max() for matrix in found)
    assert len({float(matrix[0, 5]) for matrix in found}) > 10


def test_synthetic_series_have_the_covariance(monkeypatch):
    """Many draws of one kernel: their second moments are the kernel's."""
    from structattn_lab.tasks.chronos import kernel_synth as module

    kernel = module.periodic(0.5)
    monkeypatch.setattr(module, "covariance", lambda length, _: kernel(*_grid(length)))
    series = module.kernel_synth(4000, 8, "moments").double()
    found = series.T @ series / len(series)
    assert (found - kernel(*_grid(8))).abs().max() < 0.08


def _grid(length):
    times = torch.arange(length, dtype=torch.float64) / length
    return times, times[:, None] - times


def test_synthetic_series_are_a_function_of_their_names():
    first = kernel_synth(3, 40, "a")
    kernel_synth.cache_clear()
    assert torch.equal(kernel_synth(3, 40, "a"), first)
    assert not torch.equal(kernel_synth(3, 40, "b"), first)
    assert torch.isfinite(kernel_synth(50, 64, "c")).all()
    with pytest.raises(ConfigError, match="at least one series"):
        kernel_synth(0, 10)


def test_scores_are_their_definition():
    rng = np.random.default_rng(0)
    n, horizon, season = 3, 4, 5
    context, truth = rng.normal(size=(n, 12)), rng.normal(size=(n, horizon))
    quantiles = np.sort(rng.normal(size=(n, horizon, 9)), axis=-1)
    point = rng.normal(size=(n, horizon))
    mase = 0.0
    for row in range(n):
        scale = np.mean([abs(context[row, t] - context[row, t - season]) for t in range(season, 12)])
        mase += np.mean(np.abs(truth[row] - point[row])) / scale / n
    total = 0.0
    for row in range(n):
        for step in range(horizon):
            for level, guess in zip(QUANTILES, quantiles[row, step], strict=True):
                over = truth[row, step] - guess
                total += 2 * (level * over if over > 0 else (level - 1) * over)
    given = [torch.from_numpy(x) for x in (quantiles, point, truth, context)]
    found = forecast_scores(*given, season)
    assert math.isclose(found["mase"], mase, rel_tol=1e-12)
    assert math.isclose(found["wql"], total / np.abs(truth).sum() / 9, rel_tol=1e-12)
    as_point = forecast_scores(given[1][..., None].expand(-1, -1, 9), *given[1:], season)
    assert math.isclose(as_point["wql"], np.abs(truth - point).sum() / np.abs(truth).sum(), rel_tol=1e-12)
    with pytest.raises(ShapeError, match="longer than 12"):
        forecast_scores(*given, 12)


def test_the_seasonal_forecast_repeats_a_season():
    series = torch.arange(7.0).repeat(4)[None]
    quantiles, point = seasonal_forecast(series, 10, 7)
    assert point[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert torch.equal(quantiles, point[..., None].expand(-1, -1, 9))  # nothing changes from season to season
    rising, point = seasonal_forecast(series + torch.arange(28.0), 3, 7)
    assert torch.allclose(rising, point[..., None] + 7)


def test_training_sees_no_oil_temperature_and_no_later_row(task):
    loads, oil = task._loads, torch.from_numpy(read_series(None, "date", "OT").values)
    assert loads.shape == (6, 8640)
    for channel in loads:
        assert not torch.allclose(channel[:500].double(), oil[:500])
    assert torch.equal(loads[0], torch.from_numpy(read_series(None, "date", "HUFL").values[:8640]).float())
    train_series = task._synthetic
    for split in ("validation", "test"):
        held = task._held_out(split)["synthetic"]
        assert not (train_series[:, None, :36] == held[None]).all(-1).any()
    context, truth = task._test_windows()
    assert torch.equal(truth[0].double(), oil[11520:11526].float().double())
    assert torch.equal(context[-1].double(), oil[14400 - 36 : 14400 - 6].float().double())


def test_batches_are_a_function_of_seed_and_step(task):
    a, b = task.batch(0, 3, 8), task.batch(0, 3, 8)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["input_ids"], task.batch(1, 3, 8)["input_ids"])
    assert not torch.equal(a["input_ids"], task.batch(0, 4, 8)["input_ids"])
    assert a["input_ids"].shape == (8, 31)
    assert a["labels"].shape == (8, 7)
    assert (a["labels"][:, -1] == 1).all()  # the end of the series


def test_the_tokens_are_those_of_chronos(task):
    """Tokens of a future, back in units: at most half a bin away."""
    series = task._oil("test", 2)
    batch = task._tokens(series)
    _, _, scale = task.tokenizer.context_input_transform(series[:, :30])
    values = task.tokenizer.output_transform(batch["labels"][:, None, :6], scale)[:, 0]
    assert (values - series[:, 30:]).abs().max() <= 15 / 60 * 1.01 * scale.max()


def test_baselines_and_details(task):
    naive, frequencies = task.baselines()
    assert set(naive.metrics) == {"mase", "wql"}
    assert 0 < frequencies.metrics["nats_per_token"] < math.log(64)
    torch.manual_seed(0)
    model = task.build_model("mlr:4|2|2").eval()
    scores = task.evaluate(model, "test")
    assert scores == task.evaluate(model, "test")  # sampling has a separate seed
    assert set(scores) == {"nats_per_token", "nats_synthetic", "nats_ett", "mase", "wql"}
    assert math.isclose(scores["nats_per_token"], (scores["nats_synthetic"] + scores["nats_ett"]) / 2)
    assert set(task.evaluate(model, "validation")) == {"nats_per_token", "nats_synthetic", "nats_ett"}
    for example in task.details(model)["examples"]:
        assert len(example["truth"]) == len(example["forecast"]) == 6
        assert all(a <= b <= c for a, b, c in zip(example["low"], example["forecast"], example["high"], strict=True))


def test_training_learns_and_a_run_is_reloaded_as_a_pipeline(task, tmp_path):
    """Trained, written, read back: the same forecasts; and saved as a folder that a pipeline loads."""
    config = TrainingConfig(steps=12, batch_size=8, learning_rate=1e-2, eval_every=12, checkpoint_every=6, patience=3)
    result = train(task, "mlr:4|2|2", config, seed=0, run_dir=tmp_path / "run", show_progress=False)
    torch.manual_seed(0)
    fresh = task.build_model("mlr:4|2|2").eval()
    before, after = (task.evaluate(model, "validation")["nats_per_token"] for model in (fresh, result.model))
    assert after < before - 0.1
    context, _ = task._test_windows()
    expected, _ = task.forecast(result.model, context)
    run = load_run(tmp_path / "run")
    found, _ = run.task.forecast(run.model, context)
    assert torch.equal(found, expected)
    run.model.model.save_pretrained(tmp_path / "saved")

    from structattn.integrations.chronos import load_pipeline

    assert load_pipeline(tmp_path / "saved").predict(context, num_samples=2).shape == (3, 2, 6)
    with pytest.raises(ConfigError, match="expected a T5ForConditionalGeneration, got"):
        ChronosTask(replace(TINY, checkpoint=str(tmp_path / "saved"))).build_model("standard")


def test_a_checkpoint_is_restructured_and_fine_tuned(tmp_path):
    pytest.importorskip("chronos")
    from transformers import T5ForConditionalGeneration

    from structattn.integrations.chronos import new_config

    sizes = {"num_tokens": 50, "embed_dim": 8, "num_heads": 1, "head_dim": 8, "mlp_dim": 8, "num_layers": 1}
    T5ForConditionalGeneration(new_config(context_length=40, prediction_length=9, **sizes)).save_pretrained(tmp_path)
    task = ChronosTask(replace(TINY, checkpoint=str(tmp_path)))
    assert task.data_sha256 != ChronosTask(TINY).data_sha256
    one, other = (task.build_model(spec) for spec in ("standard", "mlr:8"))
    batch = task.batch(0, 0, 4)
    assert batch["labels"].max() < 50
    assert torch.allclose(
        one.eval()(**batch), other.eval()(**batch), atol=ANOTHER_ORDER
    )  # one level: the checkpoint, unchanged
    assert one.model.config.structattn["encoder_length"] == 31  # of the task, not of the checkpoint
    config = TrainingConfig(steps=2, batch_size=4, learning_rate=1e-3, eval_every=2)
    result = train(task, "mlr:4|4", config, seed=0, run_dir=tmp_path / "run", show_progress=False)
    assert result.progress.step == 2
    with pytest.raises(ConfigError, match="must not be longer, got 41"):
        ChronosTask(replace(TINY, checkpoint=str(tmp_path), context_length=41))
    with pytest.raises(ConfigError, match="expected a folder"):
        ChronosTask(replace(TINY, checkpoint=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed_dim": 0}, "embed_dim"),
        ({"season": 30}, "shorter than the context"),
        ({"synthetic": 1.5}, "task.synthetic must be a finite number"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_settings_out_of_range(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **change)
