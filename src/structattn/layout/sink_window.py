"""A window with sink tokens for heads whose dimension is known only when a model is built."""

from __future__ import annotations

from dataclasses import dataclass

from structattn.checks import MAX_LENGTH, check_size
from structattn.layout.levels import MAX_SINK_TOKENS, LevelLayout
from structattn.layout.scaling import Scaling


@dataclass(frozen=True)
class SinkWindow:
    """Each query sees the last ``window`` positions, its own included, and the first ``sink_tokens``.

    Args:
        window: in positions.
        sink_tokens: at least 1.
        scaling: as ``LevelLayout``.

    Source: Xiao et al. 2023 (StreamingLLM).
    """

    window: int
    sink_tokens: int
    scaling: Scaling = "variance"

    def __post_init__(self) -> None:
        check_size("window", self.window, MAX_LENGTH)
        check_size("sink_tokens", self.sink_tokens, MAX_SINK_TOKENS)
        self.resolve(1)

    def resolve(self, head_dim: int) -> LevelLayout:
        """The layout of heads of that dimension: one sliding level."""
        return LevelLayout.sliding((head_dim,), (self.window,), self.scaling, sink_tokens=self.sink_tokens)
