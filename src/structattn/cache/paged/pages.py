"""A pool of pages of equal size, and which request has which."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from structattn.cache.paged.geometry import Group, PagedLayerShape, Part, groups_of, page_numbers, pages_of
from structattn.cache.paged.prefixes import PrefixIndex, share_unit
from structattn.checks import check_size
from structattn.errors import ConfigError


class LevelPages:
    """The slots of a part of one level of the keys or values of one layer, in all pages.

    Args:
        memory: of all pages.
        group: number of its group.
        slots: in a page.
        part: which of them.
        scratch: bytes for what is read, which layers share.
        ring: in how many slots a window lies, see ``Lifetime.ring``; ``None`` without one.
        block: after how many slots those of a block are written over; ``None`` without one.

    Attributes:
        group, ring, block: as given.
        dtype: of the numbers.
        view: all of them, (pages, heads, slots, dim).
    """

    def __init__(
        self,
        memory: Tensor,
        group: int,
        slots: int,
        part: Part,
        scratch: Tensor,
        *,
        ring: int | None,
        block: int | None,
    ) -> None:
        self.group, self.ring, self.block, self.dtype = group, ring, block, part.dtype
        self._scratch = scratch
        memory = memory.view(part.dtype)
        self._page, self._head, self._first = memory.shape[1], slots * part.dim, slots * part.offset
        size, stride = (len(memory), part.heads, slots, part.dim), (self._page, self._head, part.dim, 1)
        self.view = memory.as_strided(size, stride, self._first)
        # Every run of numbers as long as the slots of a head: gathered by where it begins, which is several
        # times faster than by page and head.
        self._runs = memory.as_strided((memory.numel() - self._head + 1, self._head), (1, 1))
        self._each_head = torch.arange(part.heads, device=memory.device)[:, None]
        self._heads = self._head * self._each_head + self._first

    def put(self, pages: Tensor, slots: Tensor, numbers: Tensor) -> None:
        """Stores numbers (heads, n, dim) in slots, given by (n,) pages and (n,) slots in them."""
        self.view[pages, self._each_head, slots] = numbers.to(self.view.dtype)

    def get(self, pages: Tensor, slots: Tensor) -> Tensor:
        """The numbers in slots, (heads, n, dim), a copy; see ``put``."""
        return self.view[pages, self._each_head, slots]

    def room(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """The scratch memory as a tensor, whose numbers are any."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._scratch.numel() < nbytes:  # new memory for every copy takes longer than the copy
            self._scratch.resize_(nbytes + nbytes // 8)
        return self._scratch[:nbytes].view(dtype).view(shape)

    def gathered(self, pages: Tensor) -> Tensor:
        """The slots of pages (B, n) side by side, (B, heads, slots, dim): a copy, in the scratch memory."""
        where = (pages[:, None] * self._page + self._heads).flatten()
        runs = self.room(len(where), self._head, dtype=self.dtype)
        torch.index_select(self._runs, 0, where, out=runs)
        _, heads, slots, dim = self.view.shape
        return runs.view(len(pages), heads, pages.shape[1] * slots, dim)


class PagePool:
    """Memory for the cache of many requests, in pages that any level of any request can have.

    A level keeps the positions of the block that a request is in, so that its pages go back to the pool when
    the block ends. A page holds some positions of all layers whose level has that block size: one table of
    pages for each block size and request.

    A level with a window keeps the pages in which the window lies. The page that it has left goes back, and a
    new one is taken: every page is filled once, from its first slot on, and a full one never changes.

    So requests can share full pages: those of a beginning that an earlier request has computed (``note``,
    ``begin``), or of one that goes on in several ways (``fork``). A page that no request has any more is kept
    while it holds a beginning that was noted, until another request needs its memory: the one that was unused
    longest goes first.

    Args:
        layers: what each layer keeps.
        nbytes: of the pool; what is left of the last page is not used.
        dtype, device: of keys and values.
        most_slots: positions of level 1 in a page, at most. Fewer are chosen where that wastes less memory.
            Default 256.
        length: of a long request, for that choice. Default: the longest block.

    Attributes:
        groups: see ``groups_of``.
        slots: in a page of each group: for a position each, or for a group of quantized tokens.
        num_pages: of the pool.
        tables: pages of each request, for each group by their number: slot x is in page x // slots.
        prefixes: the beginnings that can be shared.

    Raises:
        ConfigError: the pool has no room for one page of each level, or a storage does not fit the levels.
    """

    def __init__(
        self,
        layers: Sequence[PagedLayerShape],
        *,
        nbytes: int,
        dtype: torch.dtype,
        device: torch.device,
        most_slots: int = 256,
        length: int | None = None,
    ) -> None:
        check_size("most_slots", most_slots)
        assert not any(layer.chooses_tokens for layer in layers)  # these have no slots: see ``RequestPool``
        self.groups: tuple[Group, ...] = groups_of(layers, dtype)
        longest = max(group.lifetime.block or group.lifetime.window or 1 for group in self.groups)
        numbers = page_numbers(self.groups, most_slots, length or 2 * longest)
        self.slots = tuple(numbers // group.width for group in self.groups)
        self.page_nbytes = numbers * dtype.itemsize
        self.num_pages = nbytes // self.page_nbytes
        if self.num_pages < len(self.groups):
            raise ConfigError(
                f"a pool of {nbytes:,} bytes has {self.num_pages} pages of {self.page_nbytes:,}, and a request needs "
                f"{len(self.groups)} at least, one for each block size of the levels: give it more memory"
            )
        # Page 0 belongs to no request and holds zeros: tables of different lengths are filled up with it.
        self.memory = torch.zeros((self.num_pages + 1, numbers), dtype=dtype, device=device)
        self.tables: dict[str, list[dict[int, int]]] = {}
        # By the number of a part within its layer: all parts of one layer are read before the next layer is.
        most = 1 + max(number for group in self.groups for _, number in group.parts)
        self._scratch = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(most)]
        self._fresh = 1  # from here on pages were never given away
        self._returned: list[int] = []
        self._uses = [0] * (self.num_pages + 1)  # requests that have a page
        self._cached: dict[int, None] = {}  # pages of beginnings that no request has, the one unused longest first
        self._outdated: set[str] = set()  # requests that had pages when all was forgotten
        self.prefixes = self._no_prefixes()

    def _no_prefixes(self) -> PrefixIndex:
        lifetimes = [group.lifetime for group in self.groups]
        return PrefixIndex(share_unit(lifetimes, self.slots[0] * lifetimes[0].span), lifetimes, self.slots)

    @property
    def num_free(self) -> int:
        """Pages in which nothing is kept."""
        return self.num_pages + 1 - self._fresh + len(self._returned)

    @property
    def num_cached(self) -> int:
        """Pages that no request has, and that hold the beginning of a text."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that a request can get: free ones, and cached ones, which are then forgotten."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Pages that requests have; one that several share counts once."""
        return self.num_pages - self.num_available

    def held(self, request: str) -> int:
        """Pages that a request has, those that it shares too."""
        return sum(map(len, self.tables.get(request, ())))

    def levels(self, layer: int) -> list[LevelPages]:
        """The parts of the levels of a layer, keys first: see ``Group``."""
        found = {}
        for number, (group, slots) in enumerate(zip(self.groups, self.slots, strict=True)):
            lifetime = group.lifetime
            ring, block = lifetime.ring(slots), lifetime.block
            ring, block = None if ring is None else ring * slots, None if block is None else block // lifetime.span
            for (of, index), part in group.parts.items():
                if of == layer:
                    scratch = self._scratch[index]
                    found[index] = LevelPages(self.memory, number, slots, part, scratch, ring=ring, block=block)
        return [found[index] for index in sorted(found)]

    def needed(self, length: int) -> int:
        """Pages that a request has after ``length`` tokens, and so at least while it is given the last of
        them.
        """
        return sum(len(numbers) for numbers in self._kept(length))

    def _kept(self, length: int) -> list[range]:
        """Numbers of the pages of each group that the token after ``length`` tokens may need."""
        return [
            pages_of(group.lifetime.kept(length), slots) for group, slots in zip(self.groups, self.slots, strict=True)
        ]

    def _wanted(self, past: int, count: int) -> list[range]:
        """Those while ``count`` tokens follow ``past`` others: one token is decoded from them, several need
        no block that they end.
        """
        if count > 1:
            return self._kept(past + count)
        return [
            pages_of(group.lifetime.decoded(past), slots) for group, slots in zip(self.groups, self.slots, strict=True)
        ]

    def _lacking(self, request: str, wanted: Sequence[range]) -> list[tuple[int, int]]:
        """(group, number) of the pages of these that a request has not."""
        tables = self.tables.get(request) or [{}] * len(self.groups)
        return [
            (group, number)
            for group, (numbers, table) in enumerate(zip(wanted, tables, strict=True))
            for number in numbers
            if number not in table
        ]

    def missing(self, request: str, past: int, count: int) -> int:
        """Pages that a request lacks for ``count`` tokens after ``past`` others."""
        return len(self._lacking(request, self._wanted(past, count)))

    def reserve(self, request: str, past: int, count: int) -> bool:
        """Gives a request the pages for ``count`` tokens after ``past`` others; false, and nothing is
        changed, where there are too few.
        """
        return self._give(request, self._wanted(past, count))

    def _give(self, request: str, wanted: Sequence[range]) -> bool:
        lacking = self._lacking(request, wanted)
        if len(lacking) > self.num_available:
            return False
        table = self.tables.setdefault(request, [{} for _ in self.groups])
        for group, number in lacking:
            table[group][number] = self._take()
        if lacking:  # what another request has left must not reach this one, not even times 0: that of NaN is NaN
            self.memory[self._index(table[group][number] for group, number in lacking)] = 0
        return True

    def extend(self, request: str, past: int, count: int) -> None:
        """Gives a request those pages of windows too, as far as there are any, that later requests need to
        begin with some of its next tokens, for which it has pages. ``note`` keeps them for those, and
        ``trim`` takes them back.
        """
        for length in self.prefixes.lengths(past, past + count):
            kept = zip(self.groups, self._kept(length), strict=True)
            self._give(request, [range(0) if group.lifetime.window is None else numbers for group, numbers in kept])

    def begin(self, request: str, tokens: Sequence[int]) -> int:
        """Gives a new request the pages of the longest beginning of its tokens that was noted.

        The last token is never among them, since its logits are asked for. A page of which the beginning is
        only a part is copied.

        Returns:
            The tokens that the request need not compute.
        """
        length, tables = self.prefixes.match(tokens[:-1])
        for table in tables:
            for page in table.values():
                self._acquire(page)
        entries = [group.lifetime.entries(length) for group in self.groups]
        ends = [
            (group, end // size, end % size) for group, (end, size) in enumerate(zip(entries, self.slots, strict=True))
        ]
        parts = [(group, number, count) for group, number, count in ends if count and number in tables[group]]
        if not length or len(parts) > self.num_available:
            for table in tables:
                self._release([*table.values()])
            return 0
        for group, number, count in parts:
            source = tables[group][number]
            page = tables[group][number] = self._take()
            memory = self.memory.view(torch.uint8)
            memory[page] = torch.where(self._first_slots(group, count), memory[source], 0)
            self._release([source])
        self.tables[request] = tables
        return length

    def _first_slots(self, group: int, count: int) -> Tensor:
        """Which bytes of a page of a group belong to its first slots."""
        is_first = torch.zeros(self.page_nbytes, dtype=torch.bool)
        slots = self.slots[group]
        for part in self.groups[group].parts.values():
            first, width = slots * part.offset * part.dtype.itemsize, part.dim * part.dtype.itemsize
            found = is_first[first : first + part.heads * slots * width]
            found.view(part.heads, slots, width)[:, :count] = True
        return is_first.to(self.memory.device)

    def note(self, request: str, tokens: Sequence[int]) -> None:
        """Lets later requests begin with pages of this one.

        A page of it that is full, and that another request has computed as well, is given back, and that of
        the other one taken.

        Args:
            request: its name.
            tokens: all of which it has computed the keys and values.
        """
        if request in self._outdated:
            return
        own = self.tables[request]
        self.prefixes.add(tokens, own)
        length, known = self.prefixes.match(tokens)
        for group, table, found, size in zip(self.groups, own, known, self.slots, strict=True):
            for number, page in found.items():
                if (number + 1) * size <= group.lifetime.entries(length) and table.get(number, page) != page:
                    self._acquire(page)
                    self._release([table[number]])
                    table[number] = page

    def fork(self, source: str, request: str, length: int) -> bool:
        """Gives a new request what another one has after ``length`` tokens; false, and nothing is changed,
        where there are too few pages.

        Full pages are shared, but those of blocks, which are written over. They and the last ones are copied.
        """
        old = self.tables[source]
        new = [dict(table) for table in old]
        copied = [
            (group, number)
            for group, table in enumerate(old)
            for number in table
            for lifetime in (self.groups[group].lifetime,)
            if lifetime.block is not None or number >= lifetime.entries(length) // self.slots[group]
        ]
        if len(copied) > self.num_available:
            return False
        for group, number in copied:
            new[group][number] = self._take()
        for group, table in enumerate(old):
            for number, page in table.items():
                if new[group][number] == page:
                    self._acquire(page)
        sources, targets = ([tables[group][number] for group, number in copied] for tables in (old, new))
        self.memory[self._index(targets)] = self.memory[self._index(sources)]
        self.tables[request] = new
        if source in self._outdated:
            self._outdated.add(request)
        return True

    def _index(self, pages: Iterable[int]) -> Tensor:
        return torch.tensor([*pages], device=self.memory.device, dtype=torch.int64)

    def _take(self) -> int:
        """A page that no request has: one that is free, or else cached."""
        if not self._returned and self._fresh > self.num_pages:
            for page in self.prefixes.drop(next(iter(self._cached))):
                if not self._uses[page]:
                    del self._cached[page]
                    self._returned.append(page)
        if self._returned:
            page = self._returned.pop()
        else:
            page = self._fresh
            self._fresh += 1
        self._uses[page] = 1
        return page

    def _acquire(self, page: int) -> None:
        self._uses[page] += 1
        self._cached.pop(page, None)

    def _release(self, pages: Sequence[int]) -> None:
        """Takes back pages, of which the last ones are used again first: without them those before can still
        be shared.
        """
        for page in reversed(pages):
            self._uses[page] -= 1
            if self._uses[page]:
                continue
            if page in self.prefixes:
                self._cached[page] = None
            else:
                self._returned.append(page)

    def trim(self, request: str, length: int) -> None:
        """Takes back the pages that no token after ``length`` tokens needs; those of a request without pages
        are none.
        """
        for kept, table in zip(self._kept(length), self.tables.get(request, ()), strict=False):
            if len(table) > len(kept):
                self._release([table.pop(number) for number in sorted(table) if number not in kept])

    def free(self, request: str) -> None:
        """Takes back all pages of a request, if it has any."""
        self._outdated.discard(request)
        for table in self.tables.pop(request, ()):
            self._release([table[number] for number in sorted(table)])

    def free_all(self) -> None:
        """Takes back all pages."""
        for request in list(self.tables):
            self.free(request)

    def forget(self) -> None:
        """Forgets all beginnings, also those of present requests: the model has other weights now."""
        self.prefixes = self._no_prefixes()
        self._returned.extend(self._cached)
        self._cached.clear()
        self._outdated = set(self.tables)
