"""What pages hold: the levels of all layers that keep a position equally long share one page table for each
request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from structattn.cache.head_groups import head_groups
from structattn.cache.levels import (
    Level,
    RecentLevel,
    SinkLevel,
    Softmax,
    sink_level,
    softmaxes_of,
    stored_levels,
    value_levels,
)
from structattn.cache.storage import LayerStorage, Storage, checked_storage, chooses_tokens, storage_of_heads
from structattn.errors import ConfigError
from structattn.layout.global_window import Layout
from structattn.layout.heads import AnyLayout, HeadGroup, HeadLayouts
from structattn.layout.levels import LevelLayout


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """How long a level keeps a position: always, until its block ends, or until it is as far back as the
    window. Sink tokens are always kept, and no others with them.

    Attributes:
        block: positions of a block; ``None`` at level 1.
        window: positions that a query sees, where that is shorter than the block.
        sinks: how many of the first positions are kept; ``None`` for no limit.
        span: positions of an entry, which has a slot: 1, or the tokens of a group.
    """

    block: int | None = None
    window: int | None = None
    sinks: int | None = None
    span: int = 1

    @classmethod
    def of(cls, level: Level) -> Lifetime:
        """That of a level."""
        if isinstance(level, SinkLevel):
            return cls(sinks=level.longest)
        if isinstance(level, RecentLevel):
            return GroupLifetime.of_groups(level).of_exact
        if level.ring is not None:  # the last position is always kept, and so the page that is not full yet
            return cls(window=max(2, level.ring))
        return cls(block=level.longest)

    @property
    def keeps_all(self) -> bool:
        """Whether every position is kept."""
        return self.block is None and self.window is None and self.sinks is None

    def entries(self, length: int) -> int:
        """How many entries there are after ``length`` tokens, those that are kept no longer counted too."""
        return length

    @overload
    def slot(self, position: int) -> int: ...
    @overload
    def slot(self, position: Tensor) -> Tensor: ...
    def slot(self, position: int | Tensor) -> int | Tensor:
        """The slot of a position: blocks are written over the one before."""
        return position if self.block is None else position % (self.block // self.span)

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


@dataclass(frozen=True, kw_only=True)
class GroupLifetime(Lifetime):
    """How long the groups of quantized tokens of a level are kept: an entry is a group, and where
    ``Lifetime`` has positions of entries, these are numbers of groups. Lengths, blocks and windows are
    counted in tokens.

    Attributes:
        span: tokens of a group.
        residual: tokens that are exact, as of ``Storage``.
    """

    span: int
    residual: int

    @classmethod
    def of_groups(cls, level: RecentLevel) -> GroupLifetime:
        """That of a level."""
        window, storage = level.ring_of_window, level.storage
        block = level.of_block if window is None else None
        return cls(block=block, window=window, span=storage.group_size, residual=storage.residual)

    @property
    def of_exact(self) -> Lifetime:
        """That of the exact tokens: the residual, and the group that leaves it next."""
        return Lifetime(window=self.residual + self.span)

    def entries(self, length: int) -> int:
        """See ``Lifetime``: those that the last of ``length`` tokens reads as codes."""
        return max(0, length - self.residual) // self.span

    def _of(self, position: int, end: int) -> range:
        """Slots of the groups before ``end`` that the token at ``position`` may need."""
        if self.block is not None:
            return range(max(0, end - (position - position % self.block) // self.span))
        first = 0 if self.window is None else max(0, position - self.window + 1) // self.span
        return range(min(first, end), end)

    def kept(self, length: int) -> range:
        """See ``Lifetime``."""
        return self._of(length, self.entries(length))

    def decoded(self, position: int) -> range:
        """See ``Lifetime``: also of a group that is quantized with this token."""
        return self._of(position, self.entries(position + 1))

    def written(self, past: int, end: int) -> range:
        """The numbers of the groups that are quantized with the tokens from ``past`` to ``end`` - 1, if they
        have a page: those that are kept after them. Of a window all may have one.
        """
        first, stop = self.entries(past), self.entries(end)
        if self.window is not None:
            return range(first, stop)
        kept = self.decoded(past) if end - past == 1 else self.kept(end)
        return range(max(first, stop - len(kept)), stop)

    def ring(self, size: int) -> int | None:
        """See ``Lifetime``; of all groups in which the window lies."""
        if self.window is None:
            return None
        groups = -(-(self.window - 1) // self.span) + 1
        return -(-(groups + size - 1) // size)


def pages_of(slots: range, size: int) -> range:
    """Numbers of the pages of ``size`` slots that hold these slots."""
    return range(slots.start // size, -(-slots.stop // size)) if slots else range(0)


@dataclass(frozen=True)
class HeadsShape:
    """What a cache keeps of the key heads of an attention layer that have one layout.

    Attributes:
        layout, window: as of ``structured_attention``.
        keys, values: (heads, dimension).
        storage: in which bits far tokens are kept.

    Raises:
        ConfigError: the layout has segments, whose ends are not known in advance.
    """

    layout: Layout | None
    window: int | None
    keys: tuple[int, int]
    values: tuple[int, int]
    storage: Storage | None = None

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
        """(heads, level) of all that is kept: keys, values, sink tokens of both. Levels of which far tokens
        are quantized are a ``RecentLevel``.

        Raises:
            ConfigError: the storage does not fit the levels.
        """
        for level in stored_levels(self.key_levels, self.storage, "key_bits"):
            yield self.keys[0], level
        for level in stored_levels(self.value_levels, self.storage, "value_bits"):
            yield self.values[0], level
        yield from zip((self.keys[0], self.values[0]), self.sink_levels, strict=False)


@dataclass(frozen=True)
class PagedLayerShape:
    """What a cache keeps of one attention layer.

    Attributes:
        layout, window: as of ``structured_attention``.
        keys, values: (heads, dimension).
        storage: in which bits tokens are kept that are further back than its residual; one for each key head,
            or of all. Default ``None``: as the model makes them. A call of the layer does not say it, and
            shapes are compared without it.

    Raises:
        ConfigError: a layout has segments, or there are heads without a layout or a storage of several.
    """

    layout: AnyLayout | None
    window: int | None
    keys: tuple[int, int]
    values: tuple[int, int]
    storage: LayerStorage = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage", checked_storage(self.storage))
        for heads, _ in (self.keys, self.values):
            if isinstance(self.layout, HeadLayouts):
                self.layout.check_heads(heads)
            storage_of_heads(self.storage, heads)
        assert self.by_heads  # raises where a layout has segments

    @property
    def chooses_tokens(self) -> bool:
        """Whether key heads keep only some of the far tokens, which do not lie in pages."""
        return chooses_tokens(self.storage)

    @cached_property
    def _groups(self) -> list[tuple[HeadGroup, Storage | None]]:
        return head_groups(self.layout, self.storage, self.keys[0])

    @property
    def groups(self) -> tuple[HeadGroup, ...]:
        """The key heads of each layout and storage."""
        return tuple(group for group, _ in self._groups)

    @cached_property
    def by_heads(self) -> tuple[HeadsShape, ...]:
        """The shape of the heads of each of ``groups``."""
        if len(self._groups) == 1:
            ((group, storage),) = self._groups
            return (HeadsShape(group.layout, self.window, self.keys, self.values, storage),)
        return tuple(
            HeadsShape(layout, self.window, (len(heads), self.keys[1]), (len(heads), self.values[1]), storage)
            for (layout, heads), storage in self._groups
        )

    def levels(self) -> Iterator[tuple[int, Level]]:
        """(heads, level) of all that is kept: those of each of ``by_heads``, one after the other."""
        for shape in self.by_heads:
            yield from shape.levels()


@dataclass(frozen=True, kw_only=True)
class Part:
    """Numbers of one level of the keys or values of one layer, as they lie in the pages of their group.

    Attributes:
        heads, dim: numbers of a slot.
        dtype: of the numbers.
        offset: numbers of this dtype per slot before it, in a page of one slot; times the slots of a page,
            its place in a page.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """The parts of all layers with one lifetime.

    Attributes:
        lifetime: theirs.
        parts: by (layer, number of the part within the layer). A level has one part; one of which far tokens
            are quantized has four, for exact numbers, codes, scale and zero. They are in the order of
            ``PagedLayerShape.levels``.
        width: numbers of a slot, as many of the dtype of the model as have room for it.
    """

    lifetime: Lifetime
    parts: dict[tuple[int, int], Part]
    width: int


