"""The presets of recall by distance."""

from __future__ import annotations

from structattn.studies.recipe import Preset, Recipe
from structattn.studies.tasks.recall.task import RecallConfig
from structattn.studies.training.config import TrainingConfig


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


PRESETS = {
    "default": Preset(
        _recipe(
            RecallConfig(context_length=64, num_pairs=4, num_keys=16, num_values=16, num_fillers=8),
            2000,
            ("standard", "mlr:8|8|8|8", "window:16"),
        ),
        "four of 16 keys in a context of 64, three variants, 2,000 steps",
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
