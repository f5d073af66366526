"""A decoding step of a layer like the one before it: what was checked then holds, and is not checked
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structattn.cache import LevelCache
from structattn.integrations.transformers.attention.call import AttentionCall, Reorder
from structattn.integrations.transformers.attention.registration import collects_weights
from structattn.integrations.transformers.caches.layer_cache import LevelCacheLayer, PendingStates
from structattn.integrations.transformers.masks.structured_mask import StructuredMask
from structattn.integrations.transformers.variant import Variant

_POSITIONS = "position_ids"  # the argument that is another at every step
_SIMPLE = (bool, int, float, str, type(None))  # arguments that stay what they are


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnownCall:
    """The last attention call of a layer of a cache: of one token, which hid nothing and asked for nothing
    but its output.

    Attributes:
        cache: that the token went to.
        variant, reorder, scaling: of the call.
        is_causal: what the module says.
        window, chunk_size: of the mask.
        arguments: others; the positions, if they were given, are ``None``.
    """

    cache: LevelCache
    variant: Variant
    reorder: Reorder
    scaling: float | None
    is_causal: bool | None
    window: int | None
    chunk_size: int | None
    arguments: dict[str, Any]

    def again(
        self,
        call: AttentionCall,
    ) -> Tensor | None:
        """The next call: (B, T, H, V), or ``None``, with nothing appended, where more than the numbers is
        different.
        """
        key, value, mask = call.key, call.value, call.attention_mask
        if torch.compiler.is_compiling() or not (
            type(key) is PendingStates
            and call.variant is self.variant
            and call.reorder is self.reorder
            and call.scaling == self.scaling
            and call.dropout == 0
            and key.layer.level_cache is self.cache
            and not (key.is_appended or key.layer.is_recording)
            and type(value) is PendingStates
            and type(mask) is StructuredMask
            and mask.is_next_token
            and (mask.window, mask.chunk_size, mask.num_past) == (self.window, self.chunk_size, self.cache.length)
            and getattr(call.module, "is_causal", None) is self.is_causal
            and self._has(call.arguments)
            and not collects_weights()
        ):
            return None
        self.cache.bind(call.module)
        q, scale = call.variant.scaled(call.query, call.scaling)
        layer = key.layer
        scores = layer.token_scores if layer.chooses_tokens else None
        order = call.reorder.index
        out = self.cache.try_step(q, key.states, value.states, scale=scale, order=order, token_scores=scores)
        if out is None:
            return None
        key.is_appended = True
        layer.taken_scores()
        return out.transpose(1, 2)

    def _has(self, arguments: dict[str, Any]) -> bool:
        """Whether other arguments are these, with positions of one token."""
        if len(arguments) != len(self.arguments):
            return False
        for name, value in arguments.items():
            if name != _POSITIONS and self.arguments.get(name, self) is not value:
                return False
        positions = arguments.get(_POSITIONS)
        return positions is None or (isinstance(positions, Tensor) and positions.dim() == 2 and positions.shape[1] == 1)


def known_call(call: AttentionCall, layer: LevelCacheLayer, mask: StructuredMask) -> KnownCall | None:
    """What is remembered of a call that was all right; ``None`` where the next one may differ in more than
    its numbers.
    """
    others = {name: None if name == _POSITIONS else value for name, value in call.arguments.items()}
    cache, is_simple = layer.level_cache, all(isinstance(x, _SIMPLE) for x in others.values())
    if cache is None or call.variant.backend != "auto" or not mask.is_next_token or not is_simple:
        return None
    return KnownCall(
        cache=cache,
        variant=call.variant,
        reorder=call.reorder,
        scaling=call.scaling,
        is_causal=getattr(call.module, "is_causal", None),
        window=mask.window,
        chunk_size=mask.chunk_size,
        arguments=others,
    )
