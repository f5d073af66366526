"""Small problems on a CPU, whose scores are all kept: plain attention, and levels of equal blocks.

What costs time at T = 32 and D = 4 is not arithmetic. Measured on one core (AMD EPYC, MKL, 512 matrices, float32):

- A product with narrow vectors is 2 to 4 times faster in feature-major layout, (D, T), and where the narrow side of the
  result comes first: (V, S) (S, T) instead of (T, S) (S, V). At T = 24, V = 2: 0.11 ms instead of 0.40. From ``NARROW`` on
  it makes no difference.
- A tensor of all scores that is new to the process costs as much as the product that fills it, in page faults; so the softmax and
  its gradient are written in place.
- Joining the heads to one wider product, with zeros outside of their slices, costs H times the arithmetic and is never faster
  than this: as fast at D = V = 2, 1.8 times slower at 8.
- PyTorch's fused kernel is faster forward (1.3 times), and slower with backward where heads are narrow: 1.3 times at D = V = 2 to
  8 and T = 24 to 128; as fast at 12 and more. It takes no values of another width than the keys.
- With levels the time is that of many small operations. What depends on the layout and the lengths only, the factor of each pair
  at each level, is a table that is made once: then a level costs one product and one addition.

Axes: N batch entries and heads together, T queries, S keys, D head dimension, V value dimension.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from structattn.checks import holds
from structattn.layout.levels import LevelLayout
from structattn.ops.call import Call
from structattn.ops.checks import is_eager

NARROW = 16  # from this number of dimensions on, products read rows as fast as features
NARROW_HEAD = 8  # with gradients, up to this number of dimensions PyTorch's fused kernel is slower
MOST_SCORES_PER_HEAD = 128**2  # beyond, hidden pairs are worth skipping
MOST_SCORES = 2**24  # they are all kept for the gradient, 64 MiB
DTYPES = (torch.float32, torch.float64)

# For each level the features that it has, and the factor of each pair of positions at this level, (T, S).
Levels = tuple[tuple[slice, Tensor], ...]


def why_not(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """The reason why this file cannot run a call, or ``None``; it has no log-sum-exp either, so no sinks."""
    if call.softcap is not None:
        return "the weights alone do not give the slope of a soft cap"
    return (
        None if call.alibi_slopes is None else "its tables are the same for all heads, and ALiBi has a slope per head"
    )


def suits(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool) -> bool:
    """Whether this file computes a call with few scores per head, and faster than anything else here.

    Gradients, dtype and device count; on other devices than a CPU nothing was measured.
    """
    if return_lse or why_not(q, k, v, call) is not None or not q.is_cpu or q.dtype not in DTYPES:
        return False
    (batch, heads, num_queries, dim), num_keys, layout = q.shape, k.shape[2], call.layout
    if len(layout.ranks) == 1:
        is_fused = call.window is None and dim == v.shape[3] and (not call.is_causal or holds(num_queries == num_keys))
        has_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if (is_fused and not (has_gradient and dim <= NARROW_HEAD)) or not holds(num_queries > 1):
            return False
    elif layout.boundaries is not None or layout.value_ranks is not None or not is_eager(q):
        return False
    if call.attn_bias is not None or call.attn_mask is not None or call.dropout_p > 0:
        return False
    if call.cu_seqlens is not None or call.left_padding is not None or torch.is_autocast_enabled("cpu"):
        return False
    if (call.is_causal or call.window is not None) and not holds(num_queries <= num_keys):
        return False  # the first queries may see no key
    return holds(batch * heads * num_queries * num_keys <= MOST_SCORES)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, None]:
    """Attention of a call that ``suits``, differentiable any number of times.

    Args:
        q: (B, H, T, D), ``DTYPES``.
        k: (B, G, S, D); G divides H.
        v: (B, G, S, V).
        call: the options.

    Returns:
        (B, H, T, V), and no log-sum-exp.

    Cost: 2 B H T S (D + V) FLOPs, hidden pairs included; one tensor of B H T S numbers, kept for the gradient.
    """
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    repeats = heads // groups if groups else 1
    constants = (call.layout, q.shape[2], k.shape[2], repeats, call.is_causal, call.window, call.scale, q.dtype)
    mask, levels = (_kept_tables if is_eager(q) else _tables)(*constants)
    if repeats > 1:  # the queries of a group are concatenated: one longer product for each
        q = q.unflatten(1, (groups, -1)).flatten(2, 3)
    # Heads in front of the batch, or after it: as the largest operand has them in memory.
    if torch.compiler.is_compiling():  # a compiler cannot read a stride that is dynamic
        heads_first = groups > 1 and k.transpose(0, 1).is_contiguous()
    else:
        heads_first = groups > 1 and k.stride(1) > k.stride(0)
    narrow = levels is not None or q.shape[3] < NARROW
    q, k, v = _flat(q, heads_first, narrow), _flat(k, heads_first, narrow), _flat(v, heads_first, v.shape[3] < NARROW)
    if torch.compiler.is_compiling():
        out = _traced(q, k, v, mask, call.one_level_scale)
    else:
        factor = 1.0 if levels is not None else call.one_level_scale
        out = _SmallAttention.apply(q, k, v, mask, levels, factor)[0]  # type: ignore[no-untyped-call]
    out = out.unflatten(0, (groups, batch)).transpose(0, 1) if heads_first else out.unflatten(0, (batch, groups))
    return (out if repeats == 1 else out.unflatten(2, (repeats, -1)).flatten(1, 2)), None


def _tables(
    layout: LevelLayout,
    num_queries: int,
    num_keys: int,
    repeats: int,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Levels | None]:
    """What is added to the scores, 0 or -inf, ``None`` where every pair is visible; and the levels, ``None`` for one.

    Tables have ``repeats * T`` rows, for the heads that share a key.
    """
    mask = levels = None
    if is_causal or window is not None:
        shift = num_keys - num_queries
        zeros = torch.zeros(num_queries, num_keys, dtype=torch.bool, device="cpu")
        ones = ~zeros
        hidden = ones.triu(shift + 1) if is_causal else zeros
        if window is not None:
            hidden = hidden | ones.tril(shift - window)
            if not is_causal:
                hidden = hidden | ones.triu(shift + window)
        mask = torch.zeros(num_queries, num_keys, dtype=dtype, device="cpu").masked_fill(hidden, -torch.inf)
        mask = mask if repeats == 1 else mask.repeat(repeats, 1)
    if len(layout.ranks) > 1:
        levels = _levels(layout, num_queries, num_keys, repeats, scale, dtype)
    return mask, levels


@functools.lru_cache(maxsize=32)  # of at most levels * 64 KiB in float32
def _kept_tables(*constants: Any) -> tuple[Tensor | None, Levels | None]:
    with torch.inference_mode(False), torch.no_grad():  # so that any later call may use them
        return _tables(*constants)


def _levels(
    layout: LevelLayout, num_queries: int, num_keys: int, repeats: int, scale: float | None, dtype: torch.dtype
) -> Levels:
    per_level, per_count = layout.score_factors(scale)
    positions = torch.arange(min(num_keys - num_queries, 0), num_keys, device="cpu")
    queries, keys = positions[len(positions) - num_queries :], positions[len(positions) - num_keys :]
    num_shared = layout.shared_levels(queries[:, None], keys[None])
    factors = torch.tensor(per_count, dtype=dtype, device="cpu")[num_shared - 1]
    found: list[tuple[slice, Tensor]] = []
    for level, (features, factor) in enumerate(zip(layout.slices, per_level, strict=True), start=1):
        shared = num_shared >= level
        if level > 1 and not bool(shared.any()):
            break
        weight = (factors * factor).masked_fill(~shared, 0.0)
        if found and torch.equal(weight, found[-1][1]):  # at this length one level as the level before
            found[-1] = slice(found[-1][0].start, features.stop), weight
        else:
            found.append((features, weight))
    return tuple((features, weight.repeat(repeats, 1)) for features, weight in found)


def _flat(x: Tensor, heads_first: bool, narrow: bool) -> Tensor:
    """(B, G, T, D) to (N, T, D), a view of (N, D, T) where rows are narrow."""
    x = x.transpose(0, 1) if heads_first else x
    return x.transpose(2, 3).flatten(0, 1).contiguous().transpose(1, 2) if narrow else x.flatten(0, 1)


def _product(a: Tensor, b: Tensor, scale: float | None = None) -> Tensor:
    """scale * (N, A, B) (N, B, C)."""
    if scale is None:
        return torch.bmm(a, b)
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)  # inside of the product the factor is free


def _times(weights: Tensor, x: Tensor, scale: float | None = None) -> Tensor:
    """scale * (N, A, B) (N, B, C), feature-major where C is narrow."""
    if x.shape[2] < NARROW:
        return _product(x.transpose(1, 2), weights.transpose(1, 2), scale).transpose(1, 2)
    return _product(weights, x, scale)


def _traced(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The output of ``_SmallAttention`` for a compiler, which plans memory itself and may lose second derivatives of a function."""
    scores = torch.bmm(q * scale, k.transpose(1, 2))
    return _times((scores if mask is None else scores + mask).softmax(-1), v)


