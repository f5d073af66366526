"""Part "train": language models of the paper's shape by ``structattn_lab.compare``, for the minutes that are
left; what is stopped goes on from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.rows import Row, Settings

if TYPE_CHECKING:
    from structattn_lab.settings.recipe import Recipe

LIMIT_S = 900.0
SPECS = ("standard", "mlr:32|8|6|4|4|4|4|2", "mlr:8|8|8|8|8|8|8|8,values=8|8|8|8|8|8|8|8")
REHEARSED_SPECS = ("standard", "mlr:16|8|4|4")
HEAD_DIM = 64
WIDTHS = (256, 384)
POSITIONS = {"learned positions": "", "RoPE": "low_far"}
# The packaged text is small: twelve passes over it, before models of this size learn it by heart.
STEPS, STEPS_OF_A_TEXT = 330, 2000


def recipe(settings: Settings, width: int, rotary: str) -> Recipe:
    """6 layers, 1,024 characters, 32 sequences a step, muP with the learning rate of the preset "paper"."""
    from structattn_lab.settings.recipe import Recipe  # only a worker needs what trains
    from structattn_lab.settings.training import TrainingConfig
    from structattn_lab.tasks.text.task import TextConfig

    text = "" if settings.text is None else str(settings.text)
    steps = 4 if settings.rehearse else STEPS_OF_A_TEXT if text else STEPS
    sizes = {"context_length": 64, "num_layers": 1, "num_heads": 1} if settings.rehearse else {}
    return Recipe(
        task=TextConfig(
            **({"context_length": 1024, "num_layers": 6, "num_heads": width // HEAD_DIM} | sizes),
            data=text,
            embed_dim=width,
            rotary=rotary,
            eval_windows=2 if settings.rehearse else 128,
        ),
        training=TrainingConfig(
            steps=steps,
            batch_size=2 if settings.rehearse else 32,
            learning_rate=4e-3,
            schedule="wsd",
            warmup_steps=steps // 10,
            eval_every=max(1, steps // 10),
            checkpoint_every=max(1, steps // 10),
            precision="no" if settings.rehearse else "bf16",
            parametrization="mup",
            base_fan_in=HEAD_DIM,
        ),
        attention=REHEARSED_SPECS if settings.rehearse else SPECS,
    )


def rows(settings: Settings) -> Iterator[Row]:
    """Rank 7, the last: a comparison for each width and kind of positions."""
    for width in (32,) if settings.rehearse else WIDTHS:
        for positions, rotary in POSITIONS.items():
            yield Row(
                name=f"train/E={width}/{positions}",
                rank=7,
                limit_s=LIMIT_S,
                run=_row(settings, width, positions, rotary),
                alone=True,
            )


def _row(settings: Settings, width: int, positions: str, rotary: str) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        from structattn_lab.compare.comparison import compare

        folder = settings.folder / f"train-{width}-{positions.partition(' ')[0].lower()}"
        found = compare("text", recipe(settings, width, rotary), folder, resume=True, show_progress=False)
        return {
            "metric": found.record.metric_label,
            "steps": max(found.record.rows[0].steps),
            "variants": {
                row.spec: {"score": row.score, "tokens_per_s": row.tokens_per_second, "mfu": row.mfu}
                for row in found.record.rows
            },
        }

    return run
