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
# Every family of matrices as the score of heads of full width. In all but Kronecker a product costs two FLOPs
# per parameter, so that rows with the same number of parameters also take the same number of steps.
_STRUCTURES = replace(
    _DEFAULT,
    attention=(
        "standard",
        # 1,024 parameters per head, as standard, with rank 8, 64; and 20, 30 and 47: three splits of MLR.
        "bilinear-lowrank:8",
        "bilinear-btt:1",
        "bilinear-mlbtc:1x1x4|2x2x4|4x4x4|8x8x8",
        "bilinear-mlbtc:1x1x2|2x2x4|4x4x8|8x8x16",
        "bilinear-mlbtc:1x1x1|2x2x2|4x4x4|8x8x40",
        # 1,152, with a rank of 9, 32 and 64.
        "bilinear-lowrank:9",
        "bilinear-monarch:2x16",
        "bilinear-mlbtc:1x1x1|8x8x64s",
        # 1,536, with a rank of 12 and 64.
        "bilinear-lowrank:12",
        "bilinear-kaleidoscope",
        # No other row has their number; rank 64 but for the last one.
        "bilinear-mlbtc:1x1x1|2x2x4s|8x8x64s",
        "bilinear-dense",
        "bilinear-kronecker",
        "bilinear-butterfly",
        "bilinear-btt:2",
        "standard:1",
        "bilinear-mlr:4|2|1|1",
    ),
    seeds=5,
    learning_rates=(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2, 0.16, 0.32),
    equal="compute",
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
    "structures": Preset(
        _STRUCTURES,
        "16 points of dimension 64, every family of matrices as the score, iso-FLOP, with groups of equal parameters, "
        "five seeds; about 40 minutes on 2 CPU cores with --jobs 2 (measured, beside other work)",
    ),
}
