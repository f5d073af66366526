"""Forgetting the last tokens of a cache: which lengths it still holds all keys for."""

from __future__ import annotations

from dataclasses import replace

from structattn.cache.contents import Contents
from structattn.cache.levels import Level
from structattn.errors import CacheError
from structattn.layout.levels import LevelLayout


def check_crop(contents: Contents, length: int) -> list[list[int]]:
    """The oldest position of each store and row after ``crop``; raises what that would raise, and changes nothing."""
    oldest = []
    for store, level in contents.stores():
        kept = []
        for row, _, pad in contents.rows:
            following = length - pad  # the position of the token that comes next
            needed = max(0, _first_needed(contents, level, following, row))
            if needed < following and store.oldest[row] > needed:
                raise CacheError(
                    f"cannot crop from {contents.length} to {length} tokens: level {level.number} would need the positions from "
                    f"{needed} on, and keeps those from {store.oldest[row]} on; crop to a length of at least "
                    f"{_shortest(contents)}, or reset() and start again"
                )
            kept.append(max(0, min(following, store.oldest[row])))
        oldest.append(kept)
    return oldest


def _first_needed(contents: Contents, level: Level, following: int, row: int) -> int:
    """The first position that a token at ``following``, which is not known, may share a level with and see."""
    needed = level.first_needed(following, row)
    if needed < following or following < 1 or not _may_go_on(contents, level):
        return needed
    return level.first_needed(following - 1, row)


def _may_go_on(contents: Contents, level: Level) -> bool:
    """Whether another token than there was may belong to the segment before: words begin with their own token."""
    return contents.text is not None and level.number > 1 and contents.text.units[level.number - 2] == "word"


def _shortest(contents: Contents) -> int:
    """The smallest length above 0 from which on every crop works."""
    length = contents.length
    while length > 1 and all(
        (needed := max(0, _first_needed(contents, level, length - 1 - pad, row))) >= length - 1 - pad
        or store.oldest[row] <= needed
        for store, level in contents.stores()
        for row, _, pad in contents.rows
    ):
        length -= 1
    return length


def crop(contents: Contents, length: int) -> None:
    """Forgets all tokens but the first ``length``; see ``LevelCache.crop``."""
    oldest = check_crop(contents, length)
    for (store, _), kept in zip(contents.stores(), oldest, strict=True):
        store.oldest = kept
    contents.length = length
    if (
        contents.text is not None
        and isinstance(contents.layout, LevelLayout)
        and contents.layout.boundaries is not None
    ):
        pads = contents.padding or (0,) * len(contents.layout.boundaries)
        cut = tuple(
            tuple(tuple(start for start in starts if start < max(1, length - pad)) for starts in levels)
            for levels, pad in zip(contents.layout.boundaries, pads, strict=False)
        )
        contents.layout = replace(contents.layout, boundaries=cut)
        contents.set_levels()
