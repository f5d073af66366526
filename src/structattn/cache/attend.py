"""Attention over what a cache keeps, which it only reads: over dense keys and values, or from the pages."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from structattn.cache import decode
from structattn.cache.decode import Columns, KeyValueView
from structattn.cache.storage import GroupStore
from structattn.errors import BackendUnavailableError
from structattn.layout.heads import AnyLayout
from structattn.ops import Backend, structured_attention
from structattn.ops.backends import why_not as why_not_backend
from structattn.ops.call import whole_factors
from structattn.ops.checks import check_tensors, without_autocast
from structattn.ops.chunks import chunked_attention
from structattn.ops.joined_softmax import joined_softmax
from structattn.ops.reference import with_sinks
from structattn.ops.terms import ScoreTerms, all_but

if TYPE_CHECKING:
    from structattn.ops.triton.cached_attention import GroupCodes

# The terms that the fused kernel does not compute; sinks are added to its output.
_NOT_FUSED = all_but("scale", "softcap", "sinks", "attn_mask", "alibi_slopes")


def over_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: ScoreTerms,
    *,
    layout: AnyLayout | None,
    window: int | None,
    left_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> Tensor:
    """``structured_attention`` for keys and values that may have different numbers of heads."""
    k, v = of_equal_heads(k, v)
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


def of_equal_heads(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the same number of heads, which divides that of the queries, as both do."""
    heads = math.lcm(k.shape[1], v.shape[1])
    k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    return k, v


def plain_with_lse(q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Plain attention, whose queries are the last tokens if it is causal: out (B, H, T, V), and the
    log-sum-exp of the scores, (B, H, T).
    """
    return structured_attention(
        q, *of_equal_heads(k, v), None, is_causal=is_causal, scale=options.scale, return_lse=True
    )


def over_view(q: Tensor, view: KeyValueView, options: ScoreTerms, backend: Backend) -> Tensor:
    """Attention of the last tokens of a view, by the fused kernel where it can run: see ``decode.attention``.

    Raises:
        BackendUnavailableError: ``backend`` is ``"triton"``, which cannot run here.
    """
    is_eager = not torch.compiler.is_compiling()  # Inductor fuses the operations of the other one
    is_fused = backend == "triton" or (q.is_cuda and is_eager and why_not_fused(q, view, options) is None)
    with without_autocast(q):  # it would turn the products here into 16-bit ones
        return (fused_attention if is_fused else decode.attention)(q, view, options)


def why_not_fused(q: Tensor, view: KeyValueView, options: ScoreTerms) -> str | None:
    """The reason why the fused Triton kernel cannot run a step, as a sentence for the user, or ``None`` when
    it can.
    """
    if (lacking := options.first_of(_NOT_FUSED)) is not None:
        return f"the fused kernel has no {lacking}"
    if view.latent is not None:
        return "the fused kernel reads keys, and the cache keeps hidden states"
    if options.attn_mask is not None and options.attn_mask.dtype != torch.bool:
        return "the fused kernel takes a bool mask, and this one is added to the scores"
    if len(view.softmaxes) > 1:
        return "the fused kernel computes one softmax, and a global-window layout has two"
    if any(store.num_pages > 1 for store in (*view.keys, *(store for store, _ in view.values))):
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
        group_size=view.storage.group_size if view.storage is not None and any(view.value_groups) else None,
    )


def fused_attention(q: Tensor, view: KeyValueView, options: ScoreTerms) -> Tensor:
    """As ``decode.attention``, by the fused Triton kernel; raises ``BackendUnavailableError`` where it cannot
    run.
    """
    reason = why_not_fused(q, view, options)
    if reason is not None:
        raise BackendUnavailableError(f"backend 'triton' cannot decode this cache: {reason}")
    from structattn.ops.triton import cached_attention as triton_cached

    (softmax,) = view.softmaxes
    positions = view.positions * (q.shape[0] // len(view.positions))  # one position for all rows, or one each
    if any(at < softmax.layout.sink_tokens for _, at in positions):  # there is no key besides
        return decode.attention(q, view, options)
    first = [[level.first_needed(at, row) for row, at in positions] for level in softmax.levels]
    held = [[at + 1 - start for (_, at), start in zip(positions, of_level, strict=True)] for of_level in first]
    of_blocks = [[level.start(at, row) for row, at in positions] for level in softmax.levels]
    edges = [0 if view.storage is None else view.storage.first_exact(at) for _, at in positions]
    numbers = torch.tensor([*first, *held, *of_blocks, edges], dtype=torch.int32).to(q.device, non_blocking=True)
    starts, counts, blocks = numbers[:-1].chunk(3)
    quantized = None
    if view.storage is not None and any(edges):
        quantized = triton_cached.Quantized(
            group_size=view.storage.group_size,
            edges=numbers[-1],
            keys=[_group_codes(groups) for groups in view.key_groups],
            values=[_group_codes(groups) for groups in view.value_groups],
        )
    sizes, is_chunked = softmax.layout.block_sizes, softmax.levels[0].chunk_size is not None
    out, lse = triton_cached.decode(
        q,
        [buffer for store in view.keys for buffer in store.pages[0].buffers],
        [buffer for store, _ in view.values for buffer in store.pages[0].buffers],
        starts,
        counts,
        [store.ring for store in view.keys],
        softmax.layout.score_factors(options.scale),
        softcap=options.softcap,
        mask=options.attn_mask,
        slopes=options.slopes,
        blocks=blocks,
        value_rings=[store.ring for store, _ in view.values],
        quantized=quantized,
        multiples=(0, *sizes[1:]) if sizes and not softmax.slides and not is_chunked else None,
        max_count=max(held[0]),
    )
    if view.sink_keys:
        out, lse = _with_sink_tokens(q, view, options, out, lse)
    return out if options.sinks is None else with_sinks(out, lse, options.sinks.detach())[0]


def _group_codes(groups: GroupStore | None) -> GroupCodes | None:
    """What the fused kernel reads of quantized tokens, if there are any. Pages to which others are added are
    found by a table from the first one on, so that the kernel need not be compiled again.
    """
    from structattn.ops.triton.cached_attention import GroupCodes

    if groups is None or not groups.pages:
        return None
    codes, scale, zero = groups.pages[0]
    table = None if codes.shape[2] == groups.longest else groups.places()
    return GroupCodes(codes=codes, scale=scale, zero=zero, bits=groups.format.bits, ring=groups.ring, table=table)


def _with_sink_tokens(
    q: Tensor, view: KeyValueView, options: ScoreTerms, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all keys, from those of the others than sink tokens."""
    softmax, columns = view.softmaxes[0], Columns(view.positions, view.softmaxes[0], q.device)
    count, back = columns.num_sinks, columns.back
    assert back is not None
    keys, values = (decode.sink_tokens(store, count).to(lse.dtype) for store in (*view.sink_keys, *view.sink_values))
    factors = whole_factors(softmax.layout, options.scale, lse.dtype, q.device)
    query = decode.grouped(q.to(lse.dtype) * factors, keys.shape[1])
    score = (query @ keys).view(*q.shape[:3], count)
    options.finish(score, back[:, :count])
    total, share, weights = joined_softmax(lse, score)
    weighed = decode.grouped(weights, values.shape[1]) @ values.transpose(2, 3)
    return (out * share + weighed.view(out.shape)).to(out.dtype), total
