"""Which pages hold the beginnings of texts, so that requests with the same beginning can share them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from structattn.cache.paged.geometry import Lifetime, pages_of

_Tables = list[dict[int, int]]  # pages of each group by their number, as in ``PagePool.tables``


def share_unit(lifetimes: Sequence[Lifetime], slots: int) -> int:
    """Tokens in steps of which beginnings can be shared: where all deeper blocks end, a request needs nothing
    of them.

    Args:
        lifetimes: of the groups of the pool.
        slots: positions in a page of the first group.

    Returns:
        The least common multiple of the blocks, or the smallest multiple of it in which a page fits.
    """
    border = math.lcm(*(lifetime.block or 1 for lifetime in lifetimes))
    return border * -(-slots // border)


class _Node:
    """The tokens of one unit after those of its parent.

    Attributes:
        pages: those that hold its tokens and are kept for good.
        window_pages: those that the token after it needs of levels with a window; ``None`` where they were
            lost, so that no request can begin here.
    """

    __slots__ = ("children", "pages", "parent", "tokens", "window_pages")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], pages: _Tables) -> None:
        self.parent, self.tokens, self.pages = parent, tokens, pages
        self.window_pages: _Tables | None = None
        self.children: dict[tuple[int, ...], _Node] = {}

    def subtree(self) -> Iterator[_Node]:
        """This one and all that follow it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class PrefixIndex:
    """The texts whose beginnings are in pages: a tree, in which each node follows its parent by one unit of
    tokens.

    Tokens are compared, not hashed: equal beginnings only are found.

    Args:
        unit: see ``share_unit``.
        lifetimes: of the groups of the pool.
        slots: in a page of each group.

    Cost: one dictionary entry, and the tokens, for each unit that is kept; looking up takes time in
        proportion to what is found.

    Source: sharing complete blocks by their tokens, and windows beside them, as in vLLM and transformers; the
        tree as in SGLang (Zheng et al. 2024, RadixAttention).
    """

    def __init__(self, unit: int, lifetimes: Sequence[Lifetime], slots: Sequence[int]) -> None:
        self.unit = unit
        self._groups = list(zip(lifetimes, slots, strict=True))
        self._root = _Node(None, (), [])
        self._nodes: dict[int, list[_Node]] = {}  # that need a page

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def lengths(self, past: int, end: int) -> range:
        """Those of the beginnings that end with one of the tokens from ``past`` to ``end`` - 1."""
        return range((past // self.unit + 1) * self.unit, end + 1, self.unit)

    def _units(self, tokens: Sequence[int]) -> Iterator[tuple[tuple[int, ...], range]]:
        """Each whole unit of a text: its tokens and their positions."""
        for first, end in pairwise(range(0, len(tokens) + 1, self.unit)):
            yield tuple(tokens[first:end]), range(first, end)

    def match(self, tokens: Sequence[int]) -> tuple[int, _Tables]:
        """The longest beginning that is in pages: its length, and the pages."""
        node, path, count = self._root, list[_Node](), 0
        for unit, _ in self._units(tokens):
            if (found := node.children.get(unit)) is None:
                break
            node = found
            path.append(node)
            if node.window_pages is not None:
                count = len(path)
        tables: _Tables = [{} for _ in self._groups]
        for node in path[:count]:  # where two units meet, the later one's page holds both
            for table, pages in zip(tables, node.pages, strict=True):
                table.update(pages)
        for table, pages in zip(tables, (path[count - 1].window_pages if count else None) or (), strict=False):
            table.update(pages)
        return count * self.unit, tables

    def add(self, tokens: Sequence[int], tables: _Tables) -> None:
        """Notes all whole units of a text with these pages, and the windows that are in them; what is known
        already stays where it is.
        """
        node = self._root
        for unit, positions in self._units(tokens):
            if (found := node.children.get(unit)) is None:
                found = node.children[unit] = _Node(node, unit, self._pages(tables, positions))
                self._index(found, found.pages)
            node = found
            if node.window_pages is None:
                node.window_pages = self._window(tables, positions.stop)
                self._index(node, node.window_pages or [])
        self._prune(node, set())

    def _pages(self, tables: _Tables, positions: range) -> _Tables:
        """The pages of positions that are kept for good: the first may hold the end of the unit before."""
        found: _Tables = []
        for (lifetime, slots), table in zip(self._groups, tables, strict=True):
            is_for_good = lifetime.block is None and lifetime.window is None
            entries = range(lifetime.entries(positions.start), lifetime.kept(positions.stop).stop)
            numbers = pages_of(entries, slots) if is_for_good else ()
            found.append({number: table[number] for number in numbers})
        return found

    def _window(self, tables: _Tables, length: int) -> _Tables | None:
        """The pages of windows that the token after ``length`` tokens needs; ``None`` where they are not
        there.
        """
        found: _Tables = []
        for (lifetime, slots), table in zip(self._groups, tables, strict=True):
            numbers = () if lifetime.window is None else pages_of(lifetime.kept(length), slots)
            if not all(number in table for number in numbers):
                return None
            found.append({number: table[number] for number in numbers})
        return found

    def _index(self, node: _Node, tables: _Tables) -> None:
        for table in tables:
            for page in table.values():
                self._nodes.setdefault(page, []).append(node)

    def drop(self, page: int) -> set[int]:
        """Forgets all beginnings that need a page, and returns the pages that none needs any more. Longer
        beginnings need no window of a shorter one, and all else of it.
        """
        dropped = set[int]()
        while page in self._nodes:
            node = self._nodes[page][0]
            if any(page in table.values() for table in node.pages):
                assert node.parent is not None
                self._remove(node, dropped)
                self._prune(node.parent, dropped)
                continue
            assert node.window_pages is not None
            self._forget(node, node.window_pages, dropped)
            node.window_pages = None
            self._prune(node, dropped)
        return dropped

    def _prune(self, node: _Node, dropped: set[int]) -> None:
        """Removes a node, and those before it, if nothing needs them: they have no page with which they would
        be dropped.
        """
        while node.parent is not None and not node.children and node.window_pages is None and not any(node.pages):
            node, useless = node.parent, node
            self._remove(useless, dropped)

    def _remove(self, top: _Node, dropped: set[int]) -> None:
        """Removes a node with all that follow it."""
        assert top.parent is not None
        del top.parent.children[top.tokens]
        for node in top.subtree():
            self._forget(node, [*node.pages, *(node.window_pages or ())], dropped)

    def _forget(self, node: _Node, tables: _Tables, dropped: set[int]) -> None:
        """Forgets that a node needs these pages."""
        for table in tables:
            for page in table.values():
                self._nodes[page].remove(node)
                if not self._nodes[page]:
                    del self._nodes[page]
                    dropped.add(page)
