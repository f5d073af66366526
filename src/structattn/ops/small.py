"""Small problems on a CPU, whose scores are all kept: plain attention, and levels of equal blocks.

What costs time at T = 32 and D = 4 is not arithmetic. Measured on one core (AMD EPYC, MKL, 512 matrices,
float32):

- A product with narrow vectors is 2 to 4 times faster in feature-major layout, (D, T), and where the narrow
  side of the result comes first: (V, S) (S, T) instead of (T, S) (S, V). At T = 24, V = 2: 0.11 ms instead of
  0.40. From ``NARROW`` on it makes no difference.
- A tensor of all scores that is new to the process costs as much as the product that fills it, in page
  faults; so the softmax and its gradient are written in place.
- Joining the heads to one wider product, with zeros outside of their slices, costs H times the arithmetic and
  is never faster than this: as fast at D = V = 2, 1.8 times slower at 8.
- PyTorch's fused kernel is faster forward (1.3 times), and slower with backward where heads are narrow: 1.3
  times at D = V = 2 to 8 and T = 24 to 128; as fast at 12 and more. It takes no values of another width than
  the keys.
- With levels the time is that of many small operations. What depends on the layout and the lengths only, the
  factor of each pair at each level, is a table that is made once: then a level costs one product and one
  addition.
- A sink is one more key: of zeros, with the sink as its score. That is one more column in products that are
  made anyway; by the log-sum-exp it would be one more pass over all scores.

Axes: N batch entries and heads together, T queries, S keys, D head dimension, V value dimension.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structattn.checks import holds
from structattn.layout.levels import LevelLayout
from structattn.ops import sdpa, small_causal
from structattn.ops.call import Call
from structattn.ops.checks import is_eager
from structattn.ops.terms import all_but, needs_gradient

NARROW = 16  # from this number of dimensions on, products read rows as fast as features
NARROW_HEAD = 8  # with gradients, up to this number of dimensions PyTorch's fused kernel is slower
MOST_SCORES_PER_HEAD = 512**2  # of several levels, where ``small_causal`` skips hidden pairs
MOST_SCORES_PER_HEAD_AT_ONCE = 128**2  # of all others: beyond, hidden pairs are worth skipping
MOST_SCORES = 2**24  # they are all kept for the gradient, 64 MiB
# Beyond, the blocked backend is as fast for a soft cap or sinks: of one level with gradients. A quarter with
# levels, a quarter without gradients.
MOST_SCORES_UNMASKED = 2**22
DTYPES = (torch.float32, torch.float64)
_LACKING = all_but("scale", "softcap", "sinks", "attn_mask")

# For each level the features that it has, and the factor of each pair of positions at this level, (T, S).
Levels = tuple[tuple[slice, Tensor], ...]


def suits(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool) -> bool:
    """Whether this file computes a call with few scores per head, and faster than anything else here.

    Gradients, dtype and device count; on other devices than a CPU nothing was measured.
    """
    if return_lse or not q.is_cpu or q.dtype not in DTYPES:
        return False
    (batch, heads, num_queries, dim), num_keys, layout = q.shape, k.shape[2], call.layout
    has_spans = small_causal.suits(q, k, call)
    if not has_spans and not holds(num_queries * num_keys <= MOST_SCORES_PER_HEAD_AT_ONCE):
        return False
    has_gradient = needs_gradient(q, k, v, call.terms.sinks)
    if len(layout.ranks) == 1:
        is_fused = dim == v.shape[3] and sdpa.suits(q, k, v, call, call.terms.sinks is not None)
        if (is_fused and not (has_gradient and dim <= NARROW_HEAD)) or not holds(num_queries > 1):
            return False
    elif layout.boundaries is not None or layout.value_ranks is not None or not is_eager(q):
        return False
    has_terms = call.terms.softcap is not None or call.terms.attn_mask is not None or call.terms.sinks is not None
    if call.terms.first_of(_LACKING) is not None or call.dropout_p > 0 or (has_terms and not is_eager(q)):
        return False
    if call.cu_seqlens is not None or call.left_padding is not None or torch.is_autocast_enabled("cpu"):
        return False
    if (call.is_causal or call.window is not None) and not holds(num_queries <= num_keys):
        return False  # the first queries may see no key
    limit, has_levels = MOST_SCORES, len(layout.ranks) > 1
    if call.terms.attn_mask is None and not has_spans and (has_terms or has_levels):
        limit = MOST_SCORES_UNMASKED // (4 if has_levels else 1) // (1 if has_gradient else 4)
    return holds(batch * heads * num_queries * num_keys <= limit)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, None]:
    """Attention of a call that ``suits``, differentiable any number of times.

    Args:
        q: (B, H, T, D), ``DTYPES``.
        k: (B, G, S, D); G divides H.
        v: (B, G, S, V).
        call: the options, sinks too.

    Returns:
        (B, H, T, V), and no log-sum-exp.

    Cost: 2 B H T S (D + V) FLOPs, hidden pairs included; one tensor of B H T S numbers, kept for the
    gradient, and another with a soft cap. Sinks are one key more.
    """
    if small_causal.suits(q, k, call):
        return small_causal.forward(q, k, v, call), None
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    repeats, num_queries, num_keys = heads // groups if groups else 1, q.shape[2], k.shape[2]
    has_sinks = call.terms.sinks is not None
    constants = (
        call.layout,
        num_queries,
        num_keys,
        repeats,
        call.is_causal,
        call.window,
        call.terms.scale,
        q.dtype,
        has_sinks,
    )
    mask, levels = (_cached_tables if is_eager(q) else _tables)(*constants)
    if repeats > 1:  # the queries of a group are concatenated: one longer product for each
        q = q.unflatten(1, (groups, -1)).flatten(2, 3)
    # Heads in front of the batch, or after it: as the largest operand has them in memory.
    if torch.compiler.is_compiling():  # a compiler cannot read a stride that is dynamic
        heads_first = groups > 1 and k.transpose(0, 1).is_contiguous()
    else:
        heads_first = groups > 1 and k.stride(1) > k.stride(0)
    narrow = levels is not None or q.shape[3] < NARROW
    if has_sinks:  # a key and a value of zeros; its score is written into its column
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
    q, k, v = _flat(q, heads_first, narrow), _flat(k, heads_first, narrow), _flat(v, heads_first, v.shape[3] < NARROW)
    if torch.compiler.is_compiling():
        out = _traced(q, k, v, mask, call.one_level_scale)
    else:
        front = (groups, batch) if heads_first else (batch, groups)
        hidden = _hidden(call.terms.attn_mask, mask, (heads, groups, num_queries, num_keys), heads_first)
        score = _Score(
            mask=mask if hidden is None else None,
            levels=levels,
            scale=1.0 if levels is not None else call.one_level_scale,
            softcap=call.terms.softcap,
            hidden=hidden,
            keeps_tanh=needs_gradient(q, k, v),
            shape=(*front, repeats, num_queries, k.shape[1]),
        )
        sinks = None
        if call.terms.sinks is not None:
            sinks = call.terms.sinks.to(q.dtype).view(
                (groups, 1, repeats, 1) if heads_first else (1, groups, repeats, 1)
            )
        out = _SmallAttention.apply(q, k, v, sinks, score)[0]  # type: ignore[no-untyped-call]
    out = out.unflatten(0, (groups, batch)).transpose(0, 1) if heads_first else out.unflatten(0, (batch, groups))
    return (out if repeats == 1 else out.unflatten(2, (repeats, -1)).flatten(1, 2)), None


def _hidden(
    attn_mask: Tensor | None, mask: Tensor | None, sizes: tuple[int, int, int, int], heads_first: bool
) -> Tensor | None:
    """The pairs that a mask or the table of a call hides, bool, broadcastable to (B, G, H / G, T, S), G in
    front with ``heads_first``.

    Args:
        attn_mask: of the call, broadcastable to (B, H, T, S).
        mask: the table of the call, of which the first T rows and S columns are read.
        sizes: H, G, T and S.
        heads_first: whether groups are in front of the batch.
    """
    if attn_mask is None:
        return None
    heads, groups, num_queries, num_keys = sizes
    shown = attn_mask[(None,) * (4 - attn_mask.dim())].expand(-1, -1, -1, num_keys)
    if mask is not None:
        shown = shown & (mask[:num_queries, :num_keys] == 0)
    shown = shown.unflatten(1, (groups, -1) if shown.shape[1] == heads else (1, 1))
    return ~(shown.transpose(0, 1) if heads_first else shown)


def _tables(
    layout: LevelLayout,
    num_queries: int,
    num_keys: int,
    repeats: int,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    dtype: torch.dtype,
    has_sinks: bool,
) -> tuple[Tensor | None, Levels | None]:
    """What is added to the scores, 0 or -inf, ``None`` where every pair is visible; and the levels, ``None``
    for one.

    Tables have ``repeats * T`` rows, for the heads that share a key, and with sinks a column of zeros for
    them.
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
            hidden[:, : layout.sink_tokens] = (ones.triu(shift + 1) if is_causal else zeros)[:, : layout.sink_tokens]
        mask = torch.zeros(num_queries, num_keys, dtype=dtype, device="cpu").masked_fill(hidden, -torch.inf)
        mask = mask if repeats == 1 else mask.repeat(repeats, 1)
    if len(layout.ranks) > 1:
        levels = _levels(layout, num_queries, num_keys, repeats, scale, dtype)
    if has_sinks:
        mask = None if mask is None else _with_column(mask)
        levels = None if levels is None else tuple((features, _with_column(weight)) for features, weight in levels)
    return mask, levels


