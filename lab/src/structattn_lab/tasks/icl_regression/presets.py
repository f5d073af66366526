"""The presets of in-context regression, from a minute on a laptop to the settings of the paper.

All use muP, choose the learning rate of each variant by the same sweep, and count compute on the curriculum's
lengths. The hours that a preset names are those of the whole recipe, sweep included, on 2 CPU cores with
``--jobs 2``. None was run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from structattn_lab.settings.recipe import Preset, Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.icl_regression.task import Curriculum, ICLRegressionConfig

_SPECS = ("standard", "standard:1", "bilinear-btt:1", "bilinear-btt:2")
# Small enough for a CPU, with a head dimension of 3 below d: for the effect of single settings see
# docs/results/icl-regression.md.
_SMALL = Recipe(
    task=ICLRegressionConfig(
        dim=6,
        embed_dim=24,
        num_layers=4,
        num_heads=8,
        read_in_std=0.2,
        curriculum=Curriculum(start_dim=2, start_points=4, interval=1000, end_step=2000),
    ),
    training=TrainingConfig(
        steps=10_000,
        batch_size=64,
        learning_rate=3e-3,
        schedule="wsd",
        warmup_steps=1000,
        eval_every=500,
        checkpoint_every=1000,
        parametrization="mup",
        base_fan_in=64,
    ),
    # The allocations of the paper (16|8|8, 8|8|16 and equal ranks) in small; not smaller, since layer norm
    # makes a level of 2 features a sign.
    attention=(*_SPECS, "bilinear-mlr:4|2|2", "bilinear-mlr:2|2|4", "bilinear-mlr:4|4|4"),
    equal="compute",
)


_SMOKE = replace(
    _SMALL,
    task=replace(
        _SMALL.task,
        dim=4,
        embed_dim=32,
        num_layers=2,
        curriculum=replace(_SMALL.task.curriculum, interval=200, end_step=200),
    ),
    training=replace(_SMALL.training, steps=600, warmup_steps=60, eval_every=100, checkpoint_every=300),
    attention=(*_SPECS[:3], "bilinear-mlr:2|1|1"),
    equal="steps",
)
# The sweep has half the width and half the heads: the head dimension, on which the bottleneck depends, stays.
_BOTTLENECK = replace(
    _SMALL,
    seeds=3,
    learning_rates=(1e-3, 2e-3, 4e-3),
    sweep_settings=("task.embed_dim=12", "task.num_heads=4", "training.steps=4000"),
)
# Every family of matrices as the score of heads of full width. In all but Kronecker a product costs two FLOPs
# per parameter, so that rows with the same number of parameters also take the same number of steps.
_STRUCTURES = replace(
    _SMALL,
    attention=(
        "standard",
        # 240 parameters per head, with a rank of 5, 24, 16; and 9, 12 and 15, which are three splits of MLR.
        "bilinear-lowrank:5",
        "bilinear-btt:1",
        "bilinear-monarch:2x8",
        "bilinear-mlbtc:1x1x3|2x2x2|4x4x4",
        "bilinear-mlbtc:1x1x2|2x2x2|4x4x8",
        "bilinear-mlbtc:1x1x1|2x2x2|4x4x12",
        # 432, with a rank of 9, 24 and 24; the second adds two small terms to a block tensor train.
        "bilinear-lowrank:9",
        "bilinear-mlbtc:1x1x2|2x2x4s|4x6x24s",
        "bilinear-kaleidoscope",
        # No other row has their number; rank 24 but for the last two.
        "bilinear-mlbtc:1x1x1|4x6x24s",
        "bilinear-dense",
        "bilinear-kronecker",
        "bilinear-butterfly",
        "bilinear-btt:2",
        "standard:1",
        "bilinear-lowrank:3",
        "bilinear-mlr:4|2|2",
    ),
    seeds=3,
    # At full size and length, so that no rate is chosen on the plateau where every run begins.
    learning_rates=(5e-4, 1e-3, 2e-3, 4e-3),
)
_RANK_VS_DIMENSION = replace(
    _SMALL,
    attention=("standard:12", "standard", "standard:6", "standard:4", "standard:2", "standard:1", "bilinear-btt:1"),
    variants=("task.dim=4", "task.dim=6", "task.dim=8"),
)


def _paper(dim: int) -> Recipe:
    """The paper's models at width 256: 6 layers and 8 heads, so D = 32 < d; 500,000 steps, curriculum over
    the first 6 %.
    """
    steps = 500_000
    return Recipe(
        task=ICLRegressionConfig(
            dim=dim,
            embed_dim=256,
            num_layers=6,
            num_heads=8,
            read_in_std=0.02,
            curriculum=Curriculum(end_step=steps * 6 // 100),
            eval_prompts=3200,
        ),
        training=TrainingConfig(
            steps=steps,
            batch_size=64,
            learning_rate=1e-4,
            warmup_steps=1000,
            eval_every=2500,
            checkpoint_every=10_000,
            parametrization="mup",
            compile=True,
        ),
        attention=(*_SPECS, "bilinear-mlr:16|8|8", "bilinear-mlr:8|8|16", "bilinear-mlr:8|8|8|8"),
        learning_rates=(5e-5, 1e-4, 3e-4, 1e-3),
        sweep_settings=(
            "task.embed_dim=128",
            "task.num_heads=4",
            "training.steps=50000",
            "task.curriculum.end_step=15000",
        ),
    )


_SHORT = Preset(
    _SMOKE,
    "linear functions of 4 numbers, four variants, 600 steps: tests that training runs, too short to compare; 72 "
    "seconds on 2 CPU cores",
)

PRESETS = {
    "default": _SHORT,
    "smoke": _SHORT,
    "bottleneck": Preset(
        _BOTTLENECK,
        "linear functions of 6 numbers, width 24: 8 heads of dimension 3 against scores of full rank, iso-FLOP, three "
        "seeds; under 3 hours on 2 CPU cores",
    ),
    "structures": Preset(
        _STRUCTURES,
        "linear functions of 6 numbers, width 24: every family of matrices as the score of 8 heads, iso-FLOP, with "
        "groups of equal parameters, three seeds; about 5 hours on 2 CPU cores (estimated)",
    ),
    "rank-vs-dimension": Preset(
        _RANK_VS_DIMENSION,
        "linear functions of 4, 6 and 8 numbers against heads of dimension 2 ... 24, one seed; about 3 hours on 2 CPU "
        "cores (estimated)",
    ),
    "paper-d64": Preset(
        _paper(64),
        "the paper's linear functions of 64 numbers at width 256, 500,000 steps; months on a CPU, days on a GPU "
        "(guessed from the FLOPs)",
    ),
    "paper-d128": Preset(
        _paper(128),
        "the paper's linear functions of 128 numbers at width 256, 500,000 steps; months on a CPU, weeks on a GPU "
        "(guessed from the FLOPs)",
    ),
}
