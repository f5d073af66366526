"""Tiles of positions and dimensions inside the Triton kernels: loads, ranges of levels, products, masks.

A *subtile* holds some columns of a tile; tiles are tuples of subtiles. See ``plan`` for the plan and its
terms.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM108 - the kernel language has no unpacking, and no conditional expressions of tensors

from __future__ import annotations

import triton
import triton.language as tl

from structattn.ops.triton.plan import (
    coarse_of,
    count,
    dim_of,
    factors_of,
    has_fine,
    item,
    level_of,
    num_coarse_subtiles,
    overhangs,
    scale_end,
    scale_value,
    sizes_of,
    start_of,
    stop_of,
    width_of,
)


@triton.jit
def pick(VALUES: tl.constexpr, index):
    """VALUES[index] for an index known at run time."""
    value = tl.where(index == 0, item(VALUES, 0), item(VALUES, 0))
    for n in tl.static_range(1, count(VALUES)):
        value = tl.where(index == n, item(VALUES, n), value)
    return value


@triton.jit
def block_start(position, size):
    """The first position of the block; division rounds down for negative positions too."""
    return tl.where(position < 0, -1 - (-1 - position) // size, position // size) * size


@triton.jit
def same_block(own, walk, size):
    return block_start(own, size)[:, None] == block_start(walk, size)[None, :]


@triton.jit
def own_tile(
    tile, first_block, num_queries, num_keys, cu_seqlens, cu_seqlens_k, tile_map, num_tiles,
    OWN: tl.constexpr, ANCHOR: tl.constexpr, PER_ANCHOR: tl.constexpr, PACKED: tl.constexpr, OWN_IS_KEY: tl.constexpr,
):  # fmt: skip
    """Where a tile lies: its grid position and the end of its rows; and of its sequence the offsets of
    position 0 among queries and among keys, the number of keys, and the position of the first query."""
    if PACKED:
        sequence = tl.load(tile_map + tile)
        number = tl.load(tile_map + num_tiles + tile)
        query_offset = tl.load(cu_seqlens + sequence).to(tl.int32)
        key_offset = tl.load(cu_seqlens_k + sequence).to(tl.int32)
        length = tl.load(cu_seqlens_k + sequence + 1).to(tl.int32) - key_offset
        first_query = length - (tl.load(cu_seqlens + sequence + 1).to(tl.int32) - query_offset)
        if not OWN_IS_KEY:
            first_block = block_start(first_query, ANCHOR) // ANCHOR
    else:
        number = tile
        length = num_keys
        query_offset = num_keys * 0
        key_offset = num_keys * 0
        first_query = num_keys - num_queries
    query_offset = query_offset - first_query
    block = first_block + number // PER_ANCHOR
    first = block * ANCHOR + (number % PER_ANCHOR) * OWN
    stop = tl.minimum(tl.minimum(first + OWN, (block + 1) * ANCHOR), length)
    return first, stop, query_offset, key_offset, length, first_query


@triton.jit
def reach(
    first, last, walk_first, walk_stop, window,
    OWN_IS_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ALIGNED: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """The range of walked positions that rows first ... last can see (or be seen by)."""
    low = walk_first
    high = walk_stop
    if IS_CAUSAL:
        if OWN_IS_KEY:
            low = tl.maximum(low, first)
        else:
            high = tl.minimum(high, last + 1)
    if HAS_WINDOW:
        if not (IS_CAUSAL and OWN_IS_KEY):
            low = tl.maximum(low, first - window + 1)
        if OWN_IS_KEY or not IS_CAUSAL:
            high = tl.minimum(high, last + window)
    if ALIGNED:
        low = block_start(low, WALK)
    return low, high


@triton.jit
def middle(first, last, PLAN: tl.constexpr, ALIGNED: tl.constexpr, WALK: tl.constexpr):
    """The range around the own tile in which pairs are masked one by one."""
    if has_fine(PLAN):
        SIZE: tl.constexpr = item(sizes_of(PLAN), coarse_of(PLAN))
        low = block_start(first, SIZE)
        high = block_start(last, SIZE) + SIZE
    else:
        low = first
        high = last + 1
    if ALIGNED:
        low = block_start(low, WALK)
        high = block_start(high + WALK - 1, WALK)
    return low, high


@triton.jit
def range_before(level, first, middle_low, low, high, PLAN: tl.constexpr):
    """The positions before the middle that share exactly the coarse levels up to ``level`` with the own
    tile.
    """
    SIZES: tl.constexpr = sizes_of(PLAN)
    far = tl.where(level == 0, low, block_start(first, pick(SIZES, level)))
    near = tl.where(level == coarse_of(PLAN) - 1, middle_low, block_start(first, pick(SIZES, level + 1)))
    return tl.maximum(far, low), tl.minimum(near, high)


@triton.jit
def range_after(level, first, middle_high, low, high, PLAN: tl.constexpr):
    """The positions after the middle that share exactly the coarse levels up to ``level`` with the own
    tile.
    """
    SIZES: tl.constexpr = sizes_of(PLAN)
    size = pick(SIZES, level)
    inner = pick(SIZES, level + 1)
    near = tl.where(level == coarse_of(PLAN) - 1, middle_high, block_start(first, inner) + inner)
    far = tl.where(level == 0, high, block_start(first, size) + size)
    return tl.maximum(near, low), tl.minimum(far, high)


@triton.jit
def sliding_range(
    level, turn, first, last, low, high, window,
    PLAN: tl.constexpr, OWN_IS_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """What is walked for a sliding level on one side of the own rows: the first turn takes the only side of a
    causal mask, else that before.

    Returns:
        side: 1 for walked positions before own ones, -1 after.
        near, far: pairs at distances from near to below far share exactly the levels up to ``level``.
        start, whole, rest, stop: start ... stop have such pairs, and whole ... rest have whole tiles of
        nothing else.
    """
    far = pick(sizes_of(PLAN), level)
    near = tl.where(level == coarse_of(PLAN) - 1, 0, pick(sizes_of(PLAN), level + 1))
    if HAS_WINDOW:
        far = tl.minimum(far, window)
        near = tl.minimum(near, window)
    empty = near == far
    near = tl.maximum(near, turn)  # pairs at distance 0 are of the first turn
    if IS_CAUSAL and OWN_IS_KEY:
        is_before = turn > 0
    else:
        is_before = turn == 0
    side = tl.where(is_before, 1, -1)
    start = tl.maximum(tl.where(is_before, first - far + 1, first + near), low)
    stop = tl.minimum(tl.where(is_before, last - near + 1, last + far), high)
    stop = tl.where(empty, start, stop)
    alike = tl.where(is_before, last - far + 1, last + near)
    alike_stop = tl.minimum(tl.where(is_before, first - near + 1, first + far), stop)
    whole = start + (tl.maximum(alike - start, 0) + WALK - 1) // WALK * WALK
    rest = whole + tl.maximum(alike_stop - whole, 0) // WALK * WALK
    return side, near, far, start, whole, rest, stop


@triton.jit
def load_subtiles(pointer, offsets, valid, SUBTILES: tl.constexpr, NUM: tl.constexpr, MASKED: tl.constexpr):
    """The first NUM subtiles of rows at element ``offsets``; zero where not ``valid`` and beyond the
    dimension.
    """
    subtiles = ()
    for p in tl.static_range(NUM):
        column = start_of(SUBTILES, p) + tl.arange(0, width_of(SUBTILES, p))
        place = pointer + offsets[:, None] + column[None, :]
        if overhangs(SUBTILES, p):
            inside = (column < dim_of(SUBTILES, p))[None, :]
            if MASKED:
                inside = inside & valid[:, None]
            subtiles = subtiles + (tl.load(place, mask=inside, other=0.0),)
        elif MASKED:
            subtiles = subtiles + (tl.load(place, mask=valid[:, None], other=0.0),)
        else:
            subtiles = subtiles + (tl.load(place),)
    return subtiles


@triton.jit
def column_scale(column, SCALES: tl.constexpr):
    """The factor a_l of each column of queries and keys."""
    scale = tl.zeros_like(column).to(tl.float32)
    for n in tl.static_range(count(SCALES)):
        scale = tl.where(column < scale_end(SCALES, n), scale_value(SCALES, n), scale)
    return scale


@triton.jit
def load_own(
    pointer, offsets, valid, limit,
    SUBTILES: tl.constexpr, NUM: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Subtiles of the own tile, zero from ``limit`` on (fine subtiles: from their level's end on), times
    a_l.
    """
    loaded = load_subtiles(pointer, offsets, valid, SUBTILES, NUM, True)
    subtiles = ()
    for p in tl.static_range(NUM):
        column = start_of(SUBTILES, p) + tl.arange(0, width_of(SUBTILES, p))
        if level_of(SUBTILES, p) == 0:
            kept = column < limit
        else:
            kept = column < stop_of(SUBTILES, p)
        subtile = tl.where(kept[None, :], loaded[p], 0.0)
        if count(SCALES) > 0:
            subtile = subtile * column_scale(column, SCALES)[None, :]
        subtiles = subtiles + (subtile.to(loaded[p].dtype),)
    return subtiles


