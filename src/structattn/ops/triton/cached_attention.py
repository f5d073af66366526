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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

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
_MAX_PARTS = 16  # of values: groups of dimensions that share a scale
_ALIGNMENT = 16  # slots: at least 16 bytes of every dtype
# Rows of a tile, being the queries of the heads that share a key and a value, at most: float32 has no tensor
# cores.
_MAX_ROWS = {2: 64, 4: 16}
# Positions per tile and depth of the pipeline, best first.
_WALKS = ((64, 3), (64, 2), (32, 2), (32, 1), (16, 1))


@dataclass(frozen=True, kw_only=True)
class GroupCodes:
    """The quantized numbers of one level, of keys or of values: codes c in groups of g consecutive positions,
    each of which is read as zero + scale c.

    Attributes:
        codes, scale, zero: of the first page, contiguous, or some of its dimensions: uint8 (B, G, slots, dim,
            bytes), where the first half of a group has the low 4 bits; of keys float16 (B, G, slots, dim, 1),
            of values (B, G, slots, parts, g), one for each g dimensions.
        bits: 8 or 4.
        ring: R, where group m is in slot m mod R; ``None``: in slot m - block // g.
        table: int64 (4, slots), the places of slots in several pages: of their codes, scales and zeros, as
            elements after the first of those of the first page, and how many slots their page has. Of a row
            and head of number n one adds n times the numbers of a page. ``None`` for one page.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    ring: int | None = None
    table: Tensor | None = None

    @property
    def slots(self) -> int:
        """Groups of all pages."""
        return self.codes.shape[2] if self.table is None else self.table.shape[1]

    @property
    def units(self) -> tuple[int, int]:
        """Codes in bytes, and scales, of a group of a row and head."""
        return self.codes.stride(2), self.scale.stride(2)

    def part(self, number: int, size: int) -> GroupCodes:
        """Dimensions ``number`` g ... of values, with one scale for each position."""
        rows = slice(number * size, (number + 1) * size)
        scale, zero = (x[:, :, :, number : number + 1] for x in (self.scale, self.zero))
        return replace(self, codes=self.codes[:, :, :, rows], scale=scale, zero=zero)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What of a cache is in codes.

    Attributes:
        group_size: g, even.
        edges: (B,), int32 on the device: before this position, a multiple of g, a row reads codes; all T
            queries of a row are at it or after it, or at the position before it.
        keys, values: of each level, or ``None`` for one that has all its numbers.
    """

    group_size: int
    edges: Tensor
    keys: Sequence[GroupCodes | None]
    values: Sequence[GroupCodes | None]


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
    group_size: int | None = None,
) -> str | None:
    """The reason why ``decode`` cannot run a call, as a sentence for the user, or ``None`` when it can.

    Args:
        device, dtype: of the queries and of the cache.
        ranks: r_1 ... r_L, which sum to the head dimension.
        value_ranks: v_1 ... v_L, or (V,) without hierarchical values.
        num_queries: new tokens per batch row, T.
        capacity: slots of the largest buffer.
        masked: whether there is a mask.
        group_size: of quantized values, else ``None``.
    """
    if group_size is not None:
        value_ranks = tuple(len(part) for rank in value_ranks for part in _parts(rank, group_size))
        if len(value_ranks) > _MAX_PARTS:
            return (
                f"the Triton kernel over a cache takes at most {_MAX_PARTS} groups of value dimensions, and groups of "
                f"{group_size} make {len(value_ranks)}: give a larger group_size"
            )
    if (reason := why_not_on(device, dtype, ranks, sum(value_ranks), capacity)) is not None:
        return reason
    if num_queries > MAX_QUERIES:
        return f"the Triton kernel over a cache decodes up to {MAX_QUERIES} tokens at once, not {num_queries}"
    tiles = tiles_for(ranks, value_ranks, dtype.itemsize, 1, masked, capability_of(device), tiles_in_use())
    return no_room(ranks) if tiles is None else None


