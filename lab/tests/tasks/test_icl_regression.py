"""The in-context regression task: its curriculum, scores, baselines and cost, against definitions by
loops.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from structattn.errors import ConfigError, ShapeError
from structattn.seeds import generator
from structattn.typed_records import read_as
from structattn_lab.settings.overrides import apply_overrides
from structattn_lab.tasks.icl_regression.baselines import (
    averaging,
    least_squares,
    nearest_neighbors,
    predictors,
    ridge,
)
from structattn_lab.tasks.icl_regression.prompts import PromptConfig
from structattn_lab.tasks.icl_regression.task import (
    EVAL_CHUNK,
    Curriculum,
    ICLRegressionConfig,
    ICLRegressionTask,
    Shift,
)

TINY = ICLRegressionConfig(dim=4, embed_dim=8, num_layers=2, num_heads=2, eval_prompts=300)


def task_of(**settings) -> ICLRegressionTask:
    return ICLRegressionTask(dataclasses.replace(TINY, **settings))


def trained(task: ICLRegressionTask, spec: str = "standard") -> nn.Module:
    """A model that does not predict zero."""
    torch.manual_seed(0)
    model = task.build_model(spec).eval()
    nn.init.normal_(model.read_out.weight)
    return model


# -- curriculum


def test_the_papers_curriculum() -> None:
    curriculum = Curriculum(end_step=30_000)
    sizes = [curriculum.size_at(step, 64, 128) for step in range(0, 500_000, 500)]
    for step, (dims, points) in zip(range(0, 500_000, 500), sizes, strict=True):
        raises = min(step // 2000, 15)
        assert (dims, points) == (4 + 4 * raises, 8 + 8 * raises)
    assert len(set(sizes)) == 16
    assert curriculum.size_at(29_999, 64, 128) == (60, 120)
    assert curriculum.size_at(30_000, 64, 128) == (64, 128)


@pytest.mark.parametrize(
    ("curriculum", "dim", "num_points"),
    [
        (Curriculum(end_step=1000, interval=90), 20, 41),
        (Curriculum(end_step=1000, interval=300, start_dim=1, start_points=1), 7, 3),
        (Curriculum(end_step=50, interval=2000), 16, 32),
        (Curriculum(end_step=30, interval=1, start_dim=30, start_points=99), 8, 16),
        (Curriculum(end_step=0), 8, 16),
    ],
)
def test_any_curriculum(curriculum: Curriculum, dim: int, num_points: int) -> None:
    sizes = [curriculum.size_at(step, dim, num_points) for step in range(curriculum.end_step + 3)]
    raises = max(1, curriculum.end_step // curriculum.interval)
    start = min(curriculum.start_dim, dim), min(curriculum.start_points, num_points)
    allowed = {
        tuple(a + math.ceil(k * (b - a) / raises) for a, b in zip(start, (dim, num_points), strict=True))
        for k in range(raises + 1)
    }
    full = (dim, num_points)
    assert sizes[0] == (start if curriculum.end_step else full)
    assert sizes[curriculum.end_step :] == [full] * 3
    assert set(sizes) <= allowed
    for before, after in zip(sizes, sizes[1:], strict=False):
        assert before[0] <= after[0]
        assert before[1] <= after[1]
    if curriculum.end_step and start != full:
        changes = [step for step in range(1, len(sizes)) if sizes[step] != sizes[step - 1]]
        assert changes[-1] == curriculum.end_step
        gaps = np.diff([0, *changes])
        assert gaps.min() >= min(curriculum.interval, curriculum.end_step)


@pytest.mark.parametrize("function", ["linear", "sparse-linear", "relu-network", "decision-tree"])
def test_batches_grow_and_are_pure(function: str) -> None:
    curriculum = Curriculum(start_dim=2, start_points=3, interval=10, end_step=40)
    task = task_of(dim=8, curriculum=curriculum, prompts=PromptConfig(function=function))
    for step, dims, points in [(0, 2, 3), (9, 2, 3), (10, 4, 7), (25, 5, 10), (39, 7, 13), (40, 8, 16), (99, 8, 16)]:
        batch = task.batch(1, step, 5)
        assert batch["xs"].shape == (5, points, 8)
        assert batch["ys"].shape == (5, points)
        assert (batch["xs"][..., dims:] == 0).all()
        assert (batch["xs"][..., :dims] != 0).all()
        again = task.batch(1, step, 5)
        assert torch.equal(batch["xs"], again["xs"])
        assert torch.equal(batch["ys"], again["ys"])
    first, other_step, other_seed = task.batch(1, 50, 5), task.batch(1, 51, 5), task.batch(2, 50, 5)
    for other in (other_step, other_seed):
        assert not torch.isclose(first["xs"], other["xs"]).any()
        assert not torch.isclose(first["ys"], other["ys"]).all()


# -- evaluation


def test_evaluation_prompts_are_fresh_and_full() -> None:
    curriculum = Curriculum(start_dim=1, start_points=1, interval=1, end_step=1000)
    task = task_of(eval_prompts=2 * EVAL_CHUNK + 5, curriculum=curriculum)
    chunks = {split: list(task.eval_prompts(split)) for split in ("validation", "test")}
    for found in chunks.values():
        assert [len(c.xs) for c in found] == [EVAL_CHUNK, EVAL_CHUNK, 5]
        assert all(c.xs.shape[1:] == (8, 4) for c in found)
        assert all((c.xs != 0).all() for c in found)
    points = torch.cat([c.xs for found in chunks.values() for c in found]).flatten(0, 1)
    training = torch.cat([task.batch(0, step, 64)["xs"].flatten(0, 1) for step in range(1000, 1040)])
    seen = torch.cat([points, training])
    assert len(torch.unique(seen, dim=0)) == len(seen)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_scores_by_definition(noise: float) -> None:
    """In chunks as at once, against f(x) without the noise, over d."""
    task = task_of(eval_prompts=EVAL_CHUNK + 3, prompts=PromptConfig(noise_std=noise))
    model = trained(task)
    sizes = []
    hook = model.register_forward_hook(lambda module, args, out: sizes.append((len(out), torch.is_grad_enabled())))
    got, details = task.evaluate(model, "test"), task.details(model)["error_by_point"]
    hook.remove()
    assert sizes == [(EVAL_CHUNK, False), (3, False)] * 2
    xs, ys, values = (torch.cat(parts) for parts in zip(*task.eval_prompts("test"), strict=True))
    assert torch.equal(ys, values) == (noise == 0)
    with torch.no_grad():
        errors = (model(xs, ys).double() - values).square().mean(0) / 4
    assert got["last_point_error"] == pytest.approx(float(errors[-1]), rel=1e-5)
    assert got["mean_error"] == pytest.approx(float(errors.mean()), rel=1e-5)
    assert details == pytest.approx(errors.tolist(), rel=1e-5)
    assert task.evaluate(model, "validation")["last_point_error"] != got["last_point_error"]
    batch = task.batch(0, 0, 6)
    with torch.no_grad():
        loss, predicted = task.loss(model, batch, 0), model(batch["xs"], batch["ys"])
    assert float(loss) == pytest.approx(float((predicted - batch["ys"]).square().mean()))


@pytest.mark.quick(function=["linear", "decision-tree"])
@pytest.mark.parametrize("covariates", ["isotropic", "skewed"])
@pytest.mark.parametrize("function", ["linear", "sparse-linear", "relu-network", "decision-tree"])
def test_a_model_that_knows_nothing_scores_1(function: str, covariates: str) -> None:
    task = task_of(eval_prompts=4000, prompts=PromptConfig(function=function, covariates=covariates, noise_std=1.0))
    scores = task.evaluate(task.build_model("standard").eval(), "validation")  # the read-out starts at zero
    assert scores["mean_error"] == pytest.approx(1.0, abs=0.1)


def test_shift_changes_evaluation_alone() -> None:
    plain = task_of()
    shifted = task_of(shift=Shift(noise_std=0.5, covariates="skewed"))
    a, b = plain.batch(0, 3, 5), shifted.batch(0, 3, 5)
    assert torch.equal(a["xs"], b["xs"])
    assert torch.equal(a["ys"], b["ys"])
    one, other = next(shifted.eval_prompts("test")), next(plain.eval_prompts("test"))
    assert float((one.ys - one.values).std()) == pytest.approx(0.5, rel=0.1)
    assert not torch.isclose(one.xs, other.xs).any()
    noisy = next(task_of(shift=Shift(noise_std=0.5)).eval_prompts("test"))
    assert torch.equal(noisy.xs, other.xs)
    assert torch.equal(noisy.values, other.values)
    quiet = task_of(prompts=PromptConfig(noise_std=0.5), shift=Shift(noise_std=0.0))
    assert torch.equal(next(quiet.eval_prompts("test")).ys, other.ys)
    assert [b.name for b in quiet.baselines()] == [b.name for b in plain.baselines()]
    assert "ridge (noise known)" in {b.name for b in shifted.baselines()}


# -- baselines


def drawn(count: int = 6, num_points: int = 11, dim: int = 4, **settings):
    return PromptConfig(**settings).draw(generator("test", dim), count, num_points, dim, dtype=torch.float64)


@pytest.mark.parametrize("covariates", ["isotropic", "skewed"])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("dim", [1, 4, 7])
def test_linear_fits_by_numpy(dim: int, noise: float, covariates: str) -> None:
    prompts = drawn(dim=dim, noise_std=noise, covariates=covariates)
    fits = [least_squares(prompts.xs, prompts.ys), ridge(prompts.xs, prompts.ys, noise_std=0.3)]
    assert all((fit[:, 0] == 0).all() for fit in fits)
    for b in range(6):
        for i in range(1, 11):
            X, y, x = (part.numpy() for part in (prompts.xs[b, :i], prompts.ys[b, :i], prompts.xs[b, i]))
            minimum_norm = np.linalg.lstsq(X, y, rcond=None)[0]
            penalised = np.linalg.solve(X.T @ X + 0.09 * np.eye(dim), X.T @ y)
            for fit, w in zip(fits, (minimum_norm, penalised), strict=True):
                assert float(fit[b, i]) == pytest.approx(float(w @ x), rel=1e-8, abs=1e-8)
    if not noise:
        assert (fits[0] - prompts.values)[:, dim:].abs().max() < 1e-8


def test_least_squares_with_points_that_repeat() -> None:
    """Points in the span of those before, with values that do not fit: still the minimum-norm solution."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3, 9, 5))
    X[:, 2], X[:, 3], X[:, 5] = X[:, 0], X[:, 0] - 2 * X[:, 1], 0.0
    y = rng.normal(size=(3, 9))
    fit = least_squares(torch.tensor(X), torch.tensor(y))
    for b in range(3):
        for i in range(1, 9):
            w = np.linalg.lstsq(X[b, :i], y[b, :i], rcond=None)[0]
            assert float(fit[b, i]) == pytest.approx(float(w @ X[b, i]), abs=1e-9)


