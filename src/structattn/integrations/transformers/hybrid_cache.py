"""``HybridCacheLayer``: a ``LevelCacheLayer`` for layers that have a recurrence or a convolution beside softmax attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from structattn.cache import PAGE_SIZE
from structattn.integrations.transformers.cache import LevelCacheLayer


class HybridCacheLayer(LevelCacheLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """Keys and values as ``LevelCacheLayer`` keeps them, and the states of the rest of the layer as transformers keeps them.

    Args:
        number_of_states: of convolutions or recurrences.
        max_length, page_size: see ``LevelCacheLayer``.
    """

    def __init__(self, number_of_states: int = 1, *, max_length: int | None = None, page_size: int = PAGE_SIZE) -> None:
        LevelCacheLayer.__init__(self, max_length=max_length, page_size=page_size)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """That of the states, which transformers gives by name."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the states can be put back, which a recurrence cannot."""
        return bool(LinearAttentionLayer.is_croppable.fget(self))

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """See ``LevelCacheLayer``; raises a ``RuntimeError`` of transformers where the states were not recorded."""
        LinearAttentionLayer.crop(self, int(tokens_to_remove))
        LevelCacheLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Clears everything."""
        LinearAttentionLayer.reset(self)
        LevelCacheLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes row ``beam_idx[b]``."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        LevelCacheLayer.reorder_cache(self, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        self._states(lambda state: state.repeat_interleave(repeats, dim=0))
        LevelCacheLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, given as ints or as a bool mask."""
        self._states(lambda state: state[indices.to(state.device)])
        LevelCacheLayer.batch_select_indices(self, indices)

    def _states(self, change: Any) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                states[number] = None if state is None else change(state)
