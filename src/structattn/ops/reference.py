"""The definition of structured attention: dense, differentiable, any dtype, the oracle of every faster backend.

It allocates T x S scores; it is written to be read against the formula, not to be fast. Arguments are taken as already
checked by ``ops.attention``.

Axes: B batch, H query heads, G key/value heads, T queries, S keys, D head dimension, V value dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structattn.layout import LevelLayout


def positions(
    num_queries: int,
    num_keys: int,
    cu_seqlens: Tensor | None,
    left_padding: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The position of each query and key in its own sequence, and which pairs belong to one real sequence.

    The queries are the last T of the S positions (a query before the first key has a negative position). Packed
    sequences each count from 0; with left padding a row counts from its first real token.

    Returns:
        query positions (1 or B, T), key positions (1 or B, S), int64; and a bool mask (1 or B, T, S) of the pairs that lie
        in one sequence and are not padding, ``None`` when that is all of them.
    """
    keys = torch.arange(num_keys, device=device)[None]
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[None]
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(device=device, dtype=torch.int64)
        sequence = torch.bucketize(keys[0], ends, right=True)
        keys = keys - cu_seqlens.to(device=device, dtype=torch.int64)[sequence]
        return keys, keys, (sequence[:, None] == sequence[None, :])[None]
    if left_padding is not None:
        padding = left_padding.to(device=device, dtype=torch.int64)[:, None]
        keys, queries = keys - padding, queries - padding
        return queries, keys, (queries >= 0)[:, :, None] & (keys >= 0)[:, None, :]
    return queries, keys, None


def visible(
    query_positions: Tensor, key_positions: Tensor, is_causal: bool, window: int | None, same: Tensor | None
) -> Tensor | None:
    """The bool mask (1 or B, T, S) of the pairs that may attend; ``None`` when every pair may."""
    if not is_causal and window is None:
        return same
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    mask = torch.ones_like(distance, dtype=torch.bool) if same is None else same.expand_as(distance)
    if is_causal:
        mask = mask & (distance >= 0)
    if window is not None:
        mask = mask & (distance.abs() < window)
    return mask


def scores(
    q: Tensor,
    k: Tensor,
    layout: LevelLayout,
    scale: float | None,
    query_positions: Tensor,
    key_positions: Tensor,
) -> Tensor:
    """The scaled scores (B, H, T, S), level by level as in ``LevelLayout``; q and k have equal numbers of heads."""
    i, j = query_positions[:, None, :, None], key_positions[:, None, None, :]
    num_shared = layout.shared_levels(i, j)
    total = torch.zeros((), dtype=q.dtype, device=q.device)
    for level, part in enumerate(layout.slices, start=1):
        score = torch.einsum("bhtd,bhsd->bhts", q[..., part], k[..., part])
        if scale is None and layout.scaling in ("paper", "paper_sum"):
            score = score / layout.ranks[level - 1]
        total = total + score * (num_shared >= level)
    if scale is not None:
        return total * scale
    shared_rank = layout.shared_rank(i, j).to(q.dtype)
    match layout.scaling:
        case "variance":
            return total / shared_rank.sqrt()
        case "mup":
            return total * (8 / shared_rank)
        case "paper":
            return total / num_shared
        case "paper_sum":
            return total


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: LevelLayout,
    *,
    is_causal: bool,
    scale: float | None,
    window: int | None,
    attn_bias: Tensor | None,
    dropout_p: float,
    cu_seqlens: Tensor | None,
    left_padding: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Structured attention by its definition; the meaning of the arguments is that of ``structured_attention``.

    16-bit inputs are computed in float32. A query that sees no key has output 0 and log-sum-exp -inf, and no gradient.

    Returns:
        out (B, H, T, V) in q's dtype and lse (B, H, T), float32 or float64, base e.

    Cost: 2 B H T S (D + V) FLOPs and several tensors of B H T S numbers.
    """
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    dtype = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32
    repeats = q.shape[1] // k.shape[1]
    query, key, value = (
        q.to(dtype),
        k.to(dtype).repeat_interleave(repeats, dim=1),
        v.to(dtype).repeat_interleave(repeats, dim=1),
    )
    i, j, same = positions(num_queries, num_keys, cu_seqlens, left_padding, q.device)
    score = scores(query, key, layout, scale, i, j)
    if attn_bias is not None:
        score = score + attn_bias.to(dtype)
    mask = visible(i, j, is_causal, window, same)
    if mask is not None:
        score = score.masked_fill(~mask[:, None], -torch.inf)
    # A row without a visible key would be 0/0: it is computed as a row of zeros and then cleared.
    empty = score.amax(dim=-1, keepdim=True) == -torch.inf
    score = score.masked_fill(empty, 0.0)
    lse = score.logsumexp(dim=-1, keepdim=True)
    weight = (score - lse).exp().masked_fill(empty, 0.0)
    weight = F.dropout(weight, p=dropout_p, training=dropout_p > 0)
    out = torch.einsum("bhts,bhsv->bhtv", weight, value)
    return out.to(q.dtype), lse.masked_fill(empty, -torch.inf).squeeze(-1)
