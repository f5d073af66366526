"""The work of causal attention along a sequence, from the pairs that share each level: how much each token
has, and each pair of shards.

The positions before a query that share a level with it are the neighboring ones from a first key on, which
never moves back, and the sink tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from structattn.checks import MAX_LENGTH, check_number, check_size
from structattn.layout.shards import Sharing, level_dims
from structattn.layout.sliding import Windows

MAX_SHARDED = 2**26  # positions whose work is counted one by one


class Levels(Sharing, Protocol):
    """What of a ``LevelLayout`` decides how much work a token has."""

    @property
    def windows(self) -> Windows | None: ...
    @property
    def sink_tokens(self) -> int: ...
    def window_of(self, level: int, window: int | None = None) -> int | None: ...
    def lengths(self, level: int, num_positions: int, row: int = 0) -> tuple[int, ...]: ...


def first_keys(layout: Levels, level: int, num_positions: int, window: int | None = None, row: int = 0) -> Tensor:
    """(T,) int64: of each query the first key that shares a level with it, sink tokens aside."""
    if layout.windows is not None:
        first = torch.zeros(num_positions, dtype=torch.int64)
    else:
        lengths = torch.tensor(layout.lengths(level, num_positions, row))
        first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    reach = layout.window_of(level, window)
    return first if reach is None else torch.maximum(first, torch.arange(num_positions) - (reach - 1))


def shard_pairs(layout: Levels, lengths: Sequence[int], window: int | None = None) -> Tensor:
    """Causal pairs (query, key) that share each level, by shards.

    Args:
        lengths: the tokens of each of C shards, in the order of the tokens.
        window: as in ``structured_attention``.

    Returns:
        (L, C, C) int64: at level l those of the queries of shard i and the keys of shard j.

    Cost: O(L T) memory for one level at a time, O(L C^2 log T) operations besides.
    """
    ends = torch.tensor([0, *accumulate(lengths)])
    total, count = int(ends[-1]), len(lengths)
    pairs = torch.zeros(layout.num_levels, count, count, dtype=torch.int64)
    for level in range(1, layout.num_levels + 1):
        first = first_keys(layout, level, total, window)
        sums = torch.cat((torch.zeros(1, dtype=torch.int64), first.cumsum(0)))
        for shard, (start, stop) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            # Keys that are seen below each end: those queries whose first key is below it see the keys from
            # there up to it.
            below = ends[: shard + 1]
            seeing = torch.searchsorted(first[start:stop].contiguous(), below)
            earlier_pairs = below * seeing - (sums[start + seeing] - sums[start])
            # Up to each query itself.
            causal_pairs = (start + 1 + stop) * (stop - start) // 2 - (sums[stop] - sums[start])
            pairs[level - 1, shard, : shard + 1] = torch.cat((earlier_pairs, causal_pairs[None])).diff()
            sinks = torch.arange(min(layout.sink_tokens, total))
            unseen = stop - start - torch.searchsorted(first[start:stop].contiguous(), sinks, right=True)
            owners = torch.searchsorted(ends, sinks, right=True) - 1
            pairs[level - 1, shard].index_add_(0, owners, unseen)
    return pairs


def balanced_shards(
    layout: Levels,
    num_positions: int,
    num_processes: int,
    *,
    window: int | None = None,
    value_dim: int | None = None,
    other_flops: float = 0.0,
) -> tuple[int, ...]:
    """See ``LevelLayout.balanced_shards``."""
    check_size("num_positions", num_positions, MAX_SHARDED)
    check_size("num_processes", num_processes, MAX_LENGTH)
    check_number("other_flops", other_flops, minimum=0)
    work = work_of_tokens(layout, num_positions, window, value_dim).double().add_(other_flops)
    cumulative_work = torch.cat((work.new_zeros(1), work.cumsum(0)))

    def cuts(max_work: float) -> list[int]:
        """Where shards of at most so much work end; as long as possible each."""
        ends = [0]
        while len(ends) <= num_processes and ends[-1] < num_positions:
            ends.append(int(torch.searchsorted(cumulative_work, cumulative_work[ends[-1]] + max_work, right=True)) - 1)
        return ends

    low, high = max(float(work.max()), float(cumulative_work[-1]) / num_processes), float(cumulative_work[-1])
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if cuts(middle)[-1] == num_positions else (middle, high)
    ends = cuts(high)
    ends += [num_positions] * (num_processes + 1 - len(ends))
    return tuple(b - a for a, b in zip(ends, ends[1:], strict=False))


def work_of_tokens(layout: Levels, num_positions: int, window: int | None, value_dim: int | None) -> Tensor:
    """(T,) int64: the FLOPs of one head's scores and weighted values of each query, forward."""
    position, work = torch.arange(num_positions), torch.zeros(num_positions, dtype=torch.int64)
    for level, dims in enumerate(level_dims(layout, value_dim), start=1):
        first = first_keys(layout, level, num_positions, window)
        work += 2 * sum(dims) * (position + 1 - first + first.clamp(0, layout.sink_tokens))
    return work
