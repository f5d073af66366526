"""Taking new tokens back, so that a call that fails leaves caches as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from structattn.cache.store import Store
from structattn.layout.global_window import Layout


@dataclass(frozen=True, kw_only=True)
class Before:
    """What new tokens change in the contents of a cache, as it was before them.

    Attributes:
        length, layout: of the contents.
        pages: stores that have taken pages since, with the number of those that they had.
        overwritten: functions that write back numbers that are still wanted and were written over. Within a block tokens go to
            free slots, so that there are some only where a block is left, or in a ring.
    """

    length: int
    layout: Layout | None
    pages: list[tuple[Store, int]] = field(default_factory=list)
    overwritten: list[Callable[[], object]] = field(default_factory=list)

    def keep(self, page: Tensor, index: Any = ...) -> None:
        """Copies numbers that are about to be written over."""
        numbers = page.clone() if index is ... else page[index]  # tensors in an index: a copy
        self.overwritten.append(partial(page.__setitem__, index, numbers))

    def put_back(self) -> None:
        """Writes the numbers back, the last ones first, and gives back the pages."""
        with torch.inference_mode():  # pages may be views that were made in that mode
            for write_back in reversed(self.overwritten):
                write_back()
        for store, count in self.pages:
            store.pages = store.pages[:count]


class Undoable(Protocol):
    """A cache whose last new tokens can be taken back."""

    @property
    def length(self) -> int:
        """Tokens so far."""

    def undo(self) -> None:
        """Takes the last new tokens back."""


@contextmanager
def all_or_nothing(caches: Iterable[Undoable]) -> Iterator[None]:
    """Within it each cache takes new tokens once. If anything fails, Ctrl-C included, those that have taken them lose them again."""
    lengths = [(cache, cache.length) for cache in caches]
    try:
        yield
    except BaseException:
        for cache, length in lengths:
            if cache.length != length:
                cache.undo()
        raise
