"""The definition of structured attention: dense, differentiable, any dtype, the oracle of every faster
backend.

It allocates T x S scores; it is written to be read against the formula, not to be fast. Arguments are taken
as already checked by ``ops.attention``.

Axes: B batch, H query heads, G key/value heads, T queries, S keys, D head dimension, V value dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from structattn.layout.levels import LevelLayout
from structattn.ops.call import Call


@dataclass(frozen=True, kw_only=True)
class Positions:
    """The positions of queries and keys in their own sequences.

    Attributes:
        queries: (1 or B, T) int64; a query before the first key of its sequence has a negative position.
        keys: (1 or B, S) int64.
        query_rows, key_rows: the batch row, (B, 1), or packed sequence of each, (1, T) and (1, S); it selects
            the segments of a free partition.
        in_sequence: bool (1 or B, T, S), the pairs that lie in one sequence and are not padding; ``None``
            when that is all. A query before the first key is no padding, with or without padding after it.
    """

    queries: Tensor
    keys: Tensor
    query_rows: Tensor
    key_rows: Tensor
    in_sequence: Tensor | None

    def distance(self) -> Tensor:
        """Query position minus key position, (1 or B, T, S) int64."""
        return self.queries[:, :, None] - self.keys[:, None, :]

    def shared_levels(self, layout: LevelLayout) -> Tensor:
        """The number of levels that each pair shares, (1 or B, T, S) int64, at least 1: beyond the first
        window pairs are hidden.
        """
        if layout.windows is not None:
            return layout.shared_levels(self.queries[:, :, None], self.keys[:, None, :]).clamp(min=1)
        shape = (self.queries.shape[0], self.queries.shape[1], self.keys.shape[1])
        sides = (self.queries, self.query_rows), (self.keys, self.key_rows)
        count = torch.ones(shape, dtype=torch.int64, device=self.keys.device)
        for level in range(2, layout.num_levels + 1):
            i, j = (layout.blocks(level, x, 0 if layout.num_rows is None else rows) for x, rows in sides)
            count = count + (i[:, :, None] == j[:, None, :])
        if layout.sink_tokens:
            count = count.masked_fill(layout.is_sink(self.keys)[:, None, :], layout.num_levels)
        return count


def positions(
    num_queries: int,
    num_keys: int,
    cu_seqlens: tuple[Tensor, Tensor] | None,
    left_padding: Tensor | None,
    batch: int,
    device: torch.device,
) -> Positions:
    """The position of each query and key in its own sequence.

    The queries are the last T of the S positions. Packed sequences, with the boundaries of queries and of
    keys, each count from their first key; with left padding a row counts from its first real token.
    """
    keys = torch.arange(num_keys, device=device)[None]
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[None]
    rows = torch.arange(batch, device=device)[:, None]
    if cu_seqlens is not None:
        of_queries, of_keys = (x.to(device=device, dtype=torch.int64) for x in cu_seqlens)
        query, key = torch.arange(num_queries, device=device), keys[0]
        i, j = (torch.bucketize(x, ends[1:], right=True) for x, ends in ((query, of_queries), (key, of_keys)))
        first = of_keys.diff() - of_queries.diff()  # the position of the first query of each sequence
        return Positions(
            queries=(query - of_queries[i] + first[i])[None],
            keys=(key - of_keys[j])[None],
            query_rows=i[None],
            key_rows=j[None],
            in_sequence=(i[:, None] == j[None, :])[None],
        )
    if left_padding is not None:
        padding = left_padding.to(device=device, dtype=torch.int64)[:, None]
        real = (queries < 0) | (queries >= padding)
        keys, queries = keys - padding, queries - padding
        in_sequence = real[:, :, None] & (keys >= 0)[:, None, :]
        return Positions(queries=queries, keys=keys, query_rows=rows, key_rows=rows, in_sequence=in_sequence)
    return Positions(queries=queries, keys=keys, query_rows=rows, key_rows=rows, in_sequence=None)


def visible(position: Positions, is_causal: bool, window: int | None, sink_tokens: int = 0) -> Tensor | None:
    """The bool mask (1 or B, T, S) of the pairs that may attend; ``None`` when every pair may. A window hides
    no sink tokens.
    """
    if not is_causal and window is None:
        return position.in_sequence
    distance = position.distance()
    in_sequence = position.in_sequence
    mask = torch.ones_like(distance, dtype=torch.bool) if in_sequence is None else in_sequence.expand_as(distance)
    if is_causal:
        mask = mask & (distance >= 0)
    if window is not None:
        is_sink = (position.keys >= 0) & (position.keys < sink_tokens)
        mask = mask & ((distance.abs() < window) | is_sink[:, None, :])
    return mask


def scores(q: Tensor, k: Tensor, layout: LevelLayout, scale: float | None, num_shared: Tensor) -> Tensor:
    """The scaled scores (B, H, T, S), level by level as in ``LevelLayout``; q and k have equal numbers of
    heads.

    ``num_shared`` is the number of levels that each pair shares, broadcastable to (B, H, T, S).
    """
    total = torch.zeros((), dtype=q.dtype, device=q.device)
    for level, features in enumerate(layout.slices, start=1):
        # Contiguous: Inductor fixes a compiled program to the strides of a slice that is kept for the
        # gradient.
        score = q[..., features].contiguous() @ k[..., features].contiguous().transpose(2, 3)
        if scale is None and layout.scaling in ("paper", "paper_sum"):
            score = score / layout.ranks[level - 1]
        total = total + score * (num_shared >= level)
    if scale is not None:
        return total * scale
    shared_rank = torch.tensor(layout.ranks, device=q.device).cumsum(0)[num_shared - 1].to(q.dtype)
    match layout.scaling:
        case "variance":
            return total / shared_rank.sqrt()
        case "mup":
            return total * (8 / shared_rank)
        case "paper":
            return total / num_shared
        case "paper_sum":
            return total
        case "standard":
            return total / layout.head_dim**0.5


def attention(
    q: Tensor, k: Tensor, v: Tensor, call: Call, dropped: Tensor | None = None, keep_probability: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Structured attention by its definition; the meaning of the options is that of ``structured_attention``.

    16-bit inputs are computed in float32. A query that sees no key has output 0 and log-sum-exp -inf, and no
    gradient. What padding holds reaches nothing, NaN neither; nor does another packed sequence, each being
    computed separately (while PyTorch traces, when lengths are not known, all are computed together, with a
    mask).

    Args:
        q, k, v: (B, H, T, D), (B, G, S, D), (B, G, S, V).
        call: the options, checked.
        dropped: the weights that dropout drops, bool (B, H, T, S); ``None`` without dropout.
        keep_probability: the probability of keeping a weight.

    Returns:
        out (B, H, T, V) in q's dtype and lse (B, H, T), float32 or float64, base e.

    Cost: 2 B H T S (D + V) FLOPs and several tensors of B H T S numbers.
    """
    dtype = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32
    repeats, num_keys = q.shape[1] // k.shape[1] if k.shape[1] else 1, k.shape[-2]
    query = q.to(dtype)
    # Not by repeat_interleave: where the length is not known, PyTorch 2.11 cannot export it.
    head = torch.arange(q.shape[1], device=q.device) // repeats
    key, value = (x.to(dtype).index_select(1, head) for x in (k, v))
    bias = None if call.terms.attn_bias is None else call.terms.attn_bias.to(dtype).expand(*q.shape[:3], num_keys)
    shown = None if call.terms.attn_mask is None else call.terms.attn_mask.expand(*q.shape[:3], num_keys)
    of_queries, of_keys = call.cu_seqlens, call.key_seqlens
    ends = None if of_queries is None or of_keys is None else (of_queries, of_keys)
    position = positions(q.shape[-2], num_keys, ends, call.left_padding, q.shape[0], q.device)

    def of(i: slice, j: slice, position: Positions) -> tuple[Tensor, Tensor]:
        """The queries of a slice with the keys of a slice."""
        some_bias, some_dropped, some_shown = (None if x is None else x[:, :, i, j] for x in (bias, dropped, shown))
        out, lse = _dense(
            query[:, :, i], key[:, :, j], value[:, :, j], position, call, some_bias, some_dropped, some_shown
        )
        return (out if dropped is None else out / keep_probability).to(q.dtype), lse

    if ends is None or not all(_is_known(x) for x in ends):
        return of(slice(None), slice(None), position)
    results = []
    for of_i, of_j in zip(*(pairwise(x.tolist()) for x in ends), strict=True):
        i, j = slice(*of_i), slice(*of_j)
        sequence_position = Positions(
            queries=position.queries[:, i],
            keys=position.keys[:, j],
            query_rows=position.query_rows[:, i],
            key_rows=position.key_rows[:, j],
            in_sequence=None,
        )
        results.append(of(i, j, sequence_position))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _is_known(x: Tensor) -> bool:
    """Whether the numbers of a tensor can be looked at: not while PyTorch traces, nor inside of
    ``torch.vmap``.
    """
    if torch.compiler.is_compiling():  # which cannot trace what follows
        return False
    return not (isinstance(x, FakeTensor) or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x))


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Positions,
    call: Call,
    bias: Tensor | None,
    dropped: Tensor | None,
    shown: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of tensors with equal numbers of heads, of one dtype; weights that are kept keep
    their size.
    """
    num_shared = position.shared_levels(call.layout)[:, None]
    mask = visible(position, call.is_causal, call.window, call.layout.sink_tokens)
    if mask is not None:
        # What is in no visible pair may be NaN, and 0 times NaN is NaN.
        unused_query, unused_key = (~mask.any(dim)[:, None, :, None] for dim in (2, 1))
        query = query.masked_fill(unused_query, 0.0)
        key, value = (x.masked_fill(unused_key, 0.0) for x in (key, value))
    score = scores(query, key, call.layout, call.terms.scale, num_shared)
    if call.terms.softcap is not None:
        score = call.terms.softcap * torch.tanh(score / call.terms.softcap)
    if bias is not None:
        score = score + bias
    if call.terms.alibi_slopes is not None:
        score = score - call.terms.alibi_slopes.to(score.dtype)[:, :, None, None] * position.distance().abs()[:, None]
    if shown is not None:
        score = score.masked_fill(~shown, -torch.inf)
    if mask is not None:
        score = score.masked_fill(~mask[:, None], -torch.inf)
    # A row without a visible key would be 0/0: it is computed as a row of zeros and then cleared.
    empty = (score == -torch.inf).all(dim=-1, keepdim=True)
    score = score.masked_fill(empty, 0.0)
    lse = score.logsumexp(dim=-1, keepdim=True)
    # Not exp(score - lse): far from 0 the lse is rounded to a multiple of more than 1.
    weight = score.softmax(dim=-1).masked_fill(empty, 0.0)
    if dropped is not None:
        weight = weight.masked_fill(dropped, 0.0)
    if call.layout.value_slices is None:
        out = weight @ value
    else:
        outs = [
            (weight * (num_shared >= level)) @ value[..., features].contiguous()
            for level, features in enumerate(call.layout.value_slices, start=1)
        ]
        out = torch.cat(outs, dim=-1)
    return out.masked_fill(empty, 0.0), lse.masked_fill(empty, -torch.inf).squeeze(-1)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of each row with one key more, of a logit that belongs to its head and of value 0.

        out exp(lse) / (exp(lse) + exp(sink)),   log(exp(lse) + exp(sink))

    So a sink needs no backend of its own: each computes output and log-sum-exp without it, with their
    gradients.

    Args:
        out, lse: (B, H, T, V) and (B, H, T), of the keys alone.
        sinks: (H,), floating point.

    Returns:
        The same with the sinks. A row without a visible key has output 0 and the sink as its log-sum-exp.

    Cost: one product with a number per row, and the memory of another output.
    """
    sinks = sinks.to(lse.dtype)[:, None]
    empty = lse == -torch.inf
    finite_lse = lse.masked_fill(empty, 0.0)  # infinity would make NaN of second derivatives
    total_lse = torch.where(empty, sinks, torch.logaddexp(finite_lse, sinks))
    return (out * torch.sigmoid(finite_lse - sinks)[..., None]).to(out.dtype), total_lse
