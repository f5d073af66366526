"""Attention of new tokens over all tokens of a cache: straight from its pages for few tokens, else over dense keys and values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from structattn.cache import decode
from structattn.cache.append import append
from structattn.cache.contents import Contents
from structattn.cache.decode import KeyValueView
from structattn.checks import check_choice
from structattn.errors import BackendUnavailableError
from structattn.layout.global_window import Layout
from structattn.layout.levels import LevelLayout
from structattn.ops import Backend, structured_attention
from structattn.ops.backends import NAMED
from structattn.ops.backends import why_not as why_not_backend
from structattn.ops.checks import autocasted, check_tensors, without_autocast
from structattn.ops.chunks import chunked_attention
from structattn.ops.reference import with_sinks
from structattn.ops.terms import ScoreTerms

# Up to this many new tokens are decoded from the pages, run by run; more are computed as queries of the whole sequence.
_FEW_TOKENS = 16


def attend(contents: Contents, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> Tensor:
    """Appends new tokens and computes their attention; see ``LevelCache.attend``."""
    check_choice("backend", backend, NAMED)
    q, k, v = autocasted(q, k, v)
    kept_k, kept_v = k.detach(), v.detach()
    if q.shape[0] == 0 or q.shape[2] == 0:
        append(contents, kept_k, kept_v)
        return q.new_zeros((*q.shape[:3], v.shape[3]))
    if contents.length == 0 or not _is_direct(contents, q, k, v, options, backend):
        values = v if contents.length == 0 else contents.dense_values(v)
        out = _dense(contents, q, _all_keys(contents, k), values, contents.layout, options, backend)
        append(contents, kept_k, kept_v)
        return out
    runs, num_keys = contents.runs(q.shape[2]), contents.length + q.shape[2]
    if len(runs) == 1:
        own = options.of_queries(0, q.shape[2], q.shape[2], num_keys)
        return _decoded(contents, q, kept_k, kept_v, own, backend)
    outs = []
    for first, end in runs:
        own = options.of_queries(first, end, q.shape[2], num_keys)
        query, key, value = (x[:, :, first:end] for x in (q, kept_k, kept_v))
        outs.append(_decoded(contents, query, key, value, own, backend))
    return torch.cat(outs, dim=2)


def _decoded(contents: Contents, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> Tensor:
    """The attention of tokens of one run, straight from the pages."""
    if q.shape[2] == 1 and backend == "auto" and options.has_scale_only and (step := contents.step(k, v)) is not None:
        out = step.attend(q, k, v, options.scale, contents.length, contents.before)
        contents.length += 1
        return out
    append(contents, k, v)
    view = contents.view()
    is_fused = backend == "triton" or (q.is_cuda and why_not_fused(q, view, options) is None)
    with without_autocast(q):  # it would turn the products here into 16-bit ones
        return (fused_attention if is_fused else decode.attention)(q, view, options)


def weights(contents: Contents, q: Tensor, k: Tensor, options: ScoreTerms) -> Tensor:
    """The weights of new tokens, which are not appended; see ``LevelCache.weights``."""
    q, k = autocasted(q, k)
    keys, layout = _all_keys(contents, k), contents.layout
    each = torch.eye(keys.shape[2], dtype=keys.dtype, device=keys.device).expand(*keys.shape[:2], -1, -1)
    layout = replace(layout, value_ranks=None) if isinstance(layout, LevelLayout) else layout
    return _dense(contents, q, keys, each, layout, options, "reference")


def _is_direct(contents: Contents, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> bool:
    """Whether new tokens are decoded straight from what is kept: few ones, past the padding, without a gradient."""
    if torch.is_grad_enabled() and (options.needs_gradient or any(x.requires_grad for x in (q, k, v))):
        return False
    makes_keys = contents.latent is not None and not contents.latent.can_absorb
    is_past_padding = contents.length >= contents.most_padding
    return backend in ("auto", "triton") and q.shape[2] <= _FEW_TOKENS and is_past_padding and not makes_keys


def _all_keys(contents: Contents, k: Tensor) -> Tensor:
    """The keys of all tokens, with the new ones at the end: from keys, or made from hidden states."""
    state = k if contents.length == 0 else contents.dense_keys(k)
    if contents.latent is None:
        return state
    positions = torch.arange(state.shape[2], device=state.device)
    if contents.padding is not None:
        positions = positions - torch.tensor(contents.padding, device=state.device)[:, None]
    return contents.latent.keys(state[:, 0], positions)


def _dense(
    contents: Contents,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None,
    options: ScoreTerms,
    backend: Backend,
) -> Tensor:
    """Attention over the dense keys and values of a cache."""
    padding = None
    if contents.padding is not None and any(contents.padding):  # a row may still be in its padding
        padding = torch.tensor(contents.padding, device=q.device).clamp(max=k.shape[2])
    return over_dense(
        q,
        k,
        v,
        options,
        layout=layout,
        window=contents.window,
        left_padding=padding,
        backend=backend,
        chunk_size=contents.chunk_size,
    )


def over_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: ScoreTerms,
    *,
    layout: Layout | None,
    window: int | None,
    left_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> Tensor:
    """``structured_attention`` for keys and values that may have different numbers of heads."""
    heads = math.lcm(k.shape[1], v.shape[1])  # divides the query heads, as both do
    k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    check_tensors(q, k, v)
    attention: Callable[..., Tensor] = structured_attention
    if chunk_size is not None:
        attention = functools.partial(chunked_attention, chunk_size=chunk_size)
    return attention(
        q,
        k,
        v,
        layout,
        scale=options.scale,
        window=window,
        left_padding=left_padding,
        cu_seqlens=cu_seqlens,
        backend=backend,
        softcap=options.softcap,
        sinks=options.sinks,
        attn_mask=options.attn_mask,
        alibi_slopes=options.alibi_slopes,
    )


def why_not_fused(q: Tensor, view: KeyValueView, options: ScoreTerms) -> str | None:
    """The reason why the fused Triton kernel cannot run a step, as a sentence for the user, or ``None`` when it can."""
    if view.latent is not None:
        return "the fused kernel reads keys, and the cache keeps hidden states"
    if options.attn_mask is not None and options.attn_mask.dtype != torch.bool:
        return "the fused kernel takes a bool mask, and this one is added to the scores"
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
        masked=options.attn_mask is not None,
    )


def fused_attention(q: Tensor, view: KeyValueView, options: ScoreTerms) -> Tensor:
    """As ``decode.attention``, by the fused Triton kernel; raises ``BackendUnavailableError`` where it cannot run."""
    reason = why_not_fused(q, view, options)
    if reason is not None:
        raise BackendUnavailableError(f"backend 'triton' cannot decode this cache: {reason}")
    from structattn.ops.triton import cached_attention as triton_cached

    (softmax,) = view.softmaxes
    positions = view.positions * (q.shape[0] // len(view.positions))  # one position for all rows, or one each
    starts = torch.tensor([[level.first_needed(at, row) for row, at in positions] for level in softmax.levels])
    counts = torch.tensor([at for _, at in positions]) + 1 - starts
    sizes, is_chunked = softmax.layout.block_sizes, softmax.levels[0].chunk_size is not None
    out, lse = triton_cached.decode(
        q,
        [store.pages[0] for store in view.keys],
        [store.pages[0] for store, _ in view.values],
        starts.to(q.device, non_blocking=True),
        counts.to(q.device, non_blocking=True),
        [store.ring is not None for store in view.keys],
        softmax.layout.score_factors(options.scale),
        softcap=options.softcap,
        mask=options.attn_mask,
        slopes=options.slopes,
        multiples=(0, *sizes[1:]) if sizes and not softmax.slides and not is_chunked else None,
        max_count=int(counts[0].max()),
    )
    return out if options.sinks is None else with_sinks(out, lse, options.sinks.detach())[0]
