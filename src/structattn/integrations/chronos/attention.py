"""The attention of a structurized T5: structured in self-attention, transformers' own in cross attention, and
masks for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from structattn.errors import ConfigError
from structattn.integrations.transformers.attention.arguments import check_arguments
from structattn.integrations.transformers.attention.registration import register
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.integrations.transformers.variant import Variant
from structattn.ops.terms import ScoreTerms

# The attn_implementation of structurized T5 models: it makes transformers build our masks.
IMPLEMENTATION = "structurized_t5"
# Where a self-attention module of T5 keeps its variant; modules without are cross attention.
VARIANT = "structattn_variant"


@dataclass(frozen=True, eq=False, kw_only=True)
class T5Mask:
    """Replaces an attention mask: one object for all layers of a stack.

    Attributes:
        num_queries, num_keys: T and S.
        is_causal: whether later keys are hidden.
        real: (B, S) bool, false where a key is padding or missing; ``None``: all are real.
        left_padding: (B,) int64, hidden keys in front of each row; ``None``: none.
        has_holes: whether keys are hidden behind a row's first real one: missing values inside a series.
    """

    num_queries: int
    num_keys: int
    is_causal: bool
    real: Tensor | None
    left_padding: Tensor | None
    has_holes: bool

    def bias(self, position_bias: Tensor) -> Tensor:
        """The position bias, (1 or B, H, T, S), with -inf at the keys of holes; padding is given to the op by
        its count.
        """
        if not self.has_holes:
            return position_bias
        assert self.real is not None
        return position_bias.masked_fill(~self.real.to(position_bias.device)[:, None, None, :], -torch.inf)

    def dense(self) -> Tensor | None:
        """(B, 1, T, S) bool, true where a pair is visible, as the attention of transformers takes it; not
        causal.
        """
        if self.real is None:
            return None
        return self.real[:, None, None, :].expand(-1, 1, self.num_queries, -1)


def t5_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> T5Mask:
    """The mask function of a structurized T5: as ``structured_mask``, causal or bidirectional, and keys may
    be hidden anywhere.

    Raises:
        ConfigError: another mask function, or a cache that returns other keys than all so far.

    Cost: with an attention mask the device is waited for once.
    """
    is_causal = mask_function is causal_mask_function
    if not is_causal and mask_function is not bidirectional_mask_function:
        raise ConfigError(
            f"structured attention in T5 knows causal and bidirectional masks, got {mask_function!r}: packed sequences "
            "and custom masks are not supported"
        )
    if is_causal and (isinstance(q_offset, Tensor) or kv_offset != 0 or kv_length != q_offset + q_length):
        raise ConfigError(
            f"structured attention needs all keys in order, and this cache returns {kv_length} keys from position "
            f"{kv_offset} on for {q_length} queries: leave cache_implementation away"
        )
    real, left, has_holes = None, None, False
    if attention_mask is not None:
        real = attention_mask != 0
        left = (real.cumsum(dim=1) == 0).sum(dim=1)
        any_left, has_holes = torch.stack([(left > 0).any(), (left + real.sum(dim=1) < kv_length).any()]).tolist()
        left = left if any_left else None
        real = real if any_left or has_holes else None
    return T5Mask(
        num_queries=q_length, num_keys=kv_length, is_causal=is_causal, real=real, left_padding=left, has_holes=has_holes
    )


def _checked(attention_mask: object, query: Tensor, key: Tensor) -> T5Mask:
    """The mask of a call, if it came from ``t5_mask`` and fits."""
    if not isinstance(attention_mask, T5Mask):
        got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise ConfigError(
            f"structured attention in T5 takes padding masks of shape (batch, tokens), and an attention got {got}: own "
            "4-dimensional masks are not supported"
        )
    if (attention_mask.num_queries, attention_mask.num_keys) != (query.shape[2], key.shape[2]):
        raise ConfigError(
            f"the mask was made for {attention_mask.num_queries} queries and {attention_mask.num_keys} keys, and the "
            f"attention got {query.shape[2]} and {key.shape[2]}: a static cache is not supported"
        )
    return attention_mask


def t5_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As ``RegisteredAttention``, with score(i, j) + position_bias(i, j) in the softmax.

    Args:
        module: the attention module that calls; structured if it has a variant, else cross attention.
        attention_mask: what ``t5_mask`` returned.
        position_bias: (1 or B, H, T, S), added to the scores as it is.
    """
    check_arguments(module, kwargs)
    mask = _checked(attention_mask, query, key)
    variant: Variant | None = getattr(module, VARIANT, None)
    if variant is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            mask.dense(),
            dropout=dropout,
            scaling=scaling,
            is_causal=False,
            position_bias=position_bias,
        )
    out = variant.attend(
        query,
        key,
        value,
        ScoreTerms(scale=scaling, attn_bias=None if position_bias is None else mask.bias(position_bias)),
        sequences=Sequences(left_padding=mask.left_padding),
        is_causal=mask.is_causal,
        dropout=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


register(IMPLEMENTATION, t5_attention, t5_mask)
