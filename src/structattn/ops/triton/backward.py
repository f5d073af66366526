"""The backward kernels: gradients of the queries, and of the keys and values, from the saved log-sum-exp.

One kernel serves both. With P = exp(score - lse), dP = dO V^T and delta = rowsum(dO * O) - d lse,

    dS = P * (dP - delta),   dQ = c a dS K,   dK = c a dS^T Q,   dV = P^T dO,

it computes a tile of rows of one side (the *own* tile: queries with dO, or keys with values) and walks over
the other. Every program writes rows of its own, so the result is deterministic.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102, SIM108 - the kernel language has no unpacking, no lazy `and`, no conditional
# tensors

from __future__ import annotations

import triton
import triton.language as tl

from structattn.ops.triton.plan import (
    coarse_of,
    count,
    ends_of,
    factors_of,
    group_of,
    has_fine,
    is_sliced,
    item,
    key_subtiles_of,
    largest_factor,
    num_coarse_subtiles,
    num_groups_of,
    scales_of,
    slides,
    softcap_of,
    start_of,
    value_ends_of,
    value_subtiles_of,
    width_of,
)
from structattn.ops.triton.primitives import (
    add_fine,
    add_weighted,
    clear_from,
    column_scale,
    fine_factor,
    load_own,
    load_subtiles,
    middle,
    own_tile,
    pick,
    product_of,
    range_after,
    range_before,
    reach,
    shown_pairs,
    sliding_range,
    soft_tanh,
    store_subtiles,
    visible_pairs,
    with_alibi,
    zero_subtiles,
)


@triton.jit
def row_kernel(
    grad_out, out, lse, grad_lse, delta, base,
    grad_out_batch, grad_out_head, grad_out_row, out_batch, out_head, out_row,
    num_queries, num_tiles, num_heads, value_dim,
    OWN: tl.constexpr, WIDTH: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """delta, and the log-sum-exp in base 2: +inf for a row without visible keys, so that its P is 0."""
    tile = tl.program_id(0) % num_tiles
    batch = (tl.program_id(0) // num_tiles // num_heads).to(tl.int64)
    head = (tl.program_id(0) // num_tiles % num_heads).to(tl.int64)
    row = (tile * OWN + tl.arange(0, OWN)).to(tl.int64)
    valid = row < num_queries
    place = (batch * num_heads + head) * num_queries + row
    total = tl.zeros((OWN,), tl.float32)
    for start in range(0, value_dim, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = valid[:, None] & (column < value_dim)[None, :]
        grad_at = (
            grad_out + batch * grad_out_batch + head * grad_out_head + row[:, None] * grad_out_row + column[None, :]
        )
        out_at = out + batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :]
        product = tl.load(grad_at, mask=inside, other=0.0).to(tl.float32) * tl.load(out_at, mask=inside, other=0.0)
        total += tl.sum(product, 1)
    log_sum = tl.load(lse + place, mask=valid, other=0.0)
    if HAS_GRAD_LSE:
        total -= tl.load(grad_lse + place, mask=valid, other=0.0)
    empty = log_sum == float("-inf")
    tl.store(delta + place, tl.where(empty, 0.0, total), mask=valid)
    tl.store(base + place, tl.where(empty, float("inf"), log_sum * 1.4426950408889634), mask=valid)


@triton.jit
def accumulate(
    grad_key, grad_value, own, other, own_base, own_delta, position, walk_key, walk_value, walk_base, walk_delta,
    key_stride, value_stride, start, stop, walk_first, factor, near, window, side, mask, mask_stride, slope,
    PLAN: tl.constexpr, NUM_KEY: tl.constexpr, NUM_VALUE: tl.constexpr, WALK: tl.constexpr, OWN_IS_KEY: tl.constexpr,
    MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Adds what walked rows start ... stop give to the gradients of the own rows.

    ``own`` and ``walk_key`` are of the score's dimension (queries or keys), ``other`` and ``walk_value`` of
    the value's (dO or values). The walked pointers point at position 0.
    """
    KEY_SUBTILES: tl.constexpr = key_subtiles_of(PLAN)
    VALUE_SUBTILES: tl.constexpr = value_subtiles_of(PLAN)
    lanes = tl.arange(0, WALK)
    for tile in range(start, stop, WALK):
        place = tile + lanes
        valid = (place < stop) & (place >= walk_first)
        row = place.to(tl.int64)
        keys = load_subtiles(walk_key, row * key_stride, valid, KEY_SUBTILES, NUM_KEY, MASKED)
        values = load_subtiles(walk_value, row * value_stride, valid, VALUE_SUBTILES, NUM_VALUE, MASKED)
        if FINE:
            score = product_of(own, keys, num_coarse_subtiles(KEY_SUBTILES))
            score = add_fine(score, own, keys, position, place, KEY_SUBTILES, PLAN)
            scale = fine_factor(factor, position, place, PLAN)
            grad = product_of(other, values, num_coarse_subtiles(VALUE_SUBTILES))
            grad = add_fine(grad, other, values, position, place, VALUE_SUBTILES, PLAN)
        else:
            score = product_of(own, keys, NUM_KEY)
            scale = factor
            grad = product_of(other, values, NUM_VALUE)
        score = score * scale
        if softcap_of(PLAN) > 0:
            bent = soft_tanh(score, softcap_of(PLAN))
            score = bent * softcap_of(PLAN)
            scale = scale * (1 - bent * bent)
        if slope is not None:
            score = with_alibi(score, slope, position, place)
        if OWN_IS_KEY:
            # +inf makes the weight of rows that are not walked 0.
            base = tl.load(walk_base + row, mask=valid, other=float("inf"))
            delta = tl.load(walk_delta + row, mask=valid, other=0.0)
            weight = tl.exp2(score - base[None, :])
            grad = grad - delta[None, :]
        else:
            weight = tl.exp2(score - own_base[:, None])
            grad = grad - own_delta[:, None]
        if MASKED:
            shown = visible_pairs(position, place, stop, near, window, side, IS_CAUSAL, HAS_WINDOW)
            weight = tl.where(shown, weight, 0.0)
        if mask is not None:
            weight = tl.where(shown_pairs(mask, row * mask_stride, valid), weight, 0.0)
        # With factors of at most 1, so that small numbers keep their digits in float16: see `natural`.
        grad = (weight * grad * (scale * (1 / largest_factor(PLAN)))).to(keys[0].dtype)
        grad_key = add_weighted(grad_key, grad, keys, position, place, KEY_SUBTILES, NUM_KEY, FINE, PLAN)
        if OWN_IS_KEY:
            grad_value = add_weighted(
                grad_value, weight.to(values[0].dtype), values, position, place, VALUE_SUBTILES, NUM_VALUE, FINE, PLAN
            )
    return grad_key, grad_value