@triton.jit
def zero_subtiles(ROWS: tl.constexpr, SUBTILES: tl.constexpr):
    subtiles = ()
    for p in tl.static_range(count(SUBTILES)):
        subtiles = subtiles + (tl.zeros((ROWS, width_of(SUBTILES, p)), tl.float32),)
    return subtiles


@triton.jit
def clear_from(subtiles, limit, SUBTILES: tl.constexpr):
    """Accumulators with zeros from column ``limit`` on."""
    cleared = ()
    for p in tl.static_range(count(SUBTILES)):
        column = start_of(SUBTILES, p) + tl.arange(0, width_of(SUBTILES, p))
        cleared = cleared + (tl.where((column < limit)[None, :], subtiles[p], 0.0),)
    return cleared


@triton.jit
def store_subtiles(pointer, offsets, valid, subtiles, SUBTILES: tl.constexpr):
    for p in tl.static_range(count(SUBTILES)):
        column = start_of(SUBTILES, p) + tl.arange(0, width_of(SUBTILES, p))
        kept = valid[:, None] & (column < stop_of(SUBTILES, p))[None, :]
        place = pointer + offsets[:, None] + column[None, :]
        tl.store(place, subtiles[p].to(pointer.dtype.element_ty), mask=kept)


@triton.jit
def product_of(own, walk, NUM: tl.constexpr):
    """Products of own rows with walked rows over the first NUM subtiles, float32."""
    total = tl.dot(own[0], tl.trans(walk[0]), input_precision="ieee")
    for p in tl.static_range(1, NUM):
        total = tl.dot(own[p], tl.trans(walk[p]), total, input_precision="ieee")
    return total


