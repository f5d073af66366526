"""One checked call of ``structured_attention``: what a backend needs besides q, k and v."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from structattn.layout.levels import LevelLayout


@dataclass(kw_only=True, slots=True)
class Call:
    """The options of a call; see ``structured_attention``. Nothing changes one after it is made.

    Attributes:
        attn_mask: bool; a float one is an ``attn_bias``.
        seed: 0-dimensional int64 on the CPU, of the random numbers of dropout; ``None`` without dropout.
    """

    layout: LevelLayout
    is_causal: bool
    scale: float | None
    window: int | None
    attn_bias: Tensor | None
    dropout_p: float
    cu_seqlens: Tensor | None
    left_padding: Tensor | None
    softcap: float | None = None
    seed: Tensor | None = None
    attn_mask: Tensor | None = None

    @property
    def one_level_scale(self) -> float:
        """The scale of a layout with one level, where every scaling is one number."""
        if self.scale is not None:
            return self.scale
        rank = self.layout.ranks[0]
        match self.layout.scaling:
            case "variance":
                return 1 / math.sqrt(rank)
            case "mup":
                return 8 / rank
            case "paper" | "paper_sum":
                return 1 / rank
