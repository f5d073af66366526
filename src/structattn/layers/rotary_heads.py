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
        sizes: the ranks of a head without a layout.

    Cost: that of ``RotaryEmbedding``, and one more copy where there are several layouts.
    """

    def __init__(self, rotary: Rotary, layout: HeadLayouts, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layout = layout
        layouts = [of_head for of_head, _ in layout.groups]
        self.groups = nn.ModuleList(rotary.build(sizes if each is None else each.ranks) for each in layouts)
        self._numbers = {each: number for number, each in enumerate(layouts)}

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """See ``RotaryEmbedding``; x has a multiple of the key heads."""
        per_key_head = x.shape[1] // self.layout.num_heads
        outs = [
            self.groups[self._numbers[of_heads]](select_heads(x, query_heads(heads, per_key_head)), positions)
            for of_heads, heads in self.layout.groups  # those of some heads in a process of several
        ]
        return joined(outs, self.layout, per_key_head)
