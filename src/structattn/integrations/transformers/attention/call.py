"""``AttentionCall``: what transformers hands to an attention function, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from structattn.integrations.transformers.attention.arguments import TERMS
from structattn.integrations.transformers.caches.layer_cache import PendingStates
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.integrations.transformers.variant import Variant
from structattn.layers.head_orders import HeadOrders
from structattn.layout.heads import HeadLayouts
from structattn.ops.terms import ScoreTerms


class Reorder(Protocol):
    """Puts the dimensions of queries and keys, (B, heads, T, D), in the order of the levels."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    @property
    def index(self) -> Tensor | None:
        """That order, as ``LevelCache.try_step`` takes it."""

    def of_heads(self, first: int, end: int) -> Reorder:
        """That of the key heads ``first`` to ``end - 1``, and of the query heads that read them."""


class AttentionCall(NamedTuple):
    """One call of the attention of a layer, as transformers' ``AttentionInterface`` defines it.

    Attributes:
        module: the attention module that calls.
        variant: layout, window and backend; the window of the mask is added.
        reorder: puts the dimensions of keys and queries in the order of the levels.
        query: (B, H, T, D), rotated.
        key, value: (B, G, S, D or V), or what a ``LevelCacheLayer`` returned: then only the new ones.
        attention_mask: what ``structured_mask`` returned; ``None`` of an encoder that hides nothing.
        dropout, scaling: of the model.
        arguments: what else the model passed.
        seen: the pairs that a cache which chooses tokens would leave, (B, G, T, T) bool, of where sequences
            begin; ``None``: all.
    """

    module: nn.Module
    variant: Variant
    reorder: Reorder
    query: Tensor
    key: Tensor | PendingStates
    value: Tensor | PendingStates
    attention_mask: object
    dropout: float
    scaling: float | None
    arguments: dict[str, Any]
    seen: Callable[[Sequences], Tensor] | None = None

    @property
    def is_causal(self) -> bool | None:
        """What the model says, else the module."""
        is_causal = self.arguments.get("is_causal")
        return getattr(self.module, "is_causal", None) if is_causal is None else is_causal

    @property
    def name(self) -> str:
        """The class of the module, for messages."""
        return type(self.module).__name__

    def of_process(self) -> AttentionCall:
        """This call with the layouts and the orders of the key heads that this process has, where tensor
        parallelism of transformers divides them.
        """
        layout, reorder = self.variant.layout, self.reorder
        count = (self.key.states if isinstance(self.key, PendingStates) else self.key).shape[1]
        total = layout.num_heads if isinstance(layout, HeadLayouts) else count
        if isinstance(reorder, HeadOrders):
            total = len(reorder.orders)
        if count == total or (first := _first_head(self.module, count, total)) is None:
            return self
        end = first + count
        if isinstance(layout, HeadLayouts):
            layout = HeadLayouts(layout.layouts[first:end])
        return self._replace(variant=replace(self.variant, layout=layout), reorder=reorder.of_heads(first, end))

    def terms(self, attn_mask: Tensor | None = None) -> ScoreTerms:
        """The terms of the score that the model gives, with a mask; the scale is the model's, see
        ``Variant.scaled``.
        """
        named = {term: self.arguments.get(name) for name, term in TERMS.items()}
        return ScoreTerms(scale=self.scaling, attn_mask=attn_mask, **named)


def _first_head(module: nn.Module, count: int, total: int) -> int | None:
    """The first of the ``count`` key heads, of ``total`` in all processes, that a process has; ``None`` where
    its weights are not divided so.
    """
    for parameter in module.parameters():
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor, whose class is slow to import
        if mesh is not None and mesh.ndim == 1 and mesh.size() * count == total:
            rank: int = mesh.get_local_rank()
            return rank * count
    return None
