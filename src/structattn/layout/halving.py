"""MLR blocks whose sizes follow from a context length that is given later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from structattn.layout.levels import LevelLayout
from structattn.layout.scaling import Scaling


@dataclass(frozen=True)
class Halving:
    """MLR blocks that are halved from a context length that is known only when a model is built.

    Args:
        ranks: dimensions per level, level 1 first.
        scaling, value_ranks, sink_tokens: as ``LevelLayout``.
    """

    ranks: tuple[int, ...]
    scaling: Scaling = "variance"
    value_ranks: tuple[int, ...] | None = None
    sink_tokens: int = 0

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            ranks: Sequence[int],
            scaling: Scaling = "variance",
            value_ranks: Sequence[int] | None = None,
            sink_tokens: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        checked = self.resolve(1)
        object.__setattr__(self, "ranks", checked.ranks)
        object.__setattr__(self, "value_ranks", checked.value_ranks)

    def resolve(self, context_length: int) -> LevelLayout:
        """``LevelLayout.halving`` for that context length."""
        return LevelLayout.halving(
            self.ranks, context_length, self.scaling, self.value_ranks, sink_tokens=self.sink_tokens
        )
