"""What the baseline layers share: caches and costs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from structattn.cache import PAGE_SIZE
from structattn.cache.rows import all_or_nothing
from structattn.checks import check_type
from structattn.errors import ConfigError
from structattn.layers.checks import check_states
from structattn.layers.layer import AttentionLayer, LayerShape, SequenceCost
from structattn.layers.scoring_modules import HeadShape
from structattn_lab.baselines.tables import SlotTable, TableCache

_MOST_UNEQUAL = 64  # widths of a linear layer; more is a mistake in a spec, and may take minutes
_NARROW = 256


def linear(width_in: int, width_out: int) -> nn.Linear:
    """A linear layer without bias, with the initial weights of ``Attention``.

    Raises:
        ConfigError: one width is more than 64 times the other, and than 16,384.
    """
    narrow, wide = sorted((width_in, width_out))
    if wide > (most := _MOST_UNEQUAL * max(narrow, _NARROW)):
        raise ConfigError(
            f"a linear layer from {width_in:,} to {width_out:,} numbers: expected at most {most:,}, {_MOST_UNEQUAL} "
            "times the narrower side; choose a smaller rank or dimension in the spec"
        )
    layer = nn.Linear(width_in, width_out, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(width_in))
    return layer


def causal_pairs(num_tokens: int) -> int:
    """Pairs of a query and a key that it sees."""
    return num_tokens * (num_tokens + 1) // 2


def causal_mask(positions: Tensor, num_keys: int) -> Tensor:
    """Which of the keys 0 ... S - 1 queries at positions (T,) or (B, T) see: (T, S) or (B, 1, T, S). Padding
    sees the first one.
    """
    visible = torch.arange(num_keys, device=positions.device) <= positions.clamp(min=0)[..., None]
    return visible if visible.dim() == 2 else visible[:, None]


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Weights over the last dimension, of scores (B, H, T, S) and what is visible, broadcastable to them;
    every query sees something.
    """
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)


class BaselineLayer(AttentionLayer):
    """A causal layer that is no scoring and layout.

    A class says how a whole sequence is mixed, how new tokens are with a cache, what the cache keeps, and
    what it costs.

    Args:
        name: the spec, for messages.
        shape: of the model.
        tables: of the cache.
        has_key_heads: whether ``num_kv_heads`` may differ from ``num_heads``. Default ``False``.
        mixed_dim: M, what ``mix_at`` returns of a token. Default ``None``: E.

    Raises:
        ConfigError: heads do not divide, or the model is not causal, or has biases, dropout, or key heads
            that the layer has not.
    """

    def __init__(
        self,
        name: str,
        shape: LayerShape,
        tables: dict[str, SlotTable],
        *,
        has_key_heads: bool = False,
        mixed_dim: int | None = None,
    ) -> None:
        heads = shape.num_kv_heads or shape.num_heads
        HeadShape(embed_dim=shape.embed_dim, num_heads=shape.num_heads, num_kv_heads=heads)
        super().__init__(shape.embed_dim, shape.num_heads, heads)
        if not shape.is_causal or shape.bias or shape.dropout:
            raise ConfigError(
                f"{name} is a baseline for causal language models without bias and dropout, got "
                f"is_causal={shape.is_causal}, bias={shape.bias}, "
                f"dropout={shape.dropout}"
            )
        if heads != shape.num_heads and not has_key_heads:
            raise ConfigError(f"{name} has no heads of keys to share: leave num_kv_heads at None, got {heads}")
        self.tables = tables
        self.out_proj = linear(mixed_dim or shape.embed_dim, shape.embed_dim)

    @abstractmethod
    def mix_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """A whole sequence, without the output projection: (B, T, E) to (B, T, M), T at least 1;
        ``positions`` are 0 ... T - 1.
        """

    def mix(self, x: Tensor) -> Tensor:
        """See ``AttentionLayer``."""
        return self.mix_at(x, torch.arange(x.shape[1], device=x.device))

    @abstractmethod
    def decode(self, x: Tensor, positions: Tensor, cache: TableCache) -> Tensor:
        """As ``mix_at`` for new tokens, at positions (T,) or (B, T), which it adds to the cache."""

    @abstractmethod
    def mixing_flops(self, num_tokens: int) -> int:
        """FLOPs of ``mix_at``; norms and softmax not counted."""

    def forward(
        self,
        x: Tensor,
        *,
        cache: TableCache | None = None,
        left_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        layout: None = None,
    ) -> Tensor:
        """See ``AttentionLayer``."""
        if cache is None:
            return super().forward(x, left_padding=left_padding, cu_seqlens=cu_seqlens, layout=layout)
        check_states("x", x, self.embed_dim, self.out_proj.weight)
        if layout is not None:
            raise ConfigError("this layer has no layout: leave it at None")
        if left_padding is not None or cu_seqlens is not None:
            raise ConfigError("with a cache, leave cu_seqlens and left_padding at None; padding belongs to new_cache()")
        self.check_cache(cache)
        with all_or_nothing((cache,)):
            positions = cache.take(x)
            return self.out_proj(self.decode(x, positions, cache) if x.shape[1] else self._nothing(x))

    def cost(self, num_queries: int) -> SequenceCost:
        """What a sequence of that many tokens costs."""
        numbers = sum(table.width * table.slots(num_queries) for table in self.tables.values())
        flops = self.mixing_flops(num_queries) + 2 * num_queries * self.out_proj.weight.numel()
        return SequenceCost(flops=flops, cache_numbers=numbers)

    def new_cache(
        self,
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
    ) -> TableCache:
        """An empty cache for ``forward``."""
        cache = TableCache(self.tables, max_length=max_length, page_size=page_size, left_padding=left_padding)
        cache.bind(self, self.tables)
        return cache

    def check_cache(self, cache: object) -> None:
        """See ``AttentionLayer``."""
        check_type("cache", cache, TableCache, "a TableCache, as new_cache() makes one")
        assert isinstance(cache, TableCache)
        cache.bind(self, self.tables)
