"""A pool of pages of equal size, and which request has which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structattn.cache.paged.geometry import Group, LayerShape, Part, groups_of, page_numbers
from structattn.checks import check_size
from structattn.errors import ConfigError


class LevelPages:
    """The slots of one level of the keys or values of one layer, in all pages.

    Attributes:
        group: number of its group.
        view: (pages, heads, slots, dim), to be written to.
        scratch: memory for what is read, which layers share.
    """

    def __init__(self, memory: Tensor, group: int, slots: int, part: Part, scratch: Tensor) -> None:
        self.group, self.scratch = group, scratch
        self._page, self._head, self._first = memory.shape[1], slots * part.dim, slots * part.offset
        size, stride = (len(memory), part.heads, slots, part.dim), (self._page, self._head, part.dim, 1)
        self.view = memory.as_strided(size, stride, self._first)
        # Every run of numbers as long as the slots of a head: gathered by where it begins, which is several times faster than by page and head.
        self._runs = memory.as_strided((memory.numel() - self._head + 1, self._head), (1, 1))
        self._heads = self._head * torch.arange(part.heads, device=memory.device)[:, None] + self._first

    def read(self, pages: Tensor) -> Tensor:
        """The slots of pages (B, n), one after the other: (B, heads, n * slots, dim), a copy that lasts until this level is read again."""
        where = (pages[:, None] * self._page + self._heads).flatten()
        size = len(where) * self._head
        if self.scratch.numel() < size:  # new memory for every copy takes longer than the copy
            self.scratch.resize_(size)
        found = self.scratch[:size].view(len(where), -1)
        torch.index_select(self._runs, 0, where, out=found)
        return found.view(len(pages), self.view.shape[1], -1, self.view.shape[3])


class PagePool:
    """Memory for the cache of many requests, in pages that any level of any request can have.

    A level keeps the positions of the block that a request is in, so that its pages go back to the pool when the block ends. A page holds
    some positions of all layers whose level has that block size: one table of pages for each block size and request.

    Args:
        layers: what each layer keeps.
        nbytes: of the pool; what is left of the last page is not used.
        dtype, device: of keys and values.
        most_slots: positions of level 1 in a page, at most. Fewer are chosen where that wastes less memory. Default 256.
        length: of a long request, for that choice. Default: the longest block.

    Attributes:
        groups: see ``groups_of``.
        slots: positions in a page of each group.
        num_pages: of the pool.
        tables: pages of each request, for each group in the order of its slots.

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
                f"a pool of {nbytes:,} bytes has {self.num_pages} pages of {self.page_nbytes:,}, and a request needs {len(self.groups)} at least, one "
                "for each block size of the levels: give it more memory"
            )
        # Page 0 belongs to no request and holds zeros: tables of different lengths are filled up with it.
        self.memory = torch.zeros((self.num_pages + 1, numbers), dtype=dtype, device=device)
        self.tables: dict[str, list[list[int]]] = {}
        # By the number of a level within its layer: all levels of one layer are read before the next layer is.
        most = 1 + max(number for group in self.groups for _, number in group.parts)
        self._scratch = [torch.empty(0, dtype=dtype, device=device) for _ in range(most)]
        self._fresh = 1  # from here on pages were never given away
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that no request has."""
        return self.num_pages + 1 - self._fresh + len(self._returned)

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
        """Pages of each group while ``count`` tokens follow ``past`` others."""
        return [
            -(-group.lifetime.slots(past + count - 1) // slots)
            for group, slots in zip(self.groups, self.slots, strict=True)
        ]

    def needed(self, length: int) -> int:
        """Pages that a request of ``length`` tokens has when it is given all of them, or the last one."""
        return sum(self._wanted(length - 1, 1))

    def missing(self, request: str, past: int, count: int) -> int:
        """Pages that a request lacks for ``count`` tokens after ``past`` others."""
        table = self.tables.get(request) or [[]] * len(self.groups)
        return sum(max(0, wanted - len(pages)) for wanted, pages in zip(self._wanted(past, count), table, strict=True))

    def reserve(self, request: str, past: int, count: int) -> bool:
        """Gives a request the pages for ``count`` tokens after ``past`` others; false, and nothing is changed, where there are too few."""
        if self.missing(request, past, count) > self.num_free:
            return False
        table = self.tables.setdefault(request, [[] for _ in self.groups])
        new = []
        for wanted, pages in zip(self._wanted(past, count), table, strict=True):
            while len(pages) < wanted:
                pages.append(self._take())
                new.append(pages[-1])
        if new:  # what another request has left must not reach this one, not even times 0: that of NaN is NaN
            self.memory[torch.tensor(new, device=self.memory.device)] = 0
        return True

    def _take(self) -> int:
        if self._returned:
            return self._returned.pop()
        self._fresh += 1
        return self._fresh - 1

    def trim(self, request: str, length: int) -> None:
        """Takes back the pages that no token after ``length`` tokens needs; those of a request without pages are none."""
        for group, slots, pages in zip(self.groups, self.slots, self.tables.get(request, ()), strict=False):
            kept = -(-group.lifetime.kept(length) // slots)
            self._returned.extend(reversed(pages[kept:]))
            del pages[kept:]

    def free(self, request: str) -> None:
        """Takes back all pages of a request, if it has any."""
        for pages in self.tables.pop(request, ()):
            self._returned.extend(reversed(pages))

    def free_all(self) -> None:
        """Takes back all pages."""
        for request in list(self.tables):
            self.free(request)
