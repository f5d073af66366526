"""What layers share whose queries, keys and values are those of standard attention, and that see or keep
other tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structattn.layers.layer import LayerShape
from structattn.layers.scoring import Standard
from structattn.layers.scoring_modules import HeadShape
from structattn.ops.attention import structured_attention
from structattn_lab.baselines.layer import BaselineLayer, linear
from structattn_lab.baselines.tables import SlotTable


def pair_width(shape: LayerShape) -> int:
    """2 G D, the numbers of a key and a value in all heads."""
    return 2 * (shape.num_kv_heads or shape.num_heads) * (shape.embed_dim // shape.num_heads)


class KeyValueLayer(BaselineLayer):
    """Queries, keys and values of ``Attention`` from ``standard``, with its names of weights, so that the
    weights of one load into the other.

    Args:
        name: the spec, for messages.
        shape: of the model.
        tables: of the cache.
    """

    def __init__(self, name: str, shape: LayerShape, tables: dict[str, SlotTable]) -> None:
        super().__init__(name, shape, tables, has_key_heads=True)
        heads = HeadShape(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            norm=shape.qk_norm,
            fixed_features=True,
        )
        self.scoring = Standard().build(heads)
        self.value_proj = linear(self.embed_dim, self.num_kv_heads * self.head_dim)
        self.rotary = None if shape.rotary is None else shape.rotary.build((self.head_dim,))

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (B, heads, T, D), rotated by positions (T,) or (B, T)."""
        return x if self.rotary is None else self.rotary(x, positions)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, H, T, D), normed and rotated."""
        return self.turned(self.scoring.queries(x, self.scoring.cached_order), positions)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, G, T, D) each, the keys before their norm and rotation."""
        values = self.value_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        return self.scoring.keys(x, self.scoring.cached_order).to(values.dtype), values

    def keys(self, raw: Tensor, positions: Tensor) -> Tensor:
        """Keys (B, G, T, D), normed and rotated."""
        return self.turned(self.scoring.normed_keys(raw, self.scoring.cached_order), positions)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """The sum of values by the softmax of scores, all heads: (B, T, E).

        Args:
            q, k, v: (B, H, T, D) and (B, G, S, D).
            visible: (T, S) or (B, T, S), bool; every query sees something.
        """
        mask = visible if visible.dim() == 2 else visible[:, None]
        out = structured_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=False, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)

    def pair_flops(self, num_tokens: int, num_pairs: int) -> int:
        """FLOPs of the projections of that many tokens, and of pairs of a query and a key."""
        projections = self.embed_dim * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        return 2 * num_tokens * projections + 4 * self.embed_dim * num_pairs


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values (B, G, T, D) as rows of a table, (B, T, 2 G D)."""
    return torch.stack([k, v], dim=2).permute(0, 3, 2, 1, 4).flatten(2)


def separate(rows: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """The keys and values of ``joined``."""
    k, v = rows.unflatten(-1, (2, num_kv_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return k, v