@triton.jit
def natural(subtiles, SUBTILES: tl.constexpr, SCALES: tl.constexpr, PLAN: tl.constexpr):
    """Gradients of scores of base e from those of base 2, times a_l and the largest factor of a level."""
    scaled = ()
    for p in tl.static_range(count(SUBTILES)):
        subtile = subtiles[p] * (0.6931471805599453 * largest_factor(PLAN))
        if count(SCALES) > 0:
            column = start_of(SUBTILES, p) + tl.arange(0, width_of(SUBTILES, p))
            subtile = subtile * column_scale(column, SCALES)[None, :]
        scaled = scaled + (subtile,)
    return scaled


@triton.jit(do_not_specialize=["num_queries", "num_keys", "first_block", "num_tiles", "window", "num_sequences"])
def gradient_kernel(
    own_key, own_value, walk_key, walk_value, grad_key, grad_value, base, delta,
    cu_seqlens, cu_seqlens_k, tile_map, mask, slopes,
    own_key_batch, own_key_head, own_key_row, own_value_batch, own_value_head, own_value_row,
    walk_key_batch, walk_key_head, walk_key_row, walk_value_batch, walk_value_head, walk_value_row,
    grad_key_batch, grad_key_head, grad_key_row, grad_value_batch, grad_value_head, grad_value_row,
    mask_batch, mask_head, mask_query, mask_key,
    num_queries, num_keys, first_block, num_tiles, window, num_sequences, num_heads, heads_per_group,
    PLAN: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr, ANCHOR: tl.constexpr, PER_ANCHOR: tl.constexpr,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, OWN_IS_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile: of queries (own q and dO, walking over k and v), or of keys and values (the
    reverse).

    With WHOLE the walked positions begin at 0 and end with a whole tile. ``num_heads`` counts the heads of
    the own side. A tile of keys walks over the queries of every head of its group.
    """
    KEY_SUBTILES: tl.constexpr = key_subtiles_of(PLAN)
    VALUE_SUBTILES: tl.constexpr = value_subtiles_of(PLAN)
    SCALES: tl.constexpr = scales_of(PLAN)
    # Before the own tile no walked tile ends beyond its range, but queries may begin within one; after it a
    # sequence may end.
    MASKED: tl.constexpr = HAS_WINDOW or not ALIGNED or (OWN_IS_KEY and not WHOLE)
    MASKED_AFTER: tl.constexpr = HAS_WINDOW or not ALIGNED or not WHOLE
    FINE: tl.constexpr = has_fine(PLAN)
    LAST: tl.constexpr = coarse_of(PLAN) - 1
    NUM_TURNS: tl.constexpr = 1 if IS_CAUSAL else 2
    SIDE: tl.constexpr = -1 if OWN_IS_KEY else 1
    tile = tl.program_id(0) % num_tiles
    if not OWN_IS_KEY:
        # With a causal mask the last tiles of queries and the first of keys are the longest.
        tile = num_tiles - 1 - tile
    batch = (tl.program_id(0) // num_tiles // num_heads).to(tl.int64)
    head = (tl.program_id(0) // num_tiles % num_heads).to(tl.int64)
    if PACKED:
        if tl.load(tile_map + tile) >= num_sequences:
            return
    first, end, query_offset, key_offset, length, first_query = own_tile(
        tile, first_block, num_queries, num_keys, cu_seqlens, cu_seqlens_k, tile_map, num_tiles,
        OWN, ANCHOR, PER_ANCHOR, PACKED, OWN_IS_KEY,
    )  # fmt: skip
    if end <= tl.maximum(first, 0 if OWN_IS_KEY else first_query):
        return
    position = first + tl.arange(0, OWN)
    if OWN_IS_KEY:
        own_first = length * 0
        own_offset = key_offset
        walk_first = first_query
        walk_offset = query_offset.to(tl.int64)
        walk_head = head * heads_per_group
        num_walks = heads_per_group
    else:
        own_first = first_query
        own_offset = query_offset
        walk_first = length * 0
        walk_offset = key_offset.to(tl.int64)
        walk_head = head // heads_per_group
        num_walks = 1
    row_valid = (position < end) & (position >= own_first)
    row = (own_offset + position).to(tl.int64)
    low, high = reach(
        tl.maximum(first, own_first), end - 1, walk_first, length, window,
        OWN_IS_KEY, IS_CAUSAL, HAS_WINDOW, ALIGNED, WALK,
    )  # fmt: skip
    own_key += batch * own_key_batch + head * own_key_head
    own_value += batch * own_value_batch + head * own_value_head
    walk_key += batch * walk_key_batch + walk_head * walk_key_head + walk_offset * walk_key_row
    walk_value += batch * walk_value_batch + walk_head * walk_value_head + walk_offset * walk_value_row
    if OWN_IS_KEY:
        line = (batch * num_heads * heads_per_group + walk_head) * num_queries + walk_offset
        base += line
        delta += line
        own_base = 0.0
        own_delta = 0.0
    else:
        line = (batch * num_heads + head) * num_queries + row
        own_base = tl.load(base + line, mask=row_valid, other=float("inf"))
        own_delta = tl.load(delta + line, mask=row_valid, other=0.0)
    if OWN_IS_KEY:
        mask_own = mask_key
        mask_walk = mask_query
        mask_line = walk_head
    else:
        mask_own = mask_query
        mask_walk = mask_key
        mask_line = head
    if mask is not None:
        mask += batch * mask_batch + mask_line * mask_head + walk_offset * mask_walk
        mask += tl.where(row_valid, row, 0) * mask_own
    if slopes is not None:
        if OWN_IS_KEY:
            slopes += batch * num_heads * heads_per_group + walk_head
        else:
            slopes += batch * num_heads + head
    sums = zero_subtiles(OWN, KEY_SUBTILES)
    if OWN_IS_KEY:
        value_sums = zero_subtiles(OWN, VALUE_SUBTILES)
    else:
        value_sums = ()
    middle_low, middle_high = middle(first, end - 1, PLAN, ALIGNED, WALK)
    for group in tl.static_range(num_groups_of(PLAN)):
        for level in range(group_of(PLAN, group, 0), group_of(PLAN, group, 1) + 1):
            value_end = pick(value_ends_of(PLAN), level)
            own = load_own(
                own_key, row * own_key_row, row_valid, pick(ends_of(PLAN), level), KEY_SUBTILES,
                group_of(PLAN, group, 2), SCALES,
            )  # fmt: skip
            other = load_own(
                own_value, row * own_value_row, row_valid, value_end, VALUE_SUBTILES, group_of(PLAN, group, 3), ()
            )
            factor = pick(factors_of(PLAN), level)
            for walk in range(0, num_walks):
                step = tl.cast(walk, tl.int64)
                key = walk_key + step * walk_key_head
                value = walk_value + step * walk_value_head
                walked_mask = mask
                if mask is not None:
                    walked_mask = mask + step * mask_head
                slope = slopes
                if slopes is not None:
                    slope = tl.load(slopes + step) * 1.4426950408889634
                if slides(PLAN):
                    for turn in range(NUM_TURNS):
                        side, near, far, start, whole, rest, stop = sliding_range(
                            level, turn, first, end - 1, low, high, window,
                            PLAN, OWN_IS_KEY, IS_CAUSAL, HAS_WINDOW, WALK,
                        )  # fmt: skip
                        for part in range(2):
                            sums, value_sums = accumulate(
                                sums, value_sums, own, other, own_base, own_delta, position, key, value,
                                base + step * num_queries, delta + step * num_queries, walk_key_row, walk_value_row,
                                tl.where(part == 0, start, rest), tl.where(part == 0, tl.minimum(whole, stop), stop),
                                walk_first, factor, near, far, side, walked_mask, mask_walk, slope,
                                PLAN, group_of(PLAN, group, 2), group_of(PLAN, group, 3), WALK, OWN_IS_KEY,
                                True, True, True, False,
                            )  # fmt: skip
                        sums, value_sums = accumulate(
                            sums, value_sums, own, other, own_base, own_delta, position, key, value,
                            base + step * num_queries, delta + step * num_queries, walk_key_row, walk_value_row,
                            whole, rest, walk_first, factor, near, far, side, walked_mask, mask_walk, slope,
                            PLAN, group_of(PLAN, group, 2), group_of(PLAN, group, 3), WALK, OWN_IS_KEY,
                            False, False, False, False,
                        )  # fmt: skip
                else:
                    if not (IS_CAUSAL and OWN_IS_KEY):
                        start, stop = range_before(level, first, middle_low, low, high, PLAN)
                        sums, value_sums = accumulate(
                            sums, value_sums, own, other, own_base, own_delta, position, key, value,
                            base + step * num_queries, delta + step * num_queries, walk_key_row, walk_value_row,
                            start, stop, walk_first, factor, 0, window, SIDE, walked_mask, mask_walk, slope,
                            PLAN, group_of(PLAN, group, 2), group_of(PLAN, group, 3), WALK, OWN_IS_KEY,
                            MASKED, False, HAS_WINDOW, False,
                        )  # fmt: skip
                    if OWN_IS_KEY or not IS_CAUSAL:
                        start, stop = range_after(level, first, middle_high, low, high, PLAN)
                        sums, value_sums = accumulate(
                            sums, value_sums, own, other, own_base, own_delta, position, key, value,
                            base + step * num_queries, delta + step * num_queries, walk_key_row, walk_value_row,
                            start, stop, walk_first, factor, 0, window, SIDE, walked_mask, mask_walk, slope,
                            PLAN, group_of(PLAN, group, 2), group_of(PLAN, group, 3), WALK, OWN_IS_KEY,
                            MASKED_AFTER, False, HAS_WINDOW, False,
                        )  # fmt: skip
            sums = clear_from(sums, pick(ends_of(PLAN), level), KEY_SUBTILES)
            if OWN_IS_KEY and is_sliced(PLAN):
                value_sums = clear_from(value_sums, value_end, VALUE_SUBTILES)
    if not slides(PLAN):
        own = load_own(
            own_key, row * own_key_row, row_valid, item(ends_of(PLAN), LAST), KEY_SUBTILES, count(KEY_SUBTILES), SCALES
        )
        other = load_own(
            own_value,
            row * own_value_row,
            row_valid,
            item(value_ends_of(PLAN), LAST),
            VALUE_SUBTILES,
            count(VALUE_SUBTILES),
            (),
        )
        start = tl.maximum(middle_low, low)
        stop = tl.minimum(middle_high, high)
        for walk in range(0, num_walks):
            step = tl.cast(walk, tl.int64)
            walked_mask = mask
            if mask is not None:
                walked_mask = mask + step * mask_head
            slope = slopes
            if slopes is not None:
                slope = tl.load(slopes + step) * 1.4426950408889634
            sums, value_sums = accumulate(
                sums, value_sums, own, other, own_base, own_delta, position,
                walk_key + step * walk_key_head, walk_value + step * walk_value_head,
                base + step * num_queries, delta + step * num_queries, walk_key_row, walk_value_row,
                start, stop, walk_first, item(factors_of(PLAN), LAST), 0, window, SIDE, walked_mask, mask_walk, slope,
                PLAN, count(KEY_SUBTILES), count(VALUE_SUBTILES), WALK, OWN_IS_KEY, True, IS_CAUSAL, HAS_WINDOW, FINE,
            )  # fmt: skip
    store_subtiles(
        grad_key + batch * grad_key_batch + head * grad_key_head, row * grad_key_row, row_valid,
        natural(sums, KEY_SUBTILES, SCALES, PLAN), KEY_SUBTILES,
    )  # fmt: skip
    if OWN_IS_KEY:
        store_subtiles(
            grad_value + batch * grad_value_batch + head * grad_value_head, row * grad_value_row, row_valid,
            value_sums, VALUE_SUBTILES,
        )  # fmt: skip
