"""An order of a head's dimensions in which every level's slice is closed under the pairing of rotary positions.

"The first r dimensions" of a rotated key are halves of pairs, whose product with a query's does not depend only on the distance.
Permuting the dimensions of queries and keys alike changes no score, so they are permuted such that each slice holds whole pairs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from structattn.checks import check_choice
from structattn.errors import ConfigError
from structattn.integrations.transformers.rotation import Rotation
from structattn.layers.rotary import Rotary
from structattn.layout.checks import check_sum
from structattn.layout.global_window import Layout
from structattn.layout.levels import LevelLayout

RotarySplit = Literal["low_far", "interleaved"]
ROTARY_SPLITS: tuple[RotarySplit, ...] = get_args(RotarySplit)


def check_split(split: Any) -> RotarySplit:
    """The split; raises ``ConfigError`` unless it keeps trained frequencies, which ``per_level`` does not."""
    if isinstance(split, str) and split == "per_level":
        raise ConfigError(
            "rotary_split 'per_level' gives every level separate frequencies, but a trained model keeps those that it was trained "
            "with: use 'low_far' or 'interleaved'"
        )
    check_choice("rotary_split", split, ROTARY_SPLITS)
    return split


def level_pairs(ranks: tuple[int, ...], split: RotarySplit) -> tuple[tuple[int, ...], ...]:
    """Which of the D / 2 rotary pairs each level gets, as ``Rotary`` with that split does it.

    Args:
        ranks: dimensions of each level, level 1 first.
        split: ``"low_far"``: level 1 gets the slowest; ``"interleaved"``: every level gets some of the whole range.

    Returns:
        For each level the numbers of its pairs, ascending: 0 is the fastest.

    Raises:
        ConfigError: a rank is odd.
    """
    for level, rank in enumerate(ranks, start=1):
        if rank % 2:
            raise ConfigError(
                f"ranks must be even with rotary positions, which rotate two dimensions together: level {level} of "
                f"{'|'.join(map(str, ranks))} has {rank}"
            )
    frequencies = Rotary(split=split).frequencies(ranks)
    fast_to_slow = sorted((theta for level in frequencies for theta in level), reverse=True)
    number = {theta: pair for pair, theta in enumerate(fast_to_slow)}
    return tuple(tuple(number[theta] for theta in level) for level in frequencies)


def dimension_order(ranks: tuple[int, ...], split: RotarySplit, rotation: Rotation) -> tuple[int, ...]:
    """The dimension of the model at each position in the order of the levels.

    The slice of a level holds the first dimensions of its pairs, then their partners, in the same order. With one
    level this is the model's own order. Dimensions that are not rotated count as the slowest pairs.

    Args:
        ranks: dimensions of each level, level 1 first; their sum is D.
        split: see ``level_pairs``.
        rotation: which dimensions are pairs.

    Returns:
        D numbers, a permutation.

    Raises:
        ConfigError: a rank is odd.
    """
    if len(ranks) == 1:
        return tuple(range(ranks[0]))
    pairs = rotation.pairs(sum(ranks))
    return tuple(pairs[pair][end] for level in level_pairs(ranks, split) for end in (0, 1) for pair in level)


def check_fits(layout: Layout | None, head_dim: int, value_dim: int) -> None:
    """Raises ``ConfigError`` unless the ranks of a layout sum to the dimensions of a model's heads."""
    if layout is None:
        return
    check_sum("the ranks", layout.ranks, head_dim, "the head dimension of the model")
    values = layout.value_ranks if isinstance(layout, LevelLayout) else None
    if values is not None:
        check_sum("the values= ranks", values, value_dim, "the value dimension of the model")


def runs_of(order: tuple[int, ...]) -> tuple[slice, ...]:
    """An order of dimensions as slices of consecutive ones: ``x[..., order]`` is their concatenation."""
    starts = [0, *(i for i in range(1, len(order)) if order[i] != order[i - 1] + 1), len(order)]
    return tuple(slice(order[a], order[b - 1] + 1) for a, b in pairwise(starts))


def reordered(x: Tensor, runs: tuple[slice, ...]) -> Tensor:
    """The last axis of x as its runs, concatenated: slices need no index tensor on the device, and are faster than a gather."""
    return x if len(runs) <= 1 else torch.cat([x[..., run] for run in runs], dim=-1)
