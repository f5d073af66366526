"""The decoding kernel over a compressed cache, in which level l has only the keys of the block that decoding
is in.

Tiles of positions that lie before the second level's block (far) have keys of only the first level; they take
a loop of their own without masks. In all other tiles each level loads its own positions, and masked lanes
cost no memory traffic.

Tokens that are far back may be codes of 8 or 4 bits, in groups of consecutive positions. They take loops of
their own, over pairs of tiles: some positions of the first half of a group, and those in the same places of
its second half, which codes of 4 bits share bytes with. A number is made from its code in registers.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM108 - the kernel language has no unpacking, and no conditional expressions of tensors

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
def parts_of(levels, count):
    """How many parts of values are of the first ``count`` levels."""
    return sum(level < count for level in levels)


@triton.constexpr_function
def bits_of(codes, level):
    """The bits of the codes of a level; 16 where it has none."""
    return codes[level][0]


@triton.constexpr_function
def is_whole(size, half, run, masked):
    """Whether all numbers of a tile of codes are wanted."""
    return padded(size) == size and half % run == 0 and not masked


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
def load_code_pair(
    store, slots, ring, row, group, block, offset, needed,
    SIZE: tl.constexpr, FORM: tl.constexpr, PER_TOKEN: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Numbers ``offset`` ... of the first half of a group, and those of its second half, made from codes: two
    tiles (padded, RUN) of DTYPE.

    Args:
        store: codes, scales and zeros of the first page, and the places of the slots: see ``GroupCodes``.
        slots: of all pages.
        ring: slots of the level, where it is a ring.
        row: of the batch and the head.
        group, block: the number of the group, and the first position of its block.
        needed: with MASKED: whether any of these numbers is.
        FORM: bits; codes in bytes, and scales, of a group; whether it is in a ring, and in several pages.
        PER_TOKEN: whether a position has a scale, as of values, or a dimension.
    """
    HALF: tl.constexpr = GROUP // 2
    BITS: tl.constexpr = item(FORM, 0)
    UNITS: tl.constexpr = item(FORM, 1)
    slot = group - block // GROUP
    if item(FORM, 2):
        slot = group % ring
    if MASKED:
        slot = tl.where(needed, slot, 0)
    codes = store[0]
    scales = store[1]
    zeros = store[2]
    if item(FORM, 3):
        table = store[3] + slot
        codes_at = tl.load(table)
        scales_at = tl.load(table + slots)
        zeros_at = tl.load(table + 2 * slots)
        of_page = tl.load(table + 3 * slots)
        if item(UNITS, 0) % 16 == 0:
            codes_at = tl.multiple_of(codes_at, 16)
        codes += codes_at + row * of_page * item(UNITS, 0)
        scales += scales_at + row * of_page * item(UNITS, 1)
        zeros += zeros_at + row * of_page * item(UNITS, 1)
    else:
        index = row * slots + slot
        codes += index * item(UNITS, 0)
        scales += index * item(UNITS, 1)
        zeros += index * item(UNITS, 1)
    column = tl.arange(0, padded(SIZE))
    place = offset + tl.arange(0, RUN)
    pointers = codes + column[:, None] * (GROUP * BITS // 8) + place[None, :]
    WHOLE: tl.constexpr = is_whole(SIZE, HALF, RUN, MASKED)
    size = SIZE
    half = HALF
    if MASKED:
        size = tl.where(needed, SIZE, 0)
        half = tl.where(needed, HALF, 0)
    kept = (column < size)[:, None]
    if HALF % RUN != 0:
        kept = kept & (place < HALF)[None, :]
    if WHOLE:
        low = tl.load(pointers)
    else:
        low = tl.load(pointers, mask=kept, other=0)
    if BITS == 4:
        high = low >> 4
        low = low & 15
    elif WHOLE:
        high = tl.load(pointers + HALF)
    else:
        high = tl.load(pointers + HALF, mask=kept, other=0)
    if PER_TOKEN:
        shared = place < half
        low_scale = tl.load(scales + place, mask=shared, other=0.0).to(tl.float32)[None, :]
        low_zero = tl.load(zeros + place, mask=shared, other=0.0).to(tl.float32)[None, :]
        high_scale = tl.load(scales + HALF + place, mask=shared, other=0.0).to(tl.float32)[None, :]
        high_zero = tl.load(zeros + HALF + place, mask=shared, other=0.0).to(tl.float32)[None, :]
    else:
        shared = column < size
        low_scale = tl.load(scales + column, mask=shared, other=0.0).to(tl.float32)[:, None]
        low_zero = tl.load(zeros + column, mask=shared, other=0.0).to(tl.float32)[:, None]
        high_scale = low_scale
        high_zero = low_zero
    low = low.to(tl.float32) * low_scale + low_zero
    high = high.to(tl.float32) * high_scale + high_zero
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def finished(
    score, factor, position, inside, limit, mask, mask_key, slope, MASKED: tl.constexpr, SOFTCAP: tl.constexpr
):
    """Sums of products as scores (base 2): -inf where a row does not see a position, or none does that is not
    ``inside``.
    """
    score = score * factor[None, :]
    if SOFTCAP > 0:
        score = soft_tanh(score, SOFTCAP) * SOFTCAP
    if slope is not None:
        score = with_alibi(score, slope, limit, position)
    if MASKED:
        score = tl.where(inside[None, :] & (position[None, :] <= limit[:, None]), score, float("-inf"))
    if mask is not None:
        score = tl.where(shown_pairs(mask, position.to(tl.int64) * mask_key, inside), score, float("-inf"))
    return score


@triton.jit
def attend_codes(
    sums, top, total, queries, keys, key_strides, values, value_strides, capacities, value_capacities,
    key_codes, value_codes, key_slots, value_slots, key_rings, value_rings, key_row, value_row,
    starts, blocks, bases, value_bases, edge, limit, group, offset, mask, mask_key, slope,
    LEVELS: tl.constexpr, VALUE_LEVELS: tl.constexpr, MASKED: tl.constexpr,
    RANKS: tl.constexpr, VALUE_RANKS: tl.constexpr, SCALES: tl.constexpr, FACTORS: tl.constexpr,
    ALIGNS: tl.constexpr, RINGS: tl.constexpr, VALUE_ALIGNS: tl.constexpr, VALUE_RINGS: tl.constexpr,
    VALUE_OF: tl.constexpr, CODES: tl.constexpr, VALUE_CODES: tl.constexpr,
    GROUP: tl.constexpr, RUN: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """As ``attend``, for a pair of tiles of a group: positions from ``offset`` on of each of its halves.

    Levels without codes have numbers for these positions. All rows see all positions from the first on that
    are before the ``edge``.
    """
    HALF: tl.constexpr = GROUP // 2
    DTYPE: tl.constexpr = queries[0].dtype
    low_first = group * GROUP + offset
    high_first = low_first + HALF
    stop = (group + 1) * GROUP
    in_half = offset + tl.arange(0, RUN) < HALF
    low_position = low_first + tl.arange(0, RUN)
    high_position = high_first + tl.arange(0, RUN)
    low_factor = tl.full((RUN,), item(FACTORS, 0), tl.float32)
    high_factor = low_factor
    for n in tl.static_range(LEVELS):
        if bits_of(CODES, n) == 16:
            low = load_slots(
                keys[n], key_strides[n], capacities[n], low_first - bases[n], starts[n] - bases[n], edge - bases[n],
                item(RANKS, n), RUN, item(ALIGNS, n), item(RINGS, n), MASKED,
            )  # fmt: skip
            high = load_slots(
                keys[n], key_strides[n], capacities[n], high_first - bases[n], starts[n] - bases[n], edge - bases[n],
                item(RANKS, n), RUN, item(ALIGNS, n), item(RINGS, n), MASKED,
            )  # fmt: skip
        else:
            low, high = load_code_pair(
                key_codes[n], key_slots[n], key_rings[n], key_row, group, blocks[n], offset, starts[n] < stop,
                item(RANKS, n), item(CODES, n), False, GROUP, RUN, MASKED, DTYPE,
            )  # fmt: skip
        low = tl.dot(queries[n], low, input_precision="ieee")
        high = tl.dot(queries[n], high, input_precision="ieee")
        if item(SCALES, n) != 1.0:
            low = low * item(SCALES, n)
            high = high * item(SCALES, n)
        if n == 0:
            low_score = low
            high_score = high
        else:
            low_shared = low_position >= starts[n]
            high_shared = high_position >= starts[n]
            low_score += tl.where(low_shared[None, :], low, 0.0)
            high_score += tl.where(high_shared[None, :], high, 0.0)
            low_factor = tl.where(low_shared, item(FACTORS, n), low_factor)
            high_factor = tl.where(high_shared, item(FACTORS, n), high_factor)
    low_inside = (low_position >= starts[0]) & (low_position < edge) & in_half
    high_inside = (high_position >= starts[0]) & (high_position < edge) & in_half
    low_score = finished(low_score, low_factor, low_position, low_inside, limit, mask, mask_key, slope, MASKED, SOFTCAP)
    high_score = finished(
        high_score, high_factor, high_position, high_inside, limit, mask, mask_key, slope, MASKED, SOFTCAP
    )
    highest = tl.maximum(top, tl.maximum(tl.max(low_score, 1), tl.max(high_score, 1)))
    low_weight = tl.exp2(low_score - highest[:, None])
    high_weight = tl.exp2(high_score - highest[:, None])
    shrink = tl.exp2(top - highest)
    total = total * shrink + (tl.sum(low_weight, 1) + tl.sum(high_weight, 1))
    low_weight = low_weight.to(DTYPE)
    high_weight = high_weight.to(DTYPE)
    added = ()
    for n in tl.static_range(count(VALUE_RANKS)):
        product = sums[n] * shrink[:, None]
        if n < VALUE_LEVELS:
            if bits_of(VALUE_CODES, n) == 16:
                low = load_slots(
                    values[n], value_strides[n], value_capacities[n], low_first - value_bases[n],
                    starts[item(VALUE_OF, n)] - value_bases[n], edge - value_bases[n],
                    item(VALUE_RANKS, n), RUN, item(VALUE_ALIGNS, n), item(VALUE_RINGS, n), MASKED,
                )  # fmt: skip
                high = load_slots(
                    values[n], value_strides[n], value_capacities[n], high_first - value_bases[n],
                    starts[item(VALUE_OF, n)] - value_bases[n], edge - value_bases[n],
                    item(VALUE_RANKS, n), RUN, item(VALUE_ALIGNS, n), item(VALUE_RINGS, n), MASKED,
                )  # fmt: skip
            else:
                low, high = load_code_pair(
                    value_codes[n], value_slots[n], value_rings[n], value_row, group, blocks[item(VALUE_OF, n)], offset,
                    starts[item(VALUE_OF, n)] < stop, item(VALUE_RANKS, n), item(VALUE_CODES, n), True, GROUP, RUN,
                    MASKED, DTYPE,
                )  # fmt: skip
            if MASKED:  # weight 0 times garbage may be NaN
                low = tl.where((low_inside & (low_position >= starts[item(VALUE_OF, n)]))[None, :], low, 0.0)
                high = tl.where((high_inside & (high_position >= starts[item(VALUE_OF, n)]))[None, :], high, 0.0)
            product = tl.dot(low_weight, tl.trans(low), product, input_precision="ieee")
            product = tl.dot(high_weight, tl.trans(high), product, input_precision="ieee")
        added = added + (product,)
    return added, highest, total


@triton.jit
def attend(
    sums, top, total, queries, keys, key_strides, values, value_strides, capacities, value_capacities,
    starts, bases, value_bases, last, limit, first, mask, mask_key, slope,
    LEVELS: tl.constexpr, VALUE_LEVELS: tl.constexpr, MASKED: tl.constexpr,
    RANKS: tl.constexpr, VALUE_RANKS: tl.constexpr, SCALES: tl.constexpr, FACTORS: tl.constexpr,
    ALIGNS: tl.constexpr, RINGS: tl.constexpr, VALUE_ALIGNS: tl.constexpr, VALUE_RINGS: tl.constexpr,
    VALUE_OF: tl.constexpr, WALK: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Adds positions first ... first + WALK - 1 to the running softmax: its sums of values, maximum (base 2),
    denominator.

    They have the first LEVELS levels of keys and VALUE_LEVELS parts of values, part n of level VALUE_OF[n].
    Without MASKED all rows see all of them, but for what ``mask`` hides, which points at position 0 of each
    row.
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
    inside = (position >= starts[0]) & (position <= last)
    score = finished(score, factor, position, inside, limit, mask, mask_key, slope, MASKED, SOFTCAP)
    highest = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - highest[:, None])
    shrink = tl.exp2(top - highest)
    total = total * shrink + tl.sum(weight, 1)
    added = ()
    for n in tl.static_range(count(VALUE_RANKS)):
        product = sums[n] * shrink[:, None]
        if n < VALUE_LEVELS:
            tile = load_slots(
                values[n], value_strides[n], value_capacities[n], first - value_bases[n],
                starts[item(VALUE_OF, n)] - value_bases[n], last + 1 - value_bases[n],
                item(VALUE_RANKS, n), WALK, item(VALUE_ALIGNS, n), item(VALUE_RINGS, n), MASKED,
            )  # fmt: skip
            if MASKED:  # weight 0 times garbage may be NaN
                tile = tl.where(((position >= starts[item(VALUE_OF, n)]) & (position <= last))[None, :], tile, 0.0)
            product = tl.dot(weight.to(tile.dtype), tl.trans(tile), product, input_precision="ieee")
        added = added + (product,)
    return added, highest, total


@triton.jit(do_not_specialize=["batch_size", "num_splits", "num_rows", "num_keys"])
def cached_kernel(
    q, keys, values, key_codes, value_codes, starts, counts, blocks, edges, partial, partial_lse, mask, slopes,
    q_batch, q_head, q_row, key_strides, value_strides, capacities, value_capacities,
    key_slots, value_slots, key_rings, value_rings,
    mask_batch, mask_head, mask_query, mask_key, num_keys,
    batch_size, num_splits, num_rows, num_units, num_tiles, unit,
    heads_per_key, heads_per_value, num_queries, value_dim,
    RANKS: tl.constexpr, VALUE_RANKS: tl.constexpr, SCALES: tl.constexpr, FACTORS: tl.constexpr,
    ALIGNS: tl.constexpr, MULTIPLES: tl.constexpr, RINGS: tl.constexpr,
    VALUE_ALIGNS: tl.constexpr, VALUE_RINGS: tl.constexpr, VALUE_OF: tl.constexpr,
    CODES: tl.constexpr, VALUE_CODES: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    OWN: tl.constexpr, WALK: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp (base 2) of the queries of one unit of heads over one of ``num_splits`` chunks
    of positions.

    With a GROUP, positions before the edge of the batch row are codes in groups of that size, where CODES and
    VALUE_CODES have the FORM of ``load_code_pair``; levels of 16 bits have all numbers. A unit is ``unit``
    heads that share a key and a value head. The rows of a tile are the queries of all its heads.
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

    begins, of_blocks, bases, key_places, key_rows, queries = (), (), (), (), (), ()
    for n in tl.static_range(count(RANKS)):
        begin = tl.load(starts + n * batch_size + batch).to(tl.int32)
        begins = begins + (begin,)
        block = tl.multiple_of(tl.load(blocks + n * batch_size + batch).to(tl.int32), item(MULTIPLES, n))
        of_blocks = of_blocks + (block,)
        if item(RINGS, n):
            bases = bases + (begin * 0,)
        else:
            bases = bases + (block,)
        key_places = key_places + (keys[n] + batch * key_strides[n][0] + key_head * key_strides[n][1],)
        key_rows = key_rows + (key_strides[n][2],)
        column = tl.arange(0, padded(item(RANKS, n)))
        place = q + batch * q_batch + head * q_head + query.to(tl.int64) * q_row + slice_start(RANKS, n)
        kept = row_valid[:, None] & (column < item(RANKS, n))[None, :]
        queries = queries + (tl.load(place[:, None] + column[None, :], mask=kept, other=0.0),)
    value_bases, value_places, value_rows, sums = (), (), (), ()
    for n in tl.static_range(count(VALUE_RANKS)):
        if item(VALUE_RINGS, n):
            value_bases = value_bases + (begins[0] * 0,)
        else:
            value_bases = value_bases + (of_blocks[item(VALUE_OF, n)],)
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
    # Without codes, what follows begins where a level does.
    num_pairs = last * 0
    near_begins = begins
    if GROUP > 0:
        HALF: tl.constexpr = GROUP // 2
        PAIRS: tl.constexpr = (HALF + RUN - 1) // RUN  # of a group
        edge = tl.load(edges + batch).to(tl.int32)
        first_group = begins[0] // GROUP
        num_pairs = tl.maximum(edge // GROUP - first_group, 0) * PAIRS
        near_begins = ()
        for n in tl.static_range(count(RANKS)):
            near_begins = near_begins + (tl.maximum(begins[n], edge),)
    far_stop = last - num_queries + 2  # all queries see the positions before it
    if count(RANKS) > 1:
        far_stop = tl.minimum(far_stop, near_begins[1])
    # Tiles begin where the slots of the first level are aligned.
    origin = bases[0] + (near_begins[0] - bases[0]) // WALK * WALK
    num_walks = (last - origin + WALK) // WALK
    per_split = (num_pairs + num_walks + num_splits - 1) // num_splits
    low = split * per_split
    high = tl.minimum(low + per_split, num_pairs + num_walks)
    if GROUP > 0:
        pair_low = tl.minimum(low, num_pairs)
        pair_high = tl.minimum(high, num_pairs)
        low -= pair_low
        high -= pair_high
        # Far pairs are those of whole groups that only the first level has.
        far_groups = edge // GROUP
        if count(RANKS) > 1:
            far_groups = tl.minimum(far_groups, begins[1] // GROUP)
        far_low = ((begins[0] + GROUP - 1) // GROUP - first_group) * PAIRS
        far_high = tl.maximum(far_groups - first_group, 0) * PAIRS
        if HALF % RUN != 0:
            far_high = far_low
        far_low = tl.minimum(tl.maximum(far_low, pair_low), pair_high)
        far_high = tl.maximum(tl.minimum(far_high, pair_high), far_low)
        key_row = batch * (num_units * unit // heads_per_key) + key_head
        value_row = batch * (num_units * unit // heads_per_value) + value_head
        for pair in range(far_low, far_high):
            sums, top, total = attend_codes(
                sums, top, total, queries, key_places, key_rows, value_places, value_rows, capacities,
                value_capacities, key_codes, value_codes, key_slots, value_slots, key_rings, value_rings,
                key_row, value_row, begins, of_blocks, bases, value_bases, edge, limit,
                first_group + pair // PAIRS, pair % PAIRS * RUN, mask, mask_key, slope,
                1, parts_of(VALUE_OF, 1), False, RANKS, VALUE_RANKS, SCALES, FACTORS,
                ALIGNS, RINGS, VALUE_ALIGNS, VALUE_RINGS, VALUE_OF, CODES, VALUE_CODES, GROUP, RUN, SOFTCAP,
            )  # fmt: skip
        passed = far_low - pair_low  # of a group that a window or sink tokens cut
        for near in range(0, passed + pair_high - far_high):
            pair = tl.where(near < passed, pair_low + near, far_high + near - passed)
            sums, top, total = attend_codes(
                sums, top, total, queries, key_places, key_rows, value_places, value_rows, capacities,
                value_capacities, key_codes, value_codes, key_slots, value_slots, key_rings, value_rings,
                key_row, value_row, begins, of_blocks, bases, value_bases, edge, limit,
                first_group + pair // PAIRS, pair % PAIRS * RUN, mask, mask_key, slope,
                count(RANKS), count(VALUE_RANKS), True, RANKS, VALUE_RANKS, SCALES, FACTORS,
                ALIGNS, RINGS, VALUE_ALIGNS, VALUE_RINGS, VALUE_OF, CODES, VALUE_CODES, GROUP, RUN, SOFTCAP,
            )  # fmt: skip
    far_low = tl.minimum(tl.maximum(low, tl.where(origin < near_begins[0], 1, 0)), high)
    far_high = tl.maximum(tl.minimum(high, tl.maximum(far_stop - origin, 0) // WALK), far_low)
    for walk in range(far_low, far_high):
        sums, top, total = attend(
            sums, top, total, queries, key_places, key_rows, value_places, value_rows, capacities, value_capacities,
            near_begins, bases, value_bases, last, limit, origin + walk * WALK, mask, mask_key, slope,
            1, parts_of(VALUE_OF, 1), False, RANKS, VALUE_RANKS, SCALES, FACTORS,
            ALIGNS, RINGS, VALUE_ALIGNS, VALUE_RINGS, VALUE_OF, WALK, SOFTCAP,
        )  # fmt: skip
    passed = far_low - low  # the first tile, where a window cuts it
    for near in range(0, passed + high - far_high):
        walk = tl.where(near < passed, low + near, far_high + near - passed)
        sums, top, total = attend(
            sums, top, total, queries, key_places, key_rows, value_places, value_rows, capacities, value_capacities,
            near_begins, bases, value_bases, last, limit, origin + walk * WALK, mask, mask_key, slope,
            count(RANKS), count(VALUE_RANKS), True, RANKS, VALUE_RANKS, SCALES, FACTORS,
            ALIGNS, RINGS, VALUE_ALIGNS, VALUE_RINGS, VALUE_OF, WALK, SOFTCAP,
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
