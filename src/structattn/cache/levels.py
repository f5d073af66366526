"""What a cache keeps of each level, as positions: blocks, windows, rings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from structattn.cache.storage.options import Storage
from structattn.cache.storage.quantize import GroupFormat
from structattn.errors import ConfigError
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.levels import LevelLayout


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of one softmax, as a cache sees it.

    Attributes:
        layout, number: which level of which layout.
        rank: numbers per position.
        window: of the softmax, or of the level where that is shorter.
        chunk_size: of chunks that see nothing of each other; ``None`` for none.

    Sink tokens are kept apart, as a ``SinkLevel``: of no other level a query needs them.
    """

    layout: LevelLayout
    number: int
    rank: int
    window: int | None
    chunk_size: int | None = None

    @property
    def _block(self) -> int | None:
        """The longest block, or ``None`` for no limit."""
        if self.number == 1 or not self.layout.block_sizes:
            return self.chunk_size
        size = self.layout.block_sizes[self.number - 1]
        return size if self.chunk_size is None else min(size, self.chunk_size)

    @property
    def ring(self) -> int | None:
        """The window, where blocks are longer: then no more than the window is kept."""
        block = self._block
        return None if self.window is None or (block is not None and block <= self.window) else self.window

    @property
    def longest(self) -> int | None:
        """The most positions that are ever kept, or ``None`` for no limit."""
        return self._block if self.ring is None else self.ring

    @property
    def block_size(self) -> int:
        """Positions of a block, all alike, that are counted from the start of a chunk; 0 where there are
        none.
        """
        is_whole = self.number == 1 or self.layout.windows is not None or self.layout.boundaries is not None
        return 0 if is_whole else self.layout.block_sizes[self.number - 1]

    @property
    def has_segments(self) -> bool:
        """Whether its blocks begin at positions that follow from no size."""
        return self.number > 1 and self.layout.windows is None and self.layout.boundaries is not None

    def most_slots(self, length: int) -> int:
        """The most positions that are kept at any time while a sequence grows to ``length``."""
        if self.number == 1 or self.layout.boundaries is None or self.chunk_size is not None:
            most = min(length, self._block or length)
        else:
            rows = range(self.layout.num_rows or 1)
            most = max(max(self.layout.lengths(self.number, length, row)) for row in rows)
        return most if self.ring is None else min(length, self.ring)

    def start(self, position: int, row: int) -> int:
        """The first position of the block of ``position``."""
        # Blocks are counted from the start of a chunk.
        chunk = 0 if self.chunk_size is None else position - position % self.chunk_size
        if self.number == 1 or self.layout.windows is not None:
            return chunk
        # Every step asks this for every level, and `block_start` checks its arguments.
        if self.layout.boundaries is None:
            return position - (position - chunk) % self.layout.block_sizes[self.number - 1]
        return chunk + self.layout.block_start(self.number, position - chunk, row)

    def first_needed(self, position: int, row: int) -> int:
        """The first position that a query at ``position`` shares this level with and sees, sink tokens aside;
        ``position + 1`` where there is none.
        """
        if position < 0:
            return position
        start = self.start(position, row)
        start = start if self.window is None else max(start, position - self.window + 1)
        return min(max(start, self.layout.sink_tokens), position + 1)

    def end(self, position: int) -> int:
        """The position after the last that is kept when ``position`` is the last token's."""
        return position + 1


@dataclass(frozen=True, kw_only=True)
class SinkLevel(Level):
    """The sink tokens of a layout, in all dimensions: never dropped.

    Its number is 1, and there is no window: every later query sees them.
    """

    @property
    def longest(self) -> int | None:
        """How many they are."""
        return self.layout.sink_tokens

    def most_slots(self, length: int) -> int:
        """See ``Level``."""
        return min(length, self.layout.sink_tokens)

    def first_needed(self, position: int, row: int) -> int:
        """The first of them."""
        return min(position, 0)

    def end(self, position: int) -> int:
        """See ``Level``."""
        return min(position + 1, self.layout.sink_tokens)


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """One softmax: its levels, and which dimensions of queries and keys they have."""

    layout: LevelLayout
    dims: slice
    levels: tuple[Level, ...]

    @property
    def slides(self) -> bool:
        """Whether levels have windows, so that a token may leave one at every step."""
        return any(level.window is not None for level in self.levels)

    def begins(self, position: int, row: int) -> tuple[list[int], list[int]]:
        """For each level the first position that a query shares it with and sees, and the first of the
        query's block.
        """
        blocks = [level.start(position, row) for level in self.levels]
        starts = [
            block if level.window is None else max(block, position - level.window + 1)
            for block, level in zip(blocks, self.levels, strict=True)
        ]
        if sinks := self.layout.sink_tokens:
            starts = [min(max(start, sinks), position + 1) for start in starts]
        return starts, blocks