def test_averaging_by_loops() -> None:
    xs, ys, _ = drawn(noise_std=0.1)
    got = averaging(xs, ys)
    for b in range(6):
        for i in range(11):
            w = np.mean([float(ys[b, j]) * xs[b, j].numpy() for j in range(i)], axis=0) if i else np.zeros(4)
            assert float(got[b, i]) == pytest.approx(float(w @ xs[b, i].numpy()))


@pytest.mark.parametrize("num_neighbors", [1, 3, 20])
def test_nearest_neighbors_by_loops(num_neighbors: int) -> None:
    xs, ys, _ = drawn()
    got = nearest_neighbors(xs, ys, num_neighbors=num_neighbors)
    for b in range(6):
        for i in range(11):
            order = sorted(range(i), key=lambda j: float((xs[b, j] - xs[b, i]).norm()))[:num_neighbors]
            expected = sum(float(ys[b, j]) for j in order) / max(1, len(order))
            assert float(got[b, i]) == pytest.approx(expected)


@pytest.mark.parametrize(
    "prompts", [PromptConfig(), PromptConfig(noise_std=0.5), PromptConfig(function="relu-network")]
)
def test_baselines_do_not_see_the_future(prompts: PromptConfig) -> None:
    xs, ys, _ = prompts.draw(generator(7), 4, 9, 3, dtype=torch.float64)
    other_xs, other_ys = xs.clone(), ys.clone()
    other_ys[:, 5:] += 10
    other_xs[:, 6:] *= -3
    for method in predictors(prompts):
        assert torch.equal(method.predict(xs, ys)[:, :6], method.predict(other_xs, other_ys)[:, :6])


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_baseline_rows(noise: float) -> None:
    task = task_of(prompts=PromptConfig(noise_std=noise))
    rows = {row.name: row for row in task.baselines()}
    with_noise = ["ridge (noise known)"] if noise else []
    assert list(rows) == ["zero", "averaging", "least squares", *with_noise, "3 nearest neighbors"]
    details = {name: row.details for name, row in rows.items()}
    xs, ys, values = (torch.cat(part) for part in zip(*task.eval_prompts("test", torch.float64), strict=True))
    for method in predictors(task.config.prompts):
        errors = (method.predict(xs, ys) - values).square().mean(0) / 4
        assert details[method.name]["error_by_point"] == pytest.approx(errors.tolist(), rel=1e-6, abs=1e-12)
        assert rows[method.name].metrics["last_point_error"] == pytest.approx(float(errors[-1]), rel=1e-6, abs=1e-12)
        assert rows[method.name].metrics["mean_error"] == pytest.approx(float(errors.mean()))
    assert details["zero"]["error_by_point"] == pytest.approx([1.0] * 8, abs=0.3)


