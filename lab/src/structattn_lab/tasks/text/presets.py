"""The presets of language modelling, from a minute on a laptop to the settings of the paper.

Those with budgets or widths use muP and choose the learning rate of each attention, for each kind of
positions, by the same sweep at a small width. Hours are those of the whole recipe on 2 CPU cores with
``--jobs 2``. None was run on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from structattn_lab.settings.recipe import Preset, Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.cache_sizes import cache_map
from structattn_lab.tasks.text.task import TextConfig

# Learned positions, as in the paper, where part of what MLR gains is that it knows near from far; and RoPE,
# which knows it as well.
_POSITIONS = ("learned positions: task.rotary=", "RoPE: task.rotary=low_far")
_HEAD_DIM = 64


def _plain(task: TextConfig, steps: int, batch_size: int, specs: tuple[str, ...]) -> Recipe:
    return Recipe(
        task=task,
        training=TrainingConfig(
            steps=steps,
            batch_size=batch_size,
            learning_rate=3e-3,
            schedule="cosine",
            warmup_steps=steps // 20,
            eval_every=steps // 10,
            checkpoint_every=steps // 5,
        ),
        attention=specs,
    )


_SCALING = Recipe(
    task=TextConfig(context_length=512, num_heads=2),
    training=TrainingConfig(
        steps=1000,
        batch_size=4,
        learning_rate=4e-3,
        schedule="wsd",
        warmup_steps=100,
        eval_every=500,
        checkpoint_every=500,
        parametrization="mup",
        base_fan_in=_HEAD_DIM,
    ),
    attention=("standard", "window:128", "mlr:32|8|6|4|4|4|4|2", "mlr:16|16|16|16,values=16|16|16|16"),
    seeds=2,
    learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2),
    sweep_settings=(f"task.embed_dim={_HEAD_DIM}", "task.num_heads=1", "budgets=5e11"),
    variants=_POSITIONS,
    widths=(64, 128, 256, 384),
    budgets=(5e11, 1e12, 2e12),
)

_METHODS = replace(
    _SCALING,
    # Everything that the paper compares or sweeps, and what it leaves open, at head dimension 64.
    attention=(
        "standard",
        "window:512",
        "window:128",
        "global-window:32|32@128",
        "[standard,window:128,window:128]",
        "mlr:32|32",
        "mlr:48|8|4|4",
        "mlr:40|16|4|4",
        "mlr:16|16|16|16",
        "mlr:16|16|12|8|8|4",
        "mlr:32|8|6|4|4|4|4|2",
        "mlr:24|12|8|6|4|4|4|2",
        "mlr:8|8|8|8|8|8|8|8",
        "mlr:16|16|16|16,values=16|16|16|16",
        "mlr-text:32|16|16",
        "bilinear-mlr:32|16|8|8",
        "bilinear-btt:1",
        "bilinear-btt:1+mlr:64|32|16|16",
    ),
    widths=(128,),
    budgets=(1e12,),
    seeds=1,
    sweep_settings=("budgets=2.5e11",),  # at the same width: levels of a bilinear score share out all of it
)
# The paper's models and schedule: 6 layers, 1,024 characters, 32 sequences a step for 100,000 steps.
_PAPER = replace(
    _SCALING,
    task=TextConfig(context_length=1024, embed_dim=384, num_layers=6, num_heads=6),
    training=TrainingConfig(
        steps=100_000,
        batch_size=32,
        micro_batch_size=4,
        learning_rate=4e-3,
        warmup_steps=2000,
        eval_every=1000,
        checkpoint_every=2500,
        precision="bf16",
        parametrization="mup",
        base_fan_in=_HEAD_DIM,
        compile=True,
    ),
    attention=("standard", "window:512", "window:128", "mlr:16|16|16|16", "mlr:32|8|6|4|4|4|4|2"),
    widths=(256, 384, 512, 768),
    budgets=(),
    sweep_settings=("task.embed_dim=128", "task.num_heads=2", "training.steps=5000"),
)

# The scaling laws with RoPE at up to ten times the compute, for a corpus of 50 million characters or more: at
# 2e13 FLOPs width 64 reads 30 to 38 million.
_LEVELS = replace(
    _SCALING,
    task=replace(_SCALING.task, rotary="low_far"),
    training=replace(_SCALING.training, eval_every=1000, precision="bf16"),
    attention=(
        "standard",
        "window:128",
        "mlr:32|8|6|4|4|4|4|2",
        "mlr:16|16|16|16,values=16|16|16|16",
        "sliding:16|16|16|16@-|256|128|64,values=16|16|16|16",
        # DAR, and its control: as many numbers in the cache, the same for all tokens but the query's own.
        "sliding:16|48@-|128,values=16|48",
        "sliding:28|36@-|1,values=28|36",
    ),
    seeds=3,
    learning_rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    sweep_settings=(f"task.embed_dim={_HEAD_DIM}", "task.num_heads=1", "budgets=2e12"),
    variants=(),
    widths=(64, 128, 256),
    budgets=(2e12, 6.3e12, 2e13),
)

# What each attention loses against the bytes of its cache: RoPE for all, a learning rate each, equal compute.
_CACHE_MAP = Recipe(
    task=TextConfig(context_length=1024, embed_dim=64, num_layers=2, rotary="low_far", eval_windows=64),
    training=TrainingConfig(
        steps=1200,
        batch_size=1,
        learning_rate=8e-3,
        schedule="wsd",
        warmup_steps=60,
        eval_every=600,
        checkpoint_every=600,
    ),
    attention=cache_map(1024, head_dim=16),
    seeds=5,
    learning_rates=(2e-3, 4e-3, 8e-3),
    equal="compute",
)
# Ten times the steps, for a corpus that no run reads twice; and heads that differ, at the same bytes.
_CACHE_MAP_TRAINED = replace(
    _CACHE_MAP,
    training=replace(_CACHE_MAP.training, steps=12_000, warmup_steps=600, eval_every=3000, checkpoint_every=1500),
    attention=(
        "standard",
        # a half
        "standard,kv_heads=2",
        "sliding:6|10@-|204,values=6|10",
        "mlr:4|4|4|4,values=4|4|4|4",
        "mla:56,rope=8",
        "heads:standard/window:337,sink_tokens=4*3",
        "heads:standard/sliding:4|12@-|113,values=4|12*3",
        # a quarter
        "standard,kv_heads=1",
        "sliding:2|14@-|146,values=2|14",
        "mla:24,rope=8",
        "window:252,sink_tokens=4",
        "[window:142,sink_tokens=4,heads:standard/window:142,sink_tokens=4*3]",
        "[window:112,sink_tokens=4,heads:standard/sliding:2|14@-|60,values=2|14*3]",
        # an eighth
        "standard,kv_heads=2+sliding:2|14@-|146,values=2|14",
        "mla:12,rope=4",
        "window:124,sink_tokens=4",
        "pooled:16,window=48",
        # a constant state
        "gated-delta:16",
    ),
    seeds=3,
    learning_rates=(1e-3, 2e-3, 4e-3),
)
# About ten times the parameters, and four times the context.
_CACHE_MAP_GPU = replace(
    _CACHE_MAP,
    task=replace(_CACHE_MAP.task, context_length=4096, embed_dim=128, num_layers=6),
    training=replace(
        _CACHE_MAP.training,
        steps=2000,
        batch_size=8,
        warmup_steps=100,
        eval_every=500,
        checkpoint_every=500,
        precision="bf16",
    ),
    attention=cache_map(4096, head_dim=32),
)

_SMOKE = TextConfig(context_length=128, embed_dim=64, num_layers=2, eval_windows=64)
# Long enough for levels to matter: standard attention with learned positions is then still at the loss of
# pairs of characters (2.6).
_DEMO = _plain(replace(_SMOKE, num_heads=2), 700, 8, ("standard", "mlr:16|8|4|4", "mlr:8|8|8|8,values=8|8|8|8"))

PRESETS = {
    "default": Preset(
        _plain(TextConfig(), 1000, 16, ("standard", "mlr:8|8|8|8", "mlr:16|8|4|4", "window:64")),
        "1 MB of English text (PEPs), characters as tokens, context of 256, four variants, 1,000 steps",
    ),
    "demo": Preset(
        replace(_DEMO, training=replace(_DEMO.training, learning_rate=6e-3), seeds=2),
        "1 MB of English text (PEPs), characters as tokens, context of 128, levels against standard attention, 700 "
        "steps, two seeds; two to four minutes on 2 CPU cores",
    ),
    "smoke": Preset(
        _plain(_SMOKE, 500, 8, ("standard", "mlr:8|4|2|2", "window:32")),
        "1 MB of English text (PEPs), characters as tokens, context of 128, three variants, 500 steps: tests that "
        "training runs, too short to compare",
    ),
    "cache-map": Preset(
        _CACHE_MAP,
        "context of 1,024, 18 variants by the size of their caches, equal compute, a learning rate each, five seeds; "
        "on 2 CPU cores with --jobs 2 two and a half hours (estimated: three seeds took about 100 minutes)",
    ),
    "cache-map-trained": Preset(
        _CACHE_MAP_TRAINED,
        "`cache-map` with ten times the steps, 18 variants at a half, a quarter and an eighth of the cache, heads that "
        "differ among them, three seeds, for a text of 25 MB or more (--data); about 10 core-hours (estimated from "
        "steps)",
    ),
    "cache-map-gpu": Preset(
        _CACHE_MAP_GPU,
        "`cache-map` with ten times the parameters and a context of 4,096, for a text of 100 MB or more (--data): 2e17 "
        "FLOPs, two hours at 30 TFLOP/s (counted, "
        "not run)",
    ),
    "scaling": Preset(
        _SCALING,
        "scaling laws: four variants, learned positions and RoPE, widths 64 ... 384, three budgets of compute, two "
        "seeds; on 2 CPU cores 1.3 hours for `--widths 64`, 3.6 for all (measured, in parts)",
    ),
    "levels": Preset(
        _LEVELS,
        "scaling laws with RoPE at up to ten times the compute of `scaling`: seven variants, widths 64 ... 256, three "
        "budgets, three seeds, bf16, for a text of 50 MB or more (--data); about 24 core-hours, 12 of them for "
        "`--widths 64` (estimated from steps)",
    ),
    "methods": Preset(
        _METHODS,
        "18 variants at width 128 and 1e12 training FLOPs, learned positions and RoPE, one seed; about 2 hours on 2 "
        "CPU cores (estimated)",
    ),
    "paper": Preset(
        _PAPER,
        "the paper's models: widths 256 ... 768, context of 1,024, 100,000 steps; years on a CPU, weeks on a GPU "
        "(guessed from the FLOPs)",
    ),
}
