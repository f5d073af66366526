"""Tokens per second and MFU: against a clock that the test sets, and of real runs."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from structattn.testing.tolerances import SIX_DIGITS
from structattn_lab.settings.overrides import apply_overrides
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.registry import TASKS, recipe_for, task_class
from structattn_lab.tasks.text.task import TextConfig, TextTask
from structattn_lab.training import loop
from structattn_lab.training.loop import train
from structattn_lab.training.speed import SpeedMeter, matmul_rate

CPU = torch.device("cpu")


def test_the_meter_counts_only_between_start_and_stop() -> None:
    now = [100.0]
    meter = SpeedMeter(peak=1000.0, passes=4, clock=lambda: now[0])
    meter.start()
    meter.count(tokens=30, flops=200)
    now[0] += 2.0
    meter.stop()
    now[0] += 50.0  # a validation
    meter.start()
    meter.count(tokens=10, flops=100)
    now[0] += 2.0
    meter.stop()
    # 300 forward FLOPs, 900 of the model in a step, 1,200 of the hardware, where 4,000 were possible.
    assert meter.read() == pytest.approx({"seconds": 4.0, "tokens_per_second": 10.0, "mfu": 0.225, "hfu": 0.3})
    assert meter.read() == {"seconds": 0.0, "tokens_per_second": 0.0, "mfu": 0.0, "hfu": 0.0}


def test_the_rate_of_products_is_measured_once() -> None:
    rate = matmul_rate(CPU, torch.float32)
    # A product that is timed here is not much faster than the best of those that were timed there.
    a = torch.ones(512, 512)
    started = time.perf_counter()
    a @ a
    assert rate > 2 * 512**3 / (time.perf_counter() - started) / 20
    started = time.perf_counter()
    assert matmul_rate(CPU, torch.float32) == rate
    assert time.perf_counter() - started < 0.01


class Slow(TextTask):
    """Its validation takes much longer than its training."""

    def evaluate(self, model, split):
        time.sleep(0.3)
        return super().evaluate(model, split)


def test_a_run_records_its_speed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "matmul_rate", lambda device, dtype: 1e9)
    task = Slow(TextConfig(context_length=16, embed_dim=8, num_layers=1, num_heads=2, eval_windows=2))
    config = TrainingConfig(steps=5, batch_size=4, learning_rate=1e-3, eval_every=2, checkpoint_every=2)
    result = train(task, "standard", config, seed=0, run_dir=tmp_path, show_progress=False)
    assert (
        [entry["step"] for entry in result.progress.speeds]
        == [entry["step"] for entry in result.progress.history]
        == [2, 4, 5]
    )
    seconds = [entry["seconds"] for entry in result.progress.speeds]
    assert 0 < sum(seconds) < result.progress.seconds - 0.9
    for entry, steps in zip(result.progress.speeds, [2, 2, 1], strict=True):
        assert entry["tokens_per_second"] * entry["seconds"] == pytest.approx(steps * 4 * 16)
        flops = steps * 4 * task.flops(result.model)
        assert entry["mfu"] * entry["seconds"] * 1e9 == pytest.approx(3 * flops)
        assert 2**20 < entry["peak_memory_bytes"] <= result.progress.peak_memory_bytes
    assert result.progress.tokens_per_second == pytest.approx(5 * 4 * 16 / sum(seconds))
    assert result.progress.mfu == pytest.approx(3 * result.progress.history[-1]["compute"] / 1e9 / sum(seconds))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for tag, name in [
        ("speed/tokens_per_second", "tokens_per_second"),
        ("speed/mfu", "mfu"),
        ("speed/hfu", "hfu"),
        ("memory/peak_bytes", "peak_memory_bytes"),
    ]:
        assert [(event.step, event.value) for event in board.Scalars(tag)] == [
            (entry["step"], pytest.approx(entry[name], rel=SIX_DIGITS)) for entry in result.progress.speeds
        ]
    again = train(task, "standard", config, seed=0, run_dir=tmp_path, resume=True, show_progress=False)
    assert again.progress.speeds == result.progress.speeds


SMALL = {
    "nearest-neighbor": (("task.num_points=5",), 6),
    "forecast": (("task.look_back=48", "task.patch_length=16", "task.stride=8"), 5),
    "icl-regression": (("task.dim=4", "task.num_points=7"), 14),
    "text": (("task.context_length=20",), 20),
    "chronos": (("task.context_length=30", "task.season=12", "task.prediction_length=6", "task.num_synthetic=6"), 38),
    "uptraining": (("task.context_length=20", "task.model=random"), 20),
    "recall": (("task.context_length=24", "task.num_pairs=2"), 24),
}


@pytest.mark.parametrize("name", TASKS)
def test_tasks_know_their_tokens(name: str) -> None:
    overrides, tokens = SMALL[name]
    recipe = apply_overrides(recipe_for(name, "default"), overrides)
    task = task_class(name)(recipe.task)
    assert task.tokens(task.build_model("standard")) == tokens


def test_a_curriculum_has_fewer_tokens_at_first() -> None:
    recipe = apply_overrides(recipe_for("icl-regression", "default"), ("task.dim=4", "task.num_points=16"))
    curriculum = dataclasses.replace(recipe.task.curriculum, start_points=8, interval=5, end_step=10)
    task = task_class("icl-regression")(dataclasses.replace(recipe.task, curriculum=curriculum))
    model = task.build_model("standard")
    assert [task.tokens(model, step) for step in (0, 5, 10)] == [16, 24, 32]