@triton.jit
def add_fine(total, own, walk, own_position, walk_position, SUBTILES: tl.constexpr, PLAN: tl.constexpr):
    """Adds the products over fine subtiles, each for the pairs in one block of its level."""
    for p in tl.static_range(num_coarse_subtiles(SUBTILES), count(SUBTILES)):
        same = same_block(own_position, walk_position, item(sizes_of(PLAN), level_of(SUBTILES, p)))
        total += tl.where(same, tl.dot(own[p], tl.trans(walk[p]), input_precision="ieee"), 0.0)
    return total


@triton.jit
def fine_factor(factor, own_position, walk_position, PLAN: tl.constexpr):
    """c_n log2(e) of each pair in the middle."""
    for n in tl.static_range(coarse_of(PLAN), count(sizes_of(PLAN))):
        same = same_block(own_position, walk_position, item(sizes_of(PLAN), n))
        factor = tl.where(same, item(factors_of(PLAN), n), factor)
    return factor


@triton.jit
def soft_tanh(score, CAP: tl.constexpr):
    """tanh(score / CAP), to float32's precision for small scores too."""
    x = score / CAP
    square = x * x
    near = x * (1 - square * (0.33333333333333333 - square * (0.13333333333333333 - square * 0.05396825396825397)))
    return tl.where(square < 0.01, near, 1 - 2 / (1 + tl.exp2(x * 2.8853900817779268)))


@triton.jit
def with_alibi(score, slope, own, walk):
    """Scores with the bias of ALiBi; ``slope`` is that of the own rows, a number or (rows, 1), in the units
    of the scores.
    """
    return score - slope * tl.abs(own[:, None] - walk[None, :]).to(tl.float32)


@triton.jit
def add_weighted(
    total, weight, walk, own_position, walk_position,
    SUBTILES: tl.constexpr, NUM: tl.constexpr, FINE: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    """Adds weight @ walk to the first NUM subtiles, and with FINE to all: fine subtiles by pairs in one block
    of their level.
    """
    added = ()
    for p in tl.static_range(count(SUBTILES)):
        if level_of(SUBTILES, p) > 0 and FINE:
            same = same_block(own_position, walk_position, item(sizes_of(PLAN), level_of(SUBTILES, p)))
            near = tl.where(same, weight, 0.0).to(weight.dtype)
            added = added + (tl.dot(near, walk[p], total[p], input_precision="ieee"),)
        elif p < NUM and level_of(SUBTILES, p) == 0:
            added = added + (tl.dot(weight, walk[p], total[p], input_precision="ieee"),)
        else:
            added = added + (total[p],)
    return added


@triton.jit
def shown_pairs(mask, offsets, valid):
    """What a mask shows: ``mask`` has the place of each own row, ``offsets`` are those of the walked rows."""
    return tl.load(mask[:, None] + offsets[None, :], mask=valid[None, :], other=0) != 0


@triton.jit
def visible_pairs(own, walk, stop, near, window, side, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The pairs that may attend, among walked positions below ``stop``: keys are on one side of queries, 1
    before own rows, -1 after.
    """
    shown = (walk < stop)[None, :]
    distance = (own[:, None] - walk[None, :]) * side
    if IS_CAUSAL:
        shown = shown & (distance >= near)
    if HAS_WINDOW:
        shown = shown & (distance < window)
        if not IS_CAUSAL:
            shown = shown & (distance > -window)
    return shown
