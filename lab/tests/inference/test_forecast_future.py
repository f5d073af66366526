"""Forecasts of the future: the same values as in the scores of a comparison, intervals, dates, and one clear
line for every mistake.
"""

import dataclasses
import hashlib
import math
import shutil
import stat
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from structattn.cli import main
from structattn.errors import CheckpointError, ConfigError, DataError
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS, SOLVED
from structattn_lab.compare import pages
from structattn_lab.compare.comparison import compare
from structattn_lab.data.series_file import read_columns
from structattn_lab.data.time_steps import TimeStep, step_of
from structattn_lab.inference.forecast import forecast
from structattn_lab.inference.forecast_choice import choose
from structattn_lab.records import read_comparison
from structattn_lab.settings.recipe import Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.forecast.data import WindowedChannels
from structattn_lab.tasks.forecast.future import BaselineForecaster, forecast_units
from structattn_lab.tasks.forecast.intervals import check_percents, conformal_widths
from structattn_lab.tasks.forecast.kept import read_kept
from structattn_lab.tasks.forecast.task import ForecastConfig, ForecastTask, SeriesConfig
from structattn_lab.training.evaluate import load_run
from structattn_lab.training.finished import read_record

SPECS = ("standard", "mlr:4|2|2", "baseline:DLinear", "baseline:iTransformer", "baseline:PatchTST,n_heads=2")
BASELINES = ("last value", "seasonal (24 steps)", "ridge regression")
ROWS, LOOK_BACK, HORIZON = 400, 48, 12
TRAINING = TrainingConfig(steps=4, batch_size=8, learning_rate=3e-3, warmup_steps=0, eval_every=2, checkpoint_every=4)


def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    time = np.arange(ROWS)
    daily = np.sin(time * 2 * np.pi / 24)
    frame = pd.DataFrame({"a": 3 + daily + 0.1 * rng.normal(size=ROWS), "b": 100 * daily + rng.normal(size=ROWS)})
    frame.insert(0, "t", pd.date_range("2024-01-01", periods=ROWS, freq="h"))
    return frame


def settings(path: Path, **changes) -> ForecastConfig:
    sizes = {"look_back": LOOK_BACK, "horizon": HORIZON, "embed_dim": 16, "num_heads": 2, "num_layers": 1}
    return ForecastConfig(data=SeriesConfig(path=str(path), time="t", target="*"), **(sizes | changes))


