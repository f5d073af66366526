"""Decoding over a compressed key/value cache by a fused Triton kernel: the launches, and the choice of tiles.

Level l of the cache has only the keys of the block that decoding is in, dimension by dimension, so that
positions lie side by side in memory. The kernel reads the cache as it is: nothing is copied, and no keys or
scores are written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch
import triton
from torch import Tensor

from structattn.ops.triton.cached_decode import cached_kernel
from structattn.ops.triton.config import (
    INTERPRETED,
    SHARED_MEMORY,
    capability_of,
    no_room,
    shared_memory_of,
    tiles_in_use,
    why_not_on,
)
from structattn.ops.triton.decode import merge, num_splits_for, partial_results
from structattn.ops.triton.plan import Tiles
from structattn.ops.triton.tile_table import Capability, TileTable

MAX_QUERIES = 8
_ALIGNMENT = 16  # slots: at least 16 bytes of every dtype
# Rows of a tile, being the queries of the heads that share a key and a value, at most: float32 has no tensor
# cores.
_MAX_ROWS = {2: 64, 4: 16}
# Positions per tile and depth of the pipeline, best first.
_WALKS = ((64, 3), (64, 2), (32, 2), (32, 1), (16, 1))


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@lru_cache(maxsize=1024)
def tiles_for(
    ranks: tuple[int, ...],
    value_ranks: tuple[int, ...],
    itemsize: int,
    rows: int,
    masked: bool,
    capability: Capability | None = None,
    table: TileTable | None = None,
) -> Tiles | None:
    """The tiles for queries of ``rows`` rows, with a mask or without, that fit in shared memory; the smallest
    ones in Triton's interpreter.
    """
    if INTERPRETED:
        return Tiles(own=16, walk=16)
    dim, has_levels = max(sum(ranks), sum(value_ranks)), len(value_ranks) > 1
    searched = table and table.find(
        "cached", capability, itemsize=itemsize, dim=dim, levels=len(ranks), values=has_levels
    )
    if searched:
        tiles = replace(searched, own=min(searched.own, _padded(rows)))
        if shared_memory(ranks, value_ranks, tiles, itemsize, masked=masked) <= shared_memory_of(capability):
            return tiles
    own = min(_MAX_ROWS[itemsize], _padded(rows))
    while own >= 16:
        for walk, num_stages in _WALKS:
            is_large = itemsize == 4 or own * _width(ranks, value_ranks) > 2**13
            tiles = Tiles(own=own, walk=walk, num_warps=8 if is_large else 4, num_stages=num_stages)
            if shared_memory(ranks, value_ranks, tiles, itemsize, masked=masked) <= SHARED_MEMORY:
                return tiles
        own //= 2
    return None


def _width(*ranks: tuple[int, ...]) -> int:
    """Columns of the tiles of all levels together."""
    return sum(map(_padded, itertools.chain(*ranks)))


def shared_memory(
    ranks: tuple[int, ...], value_ranks: tuple[int, ...], tiles: Tiles, itemsize: int, *, masked: bool
) -> int:
    """Bytes of shared memory per block: the queries, the buffers of the pipeline, and the scores."""
    pipeline = tiles.num_stages * tiles.walk * _width(ranks, value_ranks)
    scores = tiles.own * tiles.walk * (4 + (tiles.num_stages if masked else 0))
    return itemsize * (pipeline + tiles.own * _width(ranks)) + scores


def why_not(
    *,
    device: torch.device,
    dtype: torch.dtype,
    ranks: tuple[int, ...],
    value_ranks: tuple[int, ...],
    num_queries: int,
    capacity: int,
    masked: bool = False,
) -> str | None:
    """The reason why ``decode`` cannot run a call, as a sentence for the user, or ``None`` when it can.

    Args:
        device, dtype: of the queries and of the cache.
        ranks: r_1 ... r_L, which sum to the head dimension.
        value_ranks: v_1 ... v_L, or (V,) without hierarchical values.
        num_queries: new tokens per batch row, T.
        capacity: slots of the largest buffer.
        masked: whether there is a mask.
    """
    if (reason := why_not_on(device, dtype, ranks, sum(value_ranks), capacity)) is not None:
        return reason
    if num_queries > MAX_QUERIES:
        return f"the Triton kernel over a cache decodes up to {MAX_QUERIES} tokens at once, not {num_queries}"
    tiles = tiles_for(ranks, value_ranks, dtype.itemsize, 1, masked, capability_of(device), tiles_in_use())
    return no_room(ranks) if tiles is None else None


def decode(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    starts: Tensor,
    counts: Tensor,
    rings: Sequence[int | None],
    factors: tuple[tuple[float, ...], tuple[float, ...]],
    *,
    softcap: float | None = None,
    blocks: Tensor | None = None,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    multiples: Sequence[int] | None = None,
    max_count: int | None = None,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest tokens over a cache that already has them.

        score_h(x) = c_n sum over l <= n of a_l <q_h,l, k_l[x]>,   n = number of levels with x >= start_l
        out_h,l = sum over x >= start_l of softmax_x(score_h)(x) v_l[x]   (without value ranks: over all x)

    for the positions x = start_1 ... p of a batch row, p being that of its newest token. Arguments are taken
    as checked.

    Args:
        q: queries, (B, H, T, D), T at most 8, rotated already; float32, float16 or bfloat16; query t is at p
            - (T - 1) + t and sees no later position. With T > 1 all must lie in one block of every level, and
              see the same first
            position (no window).
        keys: per level (B, G, r_l, C_l), in q's dtype, with any strides but the last, which is 1. G divides
            H.
        values: per level (B, Gv, v_l, C_l), or only the whole value, (B, Gv, V, C_1); likewise. Gv divides H.
        starts: first position per level and row, (L, B) int32 or int64 on the device, not falling with the
            level.
        counts: positions from there to p, likewise; 0 at level 1 for a row without any.
        rings: per level R_l <= C_l, where position x is in slot x mod R_l, or ``None``: it is in slot x -
            block.
        factors: (a_1 ... a_L) and (c_1 ... c_L), see ``LevelLayout.score_factors``.
        softcap: c, makes a score s to c tanh(s / c). Default ``None``.
        blocks: the position of slot 0 per level and row, as ``starts``; default: those. Earlier ones where
            the first positions are not seen, as sink tokens.
        mask: bool, True where a query may attend, broadcastable to (B, H, T, S) with S >= all p + 1: the last
            column is that of the newest token in every row. Default ``None``.
        slopes: (1 or B, H), the ALiBi slope of each query head. Default ``None``.
        multiples: per level a number that divides ``blocks`` in all rows, 0 where they are 0: the block
            sizes. Multiples of 16 make loads wide. A wrong one reads wrong addresses.
            Default: nothing is known.
        max_count: an upper bound of the counts, by which positions are split among programs; default C_1.
        tiles: rows and positions per tile; default by the ranks and the dtype.
        num_splits: into how many chunks positions are split; default by ``max_count``.

    Returns:
        out (B, H, T, V) in q's dtype and lse (B, H, T) float32, base e. A query that sees no position has 0
        and -inf.

    Cost: the bytes of the cache, read once: per row itemsize * (sum over l of G r_l count_l + Gv V count_1),
    hierarchical Gv v_l count_l per level, instead of itemsize * (G D + Gv V) count_1. Where G and Gv differ,
    a program has the heads that share both, and what its neighbours have read it reads from the L2 cache; so
    with more than 64 queries per key head (float32: 16). Splits write and read 4 (V + 1) bytes per query
    each. Sums are float32, but 16-bit values meet weights rounded to 16 bits. The host never waits for the
    device.

    Source: Dao et al. 2023 (flash-decoding: splits merged by their log-sum-exps); Kuang et al. 2025, section
        5 (levels).
    """
    q = q if q.stride(-1) == 1 else q.contiguous()
    batch, num_heads, num_queries, _ = q.shape
    ranks, value_ranks = tuple(k.shape[2] for k in keys), tuple(v.shape[2] for v in values)
    value_dim = sum(value_ranks)
    heads_per_key, heads_per_value = num_heads // keys[0].shape[1], num_heads // values[0].shape[1]
    unit = math.gcd(heads_per_key, heads_per_value)
    num_units = num_heads // unit
    if tiles is None:
        rows, capability = unit * num_queries, capability_of(q.device)
        tiles = tiles_for(ranks, value_ranks, q.itemsize, rows, mask is not None, capability, tiles_in_use())
    if tiles is None:
        raise AssertionError("no tiles fit this call: why_not says so")
    num_tiles = math.ceil(unit * num_queries / tiles.own)
    programs = batch * num_units * num_tiles
    # A ring may have fewer slots than its buffer, whose rows begin at 16 bytes.
    capacities = tuple(k.shape[3] if ring is None else ring for k, ring in zip(keys, rings, strict=True))
    if num_splits is None:
        num_splits = num_splits_for(programs, math.ceil((max_count or capacities[0]) / tiles.walk))
    per_level, per_count = factors
    key_multiples = tuple(_ALIGNMENT if multiple % _ALIGNMENT == 0 else 1 for multiple in multiples or (1,) * len(keys))
    num_rows = batch * num_heads * num_queries
    slopes = None if slopes is None else slopes.float().expand(batch, num_heads).contiguous()
    out = torch.empty((batch, num_heads, num_queries, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, num_heads, num_queries), dtype=torch.float32, device=q.device)
    partial, partial_lse = partial_results(num_splits, num_rows, value_dim, q.device)
    shown = None if mask is None else mask.expand(batch, num_heads, num_queries, -1).view(torch.uint8)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        cached_kernel[(num_splits * programs,)](
            q, tuple(keys), tuple(values), starts.contiguous(), counts.contiguous(),
            (starts if blocks is None else blocks).contiguous(), partial, partial_lse, shown, slopes,
            *q.stride()[:3], tuple(k.stride()[:3] for k in keys), tuple(v.stride()[:3] for v in values), capacities,
            *((0,) * 5 if shown is None else (*shown.stride(), shown.shape[3])),
            batch, num_splits, num_rows, num_units, num_tiles, unit, heads_per_key, heads_per_value, num_queries,
            value_dim,
            RANKS=ranks, VALUE_RANKS=value_ranks, SCALES=tuple(per_level),
            FACTORS=tuple(factor / math.log(2) for factor in per_count),
            ALIGNS=tuple(_ALIGNMENT if slots % _ALIGNMENT == 0 else 1 for slots in capacities), MULTIPLES=key_multiples,
            RINGS=tuple(ring is not None for ring in rings), OWN=tiles.own, WALK=tiles.walk,
            SOFTCAP=0.0 if softcap is None else softcap / math.log(2), **tiles.options,
        )  # fmt: skip
        merge(partial, partial_lse, out, lse)
    return out, lse
