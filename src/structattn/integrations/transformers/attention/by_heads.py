"""Attention over a long prompt a few key heads at a time, so that copies are those of a few heads and not of
all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from structattn.integrations.transformers.attention.call import Reorder
from structattn.ops.terms import ScoreTerms, needs_gradient

# Numbers of the queries that are computed together: with fewer, the calls of many small operators would take
# longer.
_NUMBERS = 2**20


def heads_at_once(q: Tensor, k: Tensor, v: Tensor, terms: ScoreTerms, *, dropout: float) -> int:
    """How many key heads are computed together.

    All of them: in a short prompt, in training, in a traced program, on a GPU, and where a term differs by
    head.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, S, D) and (B, G, S, V).
        terms, dropout: of ``Variant.attend``.
    """
    heads = k.shape[1]
    if torch.compiler.is_compiling() or not q.is_cpu or q.numel() <= _NUMBERS:
        return heads
    if needs_gradient(q, k, v):
        return heads
    if dropout > 0 or terms.sinks is not None or terms.alibi_slopes is not None:
        return heads
    mask = terms.attn_mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        return heads
    per_thread = -(-torch.get_num_threads() // q.shape[0])  # threads divide the matrices of a product
    half = -(-heads // 2)  # with many threads too, so that copies are those of half the heads at most
    return max(min(per_thread, half), _NUMBERS * heads // q.numel())


def attention_by_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, reorder: Reorder, step: int
) -> Tensor:
    """Attention of some key heads after others.

    Args:
        attend: computes it: (B, h, T, D), (B, g, S, D) and (B, g, S, V) to (B, h, T, V).
        q: (B, H, T, D), in the model's order of dimensions.
        k, v: (B, G, S, D) and (B, G, S, V); keys in the order of the levels.
        reorder: puts queries in that order.
        step: key heads at a time.

    Returns:
        (B, H, T, V), in memory as (B, T, H, V).

    Cost: that of ``attend``; besides the result, memory for the copied queries and values of ``step`` heads.
    """
    repeats = q.shape[1] // k.shape[1]
    out = v.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
    for first in range(0, k.shape[1], step):
        end = min(first + step, k.shape[1])
        query_heads = slice(first * repeats, end * repeats)
        query = reorder.of_heads(first, end)(q[:, query_heads]).to(v.dtype)
        value = v[:, first:end].contiguous()  # rows of all heads lie between those of one, which products read often
        out[:, :, query_heads] = attend(query, k[:, first:end], value).transpose(1, 2)
    return out.transpose(1, 2)