def contents(folder: Path) -> dict[str, tuple]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A comparison whose training file was moved away, and which nothing changes."""
    folder = tmp_path_factory.mktemp("forecast")
    path, out = folder / "data.csv", folder / "out"
    table().to_csv(path, index=False)
    recipe = Recipe(task=settings(path), training=TRAINING, attention=SPECS, seeds=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "write_pages", lambda record, folder, task: folder / "report.html")  # which takes seconds
        compare("forecast", recipe, out, show_progress=False)
    path.rename(folder / "moved.csv")
    before = contents(out)
    for file in out.rglob("*"):
        if file.is_file():
            file.chmod(file.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    yield out
    assert contents(out) == before


@pytest.fixture(scope="module")
def task(finished) -> ForecastTask:
    return ForecastTask(settings(finished.parent / "moved.csv"))


@pytest.mark.quick(row=["standard", SPECS[3], "ridge regression"])
@pytest.mark.parametrize("row", [*SPECS, *BASELINES])
def test_forecasts_are_those_of_the_scores(finished, task, row) -> None:
    """From the data up to any test window, every row forecasts what its score in the comparison was computed
    from.
    """
    record, values = read_comparison(finished), table()[["a", "b"]].to_numpy().T
    chosen = choose(finished, row, None)
    starts = task.data.channels[0].starts("test")
    percents = [80, 95]
    forecasts = [forecast_units(chosen.forecaster, values[:, :start], HORIZON, percents)[0] for start in starts]
    truths = [values[:, start : start + HORIZON] for start in starts]
    errors = np.stack(forecasts) - np.stack(truths)
    scores = {one.spec: one.metrics for one in record.rows} | {one.name: one.metrics for one in record.baselines}
    if row in SPECS:  # the best of the two seeds, while the table has their mean
        run = next(
            path for path in _runs(finished, row) if _validation(path) == min(map(_validation, _runs(finished, row)))
        )
        trained = load_run(run, finished.parent / "moved.csv")
        expected = trained.task.evaluate(trained.model, "test")
        assert expected["mse"] in next(one.scores for one in record.rows if one.spec == row)
    else:
        expected = scores[row]
    assert np.square(errors).mean() == pytest.approx(expected["mse_units"], rel=SAME_MODEL)
    assert np.abs(errors).mean() == pytest.approx(expected["mae_units"], rel=SAME_MODEL)
    # The public function gives the same, with dates.
    start = starts[len(starts) // 2]
    frame = forecast(finished, table()[:start], row=row)
    assert frame["t"].tolist() == table()["t"][start : start + HORIZON].tolist()
    np.testing.assert_allclose(frame[["a", "b"]].to_numpy().T, forecasts[len(starts) // 2], rtol=SAME_MODEL)
    assert frame.attrs["row"] == row


def _runs(out: Path, spec: str) -> list[Path]:
    return sorted(path.parent for path in (out / "runs").rglob("run.json") if read_record(path.parent).spec == spec)


def _validation(run: Path) -> float:
    progress = read_record(run).progress
    return progress.final_validation_score("mse", TRAINING.patience)


@pytest.mark.parametrize("row", ["standard", "baseline:DLinear", "seasonal", "ridge"])
def test_intervals_are_the_ranked_errors_on_the_validation_windows(finished, task, row) -> None:
    values = table()[["a", "b"]].to_numpy().T
    forecaster = choose(finished, row, None).forecaster
    starts = task.data.channels[0].starts("validation")
    errors = [
        np.abs(forecast_units(forecaster, values[:, :start], HORIZON, [])[0] - values[:, start : start + HORIZON])
        for start in starts
    ]
    ranked, count = np.sort(np.stack(errors), axis=0), len(starts)
    assert forecaster.windows(HORIZON) == count
    frame = forecast(finished, table(), row=row, levels=(90, 50))
    assert list(frame) == ["t", *(f"{c}{end}" for c in "ab" for end in ("", "-lo-50", "-hi-50", "-lo-90", "-hi-90"))]
    for i, column in enumerate("ab"):
        for level in (50, 90):
            width = ranked[math.ceil(level * (count + 1) / 100) - 1, i]
            scale = np.abs(values[i]).max()
            np.testing.assert_allclose(frame[column] - frame[f"{column}-lo-{level}"], width, atol=SAME_MODEL * scale)
            np.testing.assert_allclose(frame[f"{column}-hi-{level}"] - frame[column], width, atol=SAME_MODEL * scale)


def test_conformal_widths_by_hand() -> None:
    errors = torch.tensor([[3.0, 1.0], [1.0, 2.0], [2.0, 9.0], [4.0, 5.0]])
    widths = conformal_widths(errors, [20, 40, 60, 80, 81])
    assert widths[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0, math.inf]  # the rank of 20 % of 5 is 1
    assert widths[:, 1].tolist() == [1.0, 2.0, 5.0, 9.0, math.inf]
    assert check_percents([95, 80], 19) == (80, 95)
    for percents, message in (
        ([95], "95 % needs at least 19 validation windows, and the training had 18: give levels of at most 94"),
        ([0], "a level in percent must be an int of at least 1 and at most 99, got 0"),
        ([100], "at most 99"),
        ([80, 80], "levels must be unique"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_percents(percents, 18)


def test_conformal_widths_hold_their_share_of_exchangeable_errors() -> None:
    """The probability is exactly rank / (n + 1), also for few errors."""
    rng = torch.Generator().manual_seed(0)
    errors, fresh = torch.rand(9, 40_000, generator=rng), torch.rand(40_000, generator=rng)
    for percent, share in ((80, 0.8), (75, 0.8), (90, 0.9)):
        assert (fresh <= conformal_widths(errors, [percent])[0]).float().mean().item() == pytest.approx(share, abs=0.01)


def test_coverage_of_ridge_regression_on_etth1() -> None:
    """What the page on forecasting says."""
    data = WindowedChannels(read_columns(None, "date", "OT"), 336, 96)
    task = ForecastTask(ForecastConfig())
    forecaster = BaselineForecaster(task.kept_with_baselines(), "ridge regression")
    X, Y = data.channels[0].windows("test", torch.from_numpy(data.channels[0].scaled))
    width = forecaster.widths([80, 95], 96)[:, 0]
    forecasts = torch.cat([forecaster.forecast(x[None].numpy(), 96) for x in X])
    coverage = [float(((forecasts - Y).abs() <= one).double().mean()) for one in width]
    assert coverage == pytest.approx([0.894, 0.984], abs=0.001)


STEPS = ["h", "15min", "D", "B", "W", "MS", "ME", "QS", "QE", "YS", "YE", "BME"]


@pytest.mark.parametrize("freq", STEPS)
def test_dates_continue_every_frequency(freq) -> None:
    times = pd.date_range("2023-01-31 00:00", periods=60, freq=freq).to_numpy().astype("datetime64[us]")
    step = step_of(times[:40])
    assert step.fits(times)
    assert (step.after(times[:40], 20) == times[40:]).all()
    if freq not in ("MS", "ME", "QS", "QE", "YS", "YE"):  # their days vary
        assert not step.fits(times[::2])
    else:
        assert not step.fits(times[:40] + np.arange(40) * np.timedelta64(1, "D"))


def test_dates_of_days_that_some_months_lack() -> None:
    step = TimeStep(months=1)
    times = np.array(["2024-10-30T06:00", "2024-11-30T06:00", "2024-12-30T06:00"], "datetime64[us]")
    found = step.after(times, 3).astype("datetime64[h]").astype(str).tolist()
    assert found == ["2025-01-30T06", "2025-02-28T06", "2025-03-30T06"]
    ends = np.array(["2024-12-31", "2025-01-31"], "datetime64[us]")
    assert step.after(ends, 2).astype("datetime64[D]").astype(str).tolist() == ["2025-02-28", "2025-03-31"]


def test_a_horizon_is_shorter_or_as_long_as_the_method_can(finished) -> None:
    whole = forecast(finished, table(), row="standard")
    short = forecast(finished, table(), row="standard", horizon=5)
    pd.testing.assert_frame_equal(short, whole[:5])
    for row in ("ridge", "seasonal"):
        whole = forecast(finished, table(), row=row)
        pd.testing.assert_frame_equal(forecast(finished, table(), row=row, horizon=5), whole[:5])
    for row in ("standard", "baseline:DLinear", "ridge regression"):
        with pytest.raises(ConfigError, match=r"at most 12 steps.* 13.*'last value' or 'seasonal \(24 steps\)'"):
            forecast(finished, table(), row=row, horizon=13)
    long = forecast(finished, table(), row="seasonal", horizon=50, levels=[80])
    past = table()["b"].to_numpy()[-24:]
    np.testing.assert_allclose(long["b"], past[np.arange(50) % 24], rtol=SOLVED)
    assert long["t"].tolist() == pd.date_range(table()["t"].iloc[-1], periods=51, freq="h")[1:].tolist()
    # 80 validation rows have 31 windows of 50 steps.
    values = table()["b"].to_numpy()
    errors = np.stack([np.abs(values[s - 24 : s][np.arange(50) % 24] - values[s : s + 50]) for s in range(240, 271)])
    expected = np.sort(errors, axis=0)[math.ceil(0.8 * 32) - 1]
    np.testing.assert_allclose(long["b-hi-80"] - long["b"], expected, rtol=SIX_DIGITS)
    with pytest.raises(ConfigError, match="95 % needs at least 19 validation windows, and the training had 1"):
        forecast(finished, table(), row="last", horizon=80)
    with pytest.raises(
        ConfigError, match="come from the 80 validation rows of the training, which have no window of 81"
    ):
        forecast(finished, table(), row="last", horizon=81)
    for horizon in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="horizon must be an int of at least 1"):
            forecast(finished, table(), horizon=horizon)


def test_the_row_with_the_lowest_validation_error_is_the_default(finished) -> None:
    record = read_comparison(finished)
    lowest = min([*record.rows, *record.baselines], key=lambda row: row.validation)
    frame = forecast(finished, table())
    assert frame.attrs["row"] == (lowest.spec if hasattr(lowest, "spec") else lowest.name)
    assert f"the lowest validation mse of the comparison, {lowest.validation:.3g}" in frame.attrs["why"]
    assert forecast(finished, table(), row=" MLR: 4|2|2").attrs["row"] == "mlr:4|2|2"
    assert forecast(finished, table(), row="PatchTST").attrs["row"] == SPECS[-1]
    why = forecast(finished, table(), row="standard").attrs["why"]
    runs = _runs(finished, "standard")
    best = min(runs, key=_validation)
    assert f"of its 2 seeds, {read_record(best).seed} has the lowest" in why
    pd.testing.assert_frame_equal(forecast(best, table()), forecast(str(finished), table(), row="standard"))
    for row, message in (
        ("stadnard", "did you mean 'standard'"),
        ("", "has no row ''"),
        ("baseline", "the beginning of several rows, 'baseline:DLinear', 'baseline:iTransformer'"),
    ):
        with pytest.raises(ConfigError, match=message):
            forecast(finished, table(), row=row)
    with pytest.raises(ConfigError, match="is a single run: leave --row out"):
        forecast(best, table(), row="standard")
    with pytest.raises(ConfigError, match="no variant 'h': it has only one"):
        forecast(finished, table(), variant="h")


def test_frames_in_other_forms_give_the_same_forecast(finished) -> None:
    frame = table()
    expected = forecast(finished, frame, row="ridge")
    for name in ("t", "other", None):
        pd.testing.assert_frame_equal(forecast(finished, frame.set_index("t").rename_axis(name), row="ridge"), expected)
    texts = frame.assign(t=frame["t"].astype(str)).set_index("t")
    pd.testing.assert_frame_equal(forecast(finished, texts, row="ridge"), expected)
    periods = frame.set_index(frame["t"].dt.to_period("h")).drop(columns="t").rename_axis(None)
    pd.testing.assert_frame_equal(forecast(finished, periods, row="ridge"), expected)
    mixed = frame[["b", "t", "a"]].assign(more="text")
    pd.testing.assert_frame_equal(forecast(finished, mixed, row="ridge"), expected)
    pd.testing.assert_frame_equal(forecast(finished, frame.astype(str), row="ridge"), expected)
    pd.testing.assert_frame_equal(forecast(finished, frame[-LOOK_BACK:], row="ridge"), expected)
    renamed = forecast(finished, frame.rename(columns={"t": "when"}), row="ridge", time="when")
    pd.testing.assert_frame_equal(renamed.rename(columns={"when": "t"}), expected)
    zone = frame.assign(t=frame["t"].dt.tz_localize("UTC").dt.tz_convert("Europe/Berlin"))
    found = forecast(finished, zone, row="ridge")
    assert str(found["t"].dt.tz) == "Europe/Berlin"
    assert (found["t"] == expected["t"].dt.tz_localize("UTC")).all()
    later = frame.assign(t=frame["t"] + pd.Timedelta(hours=1000))
    assert forecast(finished, later, row="ridge")["t"].iloc[0] == later["t"].iloc[-1] + pd.Timedelta(hours=1)
    steps = forecast(finished, frame.drop(columns="t"), row="ridge")
    assert steps["step"].tolist() == list(range(ROWS, ROWS + HORIZON))
    pd.testing.assert_frame_equal(steps.drop(columns="step"), expected.drop(columns="t"))


def _changed(row: int, column: str, value) -> pd.DataFrame:
    frame = table().astype({column: object})
    frame.loc[row, column] = value
    return frame


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            lambda: table().rename(columns={"a": "A"}),
            "columns of the training, 'a', 'b', got a frame without 'a': did you mean 'A'",
        ),
        (lambda: table()[: LOOK_BACK - 1], "at least 48 rows, which standard looks back on, got 47"),
        (lambda: table()[::2], "rows 1 hour apart, as in training, got 2 hours"),
        (lambda: table()[::-1], "got a time before the one above it.* Sort the frame by time"),
        (lambda: table().iloc[[0, *range(ROWS)]], "got the same time twice"),
        (lambda: table().drop(index=200), "irregular steps; the usual step is 1 hour"),
        (lambda: _changed(7, "a", "1,5 kW"), "expected numbers in column 'a', got '1,5 kW' in row 7 of the frame"),
        (lambda: _changed(7, "a", None), "got 1 empty, NaN or infinite cells, the first one in row 7"),
        (lambda: _changed(7, "b", float("inf")), "got 1 empty, NaN or infinite"),
        (lambda: _changed(7, "t", None), "expected a time in every row of column 't', got '' in row 7"),
        (lambda: table().rename(columns={"t": "when"}).astype({"when": str}), "time column 't', .*--time.*'when'"),
        (lambda: table()[:0], "expected data rows, got none"),
        (lambda: pd.concat([table(), table()["a"]], axis=1), "different names of columns, got 'a' twice"),
        (lambda: _changed(7, "a", 1e9), "expected a number like the others"),
    ],
)
def test_frames_that_cannot_be_forecast(finished, frame, message) -> None:
    with pytest.raises(DataError, match=message):
        forecast(finished, frame(), row="standard")


def test_what_is_no_frame_or_no_run(finished, tmp_path) -> None:
    with pytest.raises(ConfigError, match="frame must be a pandas.DataFrame, got"):
        forecast(finished, table()["a"])
    for name, value in (("levels", 80), ("levels", "80"), ("row", 3), ("variant", ["a"])):
        with pytest.raises(ConfigError, match=f"{name} must be a"):
            forecast(finished, table(), **{name: value})
    with pytest.raises(CheckpointError, match="there is no such folder"):
        forecast(tmp_path / "nowhere", table())
    with pytest.raises(ConfigError, match="run must be the name of a file or folder"):
        forecast("", table())
    shutil.copytree(finished / "runs", tmp_path / "without" / "runs")
    with pytest.raises(CheckpointError, match="it is a comparison of .* runs: name one of them"):
        forecast(tmp_path / "without", table())
    shutil.copyfile(finished / "owner.json", tmp_path / "without" / "owner.json")
    with pytest.raises(CheckpointError, match="is not finished: finish it with the command .* --resume"):
        forecast(tmp_path / "without", table())
    run = next((finished / "runs").rglob("run.json")).parent
    shutil.copytree(run, tmp_path / "half")
    (tmp_path / "half" / "run.json").unlink()
    with pytest.raises(CheckpointError, match="its training was interrupted: finish it"):
        forecast(tmp_path / "half", table())
    shutil.copytree(run, tmp_path / "damaged")
    kept = tmp_path / "damaged" / "forecast.safetensors"
    kept.chmod(0o644)
    kept.write_bytes(kept.read_bytes()[:-4] + b"abcd")
    with pytest.raises(CheckpointError, match="was changed since it was written"):
        forecast(tmp_path / "damaged", table())


def test_another_task_forecasts_nothing(tmp_path, capsys) -> None:
    small = ["task.dim=8", "task.num_points=4", "task.num_heads=2", "task.eval_examples=16", "training.steps=2"]
    words = [f"--set={change}" for change in [*small, "training.warmup_steps=0"]]
    assert main(["train", "nearest-neighbor", *words, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["forecast", str(tmp_path / "run"), "--out", str(tmp_path / "future.csv")]) == 2
    assert "is of the task nearest-neighbor, and forecasts are those of the task forecast" in capsys.readouterr().err


def test_runs_of_versions_that_kept_nothing_use_their_training_data(finished, tmp_path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    for file in out.rglob("forecast.safetensors"):
        file.unlink()
    for row in ("standard", "ridge"):
        with pytest.raises(DataError, match="an earlier version made .*need its training data as they were"):
            forecast(out, table(), row=row)
    data = finished.parent / "data.csv"
    shutil.copyfile(finished.parent / "moved.csv", data)
    try:
        for row in ("standard", "baseline:iTransformer", "ridge", "last"):
            pd.testing.assert_frame_equal(forecast(out, table(), row=row), forecast(finished, table(), row=row))
    finally:
        data.unlink()
    assert not list(out.rglob("forecast.safetensors"))


def test_a_run_of_an_old_version_forecasts(tmp_path) -> None:
    old = Path(__file__).parents[3] / "tests" / "old_files" / "0.1.0.zip"
    with zipfile.ZipFile(old) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith("runs/forecast/")])
    etth1 = read_columns(None, "date", "OT")[0]
    frame = pd.DataFrame({"date": etth1.times, "OT": etth1.values})
    run = load_run(tmp_path / "runs" / "forecast")
    found = forecast(tmp_path / "runs" / "forecast", frame, levels=())
    assert list(found) == ["date", "OT"]
    assert len(found) == run.task.config.horizon
    assert found["date"].iloc[0] == frame["date"].iloc[-1] + pd.Timedelta(hours=1)


def test_a_comparison_that_was_killed_keeps_the_same(finished, tmp_path, monkeypatch) -> None:
    """Results and baselines are made again on ``--resume``, with the same numbers."""
    monkeypatch.setattr(pages, "write_pages", lambda record, folder, task: folder / "report.html")
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    kept = out / "baselines" / "forecast.safetensors"
    before = read_kept(kept)
    (out / "results.json").unlink()
    kept.unlink()
    recipe = Recipe(task=settings(finished.parent / "moved.csv"), training=TRAINING, attention=SPECS, seeds=2)
    compare("forecast", recipe, out, resume=True, show_progress=False)
    again = read_kept(kept)
    assert again.facts == before.facts
    assert again.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in before.tensors.items())


def test_several_settings(tmp_path, monkeypatch) -> None:
    """Validation chooses among what is searched; what forecasts other horizons must be named."""
    path = tmp_path / "data.csv"
    table().to_csv(path, index=False)
    recipe = Recipe(
        task=settings(path),
        training=dataclasses.replace(TRAINING, steps=2),
        attention=("standard",),
        variants=("h = 6: task.horizon=6", "h = 12: task.horizon=12"),
        search=("L=24: task.look_back=24", "L=48: task.look_back=48"),
    )
    out = tmp_path / "out"
    monkeypatch.setattr(pages, "write_pages", lambda record, folder, task: folder / "report.html")
    compare("forecast", recipe, out, show_progress=False)
    with pytest.raises(ConfigError, match="other columns or horizons .* --variant: known: 'h = 12', 'h = 6'"):
        forecast(out, table())
    record = read_comparison(out)
    for horizon in (6, 12):
        found = forecast(out, table(), variant=f"h = {horizon}", row="ridge")
        assert len(found) == horizon
        rows = [row for row in record.baselines if row.name == "ridge regression" and row.group == f"h = {horizon}"]
        assert f"at {min(rows, key=lambda row: row.validation).variant}" in found.attrs["why"]
        # Every point of the grid has its own weights.
        for row in rows:
            alone = forecast(out, table(), variant=row.variant, row="ridge")
            assert row.variant in alone.attrs["why"]
            task = ForecastTask(settings(path, horizon=horizon, look_back=int(row.searched.removeprefix("L="))))
            expected = BaselineForecaster(task.kept_with_baselines(), "ridge regression")
            values = table()[["a", "b"]].to_numpy().T
            np.testing.assert_array_equal(
                alone[["a", "b"]].to_numpy().T, forecast_units(expected, values, horizon, [])[0]
            )
    assert len(forecast(out, table(), variant="h = 12", row="standard")) == 12
    with pytest.raises(ConfigError, match="no variant 'h=12': did you mean 'h = 12'"):
        forecast(out, table(), variant="h=12")


def test_a_full_disk_leaves_no_half_of_the_output(finished, tmp_path, monkeypatch) -> None:
    from structattn_lab.inference import forecast as module

    def full(path, content):
        if path.suffix == ".png":
            raise CheckpointError(f"cannot write {path}: No space left on device")
        path.write_text(content)

    options = {"row": "ridge", "horizon": 3}
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomic", full)
        with pytest.raises(CheckpointError, match="No space left"):
            module.forecast_file(finished, finished.parent / "moved.csv", tmp_path / "future.csv", **options)
    assert list(tmp_path.iterdir()) == []
    module.forecast_file(finished, finished.parent / "moved.csv", tmp_path / "future.csv", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["future.csv", "future.png"]


def test_the_command_writes_a_table_and_a_figure(finished, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = str(finished.parent / "moved.csv")
    words = ["forecast", str(finished), "--data", data, "--row", "ridge", "--out"]
    assert main([*words, "new/future.csv"]) == 0
    told = capsys.readouterr().out
    for part in (
        "row        ridge regression: its validation mse",
        "12 steps of a, b",
        "80, 95 %",
        "new/future.png",
    ):
        assert part in told
    found, expected = pd.read_csv("new/future.csv", parse_dates=["t"]), forecast(finished, table(), row="ridge")
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=1e-8)
    assert Path("new/future.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in Path("new").iterdir()) == ["future.csv", "future.png"]
    before = contents(tmp_path)
    assert main([*words, "new/future.csv"]) == 2
    assert "new/future.csv is there: give another --out, or --overwrite to replace it" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert main([*words, "new/future.csv", "--overwrite", "--horizon", "3"]) == 0
    assert len(pd.read_csv("new/future.csv")) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "future"], "suffix .csv, got 'future'"),
        (["--out", "future.png"], "suffix .csv"),
        (["--out", "mine.csv", "--overwrite"], "--out would replace the input, mine.csv"),
        (["--out", "folder.csv"], "folder.csv is a folder"),
        (["--out", "mine.csv/future.csv"], "cannot write to"),
        (["--out", "f.csv", "--horizon", "0"], "--horizon: expected a whole number of at least 1, got '0'"),
        (["--out", "f.csv", "--horizon", "-2"], "--horizon: expected a whole number of at least 1, got '-2'"),
        (["--out", "f.csv", "--horizon", "99"], "the horizon of its training, got a horizon of 99"),
        (["--out", "f.csv", "--levels", "0"], "--levels: expected a whole number of at least 1 and at most 99"),
        (["--out", "f.csv", "--row", "rigde regression"], "did you mean 'ridge regression'"),
        (["--out", "f.csv", "--time", "tt"], "f.csv"),
        (["--out", "f.csv", "--data", "nowhere.csv"], "nowhere.csv, got no such file"),
        ([], "--out"),
    ],
)
def test_mistakes_of_the_command(finished, words, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    table().to_csv("mine.csv", index=False)
    Path("folder.csv").mkdir()
    before = sorted(tmp_path.rglob("*"))
    if "--time" in words:
        table().astype({"t": str}).rename(columns={"t": "when"}).to_csv("mine.csv", index=False)
        message = "time column 'tt'"
    assert main(["forecast", str(finished), "--data", "mine.csv", *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.startswith("structattn: ")
    assert told.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_the_training_file_is_the_default(finished, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["forecast", str(finished), "--row", "last value", "--out"]
    assert main([*words, "future.csv"]) == 2
    assert "data.csv, are not there: give the series with --data" in capsys.readouterr().err
    data = finished.parent / "data.csv"
    shutil.copyfile(finished.parent / "moved.csv", data)
    try:
        assert main([*words, "future.csv"]) == 0
        assert main([*words, str(data), "--overwrite"]) == 2
        assert "--out would replace the input" in capsys.readouterr().err
        assert data.read_bytes() == (finished.parent / "moved.csv").read_bytes()
    finally:
        data.unlink()
    assert main([*words, str(finished / "future.csv")]) == 2
    assert "must be outside of the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("freq", "form", "first"),
    [("D", "%Y-%m-%d", "2025-02-04"), ("MS", "%Y-%m-%d", "2057-05-01"), ("QE", "%d.%m.%Y", "2124-03-31")],
)
def test_days_are_written_as_dates(tmp_path, freq, form, first, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = table().assign(t=pd.date_range("2024-01-01", periods=ROWS, freq=freq).strftime(form))[["t", "a"]]
    frame.to_csv("mine.csv", index=False, sep=";", decimal=",")
    words = [f"--set=task.{change}" for change in ("look_back=24", "horizon=3", "embed_dim=8", "num_heads=1")]
    words += ["--set=training.steps=1", "--set=training.warmup_steps=0", "--data=mine.csv", "--time=t", "--target=a"]
    assert main(["train", "forecast", *words, "--out", "run"]) == 0
    assert main(["forecast", "run", "--out", "future.csv"]) == 0
    assert pd.read_csv("future.csv")["t"][0] == first


def test_a_file_without_dates_has_steps(finished, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    table()[["b", "a"]].to_csv("steps.csv", index=False)
    assert main(["forecast", str(finished), "--data", "steps.csv", "--row", "ridge", "--out", "future.csv"]) == 0
    assert "its rows are taken as consecutive steps" in capsys.readouterr().out
    assert pd.read_csv("future.csv")["step"].tolist() == list(range(ROWS, ROWS + HORIZON))
    zoned = table().assign(t=table()["t"].dt.tz_localize("UTC").dt.tz_convert("Etc/GMT-1"))
    zoned.to_csv("zoned.csv", index=False)
    assert main(["forecast", str(finished), "--data", "zoned.csv", "--row", "ridge", "--out", "zone.csv"]) == 0
    assert pd.read_csv("zone.csv")["t"][0] == "2024-01-17 16:00:00+00:00"
