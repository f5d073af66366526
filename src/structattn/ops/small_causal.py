"""Causal attention on few positions with levels of equal blocks: spans of queries, each against the keys up
to its end.

The positions are cut into the blocks of one level, the spans. All queries of a span are in one block of this
level and of each one above it, so the keys before the span fall into ranges that share the same levels with
all of its queries:

- Such a range is one product of the first dimensions, with one factor, and has no mask.
- The keys of the span itself share more levels than that level in smaller blocks: one product for each level,
  with a table of factors.

So the keys after a span cost nothing, and far keys a few dimensions. Short spans save most arithmetic and
need most operations, each of which takes microseconds in Python; counted work decides (``span_size``).
Measured on one core (AMD EPYC, MKL, 128 heads, ranks 8|4|2|2): copying the features of each block into
columns of its own, so that one product compares all levels, costs more than it saves: at T = 42 the copies
take 0.6 ms, and the products of single levels 0.2.

Sliding levels and free segments have no equal blocks, and never come here.

Axes: N batch entries and heads together, T positions, D head dimension, V value dimension.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.ops import derivatives
from structattn.ops.call import Call
from structattn.ops.checks import is_eager
from structattn.ops.costs import DEFAULT, Costs, Work, costs_here


class Range(NamedTuple):
    """Keys before a span that share the same levels with all of its queries.

    Attributes:
        keys: of which positions.
        rank: of the first dimensions, which they share.
        factor: of their products.
    """

    keys: slice
    rank: int
    factor: float


class Span(NamedTuple):
    """Queries with the keys up to the last of them.

    Attributes:
        start, stop: their positions.
        ranges: the keys before them.
        inside: of their own keys: the dimensions of levels with the same blocks, and the factor of each pair,
            (t, t).
        mask: 0 or -inf, what is added to the scores of their own keys, (t, t).
    """

    start: int
    stop: int
    ranges: tuple[Range, ...]
    inside: tuple[tuple[slice, Tensor], ...]
    mask: Tensor


class Plan(NamedTuple):
    """The spans of a call, and the factors of the dimensions, (D,), ``None`` where all are 1."""

    spans: tuple[Span, ...]
    features: Tensor | None


def _levels(layout: LevelLayout) -> list[tuple[slice, int]]:
    """The dimensions and the block size of each level; every pair shares level 1."""
    return list(zip(layout.slices, (sys.maxsize, *layout.block_sizes[1:]), strict=True))


def work(layout: LevelLayout, length: int, size: int, value_dim: int, batch: int) -> Work:
    """The work of spans of ``size`` positions, forward; other arguments as ``span_size``."""
    inside = {min(block, size) for _, block in _levels(layout)}
    product, score, weight, operation = 0, 0, 0, 10
    for start in range(0, length, size):
        span_length = min(size, length - start)
        ranges = _ranges(layout, start)
        num_pairs = span_length * (start + span_length)
        product += span_length**2 * layout.head_dim + num_pairs * value_dim
        product += sum(span_length * (stop - first) * rank for first, stop, rank, _ in ranges)
        score += span_length**2 * len(inside) + span_length * start
        weight += num_pairs
        operation += 4 + 2 * len(inside) + 2 * len(ranges)
    return Work(
        product=batch * product,
        score=batch * score,
        weight=batch * weight,
        operation=operation,
        matrix=batch * operation,
    )


def _ranges(layout: LevelLayout, start: int) -> list[tuple[int, int, int, int]]:
    """The keys before a span: first and last, the rank that they share, and the number of levels."""
    ranges = []
    stop = start
    for count in range(layout.num_levels, 0, -1):  # from near to far
        size = _levels(layout)[count - 1][1]
        first = 0 if size > start else start // size * size
        if first < stop:
            ranges.append((first, stop, sum(layout.ranks[:count]), count))
            stop = first
    return ranges


@functools.lru_cache(maxsize=4096)
def span_size(layout: LevelLayout, length: int, value_dim: int, batch: int, per_unit: Costs = DEFAULT) -> int:
    """The length of spans that costs least: the block size of a level, or all positions.

    Levels with smaller blocks than that are merged: one product for each, over all pairs of a span.

    Args:
        layout: with equal blocks.
        length: T.
        value_dim: V.
        batch: N, which share the cost of calling operations.
        per_unit: what a unit of work costs.
    """
    sizes = {length} | {size for size in layout.block_sizes[1:] if size < length}
    return min(
        sorted(sizes, reverse=True), key=lambda size: work(layout, length, size, value_dim, batch).time(per_unit)
    )


@functools.lru_cache(maxsize=64)  # of at most (levels + 1) * 2 MiB in float32, most far less: tables of two spans
def plan(layout: LevelLayout, length: int, size: int, scale: float | None, dtype: torch.dtype) -> Plan:
    """The plan with spans of ``size`` positions, the block size of a level or the length; ``scale`` is that
    of the call.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):  # so that any later call may use them
        return _plan(layout, length, size, scale, dtype)


