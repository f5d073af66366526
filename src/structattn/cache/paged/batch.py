"""Where the tokens of one call of a model lie in the pages: found once, and used by all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structattn.cache.decode import Columns
from structattn.cache.levels import Level
from structattn.cache.paged.geometry import Lifetime, pages_of
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
class Singles:
    """Requests with one new token each.

    Attributes:
        tokens: (B,) of the call.
        positions: of them.
        pages: of each group, (B, n), filled up with page 0.
        columns: see ``KeyValueView``.
    """

    tokens: Tensor
    positions: list[int]
    pages: list[Tensor]
    columns: dict[tuple[Level, ...], Columns] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """A request with several new tokens that follow others: which tokens of the call, and what is kept of
    those before, with its positions, by group.
    """

    tokens: slice
    past: int
    kept: list[tuple[Slots, range]]


@dataclass(frozen=True)
class Wholes:
    """Requests that begin with several tokens: (n,) tokens of the call, and offsets among these."""

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
        self.writes = [self._writes(number, placed) for number in range(len(pool.groups))]
        self.singles = self._singles([(one, at) for one, at in placed if one.count == 1])
        self.wholes = self._wholes([(one, at) for one, at in placed if one.count > 1 and one.past == 0])
        self.chunks = [self._chunk(one, at) for one, at in placed if one.count > 1 and one.past > 0]

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, device=self.pool.memory.device)

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
        every = [found, *spans]
        return Slots(*(torch.cat([getattr(x, name) for x in every]) for name in ("pages", "slots", "tokens")))

    def _span(self, lifetime: Lifetime, size: int, table: dict[int, int], at: range, offset: int) -> Slots:
        """The slots of positions of a request that have a page; its position x is token ``offset`` + x."""
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
            tables.append(self._tensor([row + [0] * (most - len(row)) for row in rows]))
        return Singles(self._tensor([at for _, at in placed]), [one.past for one, _ in placed], tables)

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
        return Chunk(slice(at, at + one.count), one.past, list(self._kept(one)))

    def _kept(self, one: Tokens) -> Iterator[tuple[Slots, range]]:
        """For each group the slots of the tokens before that the new ones may need, and their positions."""
        for number, (group, size) in enumerate(zip(self.pool.groups, self.pool.slots, strict=True)):
            lifetime, table = group.lifetime, self.pool.tables[one.request][number]
            kept = len(lifetime.kept(one.past))
            first = 0 if lifetime.sinks is not None else one.past - kept
            yield self._span(lifetime, size, table, range(first, first + kept), 0), range(first, first + kept)


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
