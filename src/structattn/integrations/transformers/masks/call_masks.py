"""The mask of an attention call of transformers: whether it is one of ours, and fits the queries and keys."""

from __future__ import annotations

from torch import Tensor, nn

from structattn.errors import ConfigError
from structattn.integrations.transformers.masks.structured_mask import StructuredMask


def checked_mask(
    attention_mask: object,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    is_causal: bool | None,
    num_past: int | None = None,
) -> StructuredMask:
    """The mask of an attention call, which came from ``structured_mask``, is a 4-dimensional one, or that of
    an encoder that hides nothing.

    Args:
        attention_mask: what the module got.
        module: the attention module that calls.
        query, key: (B, H, T, D) and (B, G, S, D); the keys without those of a cache.
        is_causal: what the call or else the module says; ``None`` where neither does.
        num_past: cached tokens before the keys; ``None`` if these are all.

    Raises:
        ConfigError: it was lost on the way, does not fit, contradicts the call, or is one of cross attention.
    """
    name = type(module).__name__
    mask = attention_mask
    if isinstance(mask, Tensor) and mask.dim() == 4:
        if is_causal is not True and (_is_cross_attention(module) or query.shape[2] != key.shape[2]):
            raise ConfigError(
                f"{name} is cross attention, whose queries and keys are of different tokens: it is not supported"
            )
        num_new = query.shape[2] if num_past is None else key.shape[2]
        return StructuredMask.of_pairs(mask, query.shape[2], (num_past or 0) + key.shape[2], num_new)
    if mask is None and is_causal is False:
        mask = StructuredMask(num_queries=query.shape[2], num_keys=key.shape[2], attention_mask=None, is_causal=False)
        if mask.num_past != 0:
            raise ConfigError(
                f"{name} has {query.shape[2]} queries and {key.shape[2]} keys, so that they are not of the same "
                "tokens: cross attention is not supported"
            )
    if isinstance(mask, StructuredMask):
        if is_causal not in (None, mask.is_causal):
            raise ConfigError(
                f"{name} says is_causal={is_causal}, and its mask is {'' if mask.is_causal else 'not '}causal: they "
                "must agree"
            )
        if not mask.is_causal and _is_cross_attention(module):
            raise ConfigError(
                f"{name} is cross attention, whose queries and keys are of different tokens: it is not supported"
            )
        return mask
    if mask is None:
        raise ConfigError(
            "no mask reached structured attention, and without one padding and causality are unknown: this model or "
            "call does not build its masks through transformers' AttentionMaskInterface, or its attn_implementation "
            "was changed to another"
        )
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    raise ConfigError(
        f"an attention mask of {shape} reached structured attention: give the padding mask (batch, tokens), or one of "
        "(batch, 1, new tokens, all tokens)"
    )


def _is_cross_attention(module: nn.Module) -> bool:
    """Whether a module that is not causal has keys of other tokens. transformers marks it by an attribute, or
    by the class.
    """
    marks = (getattr(module, name, None) is True for name in ("is_cross_attention", "is_decoder"))
    return any(marks) or "CrossAttention" in type(module).__name__


def check_lengths(query: Tensor, key: Tensor, mask: StructuredMask, *, is_new: bool) -> None:
    """Raises ``ConfigError`` unless queries and keys are as many as the mask was made for."""
    keys = mask.num_new if is_new else mask.num_keys
    if (query.shape[2], key.shape[2]) != (mask.num_queries, keys):
        raise ConfigError(
            f"the mask was made for {mask.num_queries} queries and {keys} keys, and the attention got {query.shape[2]} "
            f"and {key.shape[2]}: cross attention, a static cache and prefixes are not supported"
        )