def _plan(layout: LevelLayout, length: int, size: int, scale: float | None, dtype: torch.dtype) -> Plan:
    per_level, per_count = layout.score_factors(scale)
    features = None
    if any(x != 1.0 for x in per_level):
        features = torch.tensor(per_level, dtype=dtype).repeat_interleave(torch.tensor(layout.ranks))
    positions = torch.arange(size)  # every span starts a block of each level that is inside of it
    num_shared = layout.shared_levels(positions[:, None], positions[None])
    pairs = torch.tensor(per_count, dtype=dtype)[num_shared - 1]
    inside: list[tuple[slice, Tensor]] = []
    for level, dims in enumerate(layout.slices, start=1):
        factors = pairs.masked_fill(num_shared < level, 0.0)
        if inside and torch.equal(factors, inside[-1][1]):  # all pairs share both levels, or none
            inside[-1] = slice(inside[-1][0].start, dims.stop), factors
        else:
            inside.append((dims, factors))
    mask = torch.zeros(size, size, dtype=dtype).masked_fill(positions[:, None] < positions[None], -torch.inf)
    spans = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        local = slice(stop - start)
        ranges = tuple(
            Range(slice(first, last), rank, per_count[count - 1]) for first, last, rank, count in _ranges(layout, start)
        )
        tables = tuple((dims, factors[local, local].contiguous()) for dims, factors in inside)
        spans.append(Span(start, stop, ranges, tables, mask[local, local].contiguous()))
    return Plan(tuple(spans), features)


def suits(q: Tensor, k: Tensor, call: Call) -> bool:
    """Whether a call of the ``small`` backend is one of this file: eager and causal, equal blocks, no window
    and no term of the scores.
    """
    layout = call.layout
    if len(layout.ranks) == 1 or not layout.block_sizes or layout.sink_tokens:
        return False
    if not call.is_causal or not is_eager(q):
        return False
    if call.window is not None or not call.terms.has_scale_only:
        return False
    return q.shape[:3] == k.shape[:3] and q.numel() > 0


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """The output (B, H, T, V) of a call that ``suits``; second derivatives are those of ``reference``.

    Cost: the products of the plan; with gradients one number is kept for each pair that is not after a span.
    """
    size = span_size(call.layout, q.shape[2], v.shape[3], q.shape[0] * q.shape[1], costs_here())
    return attend(q, k, v, call, plan(call.layout, q.shape[2], size, call.terms.scale, q.dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, span_plan: Plan) -> Tensor:
    """As ``forward``, with a plan that is given."""
    out: Tensor = _Spans.apply(q, k, v, call, span_plan)  # type: ignore[no-untyped-call]
    return out


class _Spans(torch.autograd.Function):
    """q, k, v (B, H, T, .), the call and its plan: the output (B, H, T, V)."""

    # Without setup_context, for which PyTorch reads the signature at every call; transforms of functions
    # never come here.
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, span_plan: Plan) -> Tensor:
        query, key, value = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        if span_plan.features is not None:
            key = key * span_plan.features
        keys = key.transpose(1, 2)
        weights, outs = [], []
        for start, stop, ranges, inside, mask in span_plan.spans:
            span_q, span_k = query[:, start:stop], keys[..., start:stop]
            (dims, factors), *deeper = inside
            scores = span_scores = product = torch.bmm(span_q[..., dims], span_k[:, dims])
            if start:
                scores = query.new_empty((query.shape[0], stop - start, stop))
                span_scores = scores[..., start:]
            torch.addcmul(mask, product, factors, out=span_scores)
            for dims, factors in deeper:
                span_scores.addcmul_(torch.bmm(span_q[..., dims], span_k[:, dims]), factors)
            for positions, rank, factor in ranges:
                product = torch.bmm(span_q[..., :rank], keys[:, :rank, positions])
                torch.mul(product, factor, out=scores[..., positions])
            torch.softmax(scores, -1, out=scores)
            outs.append(torch.bmm(scores, value[:, :stop]))
            if any(ctx.needs_input_grad):
                weights.append(scores)
        ctx.call, ctx.plan = call, span_plan
        ctx.save_for_backward(q, k, v, *weights)
        return torch.cat(outs, 1).view(*q.shape[:3], v.shape[3])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *weights = ctx.saved_tensors
        span_plan: Plan = ctx.plan
        if torch.is_grad_enabled():  # a gradient that will be differentiated
            function = derivatives.output(ctx.call)
            return *derivatives.vjp(lambda *inputs: function(*inputs)[:1], (q, k, v), (d_out,)), None, None
        d_out, query, key, value = (x.flatten(0, 1) for x in (d_out, q, k, v))
        if span_plan.features is not None:
            key = key * span_plan.features
        values = value.transpose(1, 2)
        keys, queries = key.transpose(1, 2), query.transpose(1, 2)
        # Feature-major: a product whose narrow side comes first is up to 4 times faster.
        d_q, d_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys))
        d_v = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        for (start, stop, ranges, inside, _), weight in zip(span_plan.spans, weights, strict=True):
            positions = slice(start, stop)
            d_out_span, span_q, span_k = d_out[:, positions], queries[..., positions], keys[..., positions]
            d_v[:, :stop] += torch.bmm(weight.transpose(1, 2), d_out_span)
            d_scores = torch.bmm(d_out_span, values[..., :stop])
            torch.ops.aten._softmax_backward_data.out(d_scores, weight, -1, weight.dtype, grad_input=d_scores)
            for dims, factors in inside:
                d_span = d_scores[..., start:] * factors
                d_q[:, dims, positions] = torch.bmm(span_k[:, dims], d_span.transpose(1, 2))
                d_k[:, dims, positions] = torch.bmm(span_q[:, dims], d_span)
            for key_positions, rank, factor in ranges:
                d_span = d_scores[..., key_positions] * factor
                d_q[:, :rank, positions] += torch.bmm(keys[:, :rank, key_positions], d_span.transpose(1, 2))
                d_k[:, :rank, key_positions] += torch.bmm(span_q[:, :rank], d_span)
        if span_plan.features is not None:
            d_k *= span_plan.features[:, None]
        return *(x.transpose(1, 2).unflatten(0, q.shape[:2]) for x in (d_q, d_k)), d_v.view(v.shape), None, None
