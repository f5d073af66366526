"""Plain attention over short sequences on a CPU: three batched products, with each operand in the layout that they read fastest.

What costs time at T = 32 and D = 4 is not arithmetic. Measured on one core (AMD EPYC, MKL, 512 matrices, float32):

- A product with narrow vectors is 2 to 4 times faster where they stand as columns, (D, T), and where the narrow side of the
  result comes first: (V, S) (S, T) instead of (T, S) (S, V). At T = 24, V = 2: 0.11 ms instead of 0.40. From ``NARROW`` on
  it makes no difference.
- A tensor of all scores that is new to the process costs as much as the product that fills it, in page faults; so the softmax and
  its gradient are written in place.
- Joining the heads to one wider product, with zeros outside of their slices, costs H times the arithmetic and is never faster
  than this: as fast at D = V = 2, 1.8 times slower at 8.
- PyTorch's fused kernel is faster forward (1.3 times), and slower with backward where heads are narrow: 1.3 times at D = V = 2 to
  8 and T = 24 to 128; as fast at 12 and more. It takes no values of another width than the keys.

Axes: N batch entries and heads together, T queries, S keys, D head dimension, V value dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from structattn.checks import holds
from structattn.ops.call import Call

NARROW = 16  # from so many dimensions on, products read rows as fast as columns
NARROW_HEAD = 8  # with gradients, up to so many dimensions PyTorch's fused kernel is slower
MOST_SCORES_PER_HEAD = 128**2  # beyond, hidden pairs are worth skipping
MOST_SCORES = 2**24  # they are all kept for the gradient, 64 MiB
DTYPES = (torch.float32, torch.float64)


def suits(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    """Whether a call is plain attention over short sequences that this file computes, and faster than anything else here.

    Gradients, dtype and device count; on other devices than a CPU nothing was measured.
    """
    if q.device.type != "cpu" or q.dtype not in DTYPES or torch.is_autocast_enabled("cpu"):
        return False
    if call.layout.num_levels > 1 or call.attn_bias is not None or call.dropout_p > 0:
        return False
    if call.cu_seqlens is not None or call.left_padding is not None:
        return False
    num_queries, num_keys = q.shape[2], k.shape[2]
    if (call.is_causal or call.window is not None) and not holds(num_queries <= num_keys):
        return False  # the first queries may see no key
    has_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    is_fused = (
        q.shape[3] == v.shape[3] and call.window is None and (not call.is_causal or holds(num_queries == num_keys))
    )
    if is_fused and not (has_gradient and q.shape[3] <= NARROW_HEAD):
        return False
    per_head = num_queries * num_keys
    is_small = holds(per_head <= MOST_SCORES_PER_HEAD) and holds(q.shape[0] * q.shape[1] * per_head <= MOST_SCORES)
    return is_small and holds(num_queries > 1)


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> Tensor:
    """Plain attention of a call that ``suits``, differentiable any number of times.

    Args:
        q: (B, H, T, D), ``DTYPES``.
        k: (B, G, S, D); G divides H.
        v: (B, G, S, V).
        call: the options.
        scale: of the scores.

    Returns:
        (B, H, T, V).

    Cost: 2 B H T S (D + V) FLOPs, hidden pairs included; one tensor of B H T S numbers, kept for the gradient.
    """
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    mask = _mask(q.shape[2], k.shape[2], call, q)
    if groups < heads:  # the queries of a group stand one after another: one longer product for each
        q = q.unflatten(1, (groups, -1)).flatten(2, 3)
        mask = None if mask is None else mask.repeat(heads // groups, 1)
    # Heads in front of the batch, or behind it: as the largest operand has them in memory.
    if torch.compiler.is_compiling():  # a compiler cannot read a stride that is dynamic
        heads_first = groups > 1 and k.transpose(0, 1).is_contiguous()
    else:
        heads_first = groups > 1 and k.stride(1) > k.stride(0)
    q, k, v = (_flat(x, heads_first) for x in (q, k, v))
    if torch.compiler.is_compiling():
        out = _traced(q, k, v, mask, scale)
    else:
        out = _ShortAttention.apply(q, k, v, mask, scale)[0]  # type: ignore[no-untyped-call]
    out = out.unflatten(0, (groups, batch)).transpose(0, 1) if heads_first else out.unflatten(0, (batch, groups))
    return out if groups == heads else out.unflatten(2, (heads // groups, -1)).flatten(1, 2)


def _mask(num_queries: int, num_keys: int, call: Call, like: Tensor) -> Tensor | None:
    """What is added to the scores, (T, S): 0 or, for hidden pairs, -inf; ``None`` where every pair is visible."""
    if not call.is_causal and call.window is None:
        return None
    shift = num_keys - num_queries
    zeros = torch.zeros(num_queries, num_keys, dtype=torch.bool, device=like.device)
    ones = ~zeros
    hidden = ones.triu(shift + 1) if call.is_causal else zeros
    if call.window is not None:
        hidden = hidden | ones.tril(shift - call.window)
        if not call.is_causal:
            hidden = hidden | ones.triu(shift + call.window)
    return torch.zeros(num_queries, num_keys, dtype=like.dtype, device=like.device).masked_fill(hidden, -torch.inf)


def _flat(x: Tensor, heads_first: bool) -> Tensor:
    """(B, G, T, D) to (N, T, D), a view of columns (N, D, T) where D is narrow."""
    x = x.transpose(0, 1) if heads_first else x
    if x.shape[3] < NARROW:
        return x.transpose(2, 3).flatten(0, 1).contiguous().transpose(1, 2)
    return x.flatten(0, 1)


def _product(a: Tensor, b: Tensor, scale: float | None = None) -> Tensor:
    """scale * (N, A, B) (N, B, C)."""
    if scale is None:
        return torch.bmm(a, b)
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)  # inside of the product the factor is free


def _times(weights: Tensor, x: Tensor, scale: float | None = None) -> Tensor:
    """scale * (N, A, B) (N, B, C), as columns where C is narrow."""
    if x.shape[2] < NARROW:
        return _product(x.transpose(1, 2), weights.transpose(1, 2), scale).transpose(1, 2)
    return _product(weights, x, scale)


def _traced(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The output of ``_ShortAttention`` for a compiler, which plans memory itself and may lose second derivatives of a function."""
    scores = torch.bmm(q * scale, k.transpose(1, 2))
    return _times((scores if mask is None else scores + mask).softmax(-1), v)


