"""Multi-head latent attention: keys and values from one small vector per token, which all heads share and the
cache keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from structattn.checks import check_size
from structattn.grammar import Form, named, positive, write_term
from structattn.layers.layer import CustomAttention, LayerShape
from structattn.ops.attention import structured_attention
from structattn_lab.baselines.layer import BaselineLayer, causal_mask, causal_pairs, linear, masked_softmax
from structattn_lab.baselines.tables import SlotTable, TableCache


@dataclass(frozen=True)
class MLA(CustomAttention):
    """The variant as a value.

    Args:
        rank: R, numbers of the latent vector.
        rope: N, dimensions of the rotary part. Default ``None``: half a head, as in the source.
    """

    rank: int
    rope: int | None = None

    def __post_init__(self) -> None:
        check_size("the rank of mla", self.rank)
        if self.rope is not None:
            check_size("rope of mla", self.rope)

    def build(self, shape: LayerShape) -> MLALayer:
        """The layer; raises ``ConfigError`` where it does not fit."""
        return MLALayer(self, shape)

    def __str__(self) -> str:
        return write_term("mla", self.rank, rope=self.rope)


class MLALayer(BaselineLayer):
    """Latent attention.

        c_j = norm(W_C x_j), R numbers;   r_j = turn_j(W_R x_j), N numbers
        k_jh = (U_h c_j, r_j);   v_jh = V_h c_j
        q_ih = (W_h x_i, turn_i(W'_h x_i));   weights = softmax_j(<q_ih, k_jh> / sqrt(D + N))

    ``turn`` are the rotary positions of the model, which the first D dimensions do not have; without them it
    does nothing. Decoding reads only (c_j, r_j): <W_h x_i, U_h c_j> = <U_h^T W_h x_i, c_j>, and the sum of
    values is V_h of the sum of latent vectors.

    Args:
        variant: R and N.
        shape: of the model; without ``qk_norm``, in whose place the latent vector has a norm.

    Cost: R + N numbers per token in the cache. A new token costs 2 H (2 R (T + D) + N T) FLOPs after T
        others, besides its projections.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1. Queries are not compressed, as in
        its smaller model.
    """

    def __init__(self, variant: MLA, shape: LayerShape) -> None:
        rope = variant.rope or max(1, shape.embed_dim // shape.num_heads // 2)
        super().__init__(str(variant), shape, {"latent": SlotTable(width=variant.rank + rope)})
        self.rank, self.rope = variant.rank, rope
        self.query_proj = linear(self.embed_dim, self.num_heads * (self.head_dim + self.rope))
        self.latent_proj = linear(self.embed_dim, self.rank + self.rope)
        self.norm = nn.RMSNorm(self.rank)
        self.expand = linear(self.rank, self.num_heads * 2 * self.head_dim)
        self.rotary = None if shape.rotary is None else shape.rotary.build((self.rope,))
        self.scale = 1 / math.sqrt(self.head_dim + self.rope)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        return x if self.rotary is None else self.rotary(x, positions)

    def _queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The two parts of the queries, (B, H, T, D) and (B, H, T, N)."""
        q = self.query_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, turned = q.split((self.head_dim, self.rope), dim=-1)
        return q, self._turned(turned, positions)

    def _latent(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """c (B, T, R) and r (B, 1, T, N)."""
        c, r = self.latent_proj(x).split((self.rank, self.rope), dim=-1)
        return self.norm(c), self._turned(r[:, None], positions)

    def mix_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """See ``BaselineLayer``."""
        q, turned = self._queries(x, positions)
        c, r = self._latent(x, positions)
        k, v = self.expand(c).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(2, dim=-1)
        k = torch.cat([k, r.expand(-1, self.num_heads, -1, -1)], dim=-1)
        out = structured_attention(torch.cat([q, turned], dim=-1), k, v, scale=self.scale)
        return out.transpose(1, 2).flatten(2)

    def decode(self, x: Tensor, positions: Tensor, cache: TableCache) -> Tensor:
        """See ``BaselineLayer``; keys and values are not made."""
        q, turned = self._queries(x, positions)
        c, r = self._latent(x, positions)
        cache.write("latent", torch.cat([c, r[:, 0]], dim=-1), positions)
        kept = cache.read("latent")
        keys, values = self.expand.weight.unflatten(0, (self.num_heads, 2, self.head_dim)).unbind(1)  # (H, D, R)
        scores = torch.cat([q @ keys, turned], dim=-1) @ kept[:, None].transpose(2, 3)
        weights = masked_softmax(scores * self.scale, causal_mask(positions, kept.shape[1]))
        out = weights @ kept[:, None, :, : self.rank] @ values.transpose(1, 2)
        return out.transpose(1, 2).flatten(2)

    def mixing_flops(self, num_tokens: int) -> int:
        """See ``BaselineLayer``."""
        weights = sum(linear.weight.numel() for linear in (self.query_proj, self.latent_proj, self.expand))
        return 2 * num_tokens * weights + 2 * self.num_heads * causal_pairs(num_tokens) * (
            2 * self.head_dim + self.rope
        )


FORM = Form(
    "mla:R[,rope=N]",
    "mla:64,rope=32",
    "latent attention of DeepSeek-V2: keys and values of all heads from R numbers per token, and N with rotary "
    "positions; a baseline",
    value=named("rank", positive),
    options={"rope": positive},
    make=lambda **arguments: {"custom": MLA(**arguments)},
)
