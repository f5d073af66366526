"""One checked call of ``structured_attention``: what a backend needs besides q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from structattn.layout.levels import LevelLayout


@dataclass(frozen=True, kw_only=True)
class Call:
    """The options of a call; see ``structured_attention``.

    Attributes:
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
    seed: Tensor | None = None
