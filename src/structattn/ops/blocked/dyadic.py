"""The pairs of a layout with block sizes as dyadic blocks: few, dense, and views of whole tensors.

Pairs whose deepest shared level is n need the first r_1 + ... + r_n dimensions and no mask of their own. When
every span of positions is halved, those pairs are the later half against the earlier one: a dyadic block.
Blocks of one shape are a family, computed as one batch; what is left are small squares on the diagonal, whose
pairs share different numbers of levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from structattn.ops.blocked.families import Block, Geometry, SpanFamily


@dataclass(frozen=True, kw_only=True)
class DyadicGeometry(Geometry):
    """A layout with ``block_sizes``; ``tile`` is the longest span that is left as a square on the
    diagonal.
    """

    def blocks(self) -> Iterator[Block]:
        if self.first_query < 0 and not self.is_causal:  # queries before the first key share only level 1
            early = SpanFamily(self.first_query, -self.first_query)
            yield Block(early, SpanFamily(0, self.num_keys), 1)
        yield from self._inside(SpanFamily(0, self.num_keys), 1)

    def _inside(self, spans: SpanFamily, level: int) -> Iterator[Block]:
        """The pairs inside the members of a family; each lies in one block of ``level`` and starts where that
        starts.
        """
        if spans.start + spans.length <= self.first_query and not spans.dims:
            return
        sizes = self.layout.block_sizes
        while level < len(sizes) and sizes[level] >= spans.length:
            level += 1
        if spans.length <= self.tile:
            yield from self._diagonal(spans, level)
            return
        unit = self.tile if level == len(sizes) else sizes[level]
        unit *= max(1, self.tile // unit)  # several small blocks in one square
        yield from self._between(spans, unit, level)
        full, rest = divmod(spans.length, unit)
        for family in self._from_first_query(spans, full, unit, unit):
            yield from self._inside(family, level)
        if rest:
            yield from self._inside(spans.inner(full * unit, 1, 0, rest), level)

    def _from_first_query(self, spans: SpanFamily, count: int, stride: int, length: int) -> Iterator[SpanFamily]:
        """``spans.inner(0, count, stride, length)`` without what lies before the first query; the span that
        holds it is separate.

        A family of more than one member never holds the first query in its middle: that is what this is for.
        """
        first = 0 if spans.dims else min(count, max(0, (self.first_query - spans.start) // stride))
        if first < count and spans.start + first * stride < self.first_query:
            yield spans.inner(first * stride, 1, 0, length)
            first += 1
        if first < count:
            yield spans.inner(first * stride, count - first, stride, length)

    def _between(self, spans: SpanFamily, unit: int, level: int) -> Iterator[Block]:
        """The pairs of different units of one member: halves against halves, from single units up to the
        whole.
        """
        width = unit
        while width < spans.length:
            full, rest = divmod(spans.length, 2 * width)
            groups = list(self._from_first_query(spans, full, 2 * width, 2 * width))
            if rest > width:
                groups.append(spans.inner(full * 2 * width, 1, 0, rest))
            for group in groups:
                left = replace(group, length=width)
                right = replace(group, start=group.start + width, length=group.length - width)
                yield from self._block(right, left, level)
                if not self.is_causal:
                    yield from self._block(left, right, level)
            width *= 2

    def _block(self, rows: SpanFamily, cols: SpanFamily, level: int) -> Iterator[Block]:
        """One block, without rows before the first query, and without what no window reaches."""
        cut = self.first_query - rows.start
        if cut > 0 and not rows.dims:
            rows = replace(rows, start=rows.start + cut, length=rows.length - cut)
        if self.window is not None:
            rows, cols = self._within_reach(rows, cols)
        if rows.length > 0 and cols.length > 0:
            yield Block(rows, cols, level)

    def _within_reach(self, rows: SpanFamily, cols: SpanFamily) -> tuple[SpanFamily, SpanFamily]:
        """The spans of rows and columns that hold a pair less than a window apart."""
        assert self.window is not None
        reach = self.window - 1

        def near(spans: SpanFamily, other: SpanFamily) -> SpanFamily:
            low = max(spans.start, other.start - reach)
            high = min(spans.start + spans.length, other.start + other.length + reach)
            return replace(spans, start=low, length=high - low)

        near_rows = near(rows, cols)
        return near_rows, near(cols, near_rows) if near_rows.length > 0 else cols

    def _diagonal(self, spans: SpanFamily, level: int) -> Iterator[Block]:
        """The pairs in one span each, which lies in one block of ``level`` and starts where one of every
        deeper level does.
        """
        sizes = (*self.layout.block_sizes, 0)
        # Pairs of exactly n levels lie in different blocks of level n + 1; there are none where it is as
        # large.
        levels = [
            n
            for n in range(level, len(sizes))
            if n == len(sizes) - 1 or sizes[n] < min(spans.length, sizes[n - 1] if n > 1 else spans.length)
        ]
        cut = max(0, self.first_query - spans.start) if not spans.dims else 0
        rows = replace(spans, start=spans.start + cut, length=spans.length - cut)
        yield Block(rows, spans, levels[0], tuple(levels[1:]))
