"""A decoding step by the fused Triton kernel, straight from the pages of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from structattn.cache.decode import KeyValueView
from structattn.errors import BackendUnavailableError
from structattn.ops.backends import why_not as why_not_backend


def why_not(q: Tensor, view: KeyValueView) -> str | None:
    """The reason why the kernel cannot run a step, as a sentence for the user, or ``None`` when it can."""
    if view.latent is not None:
        return "the fused kernel reads keys, and the cache keeps hidden states"
    if len(view.softmaxes) > 1:
        return "the fused kernel computes one softmax, and a global-window layout has two"
    if any(len(store.pages) > 1 for store in (*view.keys, *(store for store, _ in view.values))):
        return "the fused kernel needs each level in one page: give the cache a max_length"
    reason = why_not_backend("triton")
    if reason is not None:
        return reason
    from structattn.ops.triton import cached_attention as triton_cached

    return triton_cached.why_not(
        device=q.device,
        dtype=q.dtype,
        ranks=tuple(store.dim for store in view.keys),
        value_ranks=tuple(store.dim for store, _ in view.values),
        num_queries=q.shape[2],
        capacity=max(store.capacity for store in view.keys),
    )


def attention(q: Tensor, view: KeyValueView, scale: float | None) -> Tensor:
    """As ``decode.attention``; raises ``BackendUnavailableError`` where ``why_not`` has a reason."""
    reason = why_not(q, view)
    if reason is not None:
        raise BackendUnavailableError(f"backend 'triton' cannot decode this cache: {reason}")
    from structattn.ops.triton import cached_attention as triton_cached

    (softmax,) = view.softmaxes
    positions = view.positions * (q.shape[0] // len(view.positions))  # one position for all rows, or one each
    starts = torch.tensor([[level.first_needed(at, row) for row, at in positions] for level in softmax.levels])
    counts = torch.tensor([at for _, at in positions]) + 1 - starts
    sizes = softmax.layout.block_sizes
    out, _ = triton_cached.decode(
        q,
        [store.pages[0] for store in view.keys],
        [store.pages[0] for store, _ in view.values],
        starts.to(q.device, non_blocking=True),
        counts.to(q.device, non_blocking=True),
        [store.ring is not None for store in view.keys],
        softmax.layout.score_factors(scale),
        multiples=(0, *sizes[1:]) if sizes and softmax.window is None else None,
        max_count=int(counts[0].max()),
    )
    return out
