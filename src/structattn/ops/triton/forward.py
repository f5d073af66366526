"""The forward kernel: structured attention of one tile of queries, without score matrices in memory."""
# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102 - the kernel language has no unpacking and no lazy `and`

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
    has_positive_factors,
    is_sliced,
    item,
    key_subtiles_of,
    num_coarse_subtiles,
    num_groups_of,
    scales_of,
    slides,
    softcap_of,
    value_ends_of,
    value_subtiles_of,
)
from structattn.ops.triton.primitives import (
    add_fine,
    add_weighted,
    clear_from,
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
def scale_subtiles(subtiles, factor):
    scaled = ()
    for p in tl.static_range(len(subtiles)):
        scaled = scaled + (subtiles[p] * factor[:, None],)
    return scaled


@triton.jit
def attend(
    sums, top, total, query, position, key, value, key_stride, value_stride, start, stop, factor, near, window, side,
    mask, mask_stride, slope,
    PLAN: tl.constexpr, NUM_KEY: tl.constexpr, NUM_VALUE: tl.constexpr, WALK: tl.constexpr,
    MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Adds keys start ... stop to the running softmax: its sums of values, its maximum (base 2) and its
    denominator.

    ``key`` and ``value`` point at position 0, ``mask``, if there is one, at that of each query. ``factor`` is
    c_n log2(e) of the coarse levels that these keys share, ``slope`` that of ALiBi times log2(e), if there is
    one. ``near``, ``window`` and ``side`` are for ``visible_pairs``.
    """
    KEY_SUBTILES: tl.constexpr = key_subtiles_of(PLAN)
    VALUE_SUBTILES: tl.constexpr = value_subtiles_of(PLAN)
    lanes = tl.arange(0, WALK)
    for tile in range(start, stop, WALK):
        place = tile + lanes
        valid = place < stop
        row = place.to(tl.int64)
        keys = load_subtiles(key, row * key_stride, valid, KEY_SUBTILES, NUM_KEY, MASKED)
        # One factor for all pairs is multiplied into the exponent, where it takes no instruction more than
        # the subtraction does.
        IS_SCALED: tl.constexpr = FINE or softcap_of(PLAN) > 0 or slope is not None or not has_positive_factors(PLAN)
        if FINE:
            score = product_of(query, keys, num_coarse_subtiles(KEY_SUBTILES))
            score = add_fine(score, query, keys, position, place, KEY_SUBTILES, PLAN)
            score = score * fine_factor(factor, position, place, PLAN)
        else:
            score = product_of(query, keys, NUM_KEY)
            if IS_SCALED:
                score = score * factor
        if softcap_of(PLAN) > 0:
            score = soft_tanh(score, softcap_of(PLAN)) * softcap_of(PLAN)
        if slope is not None:
            score = with_alibi(score, slope, position, place)
        if MASKED:
            shown = visible_pairs(position, place, stop, near, window, side, IS_CAUSAL, HAS_WINDOW)
            score = tl.where(shown, score, float("-inf"))
        if mask is not None:
            score = tl.where(shown_pairs(mask, row * mask_stride, valid), score, float("-inf"))
        if IS_SCALED:
            highest = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - highest[:, None])
        else:
            highest = tl.maximum(top, tl.max(score, 1) * factor)
            weight = tl.exp2(score * factor - highest[:, None])
        shrink = tl.exp2(top - highest)
        top = highest
        total = total * shrink + tl.sum(weight, 1)
        values = load_subtiles(value, row * value_stride, valid, VALUE_SUBTILES, NUM_VALUE, MASKED)
        sums = scale_subtiles(sums, shrink)
        sums = add_weighted(
            sums, weight.to(values[0].dtype), values, position, place, VALUE_SUBTILES, NUM_VALUE, FINE, PLAN
        )
    return sums, top, total


@triton.jit
def walk_keys(
    query, query_offset, row_valid, position, first, last, low, high, key, value, key_stride, value_stride, window,
    mask, mask_stride, slope,
    PLAN: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ALIGNED: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """The softmax of a tile of queries at positions first ... last over the keys low ... high, level by
    level.

    In blocks, without AFTER no key that shares only coarse levels is after the queries.
    """
    KEY_SUBTILES: tl.constexpr = key_subtiles_of(PLAN)
    VALUE_SUBTILES: tl.constexpr = value_subtiles_of(PLAN)
    FINE: tl.constexpr = has_fine(PLAN)
    NUM_TURNS: tl.constexpr = 1 if IS_CAUSAL else 2
    MASKED: tl.constexpr = HAS_WINDOW or not ALIGNED
    sums = zero_subtiles(OWN, VALUE_SUBTILES)
    # Finite, so that a row without a visible key stays free of -inf - -inf.
    top = tl.full((OWN,), -3.0e38, tl.float32)
    total = tl.zeros((OWN,), tl.float32)
    middle_low, middle_high = middle(first, last, PLAN, ALIGNED, WALK)
    for group in tl.static_range(num_groups_of(PLAN)):
        for level in range(group_of(PLAN, group, 0), group_of(PLAN, group, 1) + 1):
            if slides(PLAN):
                extent = high - low
            else:
                start, stop = range_before(level, first, middle_low, low, high, PLAN)
                extent = stop - start
                if AFTER:
                    start_after, stop_after = range_after(level, first, middle_high, low, high, PLAN)
                    extent = tl.maximum(extent, stop_after - start_after)
            own = load_own(
                query,
                query_offset,
                row_valid & (position * 0 < extent),
                pick(ends_of(PLAN), level),
                KEY_SUBTILES,
                group_of(PLAN, group, 2),
                scales_of(PLAN),
            )
            factor = pick(factors_of(PLAN), level)
            if slides(PLAN):
                for turn in range(NUM_TURNS):
                    side, near, far, start, whole, rest, stop = sliding_range(
                        level, turn, first, last, low, high, window, PLAN, False, IS_CAUSAL, HAS_WINDOW, WALK
                    )
                    for part in range(2):
                        sums, top, total = attend(
                            sums, top, total, own, position, key, value, key_stride, value_stride,
                            tl.where(part == 0, start, rest), tl.where(part == 0, tl.minimum(whole, stop), stop),
                            factor, near, far, side, mask, mask_stride, slope,
                            PLAN, group_of(PLAN, group, 2), group_of(PLAN, group, 3), WALK, True, True, True, False,
                        )  # fmt: skip
                    sums, top, total = attend(
                        sums, top, total, own, position, key, value, key_stride, value_stride, whole, rest,
                        factor, near, far, side, mask, mask_stride, slope,
                        PLAN, group_of(PLAN, group, 2), group_of(PLAN, group, 3), WALK, False, False, False, False,
                    )  # fmt: skip
            else:
                sums, top, total = attend(
                    sums, top, total, own, position, key, value, key_stride, value_stride,
                    start, stop, factor, 0, window, 1,
                    mask, mask_stride, slope,
                    PLAN, group_of(PLAN, group, 2), group_of(PLAN, group, 3), WALK, MASKED, False, HAS_WINDOW, False,
                )  # fmt: skip
                if AFTER:
                    sums, top, total = attend(
                        sums, top, total, own, position, key, value, key_stride, value_stride, start_after, stop_after,
                        factor, 0, window, 1, mask, mask_stride, slope,
                        PLAN, group_of(PLAN, group, 2), group_of(PLAN, group, 3), WALK, True, False, HAS_WINDOW, False,
                    )  # fmt: skip
            if is_sliced(PLAN):
                sums = clear_from(sums, pick(value_ends_of(PLAN), level), VALUE_SUBTILES)
    if not slides(PLAN):
        LAST: tl.constexpr = coarse_of(PLAN) - 1
        own = load_own(
            query, query_offset, row_valid, item(ends_of(PLAN), LAST),
            KEY_SUBTILES, count(KEY_SUBTILES), scales_of(PLAN)
        )  # fmt: skip
        start = tl.maximum(middle_low, low)
        stop = tl.minimum(middle_high, high)
        sums, top, total = attend(
            sums, top, total, own, position, key, value, key_stride, value_stride, start, stop,
            item(factors_of(PLAN), LAST), 0, window, 1, mask, mask_stride, slope,
            PLAN, count(KEY_SUBTILES), count(VALUE_SUBTILES), WALK, True, IS_CAUSAL, HAS_WINDOW, FINE,
        )  # fmt: skip
    return sums, top, total


@triton.jit(do_not_specialize=["num_queries", "num_keys", "first_block", "num_tiles", "window", "num_sequences"])
def forward_kernel(
    q, k, v, out, lse, cu_seqlens, cu_seqlens_k, tile_map, mask, slopes,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    mask_batch, mask_head, mask_query, mask_key,
    num_queries, num_keys, first_block, num_tiles, window, num_sequences, num_heads, heads_per_group,
    PLAN: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr, ANCHOR: tl.constexpr, PER_ANCHOR: tl.constexpr,
    ALIGNED: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one tile of queries of one head."""
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles  # with a causal mask the last tiles are the longest
    batch = (tl.program_id(0) // num_tiles // num_heads).to(tl.int64)
    head = (tl.program_id(0) // num_tiles % num_heads).to(tl.int64)
    if PACKED:
        if tl.load(tile_map + tile) >= num_sequences:
            return
    first, end, query_offset, key_offset, length, first_query = own_tile(
        tile, first_block, num_queries, num_keys, cu_seqlens, cu_seqlens_k, tile_map, num_tiles,
        OWN, ANCHOR, PER_ANCHOR, PACKED, False,
    )  # fmt: skip
    if end <= tl.maximum(first, first_query):
        return
    position = first + tl.arange(0, OWN)
    row_valid = (position < end) & (position >= first_query)
    row = (query_offset + position).to(tl.int64)
    low, high = reach(
        tl.maximum(first, first_query), end - 1, length * 0, length, window, False, IS_CAUSAL, HAS_WINDOW, ALIGNED, WALK
    )
    group = head // heads_per_group
    key = k + batch * k_batch + group * k_head + key_offset.to(tl.int64) * k_row
    value = v + batch * v_batch + group * v_head + key_offset.to(tl.int64) * v_row
    if mask is not None:
        mask += batch * mask_batch + head * mask_head + key_offset.to(tl.int64) * mask_key
        mask += tl.where(row_valid, row, 0) * mask_query
    slope = slopes
    if slopes is not None:
        slope = tl.load(slopes + batch * num_heads + head) * 1.4426950408889634
    sums, top, total = walk_keys(
        q + batch * q_batch + head * q_head, row * q_row, row_valid, position, first, end - 1, low, high,
        key, value, k_row, v_row, window, mask, mask_key, slope,
        PLAN, OWN, WALK, IS_CAUSAL, HAS_WINDOW, ALIGNED, not IS_CAUSAL,
    )  # fmt: skip
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    store_subtiles(
        out + batch * out_batch + head * out_head, row * out_row, row_valid, scale_subtiles(sums, 1.0 / total),
        value_subtiles_of(PLAN),
    )  # fmt: skip
    log_sum = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + (batch * num_heads + head) * num_queries + row, log_sum, mask=row_valid)
