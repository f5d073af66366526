"""Estimates of how long presets take."""

from dataclasses import replace

import pytest

from structattn.cli import main
from structattn_lab.planning import durations
from structattn_lab.planning.durations import StepTime, estimated_seconds, in_words, measured_step
from structattn_lab.tasks.registry import TASKS, presets_of, recipe_for


def test_an_estimate_counts_steps_flops_and_runs() -> None:
    recipe = recipe_for("nearest-neighbor", "demo")
    step = StepTime(other=0.01, per_flop=0.0)
    training = 1000 * 0.01 * durations._EVALUATION + durations._PER_RUN_S
    assert estimated_seconds("nearest-neighbor", recipe, step) == pytest.approx(durations._PER_PRESET_S + 5 * training)
    more = estimated_seconds("nearest-neighbor", replace(recipe, seeds=3), step)
    assert more == pytest.approx(durations._PER_PRESET_S + 15 * training)
    by_flops = estimated_seconds("nearest-neighbor", recipe, StepTime(other=0.01, per_flop=1e-9))
    assert by_flops > 2 * durations._PER_PRESET_S + 5 * training
    assert estimated_seconds("uptraining", recipe_for("uptraining", "result"), step) is None  # it needs a model


def test_steps_are_measured(monkeypatch) -> None:
    monkeypatch.setattr(durations, "_MEASURED_S", 0.0)
    step = measured_step("nearest-neighbor")
    assert 0 < step.other < 5
    assert 0 < step.per_flop < 1e-6


def test_presets_show_estimates_that_are_kept_for_a_day(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("STRUCTATTN_CACHE", str(tmp_path))
    asked = []

    def measured(task: str) -> StepTime:
        asked.append(task)
        return StepTime(other=0.01, per_flop=0.0)

    monkeypatch.setattr(durations, "measured_step", measured)
    monkeypatch.setattr(durations, "estimated_seconds", lambda task, recipe, step: None if task == "text" else 90.0)
    for _ in range(2):
        assert main(["presets"]) == 0
        printed = capsys.readouterr().out
        assert asked == list(TASKS)
        assert printed.count("unknown  ") == len(presets_of("text"))
        assert printed.count("about 1.5 min") == sum(len(presets_of(task)) for task in TASKS if task != "text")
    monkeypatch.setattr(durations, "_KEPT_S", 0.0)
    assert main(["presets"]) == 0
    assert asked == [*TASKS, *TASKS]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (9.4, "9.4 s"),
        (80, "80 s"),
        (100, "1.7 min"),
        (1234, "21 min"),
        (5000, "80 min"),
        (6000, "1.7 hours"),
        (4e5, "4.6 days"),
    ],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
