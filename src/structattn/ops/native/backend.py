"""The ``native`` backend: structured attention by C++ code for CPUs, in memory linear in T.

One pass over tiles of 64 queries and 64 keys, as fused kernels on a GPU make it: scores and weights of a tile
stay in the core's caches, and each tile is computed in the dimensions of the levels that its pairs share. Of
each query the keys of a level are one interval of positions, for blocks as for windows, so that the C++ code
knows intervals only; sink tokens are one interval more, of all levels.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.ops.blocked import backend as blocked
from structattn.ops.call import Call
from structattn.ops.sequences import SequenceSpan, sequences_of
from structattn.ops.terms import all_but

_END = 2**31 - 1  # after every position
_LACKING = all_but("scale", "softcap", "sinks", "attn_mask", "attn_bias", "alibi_slopes")


def why_not(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """The reason why this backend cannot run a call, or ``None``."""
    if not q.is_cpu:
        return f"it runs on a CPU, and the tensors are on {q.device}"
    if call.layout.boundaries is not None:
        return "it has no free segments (LevelLayout.from_boundaries)"
    if (lacking := call.terms.first_of(_LACKING)) is not None:
        return f"it has no {lacking}"
    return "it has no dropout" if call.dropout_p else None


@functools.lru_cache(maxsize=32)
def _intervals(layout: LevelLayout, first: int, count: int, is_causal: bool, window: int | None) -> Tensor:
    """The keys that queries share each level with, from their first to the one after the last: (2, L, count)
    int32. Sink tokens are an entry more after the levels, and in no other.

    Args:
        first, count: the positions of the queries, counted from the first key.
    """
    i = torch.arange(first, first + count, device="cpu")
    low, high = torch.zeros_like(i), torch.full_like(i, _END)
    if is_causal:
        high = i + 1
    limits = []
    for level in range(layout.num_levels):
        reach = layout.window_of(level + 1, window)
        if reach is not None:
            low, high = torch.maximum(low, i - reach + 1), torch.minimum(high, i + reach)
        if level and layout.windows is None:
            start = i.div(layout.block_sizes[level], rounding_mode="floor") * layout.block_sizes[level]
            low, high = torch.maximum(low, start), torch.minimum(high, start + layout.block_sizes[level])
        high = high.clamp(min=layout.sink_tokens)
        low = torch.minimum(low.clamp(min=layout.sink_tokens), high)
        limits.append(torch.stack([low, high]))
    if layout.sink_tokens:
        end = i + 1 if is_causal else torch.full_like(i, layout.sink_tokens)
        limits.append(torch.stack([torch.zeros_like(i), end.clamp(0, layout.sink_tokens)]))
    return torch.stack(limits, 1).int()


_Arguments = tuple[Tensor, tuple[int, ...], tuple[int, ...], tuple[float, ...], tuple[float, ...], Tensor, int]


def _arguments(q: Tensor, k: Tensor, v: Tensor, call: Call) -> _Arguments:
    """What the C++ code is told of a call: sequences, ranks, value ranks, factors, intervals, and the
    position of their first.
    """
    settings = call.layout, call.is_causal, call.terms.scale, call.window, v.shape[3]
    if call.cu_seqlens is None and call.left_padding is None:
        return _of_equal_rows(q.shape[0], q.shape[2], k.shape[2], *settings)
    return _of_sequences(sequences_of(q, k, call), *settings)


@functools.lru_cache(maxsize=64)
def _of_equal_rows(
    batch: int,
    num_queries: int,
    num_keys: int,
    layout: LevelLayout,
    is_causal: bool,
    scale: float | None,
    window: int | None,
    value_dim: int,
) -> _Arguments:
    rows = [SequenceSpan(n, n, 0, 0, num_queries, num_keys, num_keys - num_queries) for n in range(batch)]
    return _of_sequences(rows, layout, is_causal, scale, window, value_dim)


def _of_sequences(
    sequences: list[SequenceSpan],
    layout: LevelLayout,
    is_causal: bool,
    scale: float | None,
    window: int | None,
    value_dim: int,
) -> _Arguments:
    spans = [[s.batch, s.queries, s.keys, s.num_queries, s.num_keys, s.first_query] for s in sequences]
    first = min((s.first_query for s in sequences), default=0)
    end = max((s.first_query + s.num_queries for s in sequences), default=0)
    per_level, per_count = layout.score_factors(scale)
    return (
        torch.tensor(spans, dtype=torch.int64, device="cpu").view(-1, 6),
        layout.ranks,
        layout.value_ranks or (value_dim, *(0,) * (layout.num_levels - 1)),
        per_level,
        per_count,
        _intervals(layout, first, end - first, is_causal, window),
        first,
    )


def _terms(
    q: Tensor, k: Tensor, call: Call, dtype: torch.dtype
) -> tuple[float, Tensor | None, Tensor | None, Tensor | None]:
    """What is added to scores, as the C++ code takes it: the soft cap (0 for none), slopes, bias and mask."""
    size = (*q.shape[:3], k.shape[2])
    slopes, bias, mask = call.terms.alibi_slopes, call.terms.attn_bias, call.terms.attn_mask
    if bias is not None and (dtype == torch.float64 or bias.dtype not in (torch.float16, torch.bfloat16)):
        bias = bias.to(dtype)
    return (
        call.terms.softcap or 0.0,
        None if slopes is None else slopes.detach().to(dtype),
        None if bias is None else bias.detach().expand(size),
        None if mask is None else mask.expand(size),
    )


def _rows(x: Tensor) -> Tensor:
    """x as the C++ code reads it: numbers of a row are neighbours."""
    x = x.detach()
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Structured attention; the arguments are those of ``structured_attention``, checked.

    Sums are float32 for 16-bit inputs. With AVX512-BF16 the products of bfloat16 take bfloat16 numbers, and
    weights are rounded to it, as in PyTorch's kernel; everywhere else, and where each head has one query,
    16 bits are converted tile by tile.

    Returns:
        out (B, H, T, V) in q's dtype, with the heads of a token side by side in memory where q has them so,
        and lse (B, H, T), contiguous, float32 or float64, base e.

    Cost: ``layout.score_flops`` + ``layout.value_flops``, for whole tiles, and one exponential per visible
        pair; with more than 64 queries memory for a copy of the keys in their dtype, and of bfloat16 values.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not q.numel() or not k.numel() or not v.numel():
        return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    arguments = *_arguments(q, k, v, call), *_terms(q, k, call, dtype)
    result: tuple[Tensor, Tensor] = torch.ops.structattn_native.forward(*(_rows(x) for x in (q, k, v)), *arguments)
    return result


def over_two_ranges(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, starts: Tensor, scale: float | None) -> Tensor:
    """Plain attention in which query t sees the keys before ends[t] and those from starts[t] to its own, in
    one softmax; no gradients.

    Args:
        q: (B, H, T, D); the last queries belong to the last keys.
        k, v: (B, G, S, D) and (B, G, S, V).
        ends, starts: (T,) whole numbers, with ends[t] <= starts[t] <= S - T + t.
        scale: of the scores; ``None``: D^-1/2.

    Returns:
        (B, H, T, V), in q's dtype.

    Cost: 2 (D + V) FLOPs and one exponential per pair that is seen, for whole tiles; with more than 64
        queries memory for a copy of the keys in their dtype, and of bfloat16 values.
    """
    batch, num_queries, num_keys, dim = q.shape[0], q.shape[2], k.shape[2], q.shape[3]
    first = num_keys - num_queries
    after = torch.arange(first + 1, num_keys + 1, device="cpu")
    limits = [torch.stack([starts, after]), torch.stack([torch.zeros_like(ends), ends])]  # the latter as sink tokens
    per_level, per_count = LevelLayout((dim,), (1,)).score_factors(scale)
    out: Tensor = torch.ops.structattn_native.forward(
        *(_rows(x) for x in (q, k, v)),
        torch.tensor([[row, 0, 0, num_queries, num_keys, first] for row in range(batch)], device="cpu"),
        (dim,),
        (v.shape[3],),
        per_level,
        per_count,
        torch.stack(limits, 1).int(),
        first,
        *(0.0, None, None, None),
    )[0]
    return out


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    *,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k and v, in their dtypes and shapes, and that of the bias, which ``blocked``
    computes, if it is asked for.

    Gradients have heads and tokens in the order in memory that their tensors have.

    Args:
        grad_out, grad_lse: of ``forward``'s results; ``grad_lse`` may be ``None``.
        q, k, v, call: as in ``forward``.
        out, lse: what ``forward`` returned.

    Cost: three products of the score's rank and two of the value's per visible pair. Each thread has memory
        for one key head: its keys and values in their dtype, and their gradients in that of the sums. With
        fewer key heads than threads all gradients of keys and values exist once more for each part.
    """
    if needs_bias:
        return blocked.backward(grad_out, grad_lse, q, k, v, out, lse, call, needs_bias=True)
    if not q.numel() or not k.numel() or not v.numel():
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        return dq, dk, dv, None
    dq, dk, dv = torch.ops.structattn_native.backward(
        *(_rows(x) for x in (grad_out, q, k, v, out)),
        lse.contiguous(),
        None if grad_lse is None else grad_lse.contiguous(),
        *_arguments(q, k, v, call),
        *_terms(q, k, call, lse.dtype),
    )
    return dq, dk, dv, None
