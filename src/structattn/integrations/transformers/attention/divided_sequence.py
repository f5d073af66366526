"""Attention where the sequences of a model are divided among processes: over the tokens of this process, with
the keys and values that the others have.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from structattn.errors import ConfigError
from structattn.integrations.transformers.attention.arguments import TERMS, check_arguments
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.caches.layer_cache import PendingStates
from structattn.integrations.transformers.masks.call_masks import check_lengths, checked_mask
from structattn.layers.checks import check_fits
from structattn.layout.shards import Order
from structattn.parallel.context import ContextParallel

_ATTRIBUTE = "_structattn_sequence_mesh"  # of the modules of a model whose sequences are divided


class Division:
    """How sequences of a model are divided; copies of the model have the same one."""

    def __init__(self, mesh: DeviceMesh, order: Order) -> None:
        self.mesh, self.order = mesh, order

    def __deepcopy__(self, memo: object) -> Division:
        return self

    def attention(self, layout: Any) -> ContextParallel:
        return ContextParallel(layout, self.mesh, order=self.order)


def division_of(module: nn.Module) -> Division | None:
    """How the sequences of a module are divided; ``None`` where they are whole."""
    return module.__dict__.get(_ATTRIBUTE)


def set_division(model: nn.Module, division: Division | None) -> None:
    """Makes all attention of a model that of divided sequences, or (``None``) of whole ones again."""
    for module in model.modules():
        if division is None:
            module.__dict__.pop(_ATTRIBUTE, None)
        else:
            module.__dict__[_ATTRIBUTE] = division


def attend_shard(call: AttentionCall) -> tuple[Tensor, None]:
    """As ``interface.attend``, of the tokens of this process; ``attention_mask`` may be ``None`` where the
    module is causal.

    Raises:
        ConfigError: a cache, dropout, padding, or another thing that attention over a divided sequence does
            not have.
    """
    module, variant, reorder, query, key, value, attention_mask, dropout, _, arguments, seen = call
    name = call.name
    if seen is not None:
        raise ConfigError(
            f"{name} chooses what its cache keeps (keep=) in whole sequences, and this one is divided among processes: "
            "leave sequence_shard away"
        )
    if isinstance(key, PendingStates) or isinstance(value, PendingStates):
        raise ConfigError(f"{name} has tokens of one process only, and a cache needs all: pass use_cache=False")
    if dropout > 0:
        raise ConfigError(
            f"attention over a divided sequence has no dropout, got {dropout}: set that of the config "
            "(attention_dropout, attn_pdrop) to 0"
        )
    if variant.backend != "auto":
        raise ConfigError(
            f"attention over a divided sequence chooses its backend: register 'auto', got {variant.backend!r}"
        )
    check_arguments(module, arguments, TERMS)
    is_causal = call.is_causal
    window = arguments.get("sliding_window")
    if attention_mask is not None or not is_causal:
        mask = checked_mask(attention_mask, module, query, key, is_causal)
        if mask.pairs is not None or mask.padding_counts is not None:
            raise ConfigError(
                "attention over a divided sequence takes no mask and no padding: give rows of real tokens, and leave "
                "attention_mask away"
            )
        if mask.chunk_size is not None:
            raise ConfigError(f"{name} has chunks of {mask.chunk_size} tokens, which a divided sequence does not know")
        check_lengths(query, key, mask, is_new=False)
        is_causal, window = mask.is_causal, mask.window
    variant = variant.within(window)
    check_fits(variant.layout, query.shape[-1], value.shape[-1])
    k, q = (reorder(x).to(value.dtype) for x in (key, query))
    q, terms = variant.fitted(q, call.terms())
    division = division_of(module)
    assert division is not None
    out = division.attention(variant.layout)(
        q,
        k,
        value,
        is_causal=bool(is_causal),
        scale=terms.scale,
        window=variant.window,
        cu_seqlens=arguments.get("cu_seq_lens_q"),
        softcap=terms.softcap,
        sinks=terms.sinks,
        alibi_slopes=terms.alibi_slopes,
    )
    return out.transpose(1, 2).contiguous(), None
