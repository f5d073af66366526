"""Levels that slide with the query: a pair of positions shares a level where its distance is below the window
of the level.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from structattn.checks import MAX_LENGTH, check_size, describe
from structattn.errors import ConfigError

Windows = tuple[int | None, ...]  # of each level, level 1 first; ``None`` reaches every position


def shorter(a: int | None, b: int | None) -> int | None:
    """The shorter of two windows."""
    return a if b is None else b if a is None else min(a, b)


def checked_windows(ranks: tuple[int, ...], windows: object) -> Windows:
    """The windows as a tuple; raises ``ConfigError`` unless there is one per rank and none is longer than the
    one before.
    """
    if not isinstance(windows, Sequence) or isinstance(windows, str | bytes):
        raise ConfigError(f"windows must be a tuple or list of ints or None, one per level, got {describe(windows)}")
    for level, window in enumerate(windows, start=1):
        if window is not None:
            check_size(f"windows: level {level}", window, MAX_LENGTH)
    if len(windows) != len(ranks):
        raise ConfigError(
            f"a layout needs one window per rank: got {len(ranks)} ranks {ranks} and {len(windows)} windows "
            f"{tuple(windows)}"
        )
    for level, (outer, inner) in enumerate(pairwise(windows), start=2):
        if shorter(outer, inner) != inner:
            raise ConfigError(
                f"windows must not grow: expected at most {outer}, the window of level {level - 1}, at level {level}, "
                f"got {inner}"
            )
    return tuple(windows)


def num_shared(windows: Windows, i: Tensor, j: Tensor) -> Tensor:
    """How many levels positions share, int64, of the shape to which i and j broadcast; 0 beyond the first
    window.
    """
    i, j = i.long(), j.long()
    count = (i - j) * 0
    for window in windows:
        # Not by the distance: that of positions far apart does not fit 64 bits.
        count = count + (1 if window is None else (i < j + window) & (j < i + window))
    return count


def pairs_within(window: int | None, num_positions: int, is_causal: bool) -> int:
    """The number of (query, key) pairs among ``num_positions`` whose distance is below a window."""
    reach = num_positions if window is None else min(window, num_positions)
    causal = reach * num_positions - reach * (reach - 1) // 2
    return causal if is_causal else 2 * causal - num_positions
