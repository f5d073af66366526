"""The checks of layouts: rank lists, block sizes, segment boundaries, positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from structattn.checks import INT_DTYPES, MAX_LENGTH, MAX_SIZE, check_sizes, check_tensor, describe, is_int
from structattn.errors import ConfigError, ShapeError, StructAttnError

Boundaries = tuple[tuple[tuple[int, ...], ...], ...]  # rows x levels x starts of segments


def positive_ints(values: object, name: str, maximum: int = MAX_SIZE) -> tuple[int, ...]:
    """A tuple of positive ints, one per level and at least one; or ``ConfigError`` with the level that is wrong."""
    checked = check_sizes(name, values, entry="level", maximum=maximum)
    if not checked:
        raise ConfigError(f"{name} must have one int per level, got none")
    return checked


def check_sum(
    name: str, ranks: Sequence[int], expected: int, what: str, error: type[StructAttnError] = ConfigError
) -> None:
    """Raises ``error`` unless ranks sum to a dimension; names ranks in the same proportions that do, if there are any."""
    total = sum(ranks)
    if total == expected:
        return
    message = f"{name} must sum to {what}: expected {expected}, got {'|'.join(map(str, ranks))} = {total}"
    if expected > 0 and all(rank * expected % total == 0 for rank in ranks):
        message += f"; in the same proportions: {'|'.join(str(rank * expected // total) for rank in ranks)}"
    raise error(message)


def check_blocks(ranks: tuple[int, ...], block_sizes: tuple[int, ...]) -> None:
    """Raises ``ConfigError`` unless there is one block size per rank, each a divisor of the one before."""
    if len(ranks) != len(block_sizes):
        raise ConfigError(
            f"a layout needs one block size per rank: got {len(ranks)} ranks {ranks} and "
            f"{len(block_sizes)} block_sizes {block_sizes}"
        )
    for level, (outer, inner) in enumerate(pairwise(block_sizes), start=2):
        if outer % inner:
            raise ConfigError(
                f"block_sizes: level {level} must divide level {level - 1}: expected a divisor of {outer}, got {inner}"
            )


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
                    f"boundaries: level {n}{where} must also start at {min(missing)}, where a segment of level {n - 1} starts"
                )
        rows.append(row)
    return tuple(rows)


def checked_positions(name: str, value: object) -> Tensor:
    """Positions as a tensor, from an int or an int tensor."""
    if isinstance(value, Tensor) and value.dtype in INT_DTYPES:
        check_tensor(name, value)
        return value
    if not is_int(value) or not -(2**62) <= value <= 2**62:  # type: ignore[operator]
        raise ShapeError(
            f"{name} must be a position, an int from -2**62 to 2**62 or a tensor of ints, got {describe(value)}"
        )
    return torch.tensor(value, device="cpu")
