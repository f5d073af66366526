"""What is remembered of the last tokens of a cache, so that more of them can be removed than it keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

from structattn.cache import LevelCache

# Appends the first n of some new tokens to a cache.
Append = Callable[[LevelCache, int], None]


@dataclass(eq=False)
class Recording:
    """What a rollback over the boundary of a block needs: the cache before the recorded calls, and the tokens
    since then.

    Attributes:
        cache: before the recorded calls.
        since: (tokens before, how many, what appends them) of each call. One that failed is dropped by the
            next.
    """

    cache: LevelCache
    since: list[tuple[int, int, Append]] = field(default_factory=list)

    def add(self, length: int, count: int, append: Append) -> None:
        """Tokens that follow ``length`` others."""
        self.since = [*(call for call in self.since if call[0] < length), (length, count, append)]

    def replay(self, length: int) -> LevelCache:
        """Another cache, with ``length`` tokens."""
        cache = copy.deepcopy(self.cache)  # other layers may still refuse to go back: then nothing has changed
        for start, count, append in self.since:
            if start < length:
                append(cache, min(count, length - start))
        return cache
