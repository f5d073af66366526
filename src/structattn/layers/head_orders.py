"""The dimensions of queries and keys in an order of each key head, for heads with layouts of their own."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from structattn.errors import ConfigError
from structattn.layers.rotary_order import RotarySplit, Rotation, dimension_order
from structattn.layout.heads import HeadLayouts


def ranks_of_heads(layout: HeadLayouts) -> tuple[tuple[int, ...], ...]:
    """The ranks of each key head; none where all have one, whose dimensions may stay where they are."""
    if layout.head_dim is None:
        return ()
    ranks = tuple((layout.head_dim,) if of_head is None else of_head.ranks for of_head in layout.layouts)
    return () if all(len(of_head) == 1 for of_head in ranks) else ranks


def orders_of_heads(layout: HeadLayouts, split: RotarySplit, rotation: Rotation) -> tuple[tuple[int, ...], ...]:
    """``dimension_order`` of each key head; none where all dimensions stay where they are.

    Raises:
        ConfigError: a rank is odd.
    """
    return tuple(dimension_order(ranks, split, rotation) for ranks in ranks_of_heads(layout))


class HeadOrders:
    """Puts dimensions in an order of each key head; the query heads of a group have that of its keys.

    Args:
        orders: the dimension of the head at each position, for each key head.
    """

    def __init__(self, orders: tuple[tuple[int, ...], ...]) -> None:
        self.orders = orders
        self._by_device: dict[torch.device, Tensor] = {}
        self._parts: dict[tuple[int, int], HeadOrders] = {}

    @cached_property
    def index(self) -> Tensor:
        """The dimension at each position, int64 (G, D) on the CPU."""
        with torch.inference_mode(False):
            return torch.tensor(self.orders, device="cpu")

    def __call__(self, x: Tensor) -> Tensor:
        """Queries or keys, (B, H or G, T, D).

        Raises:
            ConfigError: there are other heads than in the orders.
        """
        index = self._by_device.get(x.device)
        if index is None:
            index = torch.tensor(self.orders, device=x.device)
            if not torch.compiler.is_compiling():  # a compiled program cannot keep objects for later calls
                self._by_device[x.device] = index
        if x.shape[1] % len(self.orders):
            raise ConfigError(
                f"the order of dimensions is of {len(self.orders)} key heads, and this call has {x.shape[1]} heads: a "
                "division of heads that shows in no weights needs one spec for all heads, and rotary_split='low_far' "
                "or 'interleaved'"
            )
        index = index.repeat_interleave(x.shape[1] // len(self.orders), dim=0)
        return x.gather(-1, index[None, :, None, :].expand(x.shape[0], -1, x.shape[2], -1))

    def of_heads(self, first: int, end: int) -> HeadOrders:
        """Those of some key heads."""
        if (part := self._parts.get((first, end))) is None:
            part = HeadOrders(self.orders[first:end])
            if not torch.compiler.is_compiling():
                self._parts[first, end] = part
        return part