def test_least_squares_is_solved_by_more_than_d_pairs() -> None:
    errors = task_of(eval_prompts=1000).baselines()[2].details["error_by_point"]
    assert max(errors[4:]) < 1e-8
    # With i < d pairs the fit knows the part of w in their span: (d - i) / d of the error remains.
    assert errors[:4] == pytest.approx([1, 0.75, 0.5, 0.25], abs=0.12)
    assert "optimal" in task_of().baselines()[2].note


def test_baselines_are_computed_once(monkeypatch) -> None:
    task = task_of()
    task.baselines()
    monkeypatch.setattr(PromptConfig, "draw", None)
    assert len(task.baselines()) == 4


def test_ridge_is_best_under_noise_and_optimal_only_for_linear() -> None:
    task = task_of(prompts=PromptConfig(noise_std=1.0), eval_prompts=1000)
    rows = {row.name: row for row in task.baselines()}
    assert min(rows.values(), key=lambda row: row.metrics["mean_error"]).name == "ridge (noise known)"
    assert "optimal" in rows["ridge (noise known)"].note
    assert "optimal" not in rows["least squares"].note
    assert not any("optimal" in p.note for p in predictors(PromptConfig(function="sparse-linear", noise_std=1.0)))
    assert not any("optimal" in p.note for p in predictors(PromptConfig(function="sparse-linear")))


