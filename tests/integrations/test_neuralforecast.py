"""``StructTransformer`` and its search in neuralforecast: as its own models, with covariates, losses, missing
steps, long inputs.
"""

import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from structattn.errors import ConfigError

pytest.importorskip("neuralforecast")
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.common._base_auto import MockTrial
from neuralforecast.losses.pytorch import MSE, DistributionLoss, IQLoss, MQLoss
from neuralforecast.models import PatchTST
from ray import tune

from structattn.integrations.neuralforecast.model import AutoStructTransformer, StructTransformer
from structattn.testing.tolerances import SIX_DIGITS

QUIET = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False, "accelerator": "cpu"}
TINY = {
    "h": 4, "input_size": 16, "attention": "mlr:2|2", "patch_length": 4, "embed_dim": 16, "num_layers": 1,
    "max_steps": 3, "windows_batch_size": 8, **QUIET,
}  # fmt: skip
COVARIATES = {"hist_exog_list": ["wind"], "futr_exog_list": ["sun"], "stat_exog_list": ["site"]}
STATIC = pd.DataFrame({"unique_id": ["a", "b"], "site": [0.0, 1.0]})
PAGE = Path(__file__).parents[2] / "docs" / "neuralforecast.md"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def frame(n: int = 96) -> pd.DataFrame:
    """Two series of period 12 around 100 and 200, with a historic and a future covariate."""
    steps, rng = np.arange(n), np.random.default_rng(0)
    parts = []
    for name, level in (("a", 100.0), ("b", 200.0)):
        part = pd.DataFrame({"ds": pd.date_range("2024-01-01", periods=n, freq="h"), "unique_id": name})
        parts.append(
            part.assign(y=level + 5 * np.sin(np.pi * steps / 6), wind=rng.normal(size=n), sun=np.cos(steps / 3))
        )
    return pd.concat(parts, ignore_index=True)


def fitted(df=None, *, fit=None, **options) -> NeuralForecast:
    nf = NeuralForecast(models=[StructTransformer(**(TINY | options))], freq="h")
    nf.fit(frame() if df is None else df, **(fit or {}))
    return nf


def test_it_stands_beside_patchtst_and_learns() -> None:
    peer = PatchTST(
        h=4, input_size=16, hidden_size=16, n_heads=4, patch_len=4, stride=2, max_steps=2, windows_batch_size=8, **QUIET
    )
    own = StructTransformer(**(TINY | {"input_size": 24, "max_steps": 80, "learning_rate": 1e-2, "dropout": 0.0}))
    nf = NeuralForecast(models=[own, peer], freq="h")
    found = nf.cross_validation(frame(), n_windows=6, step_size=4)
    assert {"StructTransformer", "PatchTST", "cutoff", "y"} < set(found.columns)
    assert (found.StructTransformer - found.y).abs().mean() < 1.5
    last = found.y - 5 * (np.sin(np.pi * found.ds.dt.hour / 6) - np.sin(np.pi * found.cutoff.dt.hour / 6))
    assert (last - found.y).abs().mean() > 3  # the last value is that far off
    assert nf.predict().shape == (8, 4)


