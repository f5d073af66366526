"""The pairs of a layout with sliding levels as squares at equal distances from the diagonal: few families,
dense, and views of whole tensors.

All squares of b positions that are m squares away from the diagonal have pairs at the distances (m - 1) b + 1
to (m + 1) b - 1, and are one family. Where these pairs share one number of levels, the family is a block;
else each of its squares is divided into four. Squares are never divided below a size at which that costs more
than products over all levels of their pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from structattn.ops.blocked.bands import bands_of
from structattn.ops.blocked.families import Block, Geometry, SpanFamily

# Squares of at most this number of positions, over the levels that only some of their pairs share, are not
# divided to separate those.
_MIXED = 256


@dataclass(frozen=True, kw_only=True)
class SlidingGeometry(Geometry):
    """A layout with ``windows``; ``tile`` is the size of the smallest squares, with hidden pairs."""

    def blocks(self) -> Iterator[Block]:
        size = self.tile
        while size < max(self.num_keys, self.num_queries):
            size *= 2
        # Of each distance in squares, which of them are there: those of queries in even squares (0), in odd
        # ones (1).
        squares = {m: {0, 1} for m in range(self.first_query // size, 1)}
        bands = bands_of(self.layout, self.is_causal, self.window)
        while squares:
            divided: dict[int, set[int]] = defaultdict(set)
            for m, parities in squares.items():
                low, high = (m - 1) * size + 1, (m + 1) * size - 1
                levels = sorted(
                    bands.levels(max(low, self.first_query - self.num_keys + 1), min(high, self.num_keys - 1))
                )
                visible_levels = [level for level in levels if level]
                is_mixed = size * (len(visible_levels) - 1) > _MIXED
                # What is kept has no part that would be divided: only so do parities tell which parts are
                # there.
                if is_mixed or (visible_levels and levels[0] == 0 and size > self.tile):
                    # Square t of the queries against t - m becomes 2 t and 2 t + 1 against 2 (t - m) and 2 (t
                    # - m) + 1.
                    divided[2 * m] |= {0, 1}
                    divided[2 * m + 1].add(1)
                    divided[2 * m - 1].add(0)
                elif visible_levels:
                    for parity in (None,) if len(parities) == 2 else parities:
                        for rows, cols in self._squares(size, m, parity):
                            yield Block(rows, cols, visible_levels[0], tuple(visible_levels[1:]))
            squares, size = divided, size // 2

    def _squares(self, size: int, distance: int, parity: int | None) -> Iterator[tuple[SpanFamily, SpanFamily]]:
        """The squares at a distance: whole ones as one family, and each that is cut by the end of the queries
        or keys.
        """
        last = (self.num_keys - 1) // size
        numbers = range(max(self.first_query // size, distance), min(last, last + distance) + 1)
        step = 1
        if parity is not None:
            numbers, step = range(numbers.start + (parity - numbers.start) % 2, numbers.stop, 2), 2
        squares: list[int] = []
        for t in numbers:
            start, first = t * size, (t - distance) * size
            low, high = max(start, self.first_query), min(start + size, self.num_keys)
            stop = min(first + size, self.num_keys)
            if high - low == stop - first == size:
                squares.append(t)
            else:
                yield SpanFamily(low, high - low), SpanFamily(first, stop - first)
        if squares:
            dims = ((len(squares), step * size),) if len(squares) > 1 else ()
            yield SpanFamily(squares[0] * size, size, dims), SpanFamily((squares[0] - distance) * size, size, dims)