def _with_column(table: Tensor) -> Tensor:
    """A table with a column of zeros at the end."""
    return torch.cat([table, table.new_zeros((table.shape[0], 1))], dim=1)


@functools.lru_cache(maxsize=32)  # of at most levels * 64 KiB in float32
def _cached_tables(*constants: Any) -> tuple[Tensor | None, Levels | None]:
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
    levels: list[tuple[slice, Tensor]] = []
    for level, (features, factor) in enumerate(zip(layout.slices, per_level, strict=True), start=1):
        shared = num_shared >= level
        if level > 1 and not bool(shared.any()):
            break
        weight = (factors * factor).masked_fill(~shared, 0.0)
        if levels and torch.equal(weight, levels[-1][1]):  # at this length one level as the level before
            levels[-1] = slice(levels[-1][0].start, features.stop), weight
        else:
            levels.append((features, weight))
    return tuple((features, weight.repeat(repeats, 1)) for features, weight in levels)


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
    """The output of ``_SmallAttention`` for a compiler, which plans memory itself and may lose second
    derivatives of a function.
    """
    scores = torch.bmm(q * scale, k.transpose(1, 2))
    return _times((scores if mask is None else scores + mask).softmax(-1), v)


def _level_scores(q: Tensor, keys: Tensor, mask: Tensor | None, levels: Levels) -> Tensor:
    """The scores of several levels and the mask, (N, T, S); ``keys`` are (N, D, S)."""
    (features, weight), *deeper = levels
    scores = torch.bmm(q[..., features], keys[:, features])
    scores = scores.mul_(weight) if mask is None else torch.addcmul(mask, scores, weight)
    for features, weight in deeper:
        scores.addcmul_(torch.bmm(q[..., features], keys[:, features]), weight)
    return scores


