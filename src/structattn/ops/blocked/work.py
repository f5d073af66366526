"""The work of the ``blocked`` backend, counted from its blocks, and the tile that costs least.

Spans of at most a tile are squares on the diagonal whose levels are merged: one product for each, over all
pairs, with a mask. Long tiles take fewer operations, short ones less arithmetic.
"""

from __future__ import annotations

import functools

from structattn.layout.levels import LevelLayout
from structattn.ops.blocked.dyadic import DyadicGeometry
from structattn.ops.blocked.families import Block, Geometry
from structattn.ops.blocked.sliding import SlidingGeometry
from structattn.ops.costs import Costs, Work

# Products of shorter tiles cost more than they save, on a CPU; of longer ones most pairs of a square are
# hidden.
_TILES = (16, 32, 64, 128)
_DEVICE_TILE = 32  # on other devices nothing was measured
# Operations of a call, of a block, and of each further number of levels in a block: forward passes of 16 to
# 512 positions, one core of an Intel Xeon.
_CALL = 40
_BLOCK = 32
_LEVEL = 6


def geometry(
    layout: LevelLayout, num_queries: int, num_keys: int, is_causal: bool, window: int | None, tile: int = _DEVICE_TILE
) -> Geometry:
    """Which pairs of a call are visible, see ``Geometry``."""
    kind = DyadicGeometry if layout.windows is None else SlidingGeometry
    return kind(
        layout=layout, num_queries=num_queries, num_keys=num_keys, is_causal=is_causal, window=window, tile=tile
    )


@functools.lru_cache(maxsize=1024)
def cheapest(
    layout: LevelLayout,
    num_queries: int,
    num_keys: int,
    is_causal: bool,
    window: int | None,
    *,
    sequences: int,
    repeats: int,
    value_dim: int,
    per_unit: Costs,
) -> tuple[Geometry, float]:
    """The geometry whose tile costs least on a CPU, and the time of a forward pass in nanoseconds.

    Args:
        layout, num_queries, num_keys, is_causal, window: as ``geometry``.
        sequences: how many there are, times key heads.
        repeats: query heads per key head.
        value_dim: V.
        per_unit: what a unit of work costs.
    """
    candidates = [geometry(layout, num_queries, num_keys, is_causal, window, tile) for tile in _TILES]
    times = [work(candidate, sequences, repeats, value_dim).time(per_unit) for candidate in candidates]
    least = min(range(len(candidates)), key=times.__getitem__)
    return candidates[least], times[least]


def work(geometry: Geometry, sequences: int, repeats: int, value_dim: int) -> Work:
    """The work of a forward pass; arguments as ``cheapest``."""
    total = Work(operation=_CALL)
    for block in geometry.blocks():
        total += _of_block(geometry, block, sequences, repeats, value_dim)
    return total


def _of_block(geometry: Geometry, block: Block, sequences: int, repeats: int, value_dim: int) -> Work:
    layout, num_deeper = geometry.layout, len(block.deeper)
    deepest = block.deeper[-1] if num_deeper else block.level
    values = value_dim if layout.value_ranks is None else sum(layout.value_ranks[:deepest])
    masked = 0 if layout.value_ranks is None else num_deeper
    count = sequences * block.rows.count
    scores = count * block.rows.length * repeats * block.cols.length
    hides = geometry.hides(block, slice(0, block.rows.length), slice(0, block.cols.length))
    return Work(
        product=scores * (sum(layout.ranks[:deepest]) + values),
        score=scores * (2 + (hides is None) + 3 * num_deeper + masked),
        weight=scores,
        operation=_BLOCK + _LEVEL * (num_deeper + masked),
        matrix=count * (2 + num_deeper + masked),
    )