def run_of(tiles: Tiles, group_size: int) -> int:
    """Positions of a tile of codes: as many of each half of a group, two of which are about a tile of
    numbers.
    """
    return max(16, min(tiles.walk // 2, triton.next_power_of_2(group_size // 2)))


def _parts(dim: int, size: int) -> list[range]:
    return [range(first, min(first + size, dim)) for first in range(0, dim, size)]


class _Part(NamedTuple):
    """Values of one level, of all its dimensions, or with codes of those that share a scale."""

    values: Tensor
    ring: int | None
    codes: GroupCodes | None
    level: int


def _value_parts(
    values: Sequence[Tensor], rings: Sequence[int | None], codes: Sequence[GroupCodes | None], size: int
) -> list[_Part]:
    """The parts of all levels, in groups of ``size`` dimensions."""
    parts = []
    for level, (value, ring, of_level) in enumerate(zip(values, rings, codes, strict=True)):
        if of_level is None or value.shape[2] <= size:
            parts.append(_Part(value, ring, of_level, level))
            continue
        for number, dims in enumerate(_parts(value.shape[2], size)):
            parts.append(_Part(value[:, :, dims.start : dims.stop], ring, of_level.part(number, size), level))
    return parts


def _capacities(stores: Sequence[Tensor], rings: Sequence[int | None]) -> tuple[int, ...]:
    """The slots of each level. A ring may have fewer than its buffer, whose rows begin at 16 bytes."""
    return tuple(x.shape[3] if ring is None else ring for x, ring in zip(stores, rings, strict=True))


def _aligns(stores: Sequence[Tensor], capacities: Sequence[int]) -> tuple[int, ...]:
    """How many slots are read at once. A buffer may be shorter than its ring: both have to be multiples."""
    return tuple(
        _ALIGNMENT if slots % _ALIGNMENT == 0 and x.shape[3] % _ALIGNMENT == 0 else 1
        for x, slots in zip(stores, capacities, strict=True)
    )


def _code_arguments(
    stores: Sequence[Tensor], codes: Sequence[GroupCodes | None]
) -> tuple[tuple[tuple[Tensor, ...], ...], tuple[int, ...], tuple[int, ...], tuple[tuple[Any, ...], ...]]:
    """What the kernel takes of the codes of each level: tensors, slots, rings, and constants. Of a level
    without codes it reads none of these.
    """
    tensors, slots, rings, constants = [], [], [], []
    for store, of_level in zip(stores, codes, strict=True):
        if of_level is None:
            tensors.append((store,) * 4)
            slots.append(1)
            rings.append(1)
            constants.append((16, (1, 1), False, False))
            continue
        table = of_level.codes if of_level.table is None else of_level.table
        tensors.append((of_level.codes, of_level.scale, of_level.zero, table))
        slots.append(of_level.slots)
        rings.append(of_level.ring or 1)
        constants.append((of_level.bits, of_level.units, of_level.ring is not None, of_level.table is not None))
    return tuple(tensors), tuple(slots), tuple(rings), tuple(constants)


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
    value_rings: Sequence[int | None] | None = None,
    quantized: Quantized | None = None,
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
        value_rings: as ``rings``, of each level of the values; default: those of the keys.
        quantized: what of the cache is in codes; the numbers of these levels begin at its edges. Default:
            nothing.
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
    parts = _value_parts(
        values,
        rings[: len(values)] if value_rings is None else value_rings,
        [None] * len(values) if quantized is None else quantized.values,
        1 if quantized is None else quantized.group_size,
    )
    values, value_rings = [part.values for part in parts], [part.ring for part in parts]
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
    capacities, value_capacities = _capacities(keys, rings), _capacities(values, value_rings)
    if num_splits is None:
        num_splits = num_splits_for(programs, math.ceil((max_count or capacities[0]) / tiles.walk))
    key_codes = [None] * len(keys) if quantized is None else quantized.keys
    of_codes = _code_arguments(keys, key_codes), _code_arguments(values, [part.codes for part in parts])
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
            q, tuple(keys), tuple(values), *(tensors for tensors, *_ in of_codes), starts.contiguous(),
            counts.contiguous(), (starts if blocks is None else blocks).contiguous(),
            starts if quantized is None else quantized.edges, partial, partial_lse, shown, slopes,
            *q.stride()[:3], tuple(k.stride()[:3] for k in keys), tuple(v.stride()[:3] for v in values),
            capacities, value_capacities, *(slots for _, slots, *_ in of_codes), *(slots for *_, slots, _ in of_codes),
            *((0,) * 5 if shown is None else (*shown.stride(), shown.shape[3])),
            batch, num_splits, num_rows, num_units, num_tiles, unit, heads_per_key, heads_per_value, num_queries,
            value_dim,
            RANKS=ranks, VALUE_RANKS=value_ranks, SCALES=tuple(per_level),
            FACTORS=tuple(factor / math.log(2) for factor in per_count),
            ALIGNS=_aligns(keys, capacities), MULTIPLES=key_multiples, RINGS=tuple(ring is not None for ring in rings),
            VALUE_ALIGNS=_aligns(values, value_capacities), VALUE_RINGS=tuple(ring is not None for ring in value_rings),
            VALUE_OF=tuple(part.level for part in parts), CODES=of_codes[0][3], VALUE_CODES=of_codes[1][3],
            GROUP=0 if quantized is None else quantized.group_size,
            RUN=16 if quantized is None else run_of(tiles, quantized.group_size), OWN=tiles.own, WALK=tiles.walk,
            SOFTCAP=0.0 if softcap is None else softcap / math.log(2), **tiles.options,
        )  # fmt: skip
        merge(partial, partial_lse, out, lse)
    return out, lse
