"""``register_attention``: structured attention as an ``attn_implementation`` of any decoder or encoder of
transformers, weights untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from structattn.cache.numbers import is_traced
from structattn.cache.paged import PackedCache
from structattn.checks import check_choice, quoted
from structattn.errors import CacheError, ConfigError
from structattn.integrations.transformers.attention.arguments import POSITION_BIAS, TERMS, check_arguments
from structattn.integrations.transformers.attention.by_heads import attention_by_heads, heads_at_once
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.attention.compiled import attend_compiled
from structattn.integrations.transformers.attention.divided_sequence import attend_shard, division_of
from structattn.integrations.transformers.attention.next_token import KnownCall, known_call
from structattn.integrations.transformers.attention.registration import collects_weights, register
from structattn.integrations.transformers.attention.rotation import read_rotation
from structattn.integrations.transformers.caches.layer_cache import LevelCacheLayer, PendingStates
from structattn.integrations.transformers.masks.call_masks import check_lengths, checked_mask
from structattn.integrations.transformers.masks.mask_functions import structured_mask
from structattn.integrations.transformers.masks.structured_mask import Sequences, StructuredMask
from structattn.integrations.transformers.variant import Variant, trained_spec
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.checks import check_fits
from structattn.layers.head_orders import HeadOrders, orders_of_heads, ranks_of_heads
from structattn.layers.rotary_order import (
    UNCHANGED,
    RotarySplit,
    Rotation,
    RunOrder,
    check_split,
    dimension_order,
    level_pairs,
    runs_of,
)
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.sink_window import SinkWindow
from structattn.ops import Backend


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, with its cache if it has one.

    Returns:
        (B, T, H, V), and the weights before dropout, (B, H, T, S), where ``output_attentions`` asks for them.

    Raises:
        ConfigError: the model's attention is one that structured attention does not know; packed sequences
            that are not supported; or dropout with a cache that holds tokens already.
        CacheError: the cache and the mask count different tokens.
    """
    key = call.key
    layer = key.layer if isinstance(key, PendingStates) else None
    if layer is not None and isinstance(last := layer.last_call, KnownCall):
        out = last.again(call)
        if out is not None:
            return out, None
    check_arguments(call.module, call.arguments, (*TERMS, POSITION_BIAS, "output_attentions"))
    is_shared = isinstance(key, PendingStates) and key.is_appended
    in_program = layer is not None and layer.number is not None and is_traced()
    if is_shared and layer is not None and not in_program:
        # Levels may drop what earlier ones of these queries need, so that every reader appends the keys
        # again.
        layer.undo()
    k, v = (x.states if isinstance(x, PendingStates) else x for x in (key, call.value))
    if in_program and isinstance(call.attention_mask, StructuredMask):
        num_past = call.attention_mask.num_past  # an operator compares it with what the layer holds
    else:
        num_past = 0 if layer is None else layer.get_seq_length()
    mask = _mask_of(call, k, None if layer is None else num_past)
    variant = call.variant.within(mask.window, mask.chunk_size)
    check_fits(variant.layout, call.query.shape[-1], v.shape[-1])
    check_lengths(call.query, k, mask, is_new=layer is not None)
    # Under autocast rotary embedding and norms give float32, projections 16 bits.
    k = call.reorder(k).to(v.dtype)
    sequences = _sequences_of(call, mask, layer)
    position_bias = call.arguments.get(POSITION_BIAS)
    terms = call.terms(mask.attn_mask(is_training=call.module.training, position_bias=position_bias))
    if layer is not None and layer.chooses_tokens and terms.attn_mask is not None and position_bias is None:
        raise ConfigError(
            f"the cache of {call.name} chooses tokens, and does not remember which they are, so that an attention_mask "
            "may hide padding on the left only: pad there (tokenizer.padding_side = 'left'), or give use_cache=False"
        )
    if call.seen is not None:
        terms = replace(terms, attn_mask=_of_seen(call, terms.attn_mask, sequences))
    asked = call.arguments.get("output_attentions")
    shows_weights = collects_weights() if asked is None else bool(asked)  # GPT-2 hands no argument to its attention

    takes_all_heads = num_past > 0 or shows_weights or isinstance(variant.layout, HeadLayouts)
    takes_all_heads = takes_all_heads or (layer is not None and layer.storage is not None)
    step = k.shape[1] if takes_all_heads else heads_at_once(call.query, k, v, terms, dropout=call.dropout)
    is_by_heads = step < k.shape[1]
    q = call.query if is_by_heads else call.reorder(call.query).to(v.dtype)

    def whole() -> Tensor:
        options: dict[str, Any] = {"sequences": sequences, "is_causal": mask.is_causal, "dropout": call.dropout}
        if is_by_heads:
            attend_heads = partial(variant.attend, terms=terms, **options)
            return attention_by_heads(attend_heads, call.query, k, v, call.reorder, step)
        return variant.attend(q, k, v, terms, **options)

    weights = None
    # Over an empty cache too, where far tokens of a prompt are read in fewer bits.
    by_cache = layer is not None and (num_past > 0 or layer.storage is not None)
    if shows_weights and not by_cache:
        weights = variant.weights(q, k, terms, sequences=sequences, is_causal=mask.is_causal)
    if layer is None:
        return whole().transpose(1, 2).contiguous(), weights
    _check_cached(call, mask, num_past)
    if by_cache and shows_weights:
        weights = _cached_weights(layer, q, k, v, variant, terms, mask.padding_counts)
    if in_program:
        ready = call._replace(variant=variant, query=q, key=k, value=v, attention_mask=mask)
        out = attend_compiled(ready, layer, terms, is_shared=is_shared, first=whole)
    else:
        out = layer.attend(
            q,
            k,
            v,
            variant,
            terms,
            module=None if is_shared else call.module,
            left_padding=mask.padding_counts,
            first=whole,
        )
        is_simple = num_past > 0 and terms.has_scale_only and not (is_shared or shows_weights)
        layer.last_call = known_call(call, layer, mask) if is_simple else None
    key.is_appended = True  # type: ignore[union-attr]
    return out.transpose(1, 2).contiguous(), weights


