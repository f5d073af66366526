"""The attention that one process computes: its queries against its own keys, and against each span of keys
that came from others.

Each is a call of a backend, with positions counted in the whole sequence. Where a part of the scores is what
a call without positions computes as well, the fastest backend takes it; the rest is computed by ``blocked``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.layout.shards import KeySpan
from structattn.ops import backends
from structattn.ops.backends import has_fused
from structattn.ops.blocked import backend as blocked
from structattn.ops.call import Call
from structattn.ops.sequences import SequenceSpan
from structattn.parallel.exchange_plan import ExchangePlan
from structattn.parallel.rectangles import Rectangle, rectangles_of


@dataclass(frozen=True)
class PartialAttention:
    """The attention of some queries of a process to some keys.

    Attributes:
        call: their options; the layout has the levels that they may share.
        sequences: their positions; ``None`` where those of the call are right.
    """

    call: Call
    sequences: tuple[SequenceSpan, ...] | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        if self.sequences is not None:
            return blocked.forward(q, k, v, self.call, self.sequences)
        out, lse = backends.with_gradients(q, k, v, self.call).forward(q, k, v, self.call)
        assert lse is not None
        return out, lse

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, from the joined output and log-sum-exp."""
        arguments = grad_out, grad_lse, q, k, v, out, lse, self.call
        if self.sequences is not None:
            return blocked.backward(*arguments, needs_bias=False, sequences=self.sequences)[:3]
        backward = backends.with_gradients(q, k, v, self.call).backward
        assert backward is not None
        return backward(*arguments, needs_bias=False)[:3]


def attention_in_shard(plan: ExchangePlan, shard: int, call: Call) -> PartialAttention:
    """The queries of a shard against its own keys."""
    shards, layout = plan.shards, plan.layout
    offset = shards.offsets[shard]
    inside = list(shards.sequences(shard))
    if all(start - shards.seqlens[n] >= layout.sink_tokens for n, start, _ in inside):
        layout = replace(layout, sink_tokens=0)
        call = replace(call, layout=layout)
    if all(_is_unmoved(layout, start - shards.seqlens[n], stop - start) for n, start, stop in inside):
        if len(shards.seqlens) == 2:
            return PartialAttention(call, None)
        ends = torch.tensor([0, *(stop - offset for _, _, stop in inside)], dtype=torch.int32, device="cpu")
        return PartialAttention(replace(call, cu_seqlens=ends), None)
    sequences = []
    for (first, last), row in shards.rows:
        for number, start, stop in inside:
            for batch in range(first, last):
                at, size, position = start - offset, stop - start, start - shards.seqlens[number]
                sequences.append(SequenceSpan(batch, shards.row(row, number), at, at, size, size, position, position))
    return PartialAttention(call, tuple(sequences))


def _is_unmoved(layout: LevelLayout, position: int, length: int) -> bool:
    """Whether positions from this one on share the levels that they would share, were they counted from 0."""
    if position == 0 and layout.num_rows is None:
        return True
    if layout.boundaries is not None or layout.sink_tokens:
        return False
    inside = range(2, layout.num_levels + 1) if layout.windows is None else ()
    return all(
        position % layout.block_sizes[level - 1] == 0
        or layout.shared_interval(level, position, position + length)[1] == position + length
        for level in inside
    )


def attention_to_span(
    plan: ExchangePlan, span: KeySpan, call: Call, q: Tensor, k: Tensor, v: Tensor
) -> list[tuple[Rectangle, PartialAttention]]:
    """The queries of a process that see a span of keys of others, against these: calls that together have
    every visible pair once.

    Args:
        q: all queries of the process.
        k, v: the keys and values of the span.
    """
    slopes = call.terms.alibi_slopes
    if slopes is not None and slopes.shape[0] > 1:
        slopes = slopes[slice(*span.batch)]
    per_level, per_count = plan.layout.score_factors(call.terms.scale)
    whole = Rectangle((0, span.queries[1] - span.queries[0]), (0, span.tokens[1] - span.tokens[0]), span.level, False)
    rectangles: tuple[Rectangle, ...] = (whole,)
    if slopes is None and set(per_level[: span.level]) == {1.0}:
        is_fused = has_fused(q[..., : k.shape[3]], k, v, _dense(plan, span.level, call, per_count))
        rectangles = rectangles_of(plan.layout, span, call.window, divides_bands=is_fused)
    parts = []
    for rectangle in rectangles:
        if rectangle.is_uniform:
            parts.append((rectangle, PartialAttention(_dense(plan, rectangle.level, call, per_count), None)))
            continue
        (first, stop), (first_key, stop_key) = rectangle.queries, rectangle.keys
        sequence = SequenceSpan(
            0, span.row, 0, 0, stop - first, stop_key - first_key, span.first_query + first, span.first_key + first_key
        )
        sequences = tuple(replace(sequence, batch=batch) for batch in range(span.batch[1] - span.batch[0]))
        layout = first_levels(plan.layout, rectangle.level)
        parts.append(
            (rectangle, PartialAttention(replace(call.with_terms(alibi_slopes=slopes), layout=layout), sequences))
        )
    return parts


def _dense(plan: ExchangePlan, level: int, call: Call, per_count: tuple[float, ...]) -> Call:
    """The options where all pairs are visible and share ``level`` levels."""
    one_level = LevelLayout((sum(plan.layout.ranks[:level]),), (2**30,))
    return replace(call.with_terms(scale=per_count[level - 1]), layout=one_level, is_causal=False, window=None)


@functools.lru_cache(maxsize=256)
def first_levels(layout: LevelLayout, count: int) -> LevelLayout:
    """A layout of the first levels of another one."""
    boundaries = layout.boundaries
    return replace(
        layout,
        ranks=layout.ranks[:count],
        block_sizes=layout.block_sizes[:count],
        value_ranks=None if layout.value_ranks is None else layout.value_ranks[:count],
        boundaries=None if boundaries is None else tuple(row[:count] for row in boundaries),
        windows=None if layout.windows is None else layout.windows[:count],
    )


def constant_scale(layout: LevelLayout, scale: float | None) -> float | None:
    """The scale of a call, where it is one number for all pairs: of fewer levels it must stay what it is of
    all.
    """
    per_level, per_count = layout.score_factors(scale)
    return per_count[0] if set(per_level) == {1.0} and len(set(per_count)) == 1 else scale
