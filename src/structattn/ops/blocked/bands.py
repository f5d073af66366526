"""Sliding levels by distance: bands of query position minus key position in which all pairs share one number
of levels, or are hidden.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from structattn.layout.levels import LevelLayout


class Bands:
    """The bands of a call. Arguments as of ``structured_attention``, with a layout whose levels slide."""

    def __init__(self, layout: LevelLayout, is_causal: bool, window: int | None) -> None:
        assert layout.windows is not None
        ends = {end for end in (window, *layout.windows) if end is not None}
        starts = sorted(ends | {1 - end for end in ends} | ({0} if is_causal else set()))
        self._starts = starts
        self._levels: list[int] = []  # of the pairs before the first start, then from each start on
        for distance in ([starts[0] - 1] if starts else [0]) + starts:
            is_hidden = (is_causal and distance < 0) or (window is not None and abs(distance) >= window)
            self._levels.append(0 if is_hidden else layout.shared_levels(abs(distance), 0))

    def levels(self, low: int, high: int) -> set[int]:
        """The numbers of levels that pairs at the distances low ... high share; 0 is that of hidden pairs."""
        return set(self._levels[bisect_right(self._starts, low) : bisect_right(self._starts, high) + 1])

    def edges(self, low: int, high: int) -> list[int]:
        """The distances above ``low``, up to ``high``, at which a band begins."""
        return self._starts[bisect_right(self._starts, low) : bisect_right(self._starts, high)]


@lru_cache(maxsize=256)
def bands_of(layout: LevelLayout, is_causal: bool, window: int | None) -> Bands:
    """The bands of a call, which its passes and later calls share."""
    return Bands(layout, is_causal, window)
