"""The presets of uptraining: a comparison of ways to a smaller cache, and smaller ones."""

from __future__ import annotations

from dataclasses import replace

from structattn_lab.settings.recipe import Preset, Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.uptraining.config import RANDOM, UptrainConfig

_SMALL = Recipe(
    task=UptrainConfig(attention_steps=80),
    training=TrainingConfig(
        steps=100,
        batch_size=8,
        learning_rate=5e-4,
        schedule="cosine",
        warmup_steps=5,
        eval_every=20,
        checkpoint_every=50,
    ),
    attention=("cache:4", "heads:1", "unchanged"),
)

_RESULT = replace(
    _SMALL,
    task=UptrainConfig(
        context_length=512,
        attention_steps=36,
        eval_windows=32,
        recall_text="\nThe key is {}.\n",
        recall_values=(
            "with this that from will have which would should other when also used using some only code class type "
            "call name file list return module Python function object string value"
        ),
    ),
    training=replace(_SMALL.training, steps=45, batch_size=16, learning_rate=2e-3, eval_every=9, checkpoint_every=15),
    attention=("cache:4", "heads:2", "recent:124,sinks=4", "unchanged", "cache:3", "cache:2"),
    seeds=2,
)

PRESETS = {
    "default": Preset(
        _SMALL,
        "four times smaller keys and values, 100 steps of 2,048 tokens, the first 80 on attention alone; needs "
        "task.model",
    ),
    "result": Preset(
        _RESULT,
        "three sizes and two other ways to a smaller cache, 45 steps of 8,192 tokens; needs --data and task.model",
    ),
    "one-shot": Preset(
        replace(
            _RESULT,
            task=replace(_RESULT.task, attention_steps=0),
            # A step that changes nothing: the scores are those of the students as they were made.
            training=replace(_RESULT.training, steps=1, warmup_steps=0, eval_every=1, learning_rate=1e-12),
            attention=("cache:4", "cache:4,ranks=uniform", "cache:3", "cache:2"),
            variants=(
                "calibrated: task.rotary_split=calibrated",
                "low_far: task.rotary_split=low_far",
                "interleaved: task.rotary_split=interleaved",
            ),
            seeds=1,
        ),
        "three splits, three sizes and uniform ranks, before any training; needs --data and task.model",
    ),
    "smoke": Preset(
        replace(
            _SMALL,
            task=UptrainConfig(
                model=RANDOM,
                context_length=64,
                attention_steps=3,
                eval_windows=4,
                calibration_windows=4,
                recall_tokens=8,
            ),
            training=replace(_SMALL.training, steps=6, warmup_steps=1, eval_every=3, batch_size=2),
            attention=("cache:2", "unchanged"),
        ),
        "a Llama of new weights, 6 steps: tests that training runs, too short to compare",
    ),
}
