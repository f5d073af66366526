"""Which pages hold the beginnings of texts, so that requests with the same beginning can share them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from structattn.cache.paged.geometry import Group


def share_unit(groups: Sequence[Group], slots: int) -> int | None:
    """Tokens in steps of which beginnings can be shared, or ``None`` if they cannot.

    Where all deeper blocks end, a request needs the pages of the first group and nothing else. A window keeps
    the last tokens wherever the request is, and sink tokens are always kept, so that there is no such
    position.

    Args:
        groups: of the pool, see ``groups_of``.
        slots: positions in a page of the first group.

    Returns:
        The least common multiple of the blocks, or the smallest multiple of it in which a page fits.
    """
    first, *others = (group.lifetime for group in groups)
    if not first.keeps_all or any(lifetime.block is None for lifetime in others):
        return None
    border = math.lcm(*(lifetime.block or 1 for lifetime in others))
    return border * -(-slots // border)


class _Node:
    """The tokens of one unit after those of its parent, and the pages that hold them."""

    __slots__ = ("children", "pages", "parent", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], pages: Sequence[int]) -> None:
        self.parent, self.tokens, self.pages = parent, tokens, tuple(pages)
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
        slots: positions in a page.

    Cost: one dictionary entry, and the tokens, for each unit that is kept; looking up takes time in
        proportion to what is found.

    Source: sharing complete blocks by their tokens as in vLLM and transformers; the tree as in SGLang (Zheng
        et al. 2024, RadixAttention).
    """

    def __init__(self, unit: int, slots: int) -> None:
        self.unit, self.slots = unit, slots
        self._root = _Node(None, (), ())
        self._nodes: dict[int, list[_Node]] = {}  # that need a page

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def _units(self, tokens: Sequence[int]) -> Iterator[tuple[tuple[int, ...], slice]]:
        """Each whole unit of a text, and which pages hold it: the first may hold the end of the unit
        before.
        """
        for first, end in pairwise(range(0, len(tokens) + 1, self.unit)):
            yield tuple(tokens[first:end]), slice(first // self.slots, -(-end // self.slots))

    def match(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The longest beginning that is in pages: its length, and the pages in the order of their slots."""
        node, length, pages = self._root, 0, list[int]()
        for unit, where in self._units(tokens):
            found = node.children.get(unit)
            if found is None:
                break
            node, length = found, length + self.unit
            pages[where.start :] = found.pages  # where two units meet, the later one's page holds both
        return length, pages

    def add(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Notes all whole units of a text whose pages are ``pages``; what is known already stays where it
        is.
        """
        node = self._root
        for unit, where in self._units(tokens):
            if (found := node.children.get(unit)) is None:
                found = node.children[unit] = _Node(node, unit, pages[where])
                for page in found.pages:
                    self._nodes.setdefault(page, []).append(found)
            node = found

    def drop(self, page: int) -> set[int]:
        """Forgets all texts that need a page, and returns the pages that no text needs any more."""
        dropped = set()
        while page in self._nodes:
            top = self._nodes[page][0]
            assert top.parent is not None
            del top.parent.children[top.tokens]
            for node in top.subtree():
                for held in node.pages:
                    self._nodes[held].remove(node)
                    if not self._nodes[held]:
                        del self._nodes[held]
                        dropped.add(held)
        return dropped