def _parts_of(heads: int, level: Level, dtype: torch.dtype) -> Iterator[tuple[Lifetime, tuple[int, int], torch.dtype]]:
    """(lifetime, (heads, dim), dtype) of all that is kept of a level."""
    yield Lifetime.of(level), (heads, level.rank), dtype
    if isinstance(level, RecentLevel):
        for shape, of_tensor in level.format.tensors(dtype):
            yield GroupLifetime.of_groups(level), (heads, math.prod(shape)), of_tensor


def groups_of(layers: Sequence[PagedLayerShape], dtype: torch.dtype) -> tuple[Group, ...]:
    """The groups of the layers of a model of a dtype; the one that keeps every position, if there is one,
    first.
    """
    shapes: dict[Lifetime, dict[tuple[int, int], tuple[tuple[int, int], torch.dtype]]] = {}
    for index, layer in enumerate(layers):
        parts = (part for heads, level in layer.levels() for part in _parts_of(heads, level, dtype))
        for number, (lifetime, shape, of_part) in enumerate(parts):
            shapes.setdefault(lifetime, {})[index, number] = shape, of_part
    ordered = sorted(shapes, key=lambda lifetime: not lifetime.keeps_all)
    return tuple(_group(lifetime, shapes[lifetime], dtype) for lifetime in ordered)


