"""What pages hold: the levels of all layers that keep a position equally long share one page table for each
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from torch import Tensor

from structattn.cache.levels import Level, SinkLevel, Softmax, sink_level, softmaxes_of, value_levels
from structattn.errors import ConfigError
from structattn.layout.global_window import Layout
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.levels import LevelLayout


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """How long a level keeps a position: always, until its block ends, or until it is as far back as the
    window. Sink tokens are always kept, and no others with them.

    Attributes:
        block: positions of a block; ``None`` at level 1.
        window: positions that a query sees, where that is shorter than the block.
        sinks: how many of the first positions are kept; ``None`` for no limit.
    """

    block: int | None = None
    window: int | None = None
    sinks: int | None = None

    @classmethod
    def of(cls, level: Level) -> Lifetime:
        """That of a level."""
        if isinstance(level, SinkLevel):
            return cls(sinks=level.longest)
        if level.ring is not None:  # the last position is always kept, and so the page that is not full yet
            return cls(window=max(2, level.ring))
        return cls(block=level.longest)

    @property
    def keeps_all(self) -> bool:
        """Whether every position is kept."""
        return self.block is None and self.window is None and self.sinks is None

    @overload
    def slot(self, position: int) -> int: ...
    @overload
    def slot(self, position: Tensor) -> Tensor: ...
    def slot(self, position: int | Tensor) -> int | Tensor:
        """The slot of a position: blocks are written over the one before."""
        return position if self.block is None else position % self.block

    def kept(self, length: int) -> range:
        """Slots that the token after ``length`` tokens may need: none of a block that has ended."""
        if self.sinks is not None:
            return range(min(length, self.sinks))
        if self.window is not None:
            return range(max(0, length - self.window + 1), length)
        return range(length if self.block is None else length % self.block)

    def decoded(self, position: int) -> range:
        """Slots from which the token at ``position`` is decoded: also its own, which is written first."""
        kept = self.kept(position)
        return kept if self.sinks is not None and position >= self.sinks else range(kept.start, kept.stop + 1)

    def written(self, past: int, end: int) -> range:
        """The positions of the tokens from ``past`` to ``end`` - 1 that are written, if they have a page:
        those that are kept after them, and a single one, which is decoded from its page. Of a window all may
        have one.
        """
        if self.sinks is not None:
            return range(past, min(end, self.sinks))
        if end - past == 1 or self.window is not None:
            return range(past, end)
        return range(max(past, end - len(self.kept(end))), end)

    def ring(self, size: int) -> int | None:
        """In how many pages of ``size`` slots a window lies at most, wherever it begins; ``None`` without
        one.
        """
        return None if self.window is None else -(-(self.window + size - 1) // size)


def pages_of(slots: range, size: int) -> range:
    """Numbers of the pages of ``size`` slots that hold these slots."""
    return range(slots.start // size, -(-slots.stop // size)) if slots else range(0)


@dataclass(frozen=True)
class HeadsShape:
    """What a cache keeps of the key heads of an attention layer that have one layout.

    Attributes:
        layout, window: as of ``structured_attention``.
        keys, values: (heads, dimension).

    Raises:
        ConfigError: the layout has segments, whose ends are not known in advance.
    """

    layout: Layout | None
    window: int | None
    keys: tuple[int, int]
    values: tuple[int, int]

    def __post_init__(self) -> None:
        if isinstance(self.layout, LevelLayout) and self.layout.boundaries is not None:
            raise ConfigError(f"a paged cache needs equal blocks, and the layout has segments: {self.layout}")

    @cached_property
    def softmaxes(self) -> tuple[Softmax, ...]:
        """Those of the layout."""
        return softmaxes_of(self.layout, self.window, self.keys[1])

    @cached_property
    def key_levels(self) -> tuple[Level, ...]:
        """The levels of the keys, of all softmaxes."""
        return tuple(level for softmax in self.softmaxes for level in softmax.levels)

    @cached_property
    def value_levels(self) -> tuple[Level, ...]:
        """The levels of the values: one without ``value_ranks``."""
        return value_levels(self.softmaxes, self.layout, self.values[1])

    @cached_property
    def sink_levels(self) -> tuple[SinkLevel, ...]:
        """The sink tokens of keys and of values; none where the layout has none."""
        found = (sink_level(self.layout, dim) for _, dim in (self.keys, self.values))
        return tuple(level for level in found if level is not None)

    def levels(self) -> Iterator[tuple[int, Level]]:
        """(heads, level) of all that is kept: keys, values, sink tokens of both."""
        for level in self.key_levels:
            yield self.keys[0], level
        for level in self.value_levels:
            yield self.values[0], level
        yield from zip((self.keys[0], self.values[0]), self.sink_levels, strict=False)


@dataclass(frozen=True)
class PagedLayerShape:
    """What a cache keeps of one attention layer.

    Attributes:
        layout, window: as of ``structured_attention``.
        keys, values: (heads, dimension).

    Raises:
        ConfigError: a layout has segments, or there are heads without a layout of several.
    """

    layout: AnyLayout | None
    window: int | None
    keys: tuple[int, int]
    values: tuple[int, int]

    def __post_init__(self) -> None:
        if isinstance(self.layout, HeadLayouts):
            for heads, _ in (self.keys, self.values):
                self.layout.check_heads(heads)
        assert self.by_heads  # raises where a layout has segments

    @cached_property
    def by_heads(self) -> tuple[HeadsShape, ...]:
        """The shape of the heads of each layout, in the order of its ``groups``; else one, of all heads."""
        if not isinstance(self.layout, HeadLayouts):
            return (HeadsShape(self.layout, self.window, self.keys, self.values),)
        return tuple(
            HeadsShape(layout, self.window, (len(heads), self.keys[1]), (len(heads), self.values[1]))
            for layout, heads in self.layout.groups
        )

    def levels(self) -> Iterator[tuple[int, Level]]:
        """(heads, level) of all that is kept: those of each of ``by_heads``, one after the other."""
        for shape in self.by_heads:
            yield from shape.levels()


@dataclass(frozen=True, kw_only=True)
class Part:
    """One level of the keys or values of one layer, as it lies in the pages of its group.

    Attributes:
        heads, dim: numbers of a token.
        offset: numbers per slot before it, in a page of one slot; times the slots of a page, its place in a
            page.
    """

    heads: int
    dim: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """The parts of all layers with one lifetime.

    Attributes:
        lifetime: theirs.
        parts: by (layer, number of the level within the layer, in the order of
            ``PagedLayerShape.levels``).
        width: numbers of a token.
    """

    lifetime: Lifetime
    parts: dict[tuple[int, int], Part]
    width: int


def groups_of(layers: Sequence[PagedLayerShape]) -> tuple[Group, ...]:
    """The groups of the layers of a model; the one that keeps every position, if there is one, first."""
    widths: dict[Lifetime, int] = {}
    parts: dict[Lifetime, dict[tuple[int, int], Part]] = {}
    for index, layer in enumerate(layers):
        for number, (heads, level) in enumerate(layer.levels()):
            lifetime = Lifetime.of(level)
            offset = widths.get(lifetime, 0)
            parts.setdefault(lifetime, {})[index, number] = Part(heads=heads, dim=level.rank, offset=offset)
            widths[lifetime] = offset + heads * level.rank
    ordered = sorted(widths, key=lambda lifetime: not lifetime.keeps_all)
    return tuple(Group(lifetime=lifetime, parts=parts[lifetime], width=widths[lifetime]) for lifetime in ordered)


def page_numbers(groups: Sequence[Group], most_slots: int, length: int) -> int:
    """Numbers of a page, for all groups the same: few enough that pages which are not full cost little.

    A group has as many slots of a page as fit. Of all sizes with at most ``most_slots`` slots in every group,
    this is the largest with which requests take within a twentieth of the fewest pages' worth of numbers.

    Args:
        groups: of a model.
        most_slots: of a page of the first group.
        length: of a long request; shorter ones are looked at too.
    """
    lengths = [max(1, length * eighths // 8 - 1) for eighths in (1, 3, 5, 8)]
    widest = max(group.width for group in groups)
    sizes = {slots * group.width for group in groups for slots in range(1, most_slots + 1)}
    sizes = {size for size in sizes if widest <= size <= most_slots * groups[0].width} or {widest}
    costs = {
        size: size * sum(_most_pages(group.lifetime, n, size // group.width) for group in groups for n in lengths)
        for size in sizes
    }
    fewest = min(costs.values())
    return max(size for size, cost in costs.items() if 20 * cost <= 21 * fewest)


def _most_pages(lifetime: Lifetime, length: int, slots: int) -> int:
    """Pages while the last of ``length`` tokens is decoded; of a window as many as it may lie in."""
    pages = len(pages_of(lifetime.decoded(length - 1), slots))
    ring = lifetime.ring(slots)
    return pages if ring is None else min(-(-length // slots), ring)
