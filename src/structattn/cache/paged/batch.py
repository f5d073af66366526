"""Where the tokens of one call of a model lie in the pages: found once, and used by all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from structattn.cache.decode import Columns
from structattn.cache.levels import Level
from structattn.cache.paged.geometry import GroupLifetime, Lifetime, pages_of
from structattn.cache.paged.pages import PagePool
from structattn.errors import CacheError


@dataclass(frozen=True)
class Tokens:
    """New tokens of a request.

    Attributes:
        request: its name.
        past: tokens before them.
        count: how many, at least 1.
        text: all tokens of the request, up to these, where later requests may begin with what is computed;
            else ``None``.
    """

    request: str
    past: int
    count: int
    text: Sequence[int] | None = None


@dataclass(frozen=True)
class Slots:
    """Slots of one group: (n,) pages and slots in them, with the tokens of the call that go there."""

    pages: Tensor
    slots: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class ExactTokens:
    """The tokens that single ones read exactly of levels whose groups of tokens have one lifetime.

    Attributes:
        slots: where they are; its ``tokens`` are the slots in which they are read.
        rows: (n,), of which request.
        count: slots in which a request is read, at least.
    """

    slots: Slots
    rows: Tensor
    count: int


@dataclass(frozen=True)
class FullGroups:
    """Groups of tokens that are quantized with a single token.

    Attributes:
        starts: (n,), the first position of each.
        tokens: where their n g tokens are.
        slots: where the groups go.
    """

    starts: list[int]
    tokens: Slots
    slots: Slots


@dataclass(frozen=True)
class Singles:
    """Requests with one new token each.

    Attributes:
        tokens: (B,) of the call.
        positions: of them.
        pages: of each group, (B, n), filled up with page 0.
        exact, full: by the group of quantized tokens; ``full`` where there are any.
        columns: see ``KeyValueView``.
    """

    tokens: Tensor
    positions: list[int]
    pages: list[Tensor]
    exact: dict[int, ExactTokens] = field(default_factory=dict)
    full: dict[int, FullGroups] = field(default_factory=dict)
    columns: dict[tuple[Level, ...], Columns] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """A request with several new tokens that follow others, or of which some are quantized in this call.

    Attributes:
        tokens: which of the call.
        past: tokens before them.
        kept: of those, by group: where they are, and which positions, or groups of quantized tokens.
        places: (page, slot) of each group of tokens that is quantized, by the group of the pool.
    """

    tokens: slice
    past: int
    kept: list[tuple[Slots, range]]
    places: dict[int, dict[int, tuple[int, int]]]


@dataclass(frozen=True)
class Wholes:
    """Requests that begin with several tokens, of which none is quantized: (n,) tokens of the call, and
    offsets among these.
    """

    tokens: Tensor | slice
    cu_seqlens: Tensor


class Batch:
    """The new tokens of all requests of one call, one after the other in one row.

    Args:
        pool: in which they have their pages.
        requests: in the order of the row.

    Raises:
        CacheError: a request has no pages for its tokens.
    """

    def __init__(self, pool: PagePool, requests: Sequence[Tokens]) -> None:
        self.pool, self.requests = pool, tuple(requests)
        for one in self.requests:
            if pool.missing(one.request, one.past, one.count):
                raise CacheError(
                    f"request {one.request!r} has no pages for {one.count} tokens after {one.past}: reserve them"
                )
        self.length = sum(one.count for one in self.requests)
        starts, first = [], 0
        for one in self.requests:
            starts.append(first)
            first += one.count
        placed = list(zip(self.requests, starts, strict=True))
        # Of quantized tokens nothing is written before the attention of the call is computed.
        self.writes = [
            None if isinstance(group.lifetime, GroupLifetime) else self._writes(number, placed)
            for number, group in enumerate(pool.groups)
        ]
        several = [(one, at) for one, at in placed if one.count > 1]
        self.singles = self._singles([(one, at) for one, at in placed if one.count == 1])
        self.wholes = self._wholes([(one, at) for one, at in several if self._is_whole(one)])
        self.chunks = [self._chunk(one, at) for one, at in several if not self._is_whole(one)]

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, device=self.pool.memory.device)

    def _is_whole(self, one: Tokens) -> bool:
        """Whether a request begins with several tokens, of which none is quantized in this call."""
        lifetimes = [group.lifetime for group in self.pool.groups if isinstance(group.lifetime, GroupLifetime)]
        return one.past == 0 and all(lifetime.entries(one.count) == 0 for lifetime in lifetimes)

    def _writes(self, number: int, placed: list[tuple[Tokens, int]]) -> Slots:
        """The tokens of which a group holds something after the call."""
        lifetime, size = self.pool.groups[number].lifetime, self.pool.slots[number]
        pages, slots, tokens = [], [], []
        spans: list[Slots] = []
        for one, at in placed:
            table = self.pool.tables[one.request][number]
            written = lifetime.written(one.past, one.past + one.count)
            if not written:
                continue
            if one.count == 1:
                slot = lifetime.slot(one.past)
                pages.append(table[slot // size])
                slots.append(slot % size)
                tokens.append(at)
            else:
                spans.append(self._span(lifetime, size, table, written, at - one.past))
        found = Slots(self._tensor(pages).long(), self._tensor(slots).long(), self._tensor(tokens).long())
        if not spans:
            return found
        return _joined([found, *spans])

    def _span(self, lifetime: Lifetime, size: int, table: dict[int, int], at: range, offset: int) -> Slots:
        """The slots of positions (or groups) of a request that have a page; x is token ``offset`` + x."""
        positions = torch.arange(at.start, at.stop, device=self.pool.memory.device)
        slots, first = lifetime.slot(positions), lifetime.slot(at.start)
        numbers = pages_of(range(first, first + len(at)), size)
        own = [table.get(number, 0) for number in numbers]
        pages = self._tensor(own).long()[slots // size - numbers.start]
        if not all(own):
            pages, slots, positions = (x[pages > 0] for x in (pages, slots, positions))
        return Slots(pages, slots % size, positions + offset)

    def _singles(self, placed: list[tuple[Tokens, int]]) -> Singles | None:
        if not placed:
            return None
        tables = []
        for number, (group, size) in enumerate(zip(self.pool.groups, self.pool.slots, strict=True)):
            rows = [_row(group.lifetime, size, self.pool.tables[one.request][number], one.past) for one, _ in placed]
            most = max(map(len, rows))
            tables.append(self._tensor([row + [0] * (most - len(row)) for row in rows]).long())
        requests = [one for one, _ in placed]
        singles = Singles(self._tensor([at for _, at in placed]), [one.past for one in requests], tables)
        for number, group in enumerate(self.pool.groups):
            if isinstance(group.lifetime, GroupLifetime):
                singles.exact[number] = self._exact(number, group.lifetime, requests)
                if (full := self._full(number, group.lifetime, requests)) is not None:
                    singles.full[number] = full
        return singles

    def _of_exact(self, one: Tokens, lifetime: GroupLifetime, positions: range) -> Slots:
        """Where exact tokens are of a level whose groups have a lifetime."""
        lifetimes = [group.lifetime for group in self.pool.groups]
        number = lifetimes.index(lifetime.of_exact)
        return self._span(
            lifetime.of_exact, self.pool.slots[number], self.pool.tables[one.request][number], positions, 0
        )

    def _exact(self, number: int, lifetime: GroupLifetime, requests: Sequence[Tokens]) -> ExactTokens:
        """What single tokens read exactly."""
        ring = lifetime.ring(self.pool.slots[number])
        cycle = lifetime.block if ring is None else ring * self.pool.slots[number] * lifetime.span
        parts, rows, count = [], [], 0
        for row, one in enumerate(requests):
            block = 0 if lifetime.block is None else one.past - one.past % lifetime.block
            first = max(block, lifetime.entries(one.past + 1) * lifetime.span)
            parts.append(self._of_exact(one, lifetime, range(first, one.past + 1)))
            rows += [row] * (one.past + 1 - first)
            count = max(count, one.past - block + 1)
        slots = _joined(parts)
        if cycle is not None:
            slots, count = replace(slots, tokens=slots.tokens % cycle), min(count, cycle)
        return ExactTokens(slots, self._tensor(rows).long(), count)

    def _full(self, number: int, lifetime: GroupLifetime, requests: Sequence[Tokens]) -> FullGroups | None:
        """What is quantized with single tokens."""
        size, span = self.pool.slots[number], lifetime.span
        starts, tokens, places = [], [], []
        for one in requests:
            for group in lifetime.written(one.past, one.past + 1):
                starts.append(group * span)
                tokens.append(self._of_exact(one, lifetime, range(group * span, (group + 1) * span)))
                slot = lifetime.slot(group)
                places.append((self.pool.tables[one.request][number][slot // size], slot % size, group))
        if not starts:
            return None
        return FullGroups(starts, _joined(tokens), Slots(*self._tensor(places).T))

    def _wholes(self, placed: list[tuple[Tokens, int]]) -> Wholes | None:
        if not placed:
            return None
        offsets = [0]
        for one, _ in placed:
            offsets.append(offsets[-1] + one.count)
        first, device = placed[0][1], self.pool.memory.device
        last, at = placed[-1]
        tokens: Tensor | slice = slice(first, first + offsets[-1])
        if at + last.count - first != offsets[-1]:  # others lie between them
            tokens = torch.cat([torch.arange(at, at + one.count, device=device) for one, at in placed])
        return Wholes(tokens, self._tensor(offsets))

    def _chunk(self, one: Tokens, at: int) -> Chunk:
        places: dict[int, dict[int, tuple[int, int]]] = {}
        for number, (pool_group, size) in enumerate(zip(self.pool.groups, self.pool.slots, strict=True)):
            lifetime, table = pool_group.lifetime, self.pool.tables[one.request][number]
            if isinstance(lifetime, GroupLifetime):
                slots = {group: lifetime.slot(group) for group in lifetime.written(one.past, one.past + one.count)}
                places[number] = {
                    group: (table[slot // size], slot % size) for group, slot in slots.items() if slot // size in table
                }
        return Chunk(slice(at, at + one.count), one.past, list(self._kept(one)), places)

    def _kept(self, one: Tokens) -> Iterator[tuple[Slots, range]]:
        """For each group the slots of the tokens before that the new ones may need, and their positions, or
        numbers of groups of quantized tokens.
        """
        for number, (group, size) in enumerate(zip(self.pool.groups, self.pool.slots, strict=True)):
            lifetime, table = group.lifetime, self.pool.tables[one.request][number]
            kept = len(lifetime.kept(one.past))
            first = 0 if lifetime.sinks is not None else lifetime.entries(one.past) - kept
            yield self._span(lifetime, size, table, range(first, first + kept), 0), range(first, first + kept)


def _joined(parts: Sequence[Slots]) -> Slots:
    return Slots(*(torch.cat([getattr(part, name) for part in parts]) for name in ("pages", "slots", "tokens")))


def _row(lifetime: Lifetime, size: int, table: dict[int, int], position: int) -> list[int]:
    """The pages from which a token is decoded, in the order of a store: page n of a window is number n mod
    its ``ring``. 0 where there is none.
    """
    numbers, ring = pages_of(lifetime.decoded(position), size), lifetime.ring(size)
    if ring is None:
        return [table[number] for number in numbers]
    row = [0] * min(numbers.stop, ring)
    for number in numbers:
        row[number % ring] = table[number]
    return row
