"""How a layout becomes the compile-time constants of the Triton kernels.

A kernel computes one tile of rows, its *own* tile, and walks over tiles of the other side. Own tiles never
cross the boundary of a block that is about as large as a tile or larger (a *coarse* level), so all own rows
share every coarse block, and the number of coarse levels that a pair shares depends only on the walked
position. A walk therefore visits, level by level from far to near, ranges whose pairs share exactly the
levels up to l: they need the first R_l dimensions and no mask. Only the middle, where blocks smaller than a
tile (*fine* levels) begin and end, masks pairs.

Windows of sliding levels begin and end at other positions for each row. There the walk of level l visits all
positions that share exactly the levels up to l with some own row: a range that overlaps with that of the next
level by a tile, of which only the ends, where not all own rows agree, mask pairs by their distance. All
levels are coarse.

Dimensions are held as *subtiles*, tensors of a power of two of columns, since a tensor in registers cannot be
sliced: first subtiles of the coarse dimensions, of which level l uses a prefix, then subtiles of each fine
level. A subtile may reach beyond R_l; there the own tile is zero, and accumulators are cleared after each
level, which is right because levels are walked in rising order.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import triton

from structattn.layout.levels import LevelLayout

Constants = tuple[Any, ...]  # ``KernelPlan.constants``

FAR = 2**30  # beyond every position
_MIN_WIDTH = 16  # the least size of a matrix product on tensor cores
_WASTE = 1.5  # a level is coarse when tiles that stop at its boundaries have at most this many times its rows
_NARROWER = 0.7  # a level has a prefix of its own when it is at most this fraction of the next wider one

# (start, width, stop, level, dim): columns start ... start + width, of which those below stop count; level is
# the index of a fine level, 0 for coarse subtiles; dim is the size of the whole dimension, beyond which
# nothing may be read.
Subtile = tuple[int, int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The sizes of a kernel's tiles, and how it is compiled.

    Args:
        own: rows of the tile that a program computes, a power of two of at least 16.
        walk: rows of the tiles that it walks over, likewise.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    own: int
    walk: int
    num_warps: int = 4
    num_stages: int = 2

    @property
    def options(self) -> dict[str, int]:
        """How the compiler is called. A product and a sum may be rounded once: newer versions of Triton have
        to be told.
        """
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """A layout as the constants of one kernel; level indices count from 0, the global level.

    Attributes:
        constants: nested tuples for the kernel: block sizes; factors c_n times log2(e); ends of the ranks;
            ends of the value ranks; (end, a_l) per level, last level first, empty when all a_l are equal; key
            subtiles; value subtiles; groups of coarse levels that use the same subtiles, as (first level,
            last level, number of key subtiles, number of value subtiles); number of coarse levels; whether
            value slices exist; the soft cap times log2(e), 0 without; whether levels slide: their windows are
            in place of the block sizes.
        own: rows of an own tile.
        anchor: own tiles start anew at multiples of this many positions.
        per_anchor: own tiles from one such position to the next.
        aligned: whether the coarse blocks are whole tiles of the walk.
        key_width: columns of all key subtiles together.
        value_width: columns of all value subtiles together.
    """

    constants: Constants
    own: int
    anchor: int
    per_anchor: int
    aligned: bool
    key_width: int
    value_width: int


def _widths(total: int) -> list[int]:
    """Powers of two of at least 16, falling, that sum to ``total`` rounded up to a multiple of 16."""
    rest, widths = math.ceil(total / _MIN_WIDTH) * _MIN_WIDTH, []
    while rest:
        widths.append(2 ** (rest.bit_length() - 1))
        rest -= widths[-1]
    return widths


def _subtiles(ends: tuple[int, ...], coarse: int) -> tuple[Subtile, ...]:
    """The subtiles of a dimension whose levels end at ``ends``, the first ``coarse`` of them being coarse."""
    dim, stop = ends[-1], ends[coarse - 1]
    edges = [sum(_widths(stop))]
    for end in reversed(ends[: coarse - 1]):
        if sum(_widths(end)) <= _NARROWER * edges[0]:
            edges.insert(0, sum(_widths(end)))
    spans = [(a, b, stop, 0) for a, b in zip([0, *edges[:-1]], edges, strict=True)]
    spans += [(ends[i - 1], ends[i], ends[i], i) for i in range(coarse, len(ends))]
    subtiles = []
    for start, end, limit, level in spans:
        widths = _widths(end - start)
        subtiles += [(start + sum(widths[:n]), width, limit, level, dim) for n, width in enumerate(widths)]
    return tuple(subtiles)


def _count_used(subtiles: tuple[Subtile, ...], end: int) -> int:
    return sum(subtile[3] == 0 and subtile[0] < end for subtile in subtiles)


def _normal(factor: float) -> float:
    """0 in place of a number that float32 has not with all its digits: Triton would compute in float64."""
    return factor if abs(factor) >= 2.0**-126 else 0.0


@lru_cache(maxsize=1024)
def make_plan(
    layout: LevelLayout,
    scale: float | None,
    value_dim: int,
    tiles: Tiles,
    num_coarse: int | None = None,
    softcap: float | None = None,
) -> KernelPlan:
    """The constants of a kernel for a layout.

    Args:
        layout: with ``block_sizes`` or ``windows``.
        scale: as in ``structured_attention``.
        value_dim: dimension V of the values.
        tiles: the sizes of the tiles.
        num_coarse: how many levels of the layout all own rows share, where that is known otherwise.
        softcap: as in ``structured_attention``.
    """
    per_level, per_count = layout.score_factors(scale)
    largest = max(per_level)
    slides = layout.windows is not None
    limits = [FAR if size is None else min(size, FAR) for size in layout.windows or layout.block_sizes]
    # Levels of one size are one level. The first of blocks is global, so it stays apart.
    levels = [
        n
        for n in range(layout.num_levels)
        if n + 1 == layout.num_levels or limits[n] != limits[n + 1] or (n == 0 and not slides)
    ]
    if slides:
        num_coarse = len(levels)
    elif num_coarse is not None:
        num_coarse = sum(n < num_coarse for n in levels)
    sizes = tuple(limits[n] for n in levels)
    ends = tuple(accumulate(layout.ranks))
    rank_ends = tuple(ends[n] for n in levels)
    sliced = layout.value_ranks is not None
    value_ends = tuple(list(accumulate(layout.value_ranks))[n] for n in levels) if layout.value_ranks else (value_dim,)
    if num_coarse is None:
        fits = [n for n, size in enumerate(sizes) if n == 0 or math.ceil(size / tiles.own) * tiles.own <= _WASTE * size]
        num_coarse = fits[-1] + 1
    anchor = sizes[num_coarse - 1] if num_coarse > 1 and not slides else tiles.own
    if anchor % tiles.own == 0:
        anchor = tiles.own
    key_subtiles = _subtiles(rank_ends, num_coarse)
    value_subtiles = _subtiles(value_ends, num_coarse if sliced else 1)
    if not sliced:
        value_ends *= len(levels)
    subtile_counts = [
        (_count_used(key_subtiles, rank_ends[n]), _count_used(value_subtiles, value_ends[n])) for n in range(num_coarse)
    ]
    groups = []
    for counts, members in groupby(range(num_coarse), key=lambda n: subtile_counts[n]):
        group = list(members)
        groups.append((group[0], group[-1], *counts))
    return KernelPlan(
        constants=(
            sizes,
            tuple(_normal(per_count[n] * largest / math.log(2)) for n in levels),
            rank_ends,
            value_ends,
            () if min(per_level) == largest else tuple(zip(ends, (a / largest for a in per_level), strict=True))[::-1],
            key_subtiles,
            value_subtiles,
            tuple(groups),
            num_coarse,
            sliced,
            0.0 if softcap is None else softcap / math.log(2),
            slides,
        ),
        own=tiles.own,
        anchor=anchor,
        per_anchor=math.ceil(anchor / tiles.own),
        aligned=not slides and all(size % tiles.walk == 0 for size in sizes[1:num_coarse]),
        key_width=sum(width for _, width, *_ in key_subtiles),
        value_width=sum(width for _, width, *_ in value_subtiles),
    )


# What kernels read from the constants. Only such functions give a constant for a constant in every version of
# Triton: indexing nested tuples does not. Triton rejects names of types in them, so they carry no
# annotations.


@triton.constexpr_function
def sizes_of(plan):
    return plan[0]


@triton.constexpr_function
def factors_of(plan):
    return plan[1]


@triton.constexpr_function
def largest_factor(plan):
    """Of the levels, without its sign; 1 where all are 0."""
    return max(abs(factor) for factor in plan[1]) or 1.0


@triton.constexpr_function
def has_positive_factors(plan):
    """Not with a scale of 0 or below, which an option can be."""
    return min(plan[1]) > 0


@triton.constexpr_function
def ends_of(plan):
    return plan[2]


@triton.constexpr_function
def value_ends_of(plan):
    return plan[3]


@triton.constexpr_function
def scales_of(plan):
    return plan[4]


@triton.constexpr_function
def key_subtiles_of(plan):
    return plan[5]


@triton.constexpr_function
def value_subtiles_of(plan):
    return plan[6]


@triton.constexpr_function
def num_groups_of(plan):
    return len(plan[7])


@triton.constexpr_function
def group_of(plan, group, field):
    return plan[7][group][field]


@triton.constexpr_function
def coarse_of(plan):
    return plan[8]


@triton.constexpr_function
def has_fine(plan):
    return plan[8] < len(plan[0])


@triton.constexpr_function
def is_sliced(plan):
    return plan[9]


@triton.constexpr_function
def softcap_of(plan):
    return plan[10]


@triton.constexpr_function
def slides(plan):
    return plan[11]


@triton.constexpr_function
def count(values):
    return len(values)


@triton.constexpr_function
def num_coarse_subtiles(subtiles):
    return sum(subtile[3] == 0 for subtile in subtiles)


@triton.constexpr_function
def item(values, index):
    return values[index]


@triton.constexpr_function
def start_of(subtiles, index):
    return subtiles[index][0]


@triton.constexpr_function
def width_of(subtiles, index):
    return subtiles[index][1]


@triton.constexpr_function
def stop_of(subtiles, index):
    return subtiles[index][2]


@triton.constexpr_function
def level_of(subtiles, index):
    return subtiles[index][3]


@triton.constexpr_function
def dim_of(subtiles, index):
    return subtiles[index][4]


@triton.constexpr_function
def overhangs(subtiles, index):
    """Whether a subtile is wider than what may be read."""
    return subtiles[index][0] + subtiles[index][1] > subtiles[index][4]


@triton.constexpr_function
def scale_end(scales, index):
    return scales[index][0]


@triton.constexpr_function
def scale_value(scales, index):
    return scales[index][1]