# -- the model


@pytest.mark.parametrize("spec", ["standard", "standard:1", "bilinear-btt:1", "bilinear-mlr:2|2", "mlr:2|2"])
def test_flops_are_those_counted(spec: str) -> None:
    task = task_of(dim=6, curriculum=Curriculum(start_dim=2, interval=5, end_step=10))
    model = task.build_model(spec).to("meta")
    if spec.startswith("mlr"):
        for block in model.trunk.layers:
            block.attention.backend = "blocked"  # the default on "meta", the definition, is not counted
    found = []
    for step, num_points in ((0, 8), (5, 10), (10, 12), (None, 12)):
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, num_points, 6, device="meta"), torch.empty(1, num_points, device="meta"))
        tokens = 2 * num_points
        expected = counter.get_total_flops() - 2 * tokens * 6 * 8
        if not spec.startswith("mlr"):  # there PyTorch counts the masked pairs too
            for block in model.trunk.layers:
                attention = block.attention
                numbers = attention.num_heads * (attention.cost(tokens).score_dim + attention.head_dim)
                expected -= 2 * numbers * tokens * (tokens - 1) // 2
        found.append(task.flops(model, step))
        assert found[-1] == expected
    assert found[0] < found[1] < found[2] == found[3] == task.flops(model) == model.flops_per_example()


