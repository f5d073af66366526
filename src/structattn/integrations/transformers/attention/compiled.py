"""The use of a layer of a cache in a program that ``torch.compile`` makes: one operator, see
``structattn.cache.compiled``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from structattn.cache.attend import over_dense
from structattn.cache.compiled import define, empty_output, with_past
from structattn.cache.numbers import NumberedLayer, numbered
from structattn.cache.over_quantized import check_no_gradient
from structattn.integrations.transformers.attention.arguments import POSITION_BIAS
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.caches.layer_cache import LevelCacheLayer, with_left_out
from structattn.integrations.transformers.masks.structured_mask import StructuredMask
from structattn.integrations.transformers.variant import Variant
from structattn.ops import flat_layout
from structattn.ops.checks import autocasted
from structattn.ops.terms import ScoreTerms, needs_gradient


@functools.lru_cache(maxsize=256)
def _variant(layout: Any, window: int | None, chunk_size: int | None, backend: Any) -> Variant:
    return Variant(layout=layout, window=window, chunk_size=chunk_size, backend=backend)


@dataclass(frozen=True)
class _LastMask:
    """The mask of the last call, which all layers of a model have in common, and what it was made of."""

    padding_mask: weakref.ref[Tensor]
    facts: tuple[Any, ...]
    mask: StructuredMask


_last: _LastMask | None = None


def runtime_mask(
    padding_mask: Tensor | None, pairs: Tensor | None, num_queries: int, num_new: int, num_past: int, is_causal: bool
) -> StructuredMask:
    """The mask of a call while a compiled program runs, with its padding as ints."""
    global _last
    last = _last  # read once: threads may call this at the same time
    facts: tuple[Any, ...] = (num_queries, num_new, num_past, is_causal)
    versioned = None if padding_mask is None or padding_mask.is_inference() else padding_mask
    if versioned is not None:
        facts = (*facts, versioned._version)
        if last is not None and last.padding_mask() is versioned and last.facts == facts:
            return last.mask
    mask = StructuredMask(
        num_queries=num_queries,
        num_keys=num_past + num_new,
        num_new=num_new,
        attention_mask=padding_mask,
        is_causal=is_causal,
        pairs=pairs,
    )
    if versioned is not None:
        _last = _LastMask(weakref.ref(versioned), facts, mask)
    return mask


def _attend_layer(
    cache: Tensor,
    layer: Tensor | None,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    pairs: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    token_scores: Tensor | None,
    num_past: int,
    is_causal: bool,
    is_shared: bool,
    scaling: float | None,
    softcap: float | None,
    *variant_of: Any,
) -> Tensor:
    cache_layer: LevelCacheLayer = numbered(cache)
    module = None if layer is None or is_shared else numbered(layer)
    *layout, window, chunk_size, backend = variant_of
    variant = _variant(flat_layout.any_layout_of(*layout), window, chunk_size, backend)
    if cache_layer.is_recording:  # which keeps them, in memory that the program will use for other numbers
        k, v = k.clone(), v.clone()
    if token_scores is not None:  # which are kept to undo the call
        cache_layer.token_scores = token_scores.clone()
    with cache_layer.uncounted(num_past, again=is_shared):
        mask = runtime_mask(padding_mask, pairs, (k if q is None else q).shape[2], k.shape[2], num_past, is_causal)
        if q is None:
            cache_layer.append(k, v, variant, module=module, left_padding=mask.padding_counts)
            return k.new_empty(0)
        queries = q
        terms = ScoreTerms(
            scale=scaling,
            softcap=softcap,
            sinks=sinks,
            attn_mask=mask.attn_mask(is_training=False, position_bias=position_bias),
            alibi_slopes=alibi_slopes,
        )

        def first() -> Tensor:
            sequences = mask.sequences(None, has_cache=True)
            return variant.attend(queries, k, v, terms, sequences=sequences, is_causal=mask.is_causal)

        padding = mask.padding_counts
        out = cache_layer.attend(q, k, v, variant, terms, module=module, left_padding=padding, first=first)
        return out.contiguous()


define(
    "attend_cache_layer(Tensor(a!) cache, Tensor? layer, Tensor? q, Tensor k, Tensor v, Tensor? padding_mask, Tensor? "
    "pairs, Tensor? position_bias, Tensor? sinks, Tensor? alibi_slopes, Tensor? token_scores, SymInt num_past, bool "
    "is_causal, bool is_shared, float? score_scale, float? softcap, "
    f"{flat_layout.SCHEMA}, int? window, int? chunk_size, str backend) "
    "-> Tensor",
    _attend_layer,
    lambda cache, layer, q, k, v, *_: empty_output(q, v),
)


def attend_compiled(
    call: AttentionCall, layer: LevelCacheLayer, terms: ScoreTerms, *, is_shared: bool, first: Callable[[], Tensor]
) -> Tensor:
    """``LevelCacheLayer.attend`` in code that ``torch.compile`` traces.

    Args:
        call: with the window of its mask in the variant, queries and keys in the order of the levels, the new
            keys and values as tensors, and its ``StructuredMask``; the layer holds ``num_past`` tokens of it.
        layer, terms, first: see ``LevelCacheLayer.attend``.
        is_shared: these keys were appended by another module, and are once more.
    """
    variant, mask, key, value = call.variant, call.attention_mask, call.key, call.value
    assert isinstance(mask, StructuredMask)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    q, k, v = autocasted(call.query, key, value)
    num_past, num_new = mask.num_past, k.shape[2]
    owner = call.module.number if isinstance(call.module, NumberedLayer) else None
    rest = (
        num_past,
        mask.is_causal,
        is_shared,
        terms.scale,
        terms.softcap,
        *flat_layout.flat_any(variant.layout),
        variant.window,
        variant.chunk_size,
        variant.backend,
    )
    tensors = (call.arguments.get(POSITION_BIAS), terms.sinks, terms.alibi_slopes)
    scores, layer.token_scores = layer.token_scores, None
    if layer.chooses_tokens:
        check_no_gradient(q, k, v, terms)
    if not needs_gradient(q, k, v, terms.attn_mask, *tensors) and call.dropout == 0:
        masks = (mask.attention_mask, mask.pairs)
        inputs = (q, k, v, *masks, *tensors, scores)
        out: Tensor = torch.ops.structattn.attend_cache_layer(layer.number, owner, *inputs, *rest)
    else:
        if num_past == 0:
            out = first()
        else:
            keys, values = with_past(layer.number, k, v, num_past)
            queries, terms = variant.fitted(q, terms)
            queries, attn_mask = with_left_out(queries, terms.attn_mask, num_new - q.shape[2])
            padding = mask.left_padding
            out = over_dense(
                queries,
                keys,
                values,
                replace(terms, attn_mask=attn_mask),
                layout=variant.layout,
                window=variant.window,
                left_padding=None if padding is None else padding.to(q.device),
                backend=variant.backend,
                chunk_size=variant.chunk_size,
            )[:, :, -q.shape[2] :]
        torch.ops.structattn.attend_cache_layer(
            layer.number, owner, None, k.detach(), v.detach(), mask.attention_mask, *(None,) * 5, *rest
        )
    layer.count_traced(num_past + num_new)
    return out
