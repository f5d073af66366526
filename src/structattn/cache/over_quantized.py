"""Attention of new tokens where far tokens are quantized: each query over the numbers that it sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from structattn.cache.attend import of_equal_heads, over_dense, plain_with_lse
from structattn.cache.storage import Storage
from structattn.errors import ConfigError
from structattn.layout.global_window import Layout
from structattn.layout.levels import LevelLayout
from structattn.ops import Backend
from structattn.ops.joined_softmax import joined_softmax
from structattn.ops.native import backend as native
from structattn.ops.native import library
from structattn.ops.terms import ScoreTerms, needs_gradient

# Queries of a prompt that are computed together: few calls, and little that is copied.
_PROMPT_QUERIES = 1024


def check_no_gradient(q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms) -> None:
    """Raises ``ConfigError`` where a gradient is asked for, which quantized tokens do not have."""
    if options.needs_gradient or needs_gradient(q, k, v):
        raise ConfigError(
            "a cache that stores fewer bits gives no gradients: call the model within torch.no_grad(), or use a "
            "cache without storage="
        )


def over_quantized(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    options: ScoreTerms,
    quantize: Callable[[int], None],
    *,
    storage: Storage,
    layout: Layout | None,
    window: int | None,
    pad: int = 0,
    chunk_size: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of the last T tokens of rows that are all at one position.

    Args:
        q: (rows, H, T, D).
        keys, values: (rows, G, S, D) and (rows, Gv, S, V) of all tokens, as the first query sees them.
        options: of these rows and queries.
        quantize: called with the position of a query, these in order; writes into ``keys`` and ``values``
            what that query reads as codes.
        storage, layout, window, chunk_size: of the cache.
        pad: leading padding tokens.
        backend: of ``structured_attention``.

    Returns:
        (rows, H, T, V).
    """
    count, length = q.shape[2], keys.shape[2]
    first = past = length - count
    is_whole = window is None and chunk_size is None and _is_plain(layout)
    is_quick = is_whole and backend == "auto" and options.has_scale_only and storage.residual > 0
    if is_quick and count >= storage.group_size:
        if isinstance(layout, LevelLayout):  # the same factor for all dimensions
            options = replace(options, scale=layout.whole_factors(options.scale)[0])
        over_all = _over_both if library.is_here(q) else _over_all
        return over_all(q, keys, values, options, quantize, storage=storage, pad=pad)
    out = q.new_empty((*q.shape[:3], values.shape[3]))
    while first < length:
        exact = storage.first_exact(first - pad)
        end = min(length, pad + max(0, exact) + storage.group_size + storage.residual - 1)
        end = max(end, first + 1)
        quantize(first - pad)
        steps = slice(first - past, end - past)
        out[:, :, steps] = over_dense(
            q[:, :, steps],
            keys[:, :, :end],
            values[:, :, :end],
            options.of_queries(steps.start, steps.stop, count, length),
            layout=layout,
            window=window,
            left_padding=torch.full((len(q),), min(pad, end), device=q.device) if pad else None,
            backend=backend,
            chunk_size=chunk_size,
        )
        first = end
    return out


def _is_plain(layout: Layout | None) -> bool:
    """Whether a layout has one level, without a window."""
    return layout is None or (isinstance(layout, LevelLayout) and layout.num_levels == 1 and not layout.windows)


def _over_both(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    options: ScoreTerms,
    quantize: Callable[[int], None],
    *,
    storage: Storage,
    pad: int,
) -> Tensor:
    """As ``_over_all``, in one call for some heads: their keys are all that any query reads as codes, and
    after them the exact ones, of which each query sees its part. As few heads as possible are together, since
    these keys and values are copies.
    """
    length = keys.shape[2]
    past = length - q.shape[2]
    first = max(past, pad)
    if first == length:
        return q.new_zeros((*q.shape[:3], values.shape[3]))
    low, end = (pad + storage.first_exact(position - pad) for position in (first, length - 1))
    exact = [x[:, :, low:].clone() for x in (keys, values)]
    quantize(length - 1 - pad)
    ends = torch.tensor([storage.first_exact(position) for position in range(first - pad, length - pad)], device="cpu")
    starts = ends + (end - low)
    out = q.new_zeros((*q.shape[:3], values.shape[3]))  # padding has no output
    parts = math.gcd(keys.shape[1], values.shape[1])
    for heads in zip(*(x.chunk(parts, dim=1) for x in (q, out, keys, exact[0], values, exact[1])), strict=True):
        query, to, key, exact_key, value, exact_value = heads
        k, v = (torch.cat([x[:, :, pad:end], own], 2) for x, own in ((key, exact_key), (value, exact_value)))
        found = native.over_two_ranges(query[:, :, first - past :], *of_equal_heads(k, v), ends, starts, options.scale)
        to[:, :, first - past :] = found
    return out


def _over_all(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    options: ScoreTerms,
    quantize: Callable[[int], None],
    *,
    storage: Storage,
    pad: int,
) -> Tensor:
    """``over_quantized`` where queries see all tokens before them, in one level, and nothing but a scale
    changes the scores: many queries at once over the groups that all of them read, and few at a time over the
    rest, whose boundary moves, joined by their log-sum-exps.
    """
    length = keys.shape[2]
    past = length - q.shape[2]
    out = q.new_zeros((*q.shape[:3], values.shape[3]))
    for first in range(max(past, pad), length, _PROMPT_QUERIES):
        end = min(first + _PROMPT_QUERIES, length)
        low = pad + storage.first_exact(first - pad)  # all these queries read what is before it as codes
        near_k, near_v = (x[:, :, low:end].clone() for x in (keys, values))
        quantize(end - 1 - pad)
        query = q[:, :, first - past : end - past]
        near, at, before = [], first, low
        while at < end:
            border = pad + storage.first_exact(at - pad)
            stop = min(end, border + storage.group_size + storage.residual - 1)
            for exact, read in ((near_k, keys), (near_v, values)):
                exact[:, :, before - low : border - low] = read[:, :, before:border]
            k, v = near_k[:, :, : stop - low], near_v[:, :, : stop - low]
            near.append(plain_with_lse(query[:, :, at - first : stop - first], k, v, options, is_causal=True))
            at, before = stop, border
        near_out, near_lse = (torch.cat(pieces, dim=2) for pieces in zip(*near, strict=True))
        if low > pad:
            k, v = keys[:, :, pad:low], values[:, :, pad:low]
            far_out, far_lse = plain_with_lse(query, k, v, options, is_causal=False)
            _, share, weight = joined_softmax(near_lse, far_lse[..., None])
            near_out = near_out * share + far_out * weight
        out[:, :, first - past : end - past] = near_out
    return out
