"""The definition of ``structured_attention`` written as Python loops, that shares no code with it."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Window:
    """Of a level that slides; ``None`` reaches every position."""

    size: int | None


def in_one_block(blocks, i, j):
    """Whether two positions share a level, given as a block size, as the starts of its segments, or as a
    ``Window``.
    """
    if isinstance(blocks, Window):
        return blocks.size is None or abs(i - j) < blocks.size
    if isinstance(blocks, int):
        return math.floor(i / blocks) == math.floor(j / blocks)
    segment = [sum(start <= x for start in blocks) for x in (i, j)]
    return segment[0] == segment[1]


def loops(
    q,
    k,
    v,
    ranks,
    sizes,
    scaling,
    *,
    is_causal=True,
    scale=None,
    window=None,
    bias=None,
    mask=None,
    offset=None,
    value_ranks=None,
    softcap=None,
    sinks=None,
    alibi_slopes=None,
    sink_tokens=0,
):
    """One head after another, one pair after another. q (B,H,T,D), k, v (B,G,S,·). Returns out, lse.

    ``sizes`` has a block size, segment starts or a ``Window`` per level, or such a list per batch row.
    """
    B, H, T, _ = q.shape
    G, S = k.shape[1], k.shape[2]
    shift = S - T if offset is None else offset
    outs, lses = [], []
    for b in range(B):
        levels = sizes[b] if isinstance(sizes[0], list) else sizes
        for h in range(H):
            g = h // (H // G)
            for t in range(T):
                i, row, cols, shares = t + shift, [], [], []
                for j in range(S):
                    if is_causal and j > i:
                        continue
                    is_sink = j < sink_tokens
                    if window is not None and abs(i - j) >= window and not is_sink:
                        continue
                    if isinstance(levels[0], Window) and not in_one_block(levels[0], i, j) and not is_sink:
                        continue
                    if mask is not None and not mask[b, h, t, j]:
                        continue
                    dots, start = [], 0
                    for level, (rank, blocks) in enumerate(zip(ranks, levels, strict=True)):
                        if level == 0 or is_sink or in_one_block(blocks, i, j):
                            dots.append((q[b, h, t, start : start + rank] @ k[b, g, j, start : start + rank], rank))
                        start += rank
                    shared = sum(rank for _, rank in dots)
                    total = sum(dot for dot, _ in dots)
                    if scale is not None:
                        s = scale * total
                    elif scaling == "variance":
                        s = total / math.sqrt(shared)
                    elif scaling == "standard":
                        s = total / math.sqrt(q.shape[-1])
                    elif scaling == "mup":
                        s = total * 8 / shared
                    else:
                        s = sum(dot / rank for dot, rank in dots)
                        s = s / len(dots) if scaling == "paper" else s
                    if softcap is not None:
                        s = torch.tanh(s / softcap) * softcap
                    if alibi_slopes is not None:
                        s = s - alibi_slopes[b, h] * abs(i - j)
                    row.append(s + (0 if bias is None else bias[b, h, t, j]))
                    cols.append(j)
                    seen = v.shape[-1] if value_ranks is None else sum(value_ranks[: len(dots)])
                    shares.append((torch.arange(v.shape[-1]) < seen).to(v.dtype))
                if row:
                    scores = torch.stack(row if sinks is None else [*row, sinks[h]])
                    outs.append(torch.softmax(scores, 0)[: len(row)] @ (v[b, g, cols] * torch.stack(shares)))
                    lses.append(torch.logsumexp(scores, 0))
                else:
                    outs.append(torch.zeros(v.shape[-1], dtype=v.dtype))
                    lses.append(torch.tensor(-torch.inf, dtype=v.dtype) if sinks is None else sinks[h])
    return torch.stack(outs).reshape(B, H, T, -1), torch.stack(lses).reshape(B, H, T)


def make(B, H, G, T, S, D, V, seed=0, grad=True):
    g = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, V))
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_(grad) for s in shapes]
