"""The checks of layouts: rank lists, block sizes, positions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from structattn.checks import INT_DTYPES, MAX_LENGTH, MAX_SIZE, check_sizes, check_tensor, describe, is_int
from structattn.errors import ConfigError, ShapeError, StructAttnError
from structattn.layout.segments import checked_boundaries
from structattn.layout.sliding import checked_windows


def positive_ints(values: object, name: str, maximum: int = MAX_SIZE) -> tuple[int, ...]:
    """A tuple of positive ints, one per level and at least one; or ``ConfigError`` with the level that is
    wrong.
    """
    checked = check_sizes(name, values, entry="level", maximum=maximum)
    if not checked:
        raise ConfigError(f"{name} must have one int per level, got none")
    return checked


def _bars(ranks: Sequence[int]) -> str:
    return "|".join(map(str, ranks))


def check_sum(
    name: str, ranks: Sequence[int], expected: int, what: str, error: type[StructAttnError] = ConfigError
) -> None:
    """Raises ``error`` unless ranks sum to a dimension; names ranks in the same proportions that do, if there
    are any.
    """
    total = sum(ranks)
    if total == expected:
        return
    message = f"{name} must sum to {what}: expected {expected}, got {_bars(ranks)} = {total}"
    if expected > 0 and all(rank * expected % total == 0 for rank in ranks):
        message += f"; in the same proportions: {_bars([rank * expected // total for rank in ranks])}"
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


def checked_sharing(
    ranks: tuple[int, ...], block_sizes: object, boundaries: object, windows: object
) -> dict[str, object]:
    """How levels are shared, by block sizes, segments or windows, as the fields of a layout; or
    ``ConfigError`` unless by one of them.
    """
    sharing = {name: x for name, x in (("boundaries", boundaries), ("windows", windows)) if x is not None}
    if not sharing:
        sizes = positive_ints(block_sizes, "block_sizes", MAX_LENGTH)
        check_blocks(ranks, sizes)
        return {"block_sizes": sizes}
    if len(sharing) > 1 or not isinstance(block_sizes, tuple | list) or block_sizes:
        raise ConfigError(
            f"give one of block_sizes, boundaries and windows: with {' and '.join(sharing)} expected block_sizes () "
            f"and nothing else, got block_sizes {describe(block_sizes)}"
        )
    if windows is not None:
        return {"block_sizes": (), "windows": checked_windows(ranks, windows)}
    return {"block_sizes": (), "boundaries": checked_boundaries(ranks, boundaries)}


def checked_value_ranks(ranks: tuple[int, ...], value_ranks: object) -> tuple[int, ...]:
    """The dimensions of the value in each level; or ``ConfigError``."""
    checked = positive_ints(value_ranks, "value_ranks")
    if len(checked) != len(ranks):
        raise ConfigError(
            f"value_ranks needs one dimension per level: expected {len(ranks)}, as there are ranks ({_bars(ranks)}), "
            f"got {len(checked)} ({_bars(checked)})"
        )
    return checked


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
