"""A decoding step by the fused Triton kernel, straight from the pages of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from structattn.cache.decode import Held
from structattn.errors import BackendUnavailableError
from structattn.ops.attention import why_not as why_not_backend


def why_not(q: Tensor, held: Held) -> str | None:
    """The reason why the kernel cannot run a step, as a sentence for the user, or ``None`` when it can."""
    if held.latent is not None:
        return "the fused kernel reads keys, and the cache keeps hidden states"
    if len(held.parts) > 1:
        return "the fused kernel computes one softmax, and a global-window layout has two"
    if any(len(store.pages) > 1 for store in (*held.keys, *(store for store, _ in held.values))):
        return "the fused kernel needs each level in one page: give the cache a max_length"
    reason = why_not_backend("triton")
    if reason is not None:
        return reason
    from structattn.ops.triton import cached_attention as triton_cached

    return triton_cached.why_not(
        device=q.device,
        dtype=q.dtype,
        ranks=tuple(store.dim for store in held.keys),
        value_ranks=tuple(store.dim for store, _ in held.values),
        num_queries=q.shape[2],
        capacity=max(store.capacity for store in held.keys),
    )


def attention(q: Tensor, held: Held, scale: float | None) -> Tensor:
    """As ``decode.attention``; raises ``BackendUnavailableError`` where ``why_not`` has a reason."""
    reason = why_not(q, held)
    if reason is not None:
        raise BackendUnavailableError(f"backend 'triton' cannot decode this cache: {reason}")
    from structattn.ops.triton import cached_attention as triton_cached

    (part,) = held.parts
    places = held.places * (q.shape[0] // len(held.places))  # one place for all rows, or one each
    starts = torch.tensor([[level.first_needed(at, row) for row, at in places] for level in part.levels])
    counts = torch.tensor([at for _, at in places]) + 1 - starts
    sizes = part.layout.block_sizes
    out, _ = triton_cached.decode(
        q,
        [store.pages[0] for store in held.keys],
        [store.pages[0] for store, _ in held.values],
        starts.to(q.device, non_blocking=True),
        counts.to(q.device, non_blocking=True),
        [store.ring is not None for store in held.keys],
        part.layout.score_factors(scale),
        multiples=(0, *sizes[1:]) if sizes and part.window is None else None,
        max_count=int(counts[0].max()),
    )
    return out