def _level_scores(q: Tensor, keys: Tensor, mask: Tensor | None, levels: Levels) -> Tensor:
    """The scores of several levels and the mask, (N, T, S); ``keys`` are (N, D, S)."""
    (features, weight), *rest = levels
    scores = torch.bmm(q[..., features], keys[:, features])
    scores = scores.mul_(weight) if mask is None else torch.addcmul(mask, scores, weight)
    for features, weight in rest:
        scores.addcmul_(torch.bmm(q[..., features], keys[:, features]), weight)
    return scores


class _SmallAttention(torch.autograd.Function):
    """(N, T, D), (N, S, D), (N, S, V), mask, levels, and the scale of one level: the output (N, T, V), and the weights (N, T, S).

    Mask and levels may be ``None``. The gradient needs the weights; that they are an output, with a gradient, is what
    makes the gradient differentiable.
    """

    # Without setup_context, for which PyTorch reads the signature at every call; transforms of functions never come here.
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, levels: Levels | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        keys = k.transpose(1, 2)
        if levels is not None:
            scores = _level_scores(q, keys, mask, levels)
        else:
            scores = _product(q, keys, scale) if mask is None else torch.baddbmm(mask, q, keys, alpha=scale)
        weights = torch.softmax(scores, -1, out=scores)
        ctx.levels, ctx.scale = levels, scale
        ctx.set_materialize_grads(False)  # the weights have a gradient in second derivatives only
        ctx.save_for_backward(q, k, v, weights)
        return _times(weights, v), weights

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_given: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        d_weights, d_v = d_given, None
        if d_out is not None:
            d_weights = torch.bmm(d_out, v.transpose(1, 2))
            d_weights = d_weights if d_given is None else d_weights + d_given
            d_v = _times(weights.transpose(1, 2), d_out)
        if d_weights is None:
            return (None,) * 6
        if d_given is not None or torch.is_grad_enabled():
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        else:
            d_scores = torch.ops.aten._softmax_backward_data.out(
                d_weights, weights, -1, weights.dtype, grad_input=d_weights
            )
        if ctx.levels is None:
            return _times(d_scores, k, ctx.scale), _times(d_scores.transpose(1, 2), q, ctx.scale), d_v, *(None,) * 3
        d_q, d_k = [], []
        for features, weight in ctx.levels:
            own = d_scores * weight
            d_q.append(_times(own, k[..., features]).transpose(1, 2))
            d_k.append(_times(own.transpose(1, 2), q[..., features]).transpose(1, 2))
        if (rest := q.shape[2] - ctx.levels[-1][0].stop) > 0:  # levels that no pair shares
            d_q.append(q.new_zeros((q.shape[0], rest, q.shape[1])))
            d_k.append(k.new_zeros((k.shape[0], rest, k.shape[1])))
        return torch.cat(d_q, 1).transpose(1, 2), torch.cat(d_k, 1).transpose(1, 2), d_v, *(None,) * 3