def _softmax(layout: LevelLayout, dims: slice, window: int | None, chunk_size: int | None) -> Softmax:
    levels = tuple(
        Level(layout=layout, number=number, rank=rank, window=layout.window_of(number, window), chunk_size=chunk_size)
        for number, rank in enumerate(layout.ranks, start=1)
    )
    return Softmax(layout=layout, dims=dims, levels=levels)


def softmaxes_of(
    layout: Layout | None, window: int | None, head_dim: int, chunk_size: int | None = None
) -> tuple[Softmax, ...]:
    """The softmaxes of a layout: two that are added for a global-window layout, else one."""
    if isinstance(layout, GlobalWindowLayout):
        first, second = layout.ranks
        return (
            _softmax(LevelLayout((first,), (1,), layout.scaling), slice(0, first), None, chunk_size),
            _softmax(
                LevelLayout((second,), (1,), layout.scaling), slice(first, first + second), layout.window, chunk_size
            ),
        )
    layout = LevelLayout((head_dim,), (1,)) if layout is None else layout
    return (_softmax(layout, slice(0, layout.head_dim), window, chunk_size),)


@dataclass(frozen=True, kw_only=True)
class RecentLevel(Level):
    """The exact numbers of a level whose other tokens are quantized: the last ones, in a ring.

    Attributes:
        storage: says which.
        format: of the other tokens.
    """

    storage: Storage
    format: GroupFormat

    @property
    def ring(self) -> int | None:
        """See ``Level``."""
        return self.storage.exact_slots

    @property
    def longest(self) -> int | None:
        """See ``Level``."""
        return self.storage.exact_slots

    @property
    def of_block(self) -> int | None:
        """The longest block of the level, quantized tokens too; ``None`` for no limit."""
        return self._block

    @property
    def ring_of_window(self) -> int | None:
        """The window of the level, quantized tokens too, where blocks are longer."""
        return super().ring

    def most_slots(self, length: int) -> int:
        """See ``Level``."""
        return min(length, self.storage.exact_slots)

    def first_needed(self, position: int, row: int) -> int:
        """The first position whose exact number is needed, by a query at ``position`` or to quantize its
        group.
        """
        if position < 0:
            return position
        size = self.storage.group_size
        exact = min(self.storage.first_exact(position), position // size * size)
        return max(self.first_group(position, row) * size, exact)

    def first_group(self, position: int, row: int) -> int:
        """The first group that a query at ``position`` sees a token of, exact or quantized."""
        return max(0, super().first_needed(position, row)) // self.storage.group_size


def stored_levels(levels: Sequence[Level], storage: Storage | None, name: str) -> tuple[Level, ...]:
    """The levels of keys or of values, those of which far tokens are quantized as a ``RecentLevel``.

    Args:
        name: ``"key_bits"`` or ``"value_bits"``.

    Raises:
        ConfigError: the bits are those of another number of levels, or groups do not divide a block.
    """
    if storage is None:
        return tuple(levels)
    found: list[Level] = []
    for level, bits in zip(levels, storage.bits(name, len(levels)), strict=True):
        if bits == 16 or storage.stays_exact(level.longest):
            found.append(level)
            continue
        of_groups = GroupFormat(
            dim=level.rank, bits=bits, group_size=storage.group_size, per_token=name == "value_bits"
        )
        values = {field.name: getattr(level, field.name) for field in fields(level)}
        recent = RecentLevel(**values, storage=storage, format=of_groups)
        # Blocks are counted from the start of a chunk, so that groups must not lie across two chunks either.
        for size, what in (
            (recent.of_block, f"the block of level {level.number}"),
            (level.chunk_size, "the chunk_size"),
        ):
            if recent.of_block is not None and size is not None and size % storage.group_size:
                raise ConfigError(
                    f"group_size must divide the blocks of each level: expected a divisor of {size}, {what}, got "
                    f"{storage.group_size}"
                )
        found.append(recent)
    return tuple(found)


def sink_level(layout: Layout | None, rank: int) -> SinkLevel | None:
    """What a cache keeps of the sink tokens of a layout; ``None`` where it has none."""
    if not isinstance(layout, LevelLayout) or not layout.sink_tokens:
        return None
    return SinkLevel(layout=layout, number=1, rank=rank, window=None)


def widest(softmaxes: Sequence[Softmax]) -> Level:
    """The level that needs the most positions."""
    first = [softmax.levels[0] for softmax in softmaxes]
    return next((level for level in first if level.window is None), first[0])


def value_levels(softmaxes: Sequence[Softmax], layout: Layout | None, value_dim: int) -> tuple[Level, ...]:
    """The levels of the values: those of the keys with ``value_ranks``, else one for all."""
    ranks = layout.value_ranks if isinstance(layout, LevelLayout) else None
    levels = (widest(softmaxes),) if ranks is None else softmaxes[0].levels
    return tuple(replace(level, rank=rank) for level, rank in zip(levels, ranks or (value_dim,), strict=True))
