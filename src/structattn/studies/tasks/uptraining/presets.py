"""The presets of uptraining: a comparison of ways to a smaller cache, and smaller ones."""

from __future__ import annotations

from dataclasses import replace

from structattn.studies.recipe import Preset, Recipe
from structattn.studies.tasks.uptraining.config import UptrainConfig
from structattn.studies.training.config import TrainingConfig

_SMALL = Recipe(
    task=UptrainConfig(attention_steps=20),
    training=TrainingConfig(
        steps=100,
        batch_size=8,
        learning_rate=5e-4,
        schedule="cosine",
        warmup_steps=5,
        betas=(0.9, 0.95),
        eval_every=20,
        checkpoint_every=50,
    ),
    attention=("cache:4", "heads:1", "unchanged"),
)

PRESETS = {
    "default": Preset(
        _SMALL, "four times smaller keys and values, 100 steps of 2,048 tokens, the first 20 on attention alone"
    ),
    "result": Preset(
        replace(
            _SMALL,
            task=UptrainConfig(context_length=512, attention_steps=10, eval_windows=96),
            training=replace(_SMALL.training, steps=50, batch_size=16, eval_every=5),
            attention=("cache:2", "cache:3", "cache:4", "cache:4,ranks=uniform", "heads:2", "recent:124,sinks=4"),
            variants=(
                "calibrated: task.rotary_split=calibrated",
                "low_far: task.rotary_split=low_far",
                "interleaved: task.rotary_split=interleaved",
            ),
            seeds=2,
        ),
        "three splits, three sizes, uniform ranks and two other ways to a smaller cache, 50 steps of 8,192 tokens; needs --data and task.model; not run yet",
    ),
    "smoke": Preset(
        replace(
            _SMALL,
            task=UptrainConfig(
                context_length=64, attention_steps=3, eval_windows=4, calibration_windows=4, recall_tokens=8
            ),
            training=replace(_SMALL.training, steps=6, warmup_steps=1, eval_every=3, batch_size=2),
            attention=("cache:2", "unchanged"),
        ),
        "a Llama of new weights, 6 steps: tests that training runs, too short to compare",
    ),
}
