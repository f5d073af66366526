"""The pairs of a span of keys that came from others, as rectangles: where all pairs share the same levels a
call needs no positions.

Blocks that begin where shards begin give one rectangle for each span. Where levels slide, the pairs that
share n levels are a band between two diagonals: it is divided into rectangles that lie inside one band, and
small ones that a diagonal crosses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from structattn.layout.levels import LevelLayout
from structattn.layout.shards import KeySpan
from structattn.layout.sliding import shorter

# queries and keys of a rectangle that a diagonal crosses, at most; the fastest of 256, 512 and 1,024 on a CPU
# with the C++ code
LEAF = 512


@dataclass(frozen=True)
class Rectangle:
    """Some queries of a span against some of its keys.

    Attributes:
        queries, keys: the first and the one after the last, counted from those of the span.
        level: the most levels that a pair shares.
        is_uniform: whether all pairs share as many.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    level: int
    is_uniform: bool


@functools.lru_cache(maxsize=1024)  # of the passes of all layers and steps
def rectangles_of(
    layout: LevelLayout, span: KeySpan, window: int | None, *, divides_bands: bool
) -> tuple[Rectangle, ...]:
    """The rectangles of a span, without those of hidden pairs.

    Args:
        window: of the call, as in ``structured_attention``.
        divides_bands: whether a span that is no uniform rectangle is divided; else it is one rectangle.
    """
    queries, keys = span.queries[1] - span.queries[0], span.tokens[1] - span.tokens[0]
    if span.first_key < layout.sink_tokens:
        return (Rectangle((0, queries), (0, keys), span.level, True),)
    reaches = [window] * span.level
    if layout.windows is not None:
        reaches = [shorter(reach, window) for reach in layout.windows[: span.level]]
    elif not _are_in_one_block(layout, span):
        return (Rectangle((0, queries), (0, keys), span.level, False),)
    offset = span.first_query - span.first_key  # how far the first query is from the first key

    def levels(query: int, key: int) -> int:
        distance = abs(offset + query - key)
        return sum(reach is None or distance < reach for reach in reaches)

    def divided(first: int, stop: int, first_key: int, stop_key: int) -> Iterator[Rectangle]:
        # Of the nearest pair and of the farthest one, or the other way round where the keys come after the
        # queries.
        corners = levels(first, stop_key - 1), levels(stop - 1, first_key)
        if max(corners) == 0:
            return
        rows, columns = stop - first, stop_key - first_key
        if min(corners) == max(corners) or max(rows, columns) <= LEAF or not divides_bands:
            yield Rectangle((first, stop), (first_key, stop_key), max(corners), min(corners) == max(corners))
        elif rows >= columns:
            middle = first + _half(rows)
            yield from divided(first, middle, first_key, stop_key)
            yield from divided(middle, stop, first_key, stop_key)
        else:
            middle = first_key + _half(columns)
            yield from divided(first, stop, first_key, middle)
            yield from divided(first, stop, middle, stop_key)

    return tuple(divided(0, queries, 0, keys))


def _half(length: int) -> int:
    """About a half, of whole leaves."""
    return -(-length // (2 * LEAF)) * LEAF


def _are_in_one_block(layout: LevelLayout, span: KeySpan) -> bool:
    """Whether all positions of a span share every level that came."""
    first = min(span.first_query, span.first_key)
    stop = max(span.first_query + span.queries[1] - span.queries[0], span.first_key + span.tokens[1] - span.tokens[0])
    return layout.shared_interval(span.level, first, stop, None, span.row)[1] == stop