def _group(
    lifetime: Lifetime, shapes: dict[tuple[int, int], tuple[tuple[int, int], torch.dtype]], dtype: torch.dtype
) -> Group:
    """The group of parts, by (layer, number): their (heads, dim) and dtype."""
    parts, nbytes = {}, 0
    # The widest numbers first, so that all begin at a multiple of their size.
    for name, ((heads, dim), of_part) in sorted(shapes.items(), key=lambda item: -item[1][1].itemsize):
        parts[name] = Part(heads=heads, dim=dim, dtype=of_part, offset=nbytes // of_part.itemsize)
        nbytes += heads * dim * of_part.itemsize
    return Group(lifetime=lifetime, parts=parts, width=-(-nbytes // dtype.itemsize))


def page_numbers(groups: Sequence[Group], most_slots: int, length: int) -> int:
    """Numbers of a page, for all groups the same: few enough that pages which are not full cost little.

    A group has as many slots of a page as fit. Of all sizes with at most ``most_slots`` slots in every group,
    this is the largest with which requests take within a twentieth of the fewest pages' worth of numbers.

    Args:
        groups: of a model.
        most_slots: positions in a page of the first group; of quantized tokens one group at least.
        length: of a long request; shorter ones are looked at too.
    """
    lengths = [max(1, length * eighths // 8 - 1) for eighths in (1, 3, 5, 8)]
    widest = max(group.width for group in groups)
    most = [max(1, most_slots // group.lifetime.span) for group in groups]
    sizes = {slots * group.width for group, count in zip(groups, most, strict=True) for slots in range(1, count + 1)}
    sizes = {size for size in sizes if widest <= size <= most[0] * groups[0].width} or {widest}
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
    return pages if ring is None else min(-(-lifetime.entries(length) // slots), ring)
