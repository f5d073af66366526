"""The segments of a free partition, from the positions at which they start."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import torch
from torch import Tensor

from structattn.checks import MAX_LENGTH, describe, is_int
from structattn.errors import ConfigError

Boundaries = tuple[tuple[tuple[int, ...], ...], ...]  # rows x levels x starts of segments


def _starts(values: object, where: str) -> tuple[int, ...]:
    """The segment starts of one level as ints."""
    listed = values.tolist() if isinstance(values, Tensor) else values
    if not isinstance(listed, tuple | list) or not all(is_int(start) and start <= MAX_LENGTH for start in listed):
        raise ConfigError(f"boundaries: {where} must hold the starts of its segments as ints, got {describe(values)}")
    if not listed or listed[0] != 0 or any(a >= b for a, b in pairwise(listed)):
        raise ConfigError(f"boundaries: the starts of {where} must rise from 0, got {listed[:8]}")
    return tuple(listed)


def checked_boundaries(ranks: tuple[int, ...], boundaries: object) -> Boundaries:
    """Boundaries as rows x levels x starts, from that or from the levels of one row."""
    if not isinstance(boundaries, tuple | list) or not boundaries:
        raise ConfigError(f"boundaries must list the segment starts of each level, got {describe(boundaries)}")
    first = boundaries[0]
    one_row = isinstance(first, Tensor) or (isinstance(first, tuple | list) and all(isinstance(s, int) for s in first))
    rows = []
    for r, levels in enumerate((boundaries,) if one_row else boundaries):
        where = "" if one_row else f" of row {r}"
        if isinstance(levels, tuple | list) and len(levels) == len(ranks) - 1:
            levels = ((0,), *levels)  # level 1, which is global, was left out
        if not isinstance(levels, tuple | list) or len(levels) != len(ranks):
            count = len(levels) if isinstance(levels, tuple | list) else describe(levels)
            raise ConfigError(f"boundaries{where} need one entry per level: expected {len(ranks)}, got {count}")
        row = tuple(_starts(starts, f"level {n}{where}") for n, starts in enumerate(levels, start=1))
        if row[0] != (0,):
            raise ConfigError(f"boundaries: level 1{where} is global and must be (0,), got {row[0][:8]}")
        for n, (outer, inner) in enumerate(pairwise(row), start=2):
            if missing := set(outer) - set(inner):
                raise ConfigError(
                    f"boundaries: level {n}{where} must also start at {min(missing)}, where a segment of level {n - 1} "
                    "starts"
                )
        rows.append(row)
    return tuple(rows)


def segment_of(starts: tuple[int, ...], position: int) -> tuple[int, int]:
    """The first position of the segment that holds a position, and the one after its last; the last segment
    has no end.
    """
    index = bisect_right(starts, position)
    return starts[index - 1], starts[index] if index < len(starts) else MAX_LENGTH


def segments_of(boundaries: Boundaries, level: int, positions: Tensor, rows: Tensor | int) -> Tensor:
    """The number of the segment in which each position lies; arguments as ``LevelLayout.blocks``."""
    # One sorted list for all rows: a start p of row r is r * 2^40 + p, and so is a position.
    far = 2**40
    starts = [r * far + start for r, segments in enumerate(boundaries) for start in segments[level - 1]]
    keys = positions.long().clamp(min=-1)
    if len(boundaries) > 1:
        keys = keys + torch.as_tensor(rows, device=positions.device) * far
    return torch.searchsorted(torch.tensor(starts, device=positions.device), keys.contiguous(), right=True)