class _ShortAttention(torch.autograd.Function):
    """(N, T, D), (N, S, D), (N, S, V), (T, S) or ``None``, scale: the output (N, T, V), and the weights (N, T, S).

    The gradient needs the weights; that they are an output, with a gradient, is what makes the gradient differentiable.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        columns = k.transpose(1, 2)
        scores = _product(q, columns, scale) if mask is None else torch.baddbmm(mask, q, columns, alpha=scale)
        weights = torch.softmax(scores, -1, out=scores)
        return _times(weights, v), weights

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Any, output: Any) -> None:
        q, k, v, _, ctx.scale = inputs  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)  # the weights have a gradient in second derivatives only
        ctx.save_for_backward(q, k, v, output[1])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_given: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        d_weights, d_v = d_given, None
        if d_out is not None:
            d_weights = torch.bmm(d_out, v.transpose(1, 2))
            d_weights = d_weights if d_given is None else d_weights + d_given
            d_v = _times(weights.transpose(1, 2), d_out)
        if d_weights is None:
            return (None,) * 5
        if d_given is not None or torch.is_grad_enabled():
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        else:
            d_scores = torch.ops.aten._softmax_backward_data.out(
                d_weights, weights, -1, weights.dtype, grad_input=d_weights
            )
        return _times(d_scores, k, ctx.scale), _times(d_scores.transpose(1, 2), q, ctx.scale), d_v, None, None
