"""The decoding kernels: few queries over many keys, which are split among programs and merged by their
log-sum-exps.
"""
# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from structattn.ops.triton.forward import scale_subtiles, walk_keys
from structattn.ops.triton.plan import value_subtiles_of
from structattn.ops.triton.primitives import reach, store_subtiles

_MAX_SPLITS = 64
_PROGRAMS = 512  # programs that fill a GPU


def num_splits_for(programs: int, num_walks: int) -> int:
    """Chunks of ``num_walks`` tiles of keys: enough programs for a GPU, and some tiles for each."""
    return max(1, min(math.ceil(_PROGRAMS / programs), num_walks // 2, _MAX_SPLITS))


def partial_results(num_splits: int, num_rows: int, value_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the output and the log-sum-exp of each split."""
    shape = num_splits, num_rows
    return tuple(torch.empty(x, dtype=torch.float32, device=device) for x in ((*shape, value_dim), shape))


def merge(partial: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes the output and the log-sum-exp from those of the splits."""
    num_splits, num_rows, value_dim = partial.shape
    merge_kernel[(num_rows,)](
        partial, partial_lse, out, lse, num_splits, num_rows, value_dim,
        SPLITS=triton.next_power_of_2(num_splits), WIDTH=32, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_queries", "num_keys", "chunk", "num_splits", "window"])
def decode_kernel(
    q, k, v, partial, partial_lse, mask, slopes,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_query, mask_key,
    num_queries, num_keys, chunk, num_splits, window, num_rows, value_dim, num_tiles, num_groups, heads_per_group,
    PLAN: tl.constexpr, OWN: tl.constexpr, WALK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp (base 2) of the queries of one group of heads over one chunk of the keys.

    The rows of a tile are the queries of all heads of the group, so each key is read once. The coarse levels
    of the plan are those that all queries share.
    """
    split = tl.program_id(0) % num_splits
    rest = tl.program_id(0) // num_splits
    tile = rest % num_tiles
    group = (rest // num_tiles % num_groups).to(tl.int64)
    batch = (rest // num_tiles // num_groups).to(tl.int64)
    row = tile * OWN + tl.arange(0, OWN)
    row_valid = row < heads_per_group * num_queries
    query = row % num_queries
    head = group * heads_per_group + row // num_queries
    first = num_keys - num_queries
    low, high = reach(first, num_keys - 1, num_keys * 0, num_keys, window, False, IS_CAUSAL, HAS_WINDOW, False, WALK)
    low = tl.maximum(low, split * chunk)
    high = tl.minimum(high, (split + 1) * chunk)
    if mask is not None:
        mask += batch * mask_batch + tl.where(row_valid, head * mask_head + query.to(tl.int64) * mask_query, 0)
    slope = slopes
    if slopes is not None:
        slope = tl.load(slopes + batch * num_groups * heads_per_group + head, mask=row_valid, other=0.0)
        slope = slope[:, None] * 1.4426950408889634
    sums, top, total = walk_keys(
        q + batch * q_batch, head * q_head + query.to(tl.int64) * q_row, row_valid, first + query, first, num_keys - 1,
        low, high, k + batch * k_batch + group * k_head, v + batch * v_batch + group * v_head, k_row, v_row, window,
        mask, mask_key, slope,
        PLAN, OWN, WALK, IS_CAUSAL, HAS_WINDOW, False, False,
    )  # fmt: skip
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    line = (batch * num_groups * heads_per_group + head) * num_queries + query
    line = split.to(tl.int64) * num_rows + line
    store_subtiles(partial, line * value_dim, row_valid, scale_subtiles(sums, 1.0 / total), value_subtiles_of(PLAN))
    tl.store(partial_lse + line, tl.where(empty, float("-inf"), top + tl.log2(total)), mask=row_valid)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    partial, partial_lse, out, lse, num_splits, num_rows, value_dim, SPLITS: tl.constexpr, WIDTH: tl.constexpr
):
    """One row of the output from its splits: out = sum_s 2^(lse_s - lse) out_s."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    line = split.to(tl.int64) * num_rows + row
    log_sums = tl.load(partial_lse + line, mask=split < num_splits, other=float("-inf"))
    top = tl.maximum(tl.max(log_sums, 0), -3.0e38)
    weight = tl.exp2(log_sums - top)
    total = tl.sum(weight, 0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    weight = weight / total
    for start in range(0, value_dim, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = (split < num_splits)[:, None] & (column < value_dim)[None, :]
        outs = tl.load(partial + line[:, None] * value_dim + column[None, :], mask=inside, other=0.0)
        merged = tl.sum(outs * weight[:, None], 0)
        tl.store(out + row * value_dim + column, merged.to(out.dtype.element_ty), mask=column < value_dim)
    tl.store(lse + row, tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453))
