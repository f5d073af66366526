"""Chunked attention: a token sees only tokens of its own chunk, so that each chunk is a sequence of its
own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from structattn.errors import ConfigError
from structattn.layout.global_window import Layout
from structattn.layout.levels import LevelLayout
from structattn.ops.attention import structured_attention


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None,
    *,
    chunk_size: int,
    left_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Causal ``structured_attention`` with the chunks of all rows as rows of the batch.

    Chunks are counted from the first real token of a row, or from the start of a packed sequence, and blocks
    from the start of a chunk: where blocks divide chunks, these are the blocks that they would be without
    chunks.

    Args:
        q, k, v: (B, H, T, D), (B, G, S, D) and (B, G, S, V); the queries are the last T of S positions.
        layout, left_padding, cu_seqlens, attn_mask, alibi_slopes: as of ``structured_attention``; with
            ``cu_seqlens``, T = S.
        chunk_size: tokens of a chunk.
        **options: of ``structured_attention``.

    Returns:
        (B, H, T, V), zero for queries in the padding.

    Cost: that of a batch of chunks, at most (T / chunk_size + 2) chunk_size^2 pairs per row; queries, keys,
        values and the mask are copied. Where T < S, only the keys from the first chunk with a query on are
        read.
    """
    if getattr(layout, "sink_tokens", 0):
        raise ConfigError("tokens of a chunk see no other chunk, and so no sink tokens: give a layout without them")
    (batch, heads, count, _), length = q.shape, k.shape[2]
    steps = torch.arange(length, device=q.device)
    at, rows = steps.expand(batch, -1), torch.arange(batch, device=q.device)[:, None].expand(-1, length)
    if cu_seqlens is not None:
        rows = torch.bucketize(steps, cu_seqlens[1:], right=True)[None]  # sequences: each may have segments of its own
        at = steps - cu_seqlens[rows]
    elif left_padding is not None:
        at = steps - left_padding[:, None]
    first = 0
    if count < length:
        first = length - count - int(at[:, length - count].clamp(min=0).remainder(chunk_size).max())
    q = F.pad(q, (0, 0, length - count - first, 0))
    k, v, at, rows, length = k[:, :, first:], v[:, :, first:], at[:, first:], rows[:, first:], length - first
    is_start = at.remainder(chunk_size) == 0
    is_start[:, 0] = True
    starts = (is_start & (at >= 0)).flatten().nonzero()[:, 0]
    if starts.numel() == 0:
        return q.new_zeros(batch, heads, count, v.shape[3])

    # (M, W): the positions of each chunk among B S, and which of them it has.
    indices = starts[:, None] + torch.arange(min(chunk_size, length), device=q.device)
    chunk = is_start.flatten().cumsum(0)
    last = batch * length - 1
    has = (indices <= last) & (chunk[indices.clamp(max=last)] == chunk[starts][:, None])
    indices = indices.clamp(max=last)
    if isinstance(layout, LevelLayout) and layout.num_rows is not None:
        layout = layout.select_rows(rows.flatten()[starts].tolist())
    if attn_mask is not None:
        attn_mask = _chunks_of_mask(attn_mask, indices, count, batch, length)
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        alibi_slopes = alibi_slopes[starts // length]
    # What a chunk has not is of another row: also NaN, whose product with a weight of 0 is NaN.
    others = ~has[:, :, None, None]
    q, k, v = (x.transpose(1, 2).flatten(0, 1)[indices].masked_fill(others, 0).transpose(1, 2) for x in (q, k, v))
    out: Tensor = structured_attention(q, k, v, layout, attn_mask=attn_mask, alibi_slopes=alibi_slopes, **options)
    flat = out.new_zeros(batch * length, heads, out.shape[3])
    flat = flat.index_put((indices[has],), out.transpose(1, 2)[has])
    return flat.unflatten(0, (batch, length)).transpose(1, 2)[:, :, -count:]


def _chunks_of_mask(mask: Tensor, indices: Tensor, count: int, batch: int, length: int) -> Tensor:
    """The mask of each chunk, (M, 1 or H, W, W), from one that is broadcastable to (B, H, T, S)."""
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask.expand(batch, -1, count, -1)
    mask = mask if mask.shape[3] == 1 else mask[..., -length:]
    mask = F.pad(mask.expand(-1, -1, -1, length), (0, 0, length - count, 0))
    row, position = indices[:, :1] // length, indices - indices[:, :1] // length * length
    # The last chunk of a row may end before those of others: what follows it is of no query.
    position = position.clamp(max=length - 1)
    return mask[row[..., None], :, position[:, :, None], position[:, None, :]].permute(0, 3, 1, 2)
