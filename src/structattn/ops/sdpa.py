"""One level by PyTorch's own ``scaled_dot_product_attention``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structattn.checks import holds
from structattn.ops import derivatives
from structattn.ops.call import Call
from structattn.ops.checks import without_autocast
from structattn.ops.terms import all_but

# On a CPU, values narrower than keys make PyTorch keep all scores: up to this many they cost less than
# anything else.
MOST_SCORES = 2**18
# Terms that it has not, besides the soft cap and ALiBi, for which ``why_not`` has its own words.
_LACKING = all_but("scale", "sinks", "attn_mask", "attn_bias", "softcap", "alibi_slopes")


def _has_one_query(q: Tensor, call: Call) -> bool:
    return call.is_causal and holds(q.shape[2] == 1)  # the last position sees every key


def why_not(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool = False) -> str | None:
    """The reason why PyTorch's kernels cannot run a call, or ``None``. Sinks are added by means of the
    log-sum-exp.
    """
    if call.terms.softcap is not None:
        return "PyTorch's kernels have no soft cap"
    if call.terms.alibi_slopes is not None:
        return "PyTorch's kernels take ALiBi as T x S numbers only"
    if (lacking := call.terms.first_of(_LACKING)) is not None:
        return f"PyTorch's kernels have no {lacking}"
    return "PyTorch's kernels return no log-sum-exp, which sinks need too" if return_lse else None


def suits(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool) -> bool:
    """Whether a call of one level is one that PyTorch's kernels run without T x S numbers that nobody asked
    for.
    """
    if why_not(q, k, v, call, return_lse) is not None:
        return False
    if call.window is not None or call.cu_seqlens is not None or call.left_padding is not None:
        return False  # only a T x S mask could say so
    if call.terms.attn_mask is not None:
        if call.terms.attn_bias is not None:
            return False
        has_all_pairs = call.terms.attn_mask.dim() > 1 and holds(call.terms.attn_mask.shape[-2] == q.shape[2])
        if call.is_causal and not has_all_pairs and not _has_one_query(q, call):
            return False  # the kernel takes one mask: of padding and causality it would have T x S numbers
    if call.is_causal and not holds(q.shape[2] == k.shape[2]) and not _has_one_query(q, call):
        return False  # PyTorch's causal queries are the first positions, not the last
    if not q.is_cpu:
        return True
    if call.dropout_p > 0:
        return False  # it keeps all scores, and its masks are not those of a seed
    # The fused kernel for CPUs wants values as wide as the keys.
    return q.shape[3] == v.shape[3] or holds(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= MOST_SCORES)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, None]:
    """Plain attention of a call that ``suits``, differentiable any number of times.

    Returns:
        (B, H, T, V) in q's dtype, and no log-sum-exp.

    Cost: that of PyTorch's kernel; second derivatives that of ``reference``.
    """
    mask, is_causal, dtype = _bias(q, call), call.is_causal and not _has_one_query(q, call), q.dtype
    query, key, value = q, k, v
    if mask is not None:
        if mask.dtype != dtype:  # the scores keep the digits of the bias, as those of the other backends
            wide = torch.promote_types(dtype, torch.float32)
            query, key, value, mask = (x.to(wide) for x in (q, k, v, mask))
        if is_causal:
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            mask, is_causal = mask.masked_fill(later, -torch.inf), False
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (1, 1, q.shape[2], k.shape[2])))
    scale = call.one_level_scale
    if scale <= 0:  # PyTorch's kernel would multiply the -inf of hidden pairs by it
        query, scale = query * scale, 1.0
    with without_autocast(q):
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=holds(q.shape[1] != k.shape[1]),
        )
    out = out if out.dtype == dtype else out.to(dtype)
    return (derivatives.with_further_derivatives(out, call, q, k, v) if out.requires_grad else out), None


def _bias(q: Tensor, call: Call) -> Tensor | None:
    """The bias or the mask, as numbers in its own shape: the kernel would expand a bool one first."""
    if call.terms.attn_mask is None:
        return call.terms.attn_bias
    return torch.zeros(call.terms.attn_mask.shape, dtype=q.dtype, device=q.device).masked_fill_(
        ~call.terms.attn_mask, -torch.inf
    )
