"""The one custom operator behind the fast backends: opaque to ``torch.compile`` and ``torch.export``, with its gradient.

Layouts and options travel as plain ints, floats and strings, since operators take nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from structattn.layout import SCALINGS, LevelLayout, visible_pairs_per_level
from structattn.ops import blocked
from structattn.ops.call import Call
from structattn.partition import Boundaries


def _flat_boundaries(boundaries: Boundaries | None) -> list[int]:
    """Rows, levels, then for each row and level the number of starts and the starts."""
    if boundaries is None:
        return []
    flat = [len(boundaries), len(boundaries[0])]
    for row in boundaries:
        for starts in row:
            flat += [len(starts), *starts]
    return flat


def _nested_boundaries(flat: Sequence[int]) -> Boundaries | None:
    if not flat:
        return None
    num_rows, num_levels, *rest = flat
    values = iter(rest)
    return tuple(
        tuple(tuple(next(values) for _ in range(next(values))) for _ in range(num_levels)) for _ in range(num_rows)
    )


# A ``Call`` and a backend in the terms of an operator's schema; the tensors among them come first.
_OPTIONS = (
    "Tensor? attn_bias, Tensor? cu_seqlens, Tensor? left_padding, Tensor? seed, int[] ranks, int[] block_sizes, "
    "int[] value_ranks, int[] boundaries, str scaling, bool is_causal, float? scale, int? window, float dropout_p, str backend"
)
_NUM_TENSORS = 4


def _flat(call: Call, backend: str) -> tuple[Any, ...]:
    """The arguments of ``_OPTIONS``."""
    layout = call.layout
    return (
        call.attn_bias,
        call.cu_seqlens,
        call.left_padding,
        call.seed,
        layout.ranks,
        layout.block_sizes,
        layout.value_ranks or (),
        _flat_boundaries(layout.boundaries),
        layout.scaling,
        call.is_causal,
        call.scale,
        call.window,
        call.dropout_p,
        backend,
    )


def _layout(ranks: Any, block_sizes: Any, value_ranks: Any, boundaries: Any, scaling: str) -> LevelLayout:
    known = next(name for name in SCALINGS if name == scaling)
    nested = _nested_boundaries(boundaries)
    return LevelLayout(tuple(ranks), tuple(block_sizes), known, tuple(value_ranks) or None, nested)


def _call(options: Sequence[Any]) -> tuple[Call, str]:
    """The call and the backend that ``_flat`` wrote."""
    attn_bias, cu_seqlens, left_padding, seed, *plain = options
    is_causal, scale, window, dropout_p, backend = plain[5:]
    call = Call(
        layout=_layout(*plain[:5]),
        is_causal=is_causal,
        scale=scale,
        window=window,
        attn_bias=attn_bias,
        dropout_p=dropout_p,
        cu_seqlens=cu_seqlens,
        left_padding=left_padding,
        seed=seed,
    )
    return call, backend


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    call, backend = _call(options)
    with torch.autocast(q.device.type, enabled=False):  # it would turn the products here into 16-bit ones
        if backend == "triton":
            from structattn.ops import triton_attention

            return triton_attention.forward(q, k, v, call)
        return blocked.forward(q, k, v, call)


_operator = custom_op(
    "structattn::attention",
    _attention,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=dtype)


def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs_bias: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, backend = _call(options)
    with torch.autocast(q.device.type, enabled=False):
        if backend == "triton":
            from structattn.ops import triton_attention

            return *triton_attention.backward(grad_out, grad_lse, q, k, v, out, lse, call), q.new_empty(0)
        dq, dk, dv, grad_bias = blocked.backward(grad_out, grad_lse, q, k, v, out, lse, call, needs_bias=needs_bias)
    return dq, dk, dv, q.new_empty(0) if grad_bias is None else grad_bias


_backward_operator = custom_op(
    "structattn::attention_backward",
    _attention_backward,
    mutates_args=(),
    schema=(
        "(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool needs_bias, Tensor q, Tensor k, Tensor v, "
        f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


@_backward_operator.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs_bias: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    bias = options[0] if needs_bias else q.new_empty(0)
    return dq, dk, dv, torch.empty_like(bias, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, attn_bias, cu_seqlens, left_padding, seed, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, attn_bias, cu_seqlens, left_padding, seed, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needs_bias = tensors[3] is not None and ctx.needs_input_grad[3]
    dq, dk, dv, grad_bias = torch.ops.structattn.attention_backward(
        grad_out, grad_lse, out, lse, needs_bias, *tensors, *ctx.options
    )
    return dq, dk, dv, grad_bias if needs_bias else None, *(None,) * (3 + len(ctx.options))


_operator.register_autograd(_backward, setup_context=_setup_context)


def _flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], options: Sequence[Any], products: tuple[int, int]
) -> int:
    """``products`` times the FLOPs of all scores and of all weighted sums; packed sequences count as one."""
    layout = _layout(*options[:5])
    is_causal, window = options[5], options[7]
    total = 0
    for row in range(q[0]):
        pairs = visible_pairs_per_level(layout, q[2], k[2], window, is_causal, row if layout.num_rows else 0)
        scores = sum(rank * n for rank, n in zip(layout.ranks, pairs, strict=True))
        values = sum(rank * n for rank, n in zip(layout.value_ranks or (v[3],), pairs, strict=False))
        total += 2 * q[1] * (products[0] * scores + products[1] * values)
    return total


@register_flop_formula(torch.ops.structattn.attention)
def _forward_flops(q: Any, k: Any, v: Any, *options: Any, **_: Any) -> int:
    return _flops(q, k, v, options[_NUM_TENSORS:], (1, 1))


@register_flop_formula(torch.ops.structattn.attention_backward)
def _backward_flops(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, needs_bias: bool, q: Any, k: Any, v: Any, *options: Any, **_: Any
) -> int:
    return _flops(q, k, v, options[_NUM_TENSORS:], (3, 2))


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Runs a fast backend, differentiably.

    Args:
        q, k, v: as in ``structured_attention``, checked.
        call: the options.
        backend: ``"blocked"`` or ``"triton"``.

    Returns:
        out (B, H, T, V) and lse (B, H, T). The gradients are exact and can not be differentiated again.
    """
    result: tuple[Tensor, Tensor] = torch.ops.structattn.attention(q, k, v, *_flat(call, backend))
    return result
