"""The presets of forecasting: a demo, a comparison with neuralforecast's models under one protocol, and the
settings of the paper.

Hours are those of the whole recipe on 2 CPU cores with ``--jobs 2``. None was run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from structattn_lab.settings.recipe import Preset, Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.forecast.task import ForecastConfig

_TRAINING = TrainingConfig(
    steps=640,
    batch_size=128,
    learning_rate=3e-4,
    warmup_steps=32,
    weight_decay=1e-2,
    betas=(0.9, 0.999),
    eval_every=32,
    patience=5,
    checkpoint_every=160,
)
_DEMO = Recipe(
    task=ForecastConfig(embed_dim=32, num_heads=2, dropout=0.3),
    training=_TRAINING,
    attention=("standard", "mlr:8|4|2|2", "window:8", "bilinear-btt:1+mlr:16|8|4|4"),
    seeds=3,
)

_BASELINE_MODELS = ("baseline:PatchTST", "baseline:iTransformer", "baseline:DLinear", "baseline:NHITS")
_HORIZONS = (96, 192, 336)
_LOOK_BACKS = (96, 336, 512, 1024, 2048)


def _look_backs(numbers: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"look-back={number}: task.look_back={number}" for number in numbers)


# An epoch of ETTh1 is about 128 steps; as is customary, every method may take 10 and stops 3 after its best.
_ETT = replace(
    _DEMO,
    training=replace(
        _TRAINING, steps=1280, batch_size=64, warmup_steps=64, eval_every=128, checkpoint_every=512, patience=3
    ),
    attention=(*_DEMO.attention, *_BASELINE_MODELS),
    learning_rates=(2e-4, 1e-3, 5e-3),
    variants=(
        *(f"one column, h = {horizon}: task.horizon={horizon}" for horizon in _HORIZONS),
        *(f"all columns, h = {horizon}: task.horizon={horizon} task.data.target=*" for horizon in _HORIZONS),
    ),
    search=_look_backs(_LOOK_BACKS),
)
_SHORT = replace(
    _ETT,
    attention=(*_DEMO.attention[:2], *_BASELINE_MODELS),
    variants=tuple(f"h = {horizon}: task.horizon={horizon}" for horizon in (96, 336)),
    search=_look_backs((96, 336, 1024)),
)
# The paper's tokens are single steps. It does not state the look-back: here it is twice the shortest horizon.
_PAPER = Recipe(
    task=ForecastConfig(look_back=192, patch_length=1, stride=1, embed_dim=512, num_heads=8, dropout=0.1),
    training=replace(_TRAINING, steps=1000, batch_size=32, warmup_steps=0, eval_every=50, patience=None),
    attention=("standard", "mlr:32|16|8|8", "mlr:32|32", "window:96"),
    seeds=3,
    learning_rates=(1e-5, 2e-4, 5e-3),
    variants=tuple(f"h = {horizon}: task.horizon={horizon}" for horizon in _HORIZONS),
    search=("steps=200: training.steps=200", "steps=1000: training.steps=1000"),
)

PRESETS = {
    "default": Preset(
        _DEMO, "oil temperature of ETTh1, 96 hours ahead from 336, four variants, 640 steps, three seeds"
    ),
    "demo": Preset(
        replace(_DEMO, seeds=1), "oil temperature of ETTh1, 96 hours ahead from 336, four variants, 640 steps, one seed"
    ),
    "ett": Preset(
        _ETT,
        "ETTh1: four variants against PatchTST, iTransformer, DLinear and NHITS, each with its best look-back of 96 "
        "... 2,048; horizons 96, 192, 336; one column and all; three seeds: 1,200 runs, days on a CPU (estimated)",
    ),
    "smoke": Preset(
        replace(_DEMO, attention=_DEMO.attention[:2], seeds=1, training=replace(_TRAINING, steps=64, warmup_steps=8)),
        "oil temperature of ETTh1, 96 hours ahead from 336, two variants, 64 steps: tests that training runs, too "
        "short to compare",
    ),
    "ett-short": Preset(
        _SHORT,
        "oil temperature of ETTh1: two variants against PatchTST, iTransformer, DLinear and NHITS, each with its best "
        "look-back of 96, 336, 1,024; horizons 96 and 336; three seeds; 34 minutes for horizon 96 (measured)",
    ),
    "paper": Preset(
        _PAPER,
        "the paper's model: 2 layers of width 512, 8 heads, one token per step, 200 or 1,000 iterations, horizons 96, "
        "192, 336; a day on a CPU (estimated)",
    ),
}
