"""``HybridCacheLayer``: a ``LevelCacheLayer`` for layers that have a recurrence or a convolution beside
softmax attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from structattn.cache import PAGE_SIZE
from structattn.cache.storage import LayerStorage
from structattn.errors import CacheError
from structattn.integrations.transformers.caches.layer_cache import LevelCacheLayer, RowChange


class HybridCacheLayer(LevelCacheLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """Keys and values as ``LevelCacheLayer`` keeps them, and the states of the rest of the layer as
    transformers keeps them.

    Args:
        number_of_states: of convolutions or recurrences.
        max_length, page_size, storage: see ``LevelCacheLayer``.
    """

    def __init__(
        self,
        number_of_states: int = 1,
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        storage: LayerStorage = None,
    ) -> None:
        LevelCacheLayer.__init__(self, max_length=max_length, page_size=page_size, storage=storage)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """That of the states, which transformers gives by name."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the states can be put back, which a recurrence cannot."""
        return bool(LinearAttentionLayer.is_croppable.fget(self))

    def cropped(self, count: int) -> Callable[[], None]:
        """See ``LevelCacheLayer``; raises ``CacheError`` as ``check_states`` too."""
        check_states(self, count, self.get_seq_length())
        crop = LevelCacheLayer.cropped(self, count)

        def both() -> None:
            crop()
            crop_states(self, count)

        return both

    def reset(self) -> None:
        """Clears everything."""
        LinearAttentionLayer.reset(self)
        LevelCacheLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See ``LevelCacheLayer``."""
        self._move("reorder_cache", beam_idx, lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See ``LevelCacheLayer``."""
        self._move("batch_repeat_interleave", repeats, lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """See ``LevelCacheLayer``."""
        self._move("batch_select_indices", indices, lambda state: state[indices.to(state.device)])

    def _move(self, change: RowChange, argument: Any, move: Callable[[Tensor], Tensor]) -> None:
        """Moves rows of keys, values and states, or (with an error) of none: all memory is taken before
        anything changes.
        """
        self.check_rows(change, argument)
        moved = [(states, i, move(state)) for states, i, state in states_of(self)]
        getattr(LevelCacheLayer, change)(self, argument)
        for states, number, state in moved:
            states[number] = state


def states_of(layer: LinearAttentionCacheLayerMixin) -> list[tuple[dict[int, Tensor], int, Tensor]]:
    """(dictionary, key, state) of each state of convolutions and recurrences that a cache layer holds."""
    every = ((states, *item) for states in (layer.conv_states, layer.recurrent_states) for item in states.items())
    return [(states, number, state) for states, number, state in every if state is not None]


def check_states(layer: LinearAttentionCacheLayerMixin, count: int, length: int) -> None:
    """Raises ``CacheError`` unless the states of a cache layer can be what they were ``count`` of ``length``
    tokens before.
    """
    states = states_of(layer)
    if not count or not states:
        return
    if any(states is layer.recurrent_states for states, _, _ in states):
        raise CacheError(
            "a recurrence keeps its last state alone, so that no tokens can be removed: reset() and start again"
        )
    for _, number, state in states:
        needed = min(layer.conv_kernel_size[number], length - count)
        if state.shape[-1] - count < needed:
            raise CacheError(
                f"the state of a convolution keeps {state.shape[-1]} of {length} tokens, too few to remove {count}: "
                "call activate_past_recording() before the tokens that may be removed"
            )


def crop_states(layer: LinearAttentionCacheLayerMixin, count: int) -> None:
    """Makes the states those before the last ``count`` tokens, as long as the next tokens need them; see
    ``check_states``.
    """
    for number, state in layer.conv_states.items():
        size = None if state is None else layer.conv_kernel_size[number]
        if size is not None and (count or state.shape[-1] > size):
            state = state[..., : state.shape[-1] - count][..., -size:]
            # Before the first token a convolution sees zeros.
            layer.conv_states[number] = F.pad(state, (size - state.shape[-1], 0))
