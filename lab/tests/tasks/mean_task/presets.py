"""The presets of the mean."""

from __future__ import annotations

from mean_task.task import MeanConfig
from structattn_lab.settings.recipe import Preset, Recipe
from structattn_lab.settings.training import TrainingConfig

_SMOKE = Recipe(
    task=MeanConfig(),
    training=TrainingConfig(
        steps=4, batch_size=4, learning_rate=1e-2, warmup_steps=0, eval_every=2, checkpoint_every=4
    ),
    attention=("standard", "mlr:2|2"),
)
PRESETS = {
    "default": Preset(_SMOKE, "4 points of dimension 8, 4 steps"),
    "smoke": Preset(_SMOKE, "4 points of dimension 8, 4 steps"),
}