@pytest.mark.parametrize("spec", ["standard", "bilinear-mlr:2|2", "mlr:2|2"])
def test_pairs_do_not_change_predictions_before_them(spec: str) -> None:
    task = task_of()
    model = trained(task, spec)
    batch = task.batch(0, 0, 3)
    before = model(batch["xs"], batch["ys"])
    for j in range(8):
        xs, ys = batch["xs"].clone(), batch["ys"].clone()
        ys[:, j] += 3
        only_y = model(xs, ys)
        xs[:, j] += 2
        both = model(xs, ys)
        torch.testing.assert_close(only_y[:, : j + 1], before[:, : j + 1])
        torch.testing.assert_close(both[:, :j], before[:, :j])
        assert not torch.isclose(both[:, j], before[:, j], atol=1e-4).any()
        assert not torch.isclose(only_y[:, j + 1 :], before[:, j + 1 :], rtol=1e-7, atol=1e-7).all(1).any() or j == 7


def test_shorter_and_longer_prompts() -> None:
    task = task_of(num_points=6)
    model = trained(task)
    assert model.num_points == 6
    xs, ys = task.batch(0, 0, 3).values()
    assert xs.shape == (3, 6, 4)
    torch.testing.assert_close(model(xs[:, :2], ys[:, :2]), model(xs, ys)[:, :2])
    with pytest.raises(ShapeError, match="14 tokens, more than the 12"):
        model(torch.zeros(1, 7, 4), torch.zeros(1, 7))


@pytest.mark.full
def test_the_loss_falls_below_knowing_nothing() -> None:
    task = task_of(dim=1, num_points=5, embed_dim=16)
    torch.manual_seed(0)
    model = task.build_model("standard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(120):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step, 64), step).backward()
        optimizer.step()
    assert task.evaluate(model.eval(), "test")["last_point_error"] < 0.7


# -- settings


def test_settings_are_written_and_read() -> None:
    changes = (
        "prompts.function=sparse-linear",
        "prompts.noise_std=0.25",
        "shift.covariates=skewed",
        "shift.noise_std=none",
        "curriculum.interval=7",
        "num_points=9",
    )
    config = apply_overrides(TINY, changes)
    assert config.prompts == PromptConfig(function="sparse-linear", noise_std=0.25)
    assert config.shift == Shift(covariates="skewed")
    assert (config.full_points, TINY.full_points) == (9, 8)
    assert read_as(ICLRegressionConfig, json.loads(json.dumps(dataclasses.asdict(config))), "") == config
    with pytest.raises(ConfigError, match="unknown value 'cubic'"):
        apply_overrides(TINY, ("prompts.function=cubic",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ICLRegressionConfig(dim=0), "task.dim must be an int of at least 1, got 0"),
        (lambda: ICLRegressionConfig(num_points=0), "task.num_points must be an int of at least 1, got 0"),
        (lambda: ICLRegressionConfig(eval_prompts=0), "task.eval_prompts"),
        (lambda: ICLRegressionConfig(embed_dim=10, num_heads=4), "must divide embed_dim: got 4 and 10"),
        (
            lambda: ICLRegressionConfig(dim=2, prompts=PromptConfig(function="sparse-linear")),
            "task.prompts.sparsity must be at most task.dim, got 3 and 2",
        ),
        (lambda: Curriculum(start_dim=0), "task.curriculum.start_dim must be an int of at least 1, got 0"),
        (lambda: Curriculum(start_points=0), "start_points must be an int of at least 1"),
        (lambda: Curriculum(interval=0), "interval must be an int of at least 1"),
        (lambda: Curriculum(end_step=-1), "end_step must be an int of at least 0, got -1"),
        (lambda: Shift(noise_std=-1.0), "task.shift.noise_std must be a finite number of at least 0, got -1.0"),
        (lambda: Shift(covariates="skwed"), "unknown task.shift.covariates 'skwed': did you mean 'skewed'"),
    ],
)
def test_mistakes(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
