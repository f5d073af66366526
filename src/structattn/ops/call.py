"""The options of a call of ``structured_attention``: as a user gives them, and checked, as a backend needs
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypedDict

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.ops.terms import ScoreTerms

_NO_TERMS = ScoreTerms()


@lru_cache(maxsize=256)  # copied to a GPU once: that waits for the GPU, and no CUDA graph can hold it
def whole_factors(layout: LevelLayout, scale: float | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``LevelLayout.whole_factors`` as a tensor (D,), to be read only."""
    with torch.inference_mode(False):
        return torch.tensor(layout.whole_factors(scale), dtype=dtype, device=device)


class Pairs(TypedDict):
    """Which pairs of a call are visible, as it is given."""

    is_causal: bool
    window: int | None
    dropout_p: float
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    left_padding: Tensor | None


class Options(TypedDict, total=False):
    """The options of ``structured_attention`` that each of its backends computes, by name."""

    is_causal: bool
    scale: float | None
    window: int | None
    attn_bias: Tensor | None
    attn_mask: Tensor | None
    softcap: float | None
    alibi_slopes: Tensor | None
    dropout_p: float
    cu_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    left_padding: Tensor | None


@dataclass(kw_only=True, slots=True)
class Call:
    """A layout and options, checked. Nothing changes one after it is made.

    Attributes:
        terms: as ``ScoreTerms.of_call`` gives them; sinks for a backend that counts them in, see
            ``backends.BackendRow``.
        seed: 0-dimensional int64 on the CPU, of the random numbers of dropout; ``None`` without dropout.
    """

    layout: LevelLayout
    terms: ScoreTerms = _NO_TERMS
    is_causal: bool = True
    window: int | None = None
    dropout_p: float = 0.0
    cu_seqlens: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    left_padding: Tensor | None = None
    seed: Tensor | None = None

    def with_terms(self, **changes: Any) -> Call:
        """The call with other terms."""
        return replace(self, terms=replace(self.terms, **changes))

    @property
    def key_seqlens(self) -> Tensor | None:
        """The boundaries of packed keys."""
        return self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k

    @property
    def one_level_scale(self) -> float:
        """The scale of a layout with one level, where every scaling is one number."""
        if self.terms.scale is not None:
            return self.terms.scale
        rank = self.layout.ranks[0]
        match self.layout.scaling:
            case "variance" | "standard":
                return 1 / math.sqrt(rank)
            case "mup":
                return 8 / rank
            case "paper" | "paper_sum":
                return 1 / rank
