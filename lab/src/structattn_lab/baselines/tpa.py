"""Tensor product attention: queries, keys and values of all heads are sums of a few products of a head factor
and a dimension factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from structattn.checks import check_size
from structattn.grammar import Form, named, positive, write_term
from structattn.layers.layer import CustomAttention, LayerShape
from structattn.ops.attention import structured_attention
from structattn_lab.baselines.layer import BaselineLayer, causal_mask, causal_pairs, linear
from structattn_lab.baselines.tables import SlotTable, TableCache


@dataclass(frozen=True)
class TPA(CustomAttention):
    """The variant as a value.

    Args:
        rank: R, products of keys, and as many of values.
        query: products of queries. Default ``None``: 3 R.
    """

    rank: int
    query: int | None = None

    def __post_init__(self) -> None:
        check_size("the rank of tpa", self.rank)
        if self.query is not None:
            check_size("query of tpa", self.query)

    def build(self, shape: LayerShape) -> TPALayer:
        """The layer; raises ``ConfigError`` where it does not fit."""
        return TPALayer(self, shape)

    def __str__(self) -> str:
        return write_term("tpa", self.rank, query=self.query)


class TPALayer(BaselineLayer):
    """Tensor product attention.

        k_jh = 1/R sum_r a_jhr turn_j(b_jr);   a_j = A x_j, (H, R) numbers;   b_j = B x_j, (R, D) numbers

    and so values, without ``turn``, and queries, with factors and a rank of their own. ``turn`` are the
    rotary positions of the model, in which a sum of turned factors is the turned sum; without them it does
    nothing. Weights are those of standard attention.

    Args:
        variant: the ranks.
        shape: of the model; without ``qk_norm``, which the source does not have.

    Cost: 2 R (H + D) numbers per token in the cache: the factors, turned. A decoding step makes the keys and
    values of all T tokens from them, 4 R H D T FLOPs besides the 4 H D T of attention, which also have their
    memory while it runs.

    Source: Zhang et al. 2025, "Tensor Product Attention Is All You Need", arXiv 2501.06425, section 3.
    Weights start as those of the other baselines, not as its code does.
    """

    def __init__(self, variant: TPA, shape: LayerShape) -> None:
        query = variant.query or 3 * variant.rank
        per_rank = shape.num_heads + shape.embed_dim // shape.num_heads
        width = variant.rank * per_rank
        super().__init__(str(variant), shape, {"keys": SlotTable(width=width), "values": SlotTable(width=width)})
        self.query_proj = linear(self.embed_dim, query * per_rank)
        self.key_proj = linear(self.embed_dim, width)
        self.value_proj = linear(self.embed_dim, width)
        self.rotary = None if shape.rotary is None else shape.rotary.build((self.head_dim,))

    def _turned(self, factors: Tensor, positions: Tensor) -> Tensor:
        """Factors (B, T, R (H + D)) with turned dimension factors."""
        if self.rotary is None:
            return factors
        heads, dims = self._split(factors)
        turned = self.rotary(dims.transpose(1, 2), positions).transpose(1, 2)
        return torch.cat([heads.flatten(2), turned.flatten(2)], dim=-1)

    def _split(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """The factors a (B, T, H, R) and b (B, T, R, D)."""
        rank = factors.shape[-1] // (self.num_heads + self.head_dim)
        heads, dims = factors.split((self.num_heads * rank, rank * self.head_dim), dim=-1)
        return heads.unflatten(-1, (self.num_heads, rank)), dims.unflatten(-1, (rank, self.head_dim))

    def _product(self, factors: Tensor) -> Tensor:
        """The mean of products, (B, H, T, D)."""
        heads, dims = self._split(factors)
        return (heads @ dims / dims.shape[2]).transpose(1, 2)

    def mix_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """See ``BaselineLayer``."""
        q = self._product(self._turned(self.query_proj(x), positions))
        k = self._product(self._turned(self.key_proj(x), positions))
        v = self._product(self.value_proj(x))
        return structured_attention(q, k, v).transpose(1, 2).flatten(2)

    def decode(self, x: Tensor, positions: Tensor, cache: TableCache) -> Tensor:
        """See ``BaselineLayer``."""
        q = self._product(self._turned(self.query_proj(x), positions))
        cache.write("keys", self._turned(self.key_proj(x), positions), positions)
        cache.write("values", self.value_proj(x), positions)
        k, v = (self._product(cache.read(name).to(q.dtype)) for name in ("keys", "values"))
        mask = causal_mask(positions, k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def mixing_flops(self, num_tokens: int) -> int:
        """See ``BaselineLayer``."""
        weights = sum(linear.weight.numel() for linear in (self.query_proj, self.key_proj, self.value_proj))
        ranks = weights // (self.embed_dim * (self.num_heads + self.head_dim))
        products = ranks * self.num_heads * self.head_dim
        return 2 * num_tokens * (weights + products) + 4 * self.num_heads * causal_pairs(num_tokens) * self.head_dim


FORM = Form(
    "tpa:R[,query=RQ]",
    "tpa:2,query=6",
    "tensor product attention: keys and values are sums of R products of a factor of the heads and one of the "
    "dimensions; a baseline",
    value=named("rank", positive),
    options={"query": positive},
    make=lambda **arguments: {"custom": TPA(**arguments)},
)
