"""A pool of pages of equal size, and which request has which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from structattn.cache.levels import Level
from structattn.cache.paged.geometry import Group, LayerShape, Part, groups_of, page_numbers
from structattn.cache.paged.prefixes import PrefixIndex, share_unit
from structattn.cache.storage import FullPage, LevelStore
from structattn.checks import check_size
from structattn.errors import ConfigError


class LevelPages:
    """The slots of one level of the keys or values of one layer, in all pages.

    Attributes:
        group: number of its group.
        scratch: memory for what is read, which layers share.
    """

    def __init__(self, memory: Tensor, group: int, slots: int, part: Part, scratch: Tensor) -> None:
        self.group, self.scratch = group, scratch
        self._page, self._head, self._first = memory.shape[1], slots * part.dim, slots * part.offset
        size, stride = (len(memory), part.heads, slots, part.dim), (self._page, self._head, part.dim, 1)
        self._view = memory.as_strided(size, stride, self._first)
        # Every run of numbers as long as the slots of a head: gathered by where it begins, which is several
        # times faster than by page and head.
        self._runs = memory.as_strided((memory.numel() - self._head + 1, self._head), (1, 1))
        self._each_head = torch.arange(part.heads, device=memory.device)[:, None]
        self._heads = self._head * self._each_head + self._first

    def put(self, pages: Tensor, slots: Tensor, numbers: Tensor) -> None:
        """Stores numbers (heads, n, dim) in slots, given by (n,) pages and (n,) slots in them."""
        self._view[pages, self._each_head, slots] = numbers.to(self._view.dtype)

    def get(self, pages: Tensor, slots: Tensor) -> Tensor:
        """The numbers in slots, (heads, n, dim), a copy; see ``put``."""
        return self._view[pages, self._each_head, slots]

    def gathered(self, pages: Tensor, level: Level) -> LevelStore:
        """The slots of pages (B, n) as those of one page, in a copy that lasts until this level is read
        again.
        """
        where = (pages[:, None] * self._page + self._heads).flatten()
        size = len(where) * self._head
        if self.scratch.numel() < size:  # new memory for every copy takes longer than the copy
            self.scratch.resize_(size)
        runs = self.scratch[:size].view(len(where), -1)
        torch.index_select(self._runs, 0, where, out=runs)
        numbers = runs.view(len(pages), self._view.shape[1], -1, self._view.shape[3]).transpose(2, 3)
        return LevelStore.of_page(FullPage(numbers), ring=level.ring, longest=level.longest)


class PagePool:
    """Memory for the cache of many requests, in pages that any level of any request can have.

    A level keeps the positions of the block that a request is in, so that its pages go back to the pool when
    the block ends. A page holds some positions of all layers whose level has that block size: one table of
    pages for each block size and request.

    Requests can share pages of level 1, which holds every position: those of a beginning that an earlier
    request has computed (``note``, ``begin``), or all (``fork``). A shared page is full, so that nobody
    writes to it. A page that no request has any more is kept while it holds a beginning that was noted, until
    another request needs its memory: the one that was unused longest goes first.

    Args:
        layers: what each layer keeps.
        nbytes: of the pool; what is left of the last page is not used.
        dtype, device: of keys and values.
        most_slots: positions of level 1 in a page, at most. Fewer are chosen where that wastes less memory.
            Default 256.
        length: of a long request, for that choice. Default: the longest block.

    Attributes:
        groups: see ``groups_of``.
        slots: positions in a page of each group.
        num_pages: of the pool.
        tables: pages of each request, for each group in the order of its slots.
        prefixes: the beginnings that can be shared; ``None`` where ``share_unit`` finds no position for it.

    Raises:
        ConfigError: the pool has no room for one page of each level.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        nbytes: int,
        dtype: torch.dtype,
        device: torch.device,
        most_slots: int = 256,
        length: int | None = None,
    ) -> None:
        check_size("most_slots", most_slots)
        self.groups: tuple[Group, ...] = groups_of(layers)
        longest = max((group.lifetime.period or 1 for group in self.groups), default=1)
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
        self.tables: dict[str, list[list[int]]] = {}
        # By the number of a level within its layer: all levels of one layer are read before the next layer
        # is.
        most = 1 + max(number for group in self.groups for _, number in group.parts)
        self._scratch = [torch.empty(0, dtype=dtype, device=device) for _ in range(most)]
        self._fresh = 1  # from here on pages were never given away
        self._returned: list[int] = []
        self._uses = [0] * (self.num_pages + 1)  # requests that have a page
        self._cached: dict[int, None] = {}  # pages of beginnings that no request has, the one unused longest first
        self._outdated: set[str] = set()  # requests that had pages when all was forgotten
        unit = share_unit(self.groups, self.slots[0])
        self.prefixes = None if unit is None else PrefixIndex(unit, self.slots[0])

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

    def levels(self, layer: int) -> list[LevelPages]:
        """The levels of a layer, keys first."""
        found = {
            number: LevelPages(self.memory, group, slots, parts.parts[of, number], self._scratch[number])
            for group, (parts, slots) in enumerate(zip(self.groups, self.slots, strict=True))
            for of, number in parts.parts
            if of == layer
        }
        return [found[number] for number in sorted(found)]

    def _wanted(self, past: int, count: int) -> list[int]:
        """Pages of each group while ``count`` tokens follow ``past`` others: one token is decoded from them,
        several need no block that they end.
        """
        end = past + count
        counts = (group.lifetime.slots(past) if count == 1 else group.lifetime.kept(end) for group in self.groups)
        return [-(-found // slots) for found, slots in zip(counts, self.slots, strict=True)]

    def needed(self, length: int) -> int:
        """Pages that a request has after ``length`` tokens, and so at least while it is given the last of
        them.
        """
        return sum(
            -(-group.lifetime.kept(length) // slots) for group, slots in zip(self.groups, self.slots, strict=True)
        )

    def missing(self, request: str, past: int, count: int) -> int:
        """Pages that a request lacks for ``count`` tokens after ``past`` others."""
        table = self.tables.get(request) or [[]] * len(self.groups)
        return sum(max(0, wanted - len(pages)) for wanted, pages in zip(self._wanted(past, count), table, strict=True))

    def reserve(self, request: str, past: int, count: int) -> bool:
        """Gives a request the pages for ``count`` tokens after ``past`` others; false, and nothing is
        changed, where there are too few.
        """
        if self.missing(request, past, count) > self.num_available:
            return False
        table = self.tables.setdefault(request, [[] for _ in self.groups])
        new = []
        for wanted, pages in zip(self._wanted(past, count), table, strict=True):
            while len(pages) < wanted:
                pages.append(self._take())
                new.append(pages[-1])
        if new:  # what another request has left must not reach this one, not even times 0: that of NaN is NaN
            self.memory[self._index(new)] = 0
        return True

    def begin(self, request: str, tokens: Sequence[int]) -> int:
        """Gives a new request the pages of the longest beginning of its tokens that was noted.

        The last token is never among them, since its logits are asked for. A page of which the beginning is
        only a part is copied.

        Returns:
            The tokens that the request need not compute.
        """
        length, pages = (0, []) if self.prefixes is None else self.prefixes.match(tokens[:-1])
        own = length % self.slots[0]
        for page in pages:
            self._acquire(page)
        if own and not self.num_available:
            self._release(pages)
            length = 0
        if not length:
            return 0
        if own:
            source = pages.pop()
            pages.append(self._take())
            self.memory[pages[-1]] = torch.where(self._first_slots(own), self.memory[source], 0)
            self._release([source])
        self.tables[request] = [pages, *([] for _ in self.groups[1:])]
        return length

    def _first_slots(self, count: int) -> Tensor:
        """Which numbers of a page of the first group belong to its first slots."""
        is_first = torch.zeros(self.memory.shape[1], dtype=torch.bool)
        for part in self.groups[0].parts.values():
            first = self.slots[0] * part.offset
            found = is_first[first : first + part.heads * self.slots[0] * part.dim]
            found.view(part.heads, self.slots[0], part.dim)[:, :count] = True
        return is_first.to(self.memory.device)

    def note(self, request: str, tokens: Sequence[int]) -> None:
        """Lets later requests begin with pages of this one.

        A page of it that is full, and that another request has computed as well, is given back, and that of
        the other one taken.

        Args:
            request: its name.
            tokens: all of which it has computed the keys and values.
        """
        if self.prefixes is None or request in self._outdated:
            return
        own = self.tables[request][0]
        self.prefixes.add(tokens, own)
        length, known = self.prefixes.match(tokens)
        for number in range(length // self.slots[0]):
            if own[number] != known[number]:
                self._acquire(known[number])
                self._release([own[number]])
                own[number] = known[number]

    def fork(self, source: str, request: str, length: int) -> bool:
        """Gives a new request what another one has after ``length`` tokens; false, and nothing is changed,
        where there are too few pages.

        Full pages of level 1 are shared, and the others copied.
        """
        table, is_kept = self.tables[source], self.groups[0].lifetime.keeps_all
        shared = table[0][: length // self.slots[0]] if is_kept else []
        copied = [table[0][len(shared) :], *table[1:]]
        if sum(map(len, copied)) > self.num_available:
            return False
        new = [[self._take() for _ in pages] for pages in copied]
        for page in shared:
            self._acquire(page)
        self.memory[self._index(chain(*new))] = self.memory[self._index(chain(*copied))]
        self.tables[request] = [[*shared, *new[0]], *new[1:]]
        if source in self._outdated:
            self._outdated.add(request)
        return True

    def _index(self, pages: Iterable[int]) -> Tensor:
        return torch.tensor([*pages], device=self.memory.device, dtype=torch.int64)

    def _take(self) -> int:
        """A page that no request has: one that is free, or else cached."""
        if not self._returned and self._fresh > self.num_pages:
            assert self.prefixes is not None
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
            if self.prefixes is not None and page in self.prefixes:
                self._cached[page] = None
            else:
                self._returned.append(page)

    def trim(self, request: str, length: int) -> None:
        """Takes back the pages that no token after ``length`` tokens needs; those of a request without pages
        are none.
        """
        for group, slots, pages in zip(self.groups, self.slots, self.tables.get(request, ()), strict=False):
            kept = -(-group.lifetime.kept(length) // slots)
            self._release(pages[kept:])
            del pages[kept:]

    def free(self, request: str) -> None:
        """Takes back all pages of a request, if it has any."""
        self._outdated.discard(request)
        for pages in self.tables.pop(request, ()):
            self._release(pages)

    def free_all(self) -> None:
        """Takes back all pages."""
        for request in list(self.tables):
            self.free(request)

    def forget(self) -> None:
        """Forgets all beginnings, also those of present requests: the model has other weights now."""
        if self.prefixes is not None:
            self.prefixes = PrefixIndex(self.prefixes.unit, self.slots[0])
            self._returned.extend(self._cached)
            self._cached.clear()
            self._outdated = set(self.tables)
