"""Plain causal attention as a Triton kernel without levels, to compare machine code with: what a tile costs
where there is nothing else.

Source: Dao 2023 (FlashAttention-2): a running softmax, keys before the tile without a mask, those beside it
    with one.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_keys(
    sums, top, total, query, position, key, value, key_row, value_row, start, stop, factor,
    DIM: tl.constexpr, WALK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys start ... stop to the running softmax in base 2; ``factor`` is the scale times log2(e)."""
    column = tl.arange(0, DIM)
    for first in range(start, stop, WALK):
        place = first + tl.arange(0, WALK)
        row = place.to(tl.int64)
        keys = tl.load(key + row[:, None] * key_row + column[None, :])
        score = tl.dot(query, tl.trans(keys))
        if MASKED:
            score = tl.where(position[:, None] >= place[None, :], score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - highest[:, None])
        shrink = tl.exp2(top - highest)
        total = total * shrink + tl.sum(weight, 1)
        top = highest
        values = tl.load(value + row[:, None] * value_row + column[None, :])
        sums = tl.dot(weight.to(values.dtype), values, sums * shrink[:, None])
    return sums, top, total


@triton.jit
def plain_kernel(
    q, k, v, out, q_head, q_row, k_head, k_row, v_head, v_row, out_head, out_row, length, factor,
    DIM: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head; the length is a multiple of the tiles."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    first = tile * OWN
    position = first + tl.arange(0, OWN)
    column = tl.arange(0, DIM)
    query = tl.load(q + head * q_head + position.to(tl.int64)[:, None] * q_row + column[None, :])
    sums = tl.zeros((OWN, DIM), tl.float32)
    top = tl.full((OWN,), -3.0e38, tl.float32)
    total = tl.zeros((OWN,), tl.float32)
    key, value = k + head * k_head, v + head * v_head
    sums, top, total = add_keys(
        sums, top, total, query, position, key, value, k_row, v_row, 0, first, factor, DIM, WALK, False
    )  # fmt: skip
    stop = tl.minimum(first + OWN, length)
    sums, top, total = add_keys(
        sums, top, total, query, position, key, value, k_row, v_row, first, stop, factor, DIM, WALK, True
    )  # fmt: skip
    place = out + head * out_head + position.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty))
