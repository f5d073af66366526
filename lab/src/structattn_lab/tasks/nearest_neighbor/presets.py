"""The presets of nearest-neighbor search: the models are so small that each trains in seconds on one CPU
core.
"""

from __future__ import annotations

from dataclasses import replace

from structattn_lab.settings.recipe import Preset, Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborConfig

_DEFAULT = Recipe(
    task=NearestNeighborConfig(),
    training=TrainingConfig(
        steps=1000,
        batch_size=256,
        learning_rate=2e-2,
        schedule="one-cycle",
        betas=(0.9, 0.999),
        checkpoint_every=250,
    ),
    attention=("standard", "standard:1", "bilinear-btt:1", "bilinear-mlr:4|2|1|1", "bilinear-mlr:1|1|1|5"),
)
_SMOKE = replace(_DEFAULT, training=replace(_DEFAULT.training, steps=100), attention=_DEFAULT.attention[:3])
_RANKS = replace(
    _DEFAULT,
    attention=(
        "standard",
        "standard:4",
        "standard:2",
        "standard:1",
        "bilinear-btt:1",
        "bilinear-mlr:4|2|1|1",
        "bilinear-mlr:1|1|1|5",
        "bilinear-mlr:2|2|2|2",
        "bilinear-btt:2",
    ),
    seeds=3,
)
_DEMO = Preset(_DEFAULT, "16 points of dimension 64, five variants, 1,000 steps, one seed")

PRESETS = {
    "default": _DEMO,
    "demo": _DEMO,
    "smoke": Preset(
        _SMOKE, "16 points of dimension 64, three variants, 100 steps: tests that training runs, too short to compare"
    ),
    "ranks": Preset(
        _RANKS,
        "error against the rank of the score: 16 points of dimension 64, nine variants, 1,000 steps, three seeds",
    ),
}
