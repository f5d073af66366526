"""The presets of recall by distance."""

from __future__ import annotations

from dataclasses import replace

from structattn_lab.settings.recipe import Preset, Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.cache_sizes import cache_map
from structattn_lab.tasks.recall.task import RecallConfig


def _recipe(task: RecallConfig, steps: int, specs: tuple[str, ...]) -> Recipe:
    return Recipe(
        task=task,
        training=TrainingConfig(
            steps=steps,
            batch_size=32,
            learning_rate=1e-2,
            schedule="cosine",
            warmup_steps=steps // 20,
            eval_every=steps // 10,
            checkpoint_every=steps // 5,
        ),
        attention=specs,
    )


_CACHE_MAP = Recipe(
    task=RecallConfig(kind="joined", context_length=256, num_pairs=32, num_values=8, num_fillers=8, num_heads=4),
    training=TrainingConfig(
        steps=500,
        batch_size=8,
        learning_rate=1e-2,
        schedule="wsd",
        warmup_steps=25,
        eval_every=250,
        checkpoint_every=500,
    ),
    attention=cache_map(256, head_dim=16),
    seeds=5,
    learning_rates=(1.25e-3, 2.5e-3, 5e-3, 1e-2),
    equal="compute",
)

# About ten times the parameters, and four times the context.
_CACHE_MAP_GPU = replace(
    _CACHE_MAP,
    task=replace(_CACHE_MAP.task, context_length=1024, num_pairs=128, num_keys=128, embed_dim=128, num_layers=6),
    training=replace(
        _CACHE_MAP.training,
        steps=2000,
        batch_size=32,
        warmup_steps=100,
        eval_every=500,
        precision="bf16",
    ),
    attention=cache_map(1024, head_dim=32),
    learning_rates=(2e-3, 4e-3, 8e-3),
)

PRESETS = {
    "default": Preset(
        _recipe(
            RecallConfig(context_length=64, num_pairs=4, num_keys=16, num_values=16, num_fillers=8),
            2000,
            ("standard", "mlr:8|8|8|8", "window:16"),
        ),
        "four of 16 keys in a context of 64, three variants, 2,000 steps",
    ),
    "cache-map": Preset(
        _CACHE_MAP,
        "32 pairs in a context of 256, 18 variants by the size of their caches, equal compute, a learning rate each, "
        "five seeds; on 2 CPU cores with --jobs 2 one hour",
    ),
    "cache-map-gpu": Preset(
        _CACHE_MAP_GPU,
        "`cache-map` with ten times the parameters, 128 pairs in a context of 1,024: 1e17 FLOPs, an hour at 30 TFLOP/s "
        "(counted, not run)",
    ),
    "smoke": Preset(
        _recipe(
            RecallConfig(context_length=32, num_pairs=2, num_keys=4, num_values=4, embed_dim=16, eval_sequences=64),
            20,
            ("standard", "window:8"),
        ),
        "two of four keys in a context of 32, two variants, 20 steps: tests that training runs, too short to compare",
    ),
}
