"""The presets of Chronos: small models from scratch on a CPU. ``--data FOLDER`` fine-tunes a trained
checkpoint instead.
"""

from __future__ import annotations

from dataclasses import replace

from structattn_lab.settings.recipe import Preset, Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.chronos.task import ChronosConfig

_SMALL = Recipe(
    task=ChronosConfig(),
    training=TrainingConfig(
        steps=400,
        batch_size=32,
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=20,
        weight_decay=1e-2,
        betas=(0.9, 0.999),
    ),
    attention=("standard", "mlr:8|4|2|2", "window:24"),
)

_DEFAULT = Preset(
    _SMALL,
    "a T5 of 0.3 million parameters from scratch, 24 hours ahead from 96, 400 steps, one seed; 3.5 minutes on 2 CPU "
    "cores (measured)",
)

PRESETS = {
    "default": _DEFAULT,
    "small": _DEFAULT,
    "smoke": Preset(
        replace(
            _SMALL,
            task=ChronosConfig(num_synthetic=32, eval_windows=16, forecasts=4, num_samples=4),
            training=replace(_SMALL.training, steps=20, warmup_steps=2, eval_every=10),
        ),
        "a T5 of 0.3 million parameters from scratch, 24 hours ahead from 96, 20 steps: tests that training runs, too "
        "short to compare",
    ),
}
