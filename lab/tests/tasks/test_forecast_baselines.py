import math

import numpy as np
import pytest
import torch

from structattn.errors import ConfigError, ShapeError
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS, SOLVED
from structattn_lab.data.series import TimeSeries, WindowedSeries
from structattn_lab.data.series_file import read_series
from structattn_lab.tasks.forecast import baselines as baselines_module
from structattn_lab.tasks.forecast.baselines import PENALTIES, fitted_methods, forecast_metrics
from structattn_lab.tasks.forecast.baselines import forecast_baselines as scores_of

KNOWN = {96: (0.0693, 0.0715, 0.0530), 192: (0.0920, 0.0916, 0.0690), 336: (0.1133, 0.1108, 0.0809)}


def forecast_baselines(data, season):
    return scores_of(data, fitted_methods(data, season))


def make(values, look_back=12, horizon=4):
    times = np.datetime64("2020-01-01", "us") + np.arange(len(values)) * np.timedelta64(1, "h")
    series = TimeSeries(values=np.asarray(values, float), times=times, name="y", step="1 hour")
    return WindowedSeries(series, look_back, horizon)


@pytest.mark.parametrize("horizon", KNOWN)
def test_known_errors_on_etth1(horizon):
    data = WindowedSeries(read_series(None, "date", "OT"), 336, horizon)
    rows = forecast_baselines(data, 24)
    assert [r.name for r in rows] == ["last value", "seasonal (24 steps)", "ridge regression"]
    for row, known in zip(rows, KNOWN[horizon], strict=True):
        metrics = row.metrics
        assert metrics["mse"] == pytest.approx(known, rel=0.02)
        assert len(row.details["error_by_lead"]) == horizon
        assert np.mean(row.details["error_by_lead"]) == pytest.approx(metrics["mse"], rel=SOLVED)
        assert metrics["mse_units"] == pytest.approx(metrics["mse"] * data.std**2)
        assert metrics["mae_units"] == pytest.approx(metrics["mae"] * data.std)
    assert "penalty 100 " in rows[2].note


def test_ridge_is_the_penalised_least_squares_solution():
    rng = np.random.default_rng(0)
    data = make(np.cumsum(rng.normal(size=400)))
    X, Y = (w.double().numpy() for w in data.windows("train"))
    A = np.hstack([X - X[:, -1:], np.ones((len(X), 1))])
    P, R = (w.double().numpy() for w in data.windows("validation"))
    B = np.hstack([P - P[:, -1:], np.ones((len(P), 1))])
    T, U = (w.double().numpy() for w in data.windows("test"))
    C = np.hstack([T - T[:, -1:], np.ones((len(T), 1))])
    fits = [np.linalg.solve(A.T @ A + p * np.eye(13), A.T @ (Y - X[:, -1:])) for p in PENALTIES]
    best = min(fits, key=lambda w: np.square(B @ w + P[:, -1:] - R).mean())
    expected = np.square(C @ best + T[:, -1:] - U).mean()
    assert forecast_baselines(data, 4)[-1].metrics["mse"] == pytest.approx(expected, rel=SAME_MODEL)


def test_seasonal_is_exact_on_a_periodic_series_with_a_horizon_over_one_season():
    rows = forecast_baselines(make(np.tile([0.0, 1.0, 5.0], 60), look_back=7, horizon=8), 3)
    assert rows[1].metrics["mse"] == pytest.approx(0.0, abs=1e-20)
    assert rows[0].metrics["mse"] > 0.1


def test_ridge_extrapolates_a_trend_through_the_intercept():
    rows = forecast_baselines(make(np.arange(200.0)), 4)
    assert rows[-1].metrics["mse_units"] < 1e-6


def test_seasonal_left_out_when_look_back_is_shorter():
    rows = forecast_baselines(make(np.sin(np.arange(200.0))), 13)
    assert [r.name for r in rows] == ["last value", "ridge regression"]
    assert len(forecast_baselines(make(np.sin(np.arange(200.0))), 12)) == 3


def test_test_values_do_not_change_the_fit():
    values = np.cumsum(np.random.default_rng(1).normal(size=300))
    changed = values.copy()
    changed[240:] += 100.0
    notes = [forecast_baselines(make(v), 4)[-1].note for v in (values, changed)]
    assert notes[0] == notes[1]


def test_metrics_by_hand():
    data = make(np.arange(100.0))
    got = forecast_metrics(torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]]), data)
    assert got["mse"] == 5.0
    assert got["mae"] == 2.0
    assert got["mae_units"] == pytest.approx(2.0 * data.std)
    assert math.isclose(got["mse_units"], 5.0 * data.std**2)


def test_mistakes():
    data = make(np.arange(100.0))
    with pytest.raises(ConfigError, match="season of at least 1 step, got 0"):
        forecast_baselines(data, 0)
    with pytest.raises(ShapeError, match=r"got \(2, 4\) and \(2, 3\)"):
        forecast_metrics(torch.zeros(2, 4), torch.zeros(2, 3), data)
    with pytest.raises(ShapeError, match="non-empty"):
        forecast_metrics(torch.zeros(0, 4), torch.zeros(0, 4), data)


def test_windows_are_taken_in_chunks_with_the_same_scores(monkeypatch) -> None:
    data = WindowedSeries(read_series(None, "date", "OT"), look_back=24, horizon=4)
    whole = forecast_baselines(data, 24)
    monkeypatch.setattr(baselines_module, "CHUNK", 500)
    for row, expected in zip(forecast_baselines(data, 24), whole, strict=True):
        assert row.note == expected.note
        assert row.metrics == pytest.approx(expected.metrics, rel=SOLVED)
        assert row.validation == pytest.approx(expected.validation, rel=SOLVED)
        assert row.details["error_by_lead"] == pytest.approx(expected.details["error_by_lead"], rel=SOLVED)
    forecast, truth = torch.randn(2, 1300, 4)
    chunked = forecast_metrics(forecast, truth, data)
    assert chunked["mse"] == pytest.approx(float((forecast - truth).double().square().mean()), rel=SIX_DIGITS)
    assert chunked["mae"] == pytest.approx(float((forecast - truth).double().abs().mean()), rel=SIX_DIGITS)
