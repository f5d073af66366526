"""Rotary positions where key heads have layouts, and so orders of frequencies, of their own."""

from __future__ import annotations

from torch import Tensor, nn

from structattn.layers.rotary import Rotary
from structattn.layout.heads import HeadLayouts
from structattn.ops.by_heads import joined, query_heads, select_heads


class HeadRotary(nn.Module):
    """Rotates queries or keys, the heads of each layout as ``RotaryEmbedding`` of its ranks does.

    Args:
        rotary: base, split and scaling.
        layout: of each key head.
        head_dim: D, which a head without a layout has as its one rank.

    Cost: that of ``RotaryEmbedding``, and one more copy where there are several layouts.
    """

    def __init__(self, rotary: Rotary, layout: HeadLayouts, head_dim: int) -> None:
        super().__init__()
        self.layout = layout
        ranks = [(head_dim,) if of_head is None else of_head.ranks for of_head, _ in layout.groups]
        self.groups = nn.ModuleList(rotary.build(each) for each in ranks)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """See ``RotaryEmbedding``; x has a multiple of the key heads."""
        per_key_head = x.shape[1] // self.layout.num_heads
        outs = [
            rotate(select_heads(x, query_heads(heads, per_key_head)), positions)
            for rotate, (_, heads) in zip(self.groups, self.layout.groups, strict=True)
        ]
        return joined(outs, self.layout, per_key_head)