class _Score(NamedTuple):
    """What makes the scores (N, T, S) of the products of queries and keys.

    Attributes:
        mask: added to them, (T, S), or ``None``.
        levels: see ``_levels``; ``None`` for one level.
        scale: of one level.
        softcap: caps them before the mask.
        hidden: bool, broadcastable to ``shape`` without sinks, in place of ``mask``.
        keeps_tanh: whether the tanh of the soft cap is kept, for the gradient.
        shape: of the scores with all axes of the call: (B, G, H / G, T, S), or with B and G exchanged.
    """

    mask: Tensor | None
    levels: Levels | None
    scale: float
    softcap: float | None
    hidden: Tensor | None
    keeps_tanh: bool
    shape: tuple[int, int, int, int, int]

    def products(self, q: Tensor, keys: Tensor, mask: Tensor | None, factor: float) -> Tensor:
        """The scaled products and the mask, times a factor where there is no mask."""
        if self.levels is not None:
            scores = _level_scores(q, keys, mask, self.levels)
            return scores if factor == 1.0 else scores.mul_(factor)
        if mask is None:
            return _product(q, keys, self.scale * factor)
        return torch.baddbmm(mask, q, keys, alpha=self.scale)

    def scores(self, q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores before sinks; with a soft cap also the tanh of them, if it is kept. ``keys`` are (N, D,
        S).
        """
        tanh = None
        if self.softcap is None:
            scores = self.products(q, keys, self.mask, 1.0)
        else:
            tanh = self.products(q, keys, None, 1 / self.softcap).tanh_()
            scores = tanh * self.softcap if self.keeps_tanh else tanh.mul_(self.softcap)
            if self.mask is not None:
                scores += self.mask
        if self.hidden is not None:
            scores.view(self.shape)[..., : self.hidden.shape[-1]].masked_fill_(self.hidden, -torch.inf)
        return scores, tanh if self.keeps_tanh else None

    def clear(self, weights: Tensor) -> None:
        """Makes the weights of rows that see nothing 0 in place: they are NaN."""
        if self.hidden is not None and bool((empty := self.hidden.all(-1, keepdim=True)).any()):
            weights.view(self.shape).masked_fill_(empty, 0.0)


class _SmallAttention(torch.autograd.Function):
    """(N, T, D), (N, S, D), (N, S, V), sinks, and the score: the output (N, T, V), the weights (N, T, S), and
    the tanh of a soft cap.

    Sinks may be ``None``; else they are (1, G, H / G, 1), or in the order of the score's shape, and take the
    last column. The gradient needs the weights and the tanh; that they are outputs, with a gradient, is what
    makes the gradient differentiable.
    """

    # Without setup_context, for which PyTorch reads the signature at every call; transforms of functions
    # never come here.
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, score: _Score
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        scores, tanh = score.scores(q, k.transpose(1, 2))
        if sinks is not None:
            scores.view(score.shape)[..., -1] = sinks
        weights = torch.softmax(scores, -1, out=scores)
        if sinks is None:  # else no row is empty
            score.clear(weights)
        ctx.score, ctx.sinks_shape = score, None if sinks is None else sinks.shape
        ctx.set_materialize_grads(False)  # the weights have a gradient in second derivatives only
        ctx.save_for_backward(q, k, v, weights, tanh)
        return _times(weights, v), weights, tanh

    @staticmethod
    def backward(
        ctx: Any, d_out: Tensor | None, d_given: Tensor | None, d_tanh: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, weights, tanh = ctx.saved_tensors
        score = ctx.score
        d_weights, d_v, d_sinks = d_given, None, None
        if d_out is not None:
            d_weights = torch.bmm(d_out, v.transpose(1, 2))
            d_weights = d_weights if d_given is None else d_weights + d_given
            d_v = _times(weights.transpose(1, 2), d_out)
        if d_weights is None and d_tanh is None:
            return (None,) * 5
        is_last = d_given is None and d_tanh is None and not torch.is_grad_enabled()  # numbers may be overwritten
        d_scores = torch.zeros_like(weights) if d_weights is None else d_weights
        if is_last:
            torch.ops.aten._softmax_backward_data.out(d_scores, weights, -1, weights.dtype, grad_input=d_scores)
        elif d_weights is not None:
            d_scores = torch._softmax_backward_data(d_scores, weights, -1, weights.dtype)
        if ctx.sinks_shape is not None:
            d_sinks = d_scores.reshape(score.shape)[..., -1].sum_to_size(ctx.sinks_shape)
        if tanh is not None and is_last:
            torch.ops.aten.tanh_backward.grad_input(d_scores, tanh, grad_input=d_scores)
        elif tanh is not None:
            d_capped = d_scores if d_tanh is None else d_scores + d_tanh / score.softcap
            d_scores = torch.ops.aten.tanh_backward(d_capped, tanh)
        if score.levels is None:
            d_q, d_k = _times(d_scores, k, score.scale), _times(d_scores.transpose(1, 2), q, score.scale)
            return d_q, d_k, d_v, d_sinks, None
        d_qs, d_ks = [], []
        for features, weight in score.levels:
            d_products = d_scores * weight
            d_qs.append(_times(d_products, k[..., features]).transpose(1, 2))
            d_ks.append(_times(d_products.transpose(1, 2), q[..., features]).transpose(1, 2))
        if (num_unshared := q.shape[2] - score.levels[-1][0].stop) > 0:  # levels that no pair shares
            d_qs.append(q.new_zeros((q.shape[0], num_unshared, q.shape[1])))
            d_ks.append(k.new_zeros((k.shape[0], num_unshared, k.shape[1])))
        return torch.cat(d_qs, 1).transpose(1, 2), torch.cat(d_ks, 1).transpose(1, 2), d_v, d_sinks, None