def _mask_of(call: AttentionCall, k: Tensor, num_past: int | None) -> StructuredMask:
    """The mask of a call, which agrees with the window of the model.

    Args:
        num_past: tokens in the cache; ``None`` without one.
    """
    mask = checked_mask(call.attention_mask, call.module, call.query, k, call.is_causal, num_past)
    window = call.arguments.get("sliding_window")
    if window is not None and mask.pairs is not None:
        raise ConfigError(
            f"{call.name} has a sliding window of {window}, which a 4-dimensional attention mask does not tell from "
            "other hidden tokens: give the padding mask (batch, tokens)"
        )
    if window is not None and window != mask.window:
        raise ConfigError(
            f"{call.name} has a sliding window of {window}, but its mask one of {mask.window}: they must agree"
        )
    return mask


def _sequences_of(call: AttentionCall, mask: StructuredMask, layer: LevelCacheLayer | None) -> Sequences:
    """Where the sequences of a call begin."""
    has_cache = layer is not None or bool(call.arguments.get("use_cache"))
    position_ids = None if layer is not None and layer.has_positions else call.arguments.get("position_ids")
    return mask.sequences(position_ids, call.arguments.get("cu_seq_lens_q"), has_cache=has_cache)


def _of_seen(call: AttentionCall, mask: Tensor | None, sequences: Sequences) -> Tensor:
    """The mask of a call with what a cache that chooses tokens would hide too, (B, H, T, T)."""
    assert call.seen is not None
    seen = call.seen(sequences)
    seen = seen.repeat_interleave(call.query.shape[1] // seen.shape[1], dim=1)
    if mask is None:
        return seen
    return seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _check_cached(call: AttentionCall, mask: StructuredMask, num_past: int) -> None:
    """Raises unless a cache that holds ``num_past`` tokens can serve a call; see ``attend``."""
    if not mask.is_causal and mask.pairs is None:
        raise ConfigError(
            f"{call.name} attends in both directions here, and a level cache only has earlier tokens: pass "
            "use_cache=False"
        )
    if call.dropout > 0 and num_past > 0:
        raise ConfigError(
            f"attention dropout ({call.dropout}) cannot be applied to cached keys: call model.eval(), or train with "
            "use_cache=False"
        )
    if num_past != mask.num_past:
        raise CacheError(
            f"this layer of the cache holds {num_past} tokens, and the model counts {mask.num_past} before the new "
            "ones: a call of the model broke off, or a layer was used without the others; reset() the cache and give "
            "all tokens again"
        )
    if num_past > 0:
        mask.check_later(
            "and those before them are in a cache, which is for causal attention: give all tokens in one call"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _cached_weights(layer: LevelCacheLayer, *arguments: Any) -> Tensor:
    """``LevelCacheLayer.weights``, which a compiled program leaves to Python."""
    return layer.weights(*arguments)


def attend_packed(call: AttentionCall, *, cache: PackedCache) -> tuple[Tensor, None]:
    """As ``attend``, where a cache of many requests was given, which are concatenated in one row.

    Raises:
        ConfigError: see ``attend``; or there is dropout.
        CacheError: see ``PagedCache.attend``.
    """
    arguments, key, value = call.arguments, call.key, call.value
    assert isinstance(key, Tensor)  # the cache of a layer is not asked
    assert isinstance(value, Tensor)
    if arguments.get(POSITION_BIAS) is not None:
        raise ConfigError(f"{call.name} adds a bias to its scores, which a paged cache does not know: use generate()")
    check_arguments(call.module, arguments, TERMS)
    mask = checked_mask(call.attention_mask, call.module, call.query, key, arguments.get("is_causal"))
    if not mask.is_causal or call.dropout > 0:
        raise ConfigError(
            f"a paged cache is for causal attention without dropout: {call.name} has is_causal={mask.is_causal} and "
            f"dropout {call.dropout}"
        )
    if mask.chunk_size is not None:
        raise ConfigError(
            f"{call.name} has chunks of {mask.chunk_size} tokens, which a paged cache does not know: use generate()"
        )
    variant = call.variant.within(mask.window)
    check_fits(variant.layout, call.query.shape[-1], value.shape[-1])
    k, q = (call.reorder(x).to(value.dtype) for x in (key, call.query))
    q, terms = variant.fitted(q, call.terms())
    layer: int = call.module.layer_idx  # type: ignore[assignment]
    out = cache.attend(layer, q, k, value, terms, layout=variant.layout, window=variant.window)
    return out.transpose(1, 2).contiguous(), None


@dataclass(frozen=True, kw_only=True)
class RegisteredAttention:
    """The attention function behind a name.

    Attributes:
        spec: the variant.
        context_length: from which blocks are halved; ``None``: the model's ``max_position_embeddings``.
        rotary_split: ``None``: the order of the dimensions is unchanged.
        backend: of ``structured_attention``.
    """

    spec: AttentionSpec
    context_length: int | None
    rotary_split: RotarySplit | None
    backend: Backend
    _orders: dict[Rotation, RunOrder | HeadOrders] = field(default_factory=dict, compare=False, repr=False)
    _variants: dict[tuple[int | None, int], Variant] = field(default_factory=dict, compare=False, repr=False)

    def variant(self, module: nn.Module, head_dim: int) -> Variant:
        """The variant for a layer of a model."""
        length = self.context_length
        if length is None and self.spec.halves_blocks:
            length = getattr(getattr(module, "config", None), "max_position_embeddings", None)
            if length is None:
                raise ConfigError(
                    "the config of this model has no max_position_embeddings to halve blocks from: give "
                    "register_attention a context_length"
                )
        if (variant := self._variants.get((length, head_dim))) is None:
            variant = Variant.of(self.spec, length or 1, head_dim, self.backend)
            if not torch.compiler.is_compiling():  # a compiled program cannot keep objects for later calls
                self._variants[length, head_dim] = variant
        return variant

    def _order(self, module: nn.Module, layout: AnyLayout | None, head_dim: int) -> RunOrder | HeadOrders:
        """The dimensions of a layer in the order of the levels."""
        if self.rotary_split is None or layout is None or not _has_levels(layout):
            return UNCHANGED
        rotation = read_rotation(module, head_dim) or Rotation("halves", head_dim)
        if (order := self._orders.get(rotation)) is None:
            if isinstance(layout, HeadLayouts):
                order = HeadOrders(orders_of_heads(layout, self.rotary_split, rotation))
            else:
                order = RunOrder(runs_of(dimension_order(layout.ranks, self.rotary_split, rotation)))
            if not torch.compiler.is_compiling():
                self._orders[rotation] = order
        return order

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor | PendingStates,
        value: Tensor | PendingStates,
        attention_mask: object,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See ``attend``."""
        variant = self.variant(module, query.shape[-1])
        states = value.states if isinstance(value, PendingStates) else value
        check_fits(variant.layout, query.shape[-1], states.shape[-1])
        order = self._order(module, variant.layout, query.shape[-1])
        call = AttentionCall(module, variant, order, query, key, value, attention_mask, dropout, scaling, kwargs)
        if isinstance(variant.layout, HeadLayouts):
            call = call.of_process()
            states = key.states if isinstance(key, PendingStates) else key
            assert isinstance(call.variant.layout, HeadLayouts)
            call.variant.layout.check_heads(states.shape[1])
        return attend(call) if division_of(module) is None else attend_shard(call)


def _has_levels(layout: AnyLayout) -> bool:
    """Whether several levels share the dimensions of a head."""
    if isinstance(layout, HeadLayouts):
        return bool(ranks_of_heads(layout))
    return len(layout.ranks) > 1


def register_attention(
    spec: str | AttentionSpec,
    *,
    name: str = "structattn",
    context_length: int | None = None,
    rotary_split: RotarySplit | None = "low_far",
    backend: Backend = "auto",
) -> str:
    """Registers structured attention, for ``model.set_attn_implementation(name)`` on any decoder or encoder
    of transformers.

    No weight is touched and nothing is saved: a reloaded model is a plain one until the implementation is set
    again.

    Queries and keys are already rotated. Their dimensions are then permuted to an order in which the slice of
    each level is closed under the pairs that the model rotates together; permuting both the same way changes
    no score.

    Args:
        spec: a layout and a window, such as ``"mlr:32|16|16"``, or one for each key head, as
            ``"heads:standard/window:252,sink_tokens=4*7"``; a bilinear scoring would need other weights.
        name: of the implementation. Registering another variant under the same name is an error.
        context_length: length in positions from which blocks are halved. Default: the
            ``max_position_embeddings`` of the model that calls.
        rotary_split: ``"low_far"``: the global level gets the slowest frequencies; ``"interleaved"``;
            ``None``: dimensions stay where they are, for models without rotary positions.
        backend: of ``structured_attention``.

    Returns:
        The name.

    Raises:
        ConfigError: the spec asks for other weights, ranks are odd with a ``rotary_split``, or the name is
            taken or means something else to transformers.
    """
    value = trained_spec(spec)
    check_choice("backend", backend, get_args(Backend))
    if rotary_split is not None:
        check_split(rotary_split)
        for one in value.heads or (value,):
            if one.layout is not None and not isinstance(one.layout, SinkWindow):
                level_pairs(one.layout.ranks, rotary_split)  # checks the ranks
    if context_length is not None:
        value.layout_for(context_length, 1)  # checks the length too
    if not isinstance(name, str) or not name.isidentifier() or "flash" in name or "paged" in name:
        raise ConfigError(
            "the name of an attention implementation is a plain word without 'flash' and 'paged', which transformers "
            f"reads, got {quoted(name)}"
        )
    attention = RegisteredAttention(
        spec=value, context_length=context_length, rotary_split=rotary_split, backend=backend
    )
    registered = AttentionInterface().get(name) if name != "eager" else "transformers"
    if registered is not None and registered != attention:
        raise ConfigError(
            f"the attention implementation {quoted(name)} is registered already, as {quoted(registered)}: choose "
            "another name"
        )
    register(name, attention, structured_mask)
    return name
