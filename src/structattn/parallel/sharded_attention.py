"""Attention over a sharded sequence, differentiable: one exchange of keys and values forward, one of their
gradients back.

    forward     out = sum over parts of exp(lse_part - lse) out_part,   lse = logsumexp over parts of lse_part
    backward    each part with the joined out and lse, as ring attention does

Queries, outputs and their gradients stay. While keys travel a process computes what needs its own keys only,
and so it does while gradients do.

Source: the joining of parts is that of Milakov and Gimelshein 2018, the backward pass from the joined
log-sum-exp that of Liu et al. 2023 (ring attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from structattn.errors import DerivativeError
from structattn.layout.shards import KeySpan
from structattn.ops.call import Call
from structattn.ops.joined_softmax import joined_softmax
from structattn.parallel.exchange_plan import ExchangePlan, Views, packed, sizes, unpacked
from structattn.parallel.partial_attention import attention_in_shard, attention_to_span
from structattn.parallel.processes import Processes
from structattn.parallel.rectangles import Rectangle


class ShardedAttention(torch.autograd.Function):
    """The output and log-sum-exp of the queries of this process."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, processes: Processes, plan: ExchangePlan, call: Call
    ) -> tuple[Tensor, Tensor]:
        views = plan.outgoing(k, v)
        others = plan.empty(k)
        exchange = None
        if not plan.is_silent:
            exchange = processes.exchange(packed(views, k), sizes(views), sizes(plan.incoming(others)))
        parts = [attention_in_shard(plan, shard, call).forward(*_tokens(at, q, k, v)) for shard, at in plan.held]
        out, lse = (_joined(tensors) for tensors in zip(*parts, strict=True))
        for view, copy in plan.kept(k, v, others):
            copy.copy_(view)
        if exchange is not None:
            _copy(exchange.wait(), plan.incoming(others))
            exchange = None  # its memory is that of all keys that came
        if others:
            joined = out.to(lse.dtype, copy=True)
            for span, key, value in zip(plan.spans, others[::2], others[1::2], strict=True):
                for rectangle, partial in attention_to_span(plan, span, call, q, key, value):
                    query, keys = _queries(q, span, rectangle), slice(*rectangle.keys)
                    dim, shared = plan.dims(rectangle.level)
                    part = partial.forward(query[..., :dim], key[:, :, keys, :dim], value[:, :, keys, :shared])
                    _join(_queries(joined, span, rectangle), _queries(lse, span, rectangle), *part)
            out = joined.to(out.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *others)
        ctx.processes, ctx.plan, ctx.call = processes, plan, call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise DerivativeError(
                "attention over a sharded sequence has first derivatives only: leave out create_graph=True, or use "
                "structured_attention in one process"
            )
        q, k, v, out, lse, *others = ctx.saved_tensors
        processes, plan, call = ctx.processes, ctx.plan, ctx.call
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        grad_q = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
        changes = []
        for span, key, value in zip(plan.spans, others[::2], others[1::2], strict=True):
            parts_of_span = attention_to_span(plan, span, call, q, key, value)
            changed = [] if len(parts_of_span) == 1 else [torch.zeros_like(x, dtype=lse.dtype) for x in (key, value)]
            for rectangle, partial in parts_of_span:
                query, outward, output = (_queries(x, span, rectangle) for x in (q, grad_out, out))
                keys = slice(*rectangle.keys)
                dim, shared = plan.dims(rectangle.level)
                # What a backend subtracts from rowsum(grad_out * out) of the dimensions that it is given.
                rest = (outward[..., shared:] * output[..., shared:]).sum(-1, dtype=lse.dtype)
                dq, dk, dv = partial.backward(
                    outward[..., :shared],
                    _queries(grad_lse, span, rectangle) - rest,
                    query[..., :dim],
                    key[:, :, keys, :dim],
                    value[:, :, keys, :shared],
                    output[..., :shared],
                    _queries(lse, span, rectangle),
                )
                _queries(grad_q, span, rectangle)[..., :dim].add_(dq)
                if len(parts_of_span) == 1:
                    changed = [dk, dv]
                else:
                    for whole, change in zip(changed, (dk, dv), strict=True):
                        whole[:, :, keys, : change.shape[3]].add_(change)
            changes += [x.to(k.dtype) for x in changed]
        views, exchange = plan.incoming(changes), None
        if not plan.is_silent:
            exchange = processes.exchange(packed(views, k), sizes(views), sizes(plan.outgoing(k, v)))
        del views, others
        changes = changes if plan.local else []
        parts = [
            attention_in_shard(plan, shard, call).backward(*_tokens(at, grad_out, grad_lse, q, k, v, out, lse))
            for shard, at in plan.held
        ]
        dq, dk, dv = (_joined(tensors) for tensors in zip(*parts, strict=True))
        grad_q.add_(dq)
        if exchange is not None or plan.local:
            grad_k, grad_v = dk.to(lse.dtype), dv.to(lse.dtype)
            for view, numbers in plan.kept(grad_k, grad_v, changes):
                view.add_(numbers)
            if exchange is not None:
                for view, numbers in unpacked(exchange.wait(), plan.outgoing(grad_k, grad_v)):
                    view.add_(numbers)
            dk, dv = grad_k.to(k.dtype), grad_v.to(v.dtype)
        return grad_q.to(q.dtype), dk, dv, None, None, None


def _tokens(at: slice, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Some tokens of tensors (B, heads, T, ...)."""
    return tuple(x[:, :, at] for x in tensors)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The tokens of all shards of a process."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), 2)


def _copy(numbers: Tensor, views: Views) -> None:
    for view, values in unpacked(numbers, views):
        view.copy_(values)


def _queries(x: Tensor, span: KeySpan, rectangle: Rectangle) -> Tensor:
    """The queries of a rectangle of a span, of a tensor (B, H, T, ...)."""
    first, stop = (span.queries[0] + query for query in rectangle.queries)
    return x[slice(*span.batch), :, first:stop]


def _join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds the keys of a part to the softmax of its queries, in place; the part may have the first dimensions
    of the output only.

    Args:
        out, lse: (..., V) and (...).
        part, part_lse: (..., V') and (...).
    """
    total, share, weight = joined_softmax(lse, part_lse[..., None])
    out.mul_(share)
    out[..., : part.shape[-1]].addcmul_(part.to(out.dtype), weight)
    lse.copy_(total)
