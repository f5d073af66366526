"""The decoding kernel over a compressed cache, in which level l has only the keys of the block that decoding
is in.

Tiles of positions that lie before the second level's block (far) have keys of only the first level; they take
a loop of their own without masks. In all other tiles each level loads its own positions, and masked lanes
cost no memory traffic.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005 - the kernel language has no unpacking, and no conditional expressions of tensors

from __future__ import annotations

import triton
import triton.language as tl

from structattn.ops.triton.plan import count, item
from structattn.ops.triton.primitives import shown_pairs, soft_tanh, with_alibi


@triton.constexpr_function
def slice_start(sizes, level):
    """Where the slice of a level begins."""
    return sum(sizes[:level])


@triton.constexpr_function
def padded(size):
    """A power of two of at least 16, the least size of a matrix product on tensor cores."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit
def load_slots(
    memory, stride, capacity, first, low, high,
    SIZE: tl.constexpr, WALK: tl.constexpr, ALIGN: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Slots first ... first + WALK - 1 of all SIZE dimensions, (padded, WALK); with MASKED those from low to
    below high.

    Zero beyond SIZE. The boundaries are rounded outwards to ALIGN, so that loads stay wide: slots between a
    boundary and its rounding hold garbage. A RING has its slots modulo the capacity.
    """
    column = tl.arange(0, padded(SIZE))
    slot = first + tl.arange(0, WALK)
    place = slot
    if RING:
        place = slot % capacity
    pointers = memory + column.to(tl.int64)[:, None] * stride + place[None, :]
    if MASKED:
        inside = (slot >= low // ALIGN * ALIGN) & (slot < (high + ALIGN - 1) // ALIGN * ALIGN)
        tile = tl.load(pointers, mask=(column < SIZE)[:, None] & inside[None, :], other=0.0)
    elif padded(SIZE) > SIZE:
        tile = tl.load(pointers, mask=(column < SIZE)[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def attend(
    sums, top, total, queries, keys, key_strides, values, value_strides, capacities, starts, bases, last, limit, first,
    mask, mask_key, slope,
    LEVELS: tl.constexpr, VALUE_LEVELS: tl.constexpr, MASKED: tl.constexpr,
    RANKS: tl.constexpr, VALUE_RANKS: tl.constexpr, SCALES: tl.constexpr, FACTORS: tl.constexpr,
    ALIGNS: tl.constexpr, RINGS: tl.constexpr, WALK: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Adds positions first ... first + WALK - 1 to the running softmax: its sums of values, maximum (base 2),
    denominator.

    They have the first LEVELS levels of keys and VALUE_LEVELS of values. Without MASKED all rows see all of
    them, but for what ``mask`` hides, which points at position 0 of each row.
    """
    position = first + tl.arange(0, WALK)
    factor = tl.full((WALK,), item(FACTORS, 0), tl.float32)
    for n in tl.static_range(LEVELS):
        tile = load_slots(
            keys[n], key_strides[n], capacities[n], first - bases[n], starts[n] - bases[n], last + 1 - bases[n],
            item(RANKS, n), WALK, item(ALIGNS, n), item(RINGS, n), MASKED,
        )  # fmt: skip
        scores = tl.dot(queries[n], tile, input_precision="ieee")
        if item(SCALES, n) != 1.0:
            scores = scores * item(SCALES, n)
        if n == 0:
            score = scores
        else:
            shared = position >= starts[n]
            score += tl.where(shared[None, :], scores, 0.0)
            factor = tl.where(shared, item(FACTORS, n), factor)
    score = score * factor[None, :]
    if SOFTCAP > 0:
        score = soft_tanh(score, SOFTCAP) * SOFTCAP
    if slope is not None:
        score = with_alibi(score, slope, limit, position)
    if MASKED:
        shown = (position >= starts[0])[None, :] & (position[None, :] <= limit[:, None])
        score = tl.where(shown, score, float("-inf"))
    if mask is not None:
        inside = (position >= starts[0]) & (position <= last)
        shown = shown_pairs(mask, position.to(tl.int64) * mask_key, inside)
        score = tl.where(shown, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - highest[:, None])
    shrink = tl.exp2(top - highest)
    total = total * shrink + tl.sum(weight, 1)
    added = ()
    for n in tl.static_range(count(VALUE_RANKS)):
        product = sums[n] * shrink[:, None]
        if n < VALUE_LEVELS:
            tile = load_slots(
                values[n], value_strides[n], capacities[n], first - bases[n], starts[n] - bases[n], last + 1 - bases[n],
                item(VALUE_RANKS, n), WALK, item(ALIGNS, n), item(RINGS, n), MASKED,
            )  # fmt: skip
            if MASKED:  # weight 0 times garbage may be NaN
                tile = tl.where(((position >= starts[n]) & (position <= last))[None, :], tile, 0.0)
            product = tl.dot(weight.to(tile.dtype), tl.trans(tile), product, input_precision="ieee")
        added = added + (product,)
    return added, highest, total


@triton.jit(do_not_specialize=["batch_size", "num_splits", "num_rows", "num_keys"])
def cached_kernel(
    q, keys, values, starts, counts, blocks, partial, partial_lse, mask, slopes,
    q_batch, q_head, q_row, key_strides, value_strides, capacities,
    mask_batch, mask_head, mask_query, mask_key, num_keys,
    batch_size, num_splits, num_rows, num_units, num_tiles, unit,
    heads_per_key, heads_per_value, num_queries, value_dim,
    RANKS: tl.constexpr, VALUE_RANKS: tl.constexpr, SCALES: tl.constexpr, FACTORS: tl.constexpr,
    ALIGNS: tl.constexpr, MULTIPLES: tl.constexpr, RINGS: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp (base 2) of the queries of one unit of heads over one of ``num_splits`` chunks
    of positions.

    A unit is ``unit`` heads that share a key and a value head. The rows of a tile are the queries of all its
    heads.
    """
    number = tl.program_id(0) % num_units
    rest = tl.program_id(0) // num_units
    tile = rest % num_tiles
    split = rest // num_tiles % num_splits
    batch = (rest // num_tiles // num_splits).to(tl.int64)
    row = tile * OWN + tl.arange(0, OWN)
    row_valid = row < unit * num_queries
    query = row % num_queries
    head = (number * unit + row // num_queries).to(tl.int64)
    key_head = (number * unit // heads_per_key).to(tl.int64)
    value_head = (number * unit // heads_per_value).to(tl.int64)

    begins, bases, key_places, key_rows, queries = (), (), (), (), ()
    for n in tl.static_range(count(RANKS)):
        begin = tl.load(starts + n * batch_size + batch).to(tl.int32)
        begins = begins + (begin,)
        if item(RINGS, n):
            bases = bases + (begin * 0,)
        else:
            block = tl.load(blocks + n * batch_size + batch).to(tl.int32)
            bases = bases + (tl.multiple_of(block, item(MULTIPLES, n)),)
        key_places = key_places + (keys[n] + batch * key_strides[n][0] + key_head * key_strides[n][1],)
        key_rows = key_rows + (key_strides[n][2],)
        column = tl.arange(0, padded(item(RANKS, n)))
        place = q + batch * q_batch + head * q_head + query.to(tl.int64) * q_row + slice_start(RANKS, n)
        kept = row_valid[:, None] & (column < item(RANKS, n))[None, :]
        queries = queries + (tl.load(place[:, None] + column[None, :], mask=kept, other=0.0),)
    value_places, value_rows, sums = (), (), ()
    for n in tl.static_range(count(VALUE_RANKS)):
        value_places = value_places + (values[n] + batch * value_strides[n][0] + value_head * value_strides[n][1],)
        value_rows = value_rows + (value_strides[n][2],)
        sums = sums + (tl.zeros((OWN, padded(item(VALUE_RANKS, n))), tl.float32),)
    # Finite, so that a row without a visible position stays free of -inf - -inf.
    top = tl.full((OWN,), -3.0e38, tl.float32)
    total = tl.zeros((OWN,), tl.float32)

    last = begins[0] + tl.load(counts + batch).to(tl.int32) - 1
    limit = last - (num_queries - 1) + query
    if mask is not None:  # its last column is the last position of every row
        mask += batch * mask_batch + (num_keys - 1 - last).to(tl.int64) * mask_key
        mask += tl.where(row_valid, head * mask_head + query.to(tl.int64) * mask_query, 0)
    slope = slopes
    if slopes is not None:
        slope = tl.load(slopes + batch * num_units * unit + head, mask=row_valid, other=0.0)
        slope = slope[:, None] * 1.4426950408889634
    far_stop = last - num_queries + 2  # all queries see the positions before it
    if count(RANKS) > 1:
        far_stop = tl.minimum(far_stop, begins[1])
    # Tiles begin where the slots of the first level are aligned.
    origin = bases[0] + (begins[0] - bases[0]) // WALK * WALK
    num_walks = (last - origin + WALK) // WALK
    per_split = (num_walks + num_splits - 1) // num_splits
    low = split * per_split
    high = tl.minimum(low + per_split, num_walks)
    far_low = tl.minimum(tl.maximum(low, tl.where(origin < begins[0], 1, 0)), high)
    far_high = tl.maximum(tl.minimum(high, tl.maximum(far_stop - origin, 0) // WALK), far_low)
    for walk in range(far_low, far_high):
        sums, top, total = attend(
            sums, top, total, queries, key_places, key_rows, value_places, value_rows, capacities, begins, bases,
            last, limit, origin + walk * WALK, mask, mask_key, slope, 1, 1, False,
            RANKS, VALUE_RANKS, SCALES, FACTORS, ALIGNS, RINGS, WALK, SOFTCAP,
        )  # fmt: skip
    passed = far_low - low  # the first tile, where a window cuts it
    for near in range(0, passed + high - far_high):
        walk = tl.where(near < passed, low + near, far_high + near - passed)
        sums, top, total = attend(
            sums, top, total, queries, key_places, key_rows, value_places, value_rows, capacities, begins, bases,
            last, limit, origin + walk * WALK, mask, mask_key, slope, count(RANKS), count(VALUE_RANKS), True,
            RANKS, VALUE_RANKS, SCALES, FACTORS, ALIGNS, RINGS, WALK, SOFTCAP,
        )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    line = split.to(tl.int64) * num_rows + (batch * num_units * unit + head) * num_queries + query
    for n in tl.static_range(count(VALUE_RANKS)):
        column = tl.arange(0, padded(item(VALUE_RANKS, n)))
        place = partial + (line * value_dim + slice_start(VALUE_RANKS, n))[:, None] + column[None, :]
        kept = row_valid[:, None] & (column < item(VALUE_RANKS, n))[None, :]
        tl.store(place, sums[n] / total[:, None], mask=kept)
    tl.store(partial_lse + line, tl.where(empty, float("-inf"), top + tl.log2(total)), mask=row_valid)