@pytest.mark.full
def test_saved_and_loaded_in_a_new_process_it_predicts_the_same(tmp_path) -> None:
    df = frame()
    nf = fitted(df, fit={"static_df": STATIC}, loss=MQLoss(level=[80]), rotary="low_far", alias="mine", **COVARIATES)
    future = nf.make_future_dataframe().assign(sun=0.5)
    expected = nf.predict(futr_df=future)
    assert list(expected.columns[2:]) == ["mine-median", "mine-lo-80", "mine-hi-80"]
    nf.save(str(tmp_path / "model"))
    future.to_json(tmp_path / "future.json")
    code = (
        "import sys, pandas as pd, structattn.integrations.neuralforecast\n"
        "from neuralforecast import NeuralForecast\n"
        "future = pd.read_json('future.json', convert_dates=['ds'])\n"
        "future['ds'] = future['ds'].astype('datetime64[ns]')\n"
        "NeuralForecast.load('model').predict(futr_df=future).to_json('found.json', double_precision=15)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
    found = pd.read_json(tmp_path / "found.json")
    for name in expected.columns[2:]:
        assert found[name].to_numpy() == pytest.approx(expected[name].to_numpy(), rel=SIX_DIGITS)


def test_every_covariate_changes_the_forecast() -> None:
    df = frame()
    nf = fitted(df, fit={"static_df": STATIC}, max_steps=5, **COVARIATES)
    future = nf.make_future_dataframe().assign(sun=0.5)

    def forecast(df=df, static=STATIC, future=future) -> np.ndarray:
        return nf.predict(df=df, static_df=static, futr_df=future).StructTransformer.to_numpy()

    before = forecast()
    assert np.array_equal(before, forecast())
    for changed in (
        {"df": df.assign(wind=df.wind + 1)},
        {"df": df.assign(sun=df.sun + 1)},
        {"future": future.assign(sun=2.0)},
        {"static": STATIC.assign(site=STATIC.site + 1)},
    ):
        assert (np.abs(forecast(**changed) - before) > 1e-5).all(), changed


def test_without_the_target_it_reads_the_covariates_alone() -> None:
    df = frame()
    nf = fitted(df, futr_exog_list=["sun"], exclude_insample_y=True, scaler_type="standard")
    assert not nf.models[0].network.instance_norm
    future = nf.make_future_dataframe().assign(sun=0.5)
    swapped = df.assign(y=df.groupby("unique_id").y.transform(lambda y: y.to_numpy()[::-1]))
    # Mean and spread of the scaler depend on the target, so that forecasts do: what the network reads must
    # not.
    batch = {
        "insample_y": torch.zeros(1, 16, 1),
        "insample_mask": torch.ones(1, 16, 1),
        "hist_exog": None,
        "stat_exog": None,
    }
    seen = []
    hook = nf.models[0].network.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    nf.predict(df=swapped, futr_df=future)
    hook.remove()
    assert not torch.cat(seen).any()
    out = nf.models[0](batch | {"futr_exog": torch.randn(1, 20, 1)})
    assert not torch.equal(out, nf.models[0](batch | {"futr_exog": torch.randn(1, 20, 1)}))


@pytest.mark.parametrize(
    "loss",
    [MSE(), MQLoss(quantiles=[0.1, 0.5, 0.9]), DistributionLoss("StudentT"), DistributionLoss("Poisson"), IQLoss()],
    ids=lambda loss: type(loss).__name__ + getattr(loss, "distribution", ""),
)
def test_losses_give_forecasts_near_the_series(loss) -> None:
    nf = fitted(loss=loss, max_steps=30, learning_rate=1e-2)
    found = nf.predict()
    values = found.iloc[:, 2:].to_numpy()
    assert values.shape[1] == len(loss.output_names)
    assert (np.abs(values[found.unique_id == "a"] - 100) < 40).all()
    assert (np.abs(values[found.unique_id == "b"] - 200) < 60).all()
    if isinstance(loss, MQLoss):
        assert (values[:, 2] > values[:, 0]).all()


def test_missing_steps_have_no_part() -> None:
    df = frame().assign(available_mask=1.0)
    gone = df.index[92:96]  # the newest of series a
    df.loc[gone, "available_mask"] = 0.0
    nf = fitted(df)

    def forecast(value: float) -> np.ndarray:
        changed = df.copy()
        changed.loc[gone, "y"] = value
        return nf.predict(df=changed).StructTransformer.to_numpy()

    assert np.array_equal(forecast(0.0), forecast(1e6))
    assert np.array_equal(forecast(0.0), forecast(np.nan))
    assert abs(forecast(0.0)[0] - 100) < 10
    # A series shorter than the input is padded with zeros, which are not values either.
    short = pd.concat([df.iloc[:92], df[df.unique_id == "b"].iloc[:5].assign(unique_id="c")])
    nf = fitted(short, start_padding_enabled=True)
    found = nf.predict().set_index("unique_id").StructTransformer
    assert (found["c"] - 203).abs().max() < 10


def test_early_stopping_and_the_scale_of_all_series() -> None:
    nf = NeuralForecast(
        models=[
            StructTransformer(
                **(TINY | {"max_steps": 40, "learning_rate": 0.0}), early_stop_patience_steps=2, val_check_steps=2
            )
        ],
        freq="h",
        local_scaler_type="standard",
    )
    nf.fit(frame(), val_size=8)
    assert 4 <= len(nf.models[0].train_trajectories) <= 8
    assert (nf.predict().query("unique_id == 'b'").StructTransformer - 200).abs().max() < 10


def test_an_input_size_below_one_is_three_horizons() -> None:
    with pytest.warns(UserWarning, match="Input size too small"):
        model = StructTransformer(**(TINY | {"input_size": -1}))
    assert model.input_size == model.network.look_back == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "mlr:3|3"}, "in the same proportions: 2|2"),
        ({"attention": "mrl:2|2"}, "did you mean 'mlr'"),
        ({"attention": None}, "must be a spec"),
        ({"num_heads": 3}, "num_heads must divide embed_dim"),
        ({"patch_length": 17}, "patch_length 17, stride 8, look_back 16"),
        ({"stride": 0}, "stride must be an int of at least 1, got 0"),
        ({"rotary": "far"}, "unknown rotary split"),
        ({"exclude_insample_y": True}, "nothing to read"),
        ({"loss": DistributionLoss("Normal"), "instance_norm": True}, "leave it at None"),
    ],
)
def test_bad_settings_are_named(options, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        StructTransformer(**(TINY | options))


@pytest.mark.parametrize(
    "change",
    [
        {name: value}
        for name in (
            "h",
            "input_size",
            "patch_length",
            "embed_dim",
            "num_layers",
            "num_heads",
            "stride",
            "loss",
            "valid_loss",
        )
        for value in ("8", 0, 1.5, [8])
        if (name, value) != ("input_size", 0)
    ],
)
def test_wrong_sizes_and_losses_are_named(change) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        StructTransformer(**{"h": 4, "input_size": 16} | change)


def test_memory_is_linear_in_the_input() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
            return out

    largest = {}
    for steps in (512, 1024, 2048):
        options = {
            "h": 2,
            "input_size": steps,
            "patch_length": 1,
            "head_tokens": 1,
            "num_heads": 2,
            "attention": "mlr:4|2|2",
        }
        model = StructTransformer(**(TINY | options))
        assert model.network.num_tokens == steps
        batch = {"insample_y": torch.randn(1, steps, 1), "insample_mask": torch.ones(1, steps, 1)}
        with Largest() as mode:
            model(batch | {"hist_exog": None, "futr_exog": None, "stat_exog": None}).sum().backward()
        largest[steps] = mode.numel
    assert largest[2048] <= 2.1 * largest[1024] <= 4.5 * largest[512]
    assert 10 * largest[2048] < 2 * 2048 * 2048


SPACE = {
    "input_size": tune.choice([8, 16]),
    "attention": tune.choice(["standard", "mlr:2|2"]),
    "learning_rate": tune.loguniform(1e-4, 1e-2),
    **{key: value for key, value in TINY.items() if key not in ("h", "input_size", "attention")},
}


def test_the_search_with_optuna(tmp_path) -> None:
    auto = AutoStructTransformer(
        h=4, config=AutoStructTransformer._ray_config_to_optuna(SPACE), num_samples=2, backend="optuna"
    )
    nf = NeuralForecast(models=[auto], freq="h")
    nf.fit(frame(), val_size=8)
    assert len(nf.models[0].results.trials) == 2
    found = nf.predict()
    nf.save(str(tmp_path / "auto"))
    loaded = NeuralForecast.load(str(tmp_path / "auto"))
    assert type(loaded.models[0]) is StructTransformer
    assert np.array_equal(loaded.predict().AutoStructTransformer, found.AutoStructTransformer)


def test_the_default_search_space_holds_models_that_can_be_built() -> None:
    for h, patches in ((24, [8, 16, 24]), (4, [8]), (1, [1])):
        space = AutoStructTransformer.get_default_config(h=h, backend="ray")
        assert space["patch_length"].categories == patches
        assert space["input_size"].categories == [2 * h, 4 * h, 8 * h]
        for spec in space["attention"].categories:
            StructTransformer(h=h, input_size=2 * h, attention=spec, patch_length=patches[-1])
    drawn = AutoStructTransformer.get_default_config(h=24, backend="optuna")(MockTrial())
    assert set(drawn) == set(space)
    assert AutoStructTransformer(h=24).config["h"] == 24


@pytest.mark.full
def test_the_search_with_ray(tmp_path) -> None:
    ray = pytest.importorskip("ray")
    from neuralforecast.common._base_auto import RayOptions

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        options = RayOptions(cpus=1, run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0))
        nf = NeuralForecast(
            models=[AutoStructTransformer(h=4, config=SPACE, num_samples=2, ray_options=options)], freq="h"
        )
        nf.fit(frame(), val_size=8)
        results = nf.models[0].results
    finally:
        ray.shutdown()
    assert len(results) == 2
    assert not results.errors
    assert nf.predict().AutoStructTransformer.notna().all()


@pytest.mark.full
def test_the_example_of_the_page_runs(capsys) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, PAGE.name, "exec"), {})
    assert "'StructTransformer-median', 'StructTransformer-lo-80'" in capsys.readouterr().out
