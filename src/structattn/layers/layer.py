"""What a model needs of an attention layer, so that it may have others than those of a scoring and a layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from structattn.cache import PAGE_SIZE
from structattn.cache.rows import OneLayerCache
from structattn.layers.checks import check_cache
from structattn.layers.rotary import Rotary
from structattn.layout.global_window import Layout
from structattn.layout.text import TextLayout


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a model asks of the attention of one of its layers; see ``Transformer`` for the arguments."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    context_length: int
    is_causal: bool = True
    rotary: Rotary | None = None
    qk_norm: bool = True
    bias: bool = False
    dropout: float = 0.0


class LayerCost(Protocol):
    """What a layer costs for one sequence."""

    @property
    def flops(self) -> int:
        """Of one forward pass, 2 per multiply-add."""

    @property
    def cache_numbers(self) -> int:
        """Numbers that ``new_cache`` keeps of the sequence."""


class AttentionLayer(nn.Module):
    """A module (B, T, E) to (B, T, E) that mixes the tokens of a sequence.

    ``forward(x, *, cache=None, left_padding=None, cu_seqlens=None, layout=None)`` has the meaning of that of ``Attention``; ``layout`` is
    ``None`` unless the layer has a ``TextLayout``.

    Args:
        embed_dim, num_heads, num_kv_heads: E; H, which divides it; and G, which divides H.

    Attributes:
        out_proj: the last linear layer, which language models start at zero.
        layout, window: of the scores, if they have one.
    """

    out_proj: nn.Linear
    layout: Layout | TextLayout | None = None
    window: int | None = None

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads

    @abstractmethod
    def cost(self, num_queries: int) -> LayerCost:
        """What one forward pass over that many tokens costs, and what the cache keeps of them."""

    @abstractmethod
    def new_cache(
        self,
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
    ) -> OneLayerCache:
        """An empty cache for ``forward``; arguments as of ``LevelCache``."""

    def check_cache(self, cache: object) -> None:
        """Raises ``ConfigError`` unless it is a cache of this layer, or like its own and of no layer yet; here, a ``LevelCache``."""
        check_cache(cache, self, self.layout, self.window)


class CustomAttention(ABC):
    """An attention variant that is no scoring and layout: a frozen value, which ``AttentionSpec`` holds and ``add_form`` gives a text form."""

    @abstractmethod
    def build(self, shape: LayerShape) -> AttentionLayer:
        """A layer of a model; raises ``ConfigError`` where it does not fit."""

    @abstractmethod
    def __str__(self) -> str:
        """The text form."""
