"""What one layer's cache keeps, by position: stores for each level, and the rows of the batch that share positions or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from structattn.cache.decode import Held
from structattn.cache.latent import Latent
from structattn.cache.levels import Level, Part, parts_of, value_levels, widest
from structattn.cache.store import Store
from structattn.cache.undo import Before
from structattn.errors import CacheError, ShapeError
from structattn.layout.global_window import Layout
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the first tokens fixed: batch size, (heads, dimension) of keys and values, dtype and device."""

    batch: int
    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class Contents:
    """The numbers that a cache keeps for the tokens so far.

    Args:
        shape: of the tokens.
        layout, window, max_length, page_size, latent: as of ``LevelCache``.
        padding: leading padding tokens of each row, or ``None``.
        text: where the segments of the layout are those of a text, of which ``set_layout`` tells the new ones.

    Attributes:
        length: tokens so far, padding included.

    Raises:
        ShapeError: the layout does not fit the shape.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        layout: Layout | None,
        window: int | None,
        max_length: int | None,
        page_size: int,
        padding: tuple[int, ...] | None,
        latent: Latent | None,
        text: TextLayout | None = None,
    ) -> None:
        _check_layout(shape, layout, latent)
        self.shape = shape
        self.layout = layout
        self.window = window
        self.padding = padding
        self.latent = latent
        self.text = text
        self.length = 0
        self._factors: dict[tuple[object, ...], Tensor] = {}
        self._before: Before | None = None
        self._set_levels()
        dims = [level.rank for level in self.key_levels]
        if latent is not None:
            dims = [shape.keys[1], latent.num_gains]

        def store(dim: int, level: Level) -> Store:
            reserve, size = 0 if max_length is None else level.most_slots(max_length), page_size
            if text is not None and level.number > 1 and level.ring is None:
                reserve, size = 0, min(page_size, _TEXT_PAGE, max_length or page_size)
            return Store(dim, ring=level.ring, longest=level.longest, page_size=size, reserve=reserve)

        self.keys = [store(dim, level) for dim, level in zip(dims, self.key_levels, strict=False)]
        self.values = [store(level.rank, level) for level in self.value_levels]
        self.reset()

    def _set_levels(self) -> None:
        """The levels of each store."""
        head_dim = self.shape.keys[1] if self.latent is None else self.latent.key_dim
        self.parts: tuple[Part, ...] = parts_of(self.layout, self.window, head_dim)
        self.key_levels: tuple[Level, ...]
        if self.latent is None:
            self.key_levels = tuple(level for part in self.parts for level in part.levels)
        else:
            self.key_levels = (widest(self.parts),) * (2 if self.latent.num_gains else 1)
        self.value_levels = value_levels(self.parts, self.layout, self.shape.values[1])

    def set_layout(self, layout: LevelLayout) -> None:
        """The layout from now on: other segments from the next token on, the current ones as they were, one entry per row."""
        if layout == self.layout:
            return
        was_uniform = self.is_uniform
        self.layout = layout
        self._set_levels()
        if was_uniform and not self.is_uniform:
            for store, _ in self.stores():
                store.oldest = store.oldest * self.shape.batch

    def stores(self) -> Iterator[tuple[Store, Level]]:
        """All stores with their levels, keys first."""
        yield from zip(self.keys, self.key_levels, strict=True)
        yield from zip(self.values, self.value_levels, strict=True)

    # Rows: one for all where they stand at the same positions with the same blocks, else one per row of the batch.

    @property
    def is_uniform(self) -> bool:
        """Whether all rows stand at the same positions with the same blocks."""
        rows = self.layout.num_rows if isinstance(self.layout, LevelLayout) else None
        return rows is None and len(set(self.padding or (0,))) == 1

    @property
    def rows(self) -> Iterator[tuple[int, slice, int]]:
        """(row of the layout, rows of the batch, padding) of each."""
        if self.is_uniform:
            yield 0, slice(None), (self.padding or (0,))[0]
            return
        for row, pad in enumerate(self.padding or (0,) * self.shape.batch):
            yield row, slice(row, row + 1), pad

    @property
    def most_padding(self) -> int:
        """The longest padding of a row."""
        return max(self.padding or (0,))

    def reset(self) -> None:
        """Forgets all tokens; memory stays."""
        self.length = 0
        for store, _ in self.stores():
            store.oldest = [0] * (1 if self.is_uniform else self.shape.batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_factors": {}, "_before": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if pages := self.keys[0].pages:  # torch.load may have moved them
            self.shape = replace(self.shape, device=pages[0].device)

    def mark(self) -> None:
        """Marks the point to which ``take_back`` returns."""
        stores = [store for store, _ in self.stores()]
        self._before = Before(
            length=self.length,
            layout=self.layout,
            oldest=[list(store.oldest) for store in stores],
            pages=[store.num_pages for store in stores],
        )

    def take_back(self) -> None:
        """Makes the contents what they were at the mark, from which on tokens were appended and nothing else was done."""
        assert self._before is not None
        self._before.put_back()
        if self.layout is not self._before.layout:
            self.layout = self._before.layout
            self._set_levels()
        for (store, _), oldest, pages in zip(self.stores(), self._before.oldest, self._before.pages, strict=True):
            store.oldest = oldest
            if store.num_pages > pages:  # stores that are read together have equal pages
                store.pages = store.pages[:pages]
        self.length, self._before = self._before.length, None

    def _kept(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """What goes into each store, in their order."""
        if self.latent is None:
            keys = list(k.split([store.dim for store in self.keys], dim=3))
        else:
            keys = [k]
            if self.latent.num_gains:
                with torch.no_grad():
                    keys.append(self.latent.gains(k[:, 0])[:, None].to(k.dtype))
        return keys + list(v.split([store.dim for store in self.values], dim=3))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds tokens: keys (or states) and values as ``LevelCache.attend`` takes them."""
        count = k.shape[2]
        if count == 1 and self.is_uniform:
            self._append_alike(k, v)
        elif count == 1:
            self._append_one(k, v)
        else:
            for (store, level), x in zip(self.stores(), self._kept(k, v), strict=True):
                for row, batch, pad in self.rows:
                    first, last = self.length - pad, self.length - pad + count - 1
                    if last < 0:
                        continue
                    start = level.start(last, row)
                    oldest = max(start, 0) if store.ring is None else last - store.ring + 1
                    low = max(first, oldest, 0)
                    slots = last - start + 1 if store.ring is None else min(last + 1, store.ring)
                    store.grow(slots, x)
                    if first > 0 and self._before is not None:
                        lost, end = max(low, store.ring or 0), last + 1
                        if (
                            store.ring is None and self.length == self._before.length
                        ):  # the block before, if it is another
                            before = level.start(first - 1, row)
                            end = low if before == start else min(end, start + first - before)
                        for piece in store.pieces(lost, end, start):
                            self._before.keep(piece.rows(batch))
                    store.write(x[batch, :, low - first :], batch, low, start)
                    store.oldest[row] = max(store.oldest[row], oldest)
        self.length += count

    def _append_alike(self, k: Tensor, v: Tensor) -> None:
        """One token per row, all at one position: all levels in one operation."""
        row, _, pad = next(iter(self.rows))
        position = self.length - pad
        if position < 0:
            return
        cells: list[Tensor] = []
        for store, level in self.stores():
            start = level.start(position, row)
            slot, oldest = position - start, start
            if store.ring is not None:
                slot, oldest = position % store.ring, position - store.ring + 1
            if slot >= store.capacity:
                store.grow(slot + 1, k if len(cells) < len(self.keys) else v)
            if oldest > store.oldest[row]:
                store.oldest[row] = oldest
            cells.append(store.cell(slot))
            if self._before is not None and self._writes_over(store, position, slot):
                self._before.keep(cells[-1])
        if self.latent is None:
            numbers = [
                part
                for x, stores in ((k, self.keys), (v, self.values))
                for part in x.flatten(0, 2).split([store.dim for store in stores], dim=1)
            ]
        else:
            numbers = [x.flatten(0, 2) for x in self._kept(k, v)]
        torch._foreach_copy_(cells, numbers)

    def _append_one(self, k: Tensor, v: Tensor) -> None:
        """One token per row, at positions of their own."""
        for (store, level), x in zip(self.stores(), self._kept(k, v), strict=True):
            slots: list[int | None] = []
            lost: list[int | None] = []
            for row, _, pad in self.rows:
                position = self.length - pad
                if position < 0:
                    slots.append(None)
                    lost.append(None)
                    continue
                start = level.start(position, row)
                slot = store.slot(position, start)
                slots.append(slot)
                lost.append(slot if self._writes_over(store, position, slot) else None)
                oldest = start if store.ring is None else position - store.ring + 1
                store.oldest[row] = max(store.oldest[row], oldest)
            store.grow(max((slot + 1 for slot in slots if slot is not None), default=0), x)
            if self._before is not None:
                for page, index in store.places(lost):
                    self._before.keep(page, index)
            store.write_each(x, slots)

    def _writes_over(self, store: Store, position: int, slot: int) -> bool:
        """Whether a slot may hold a position that was wanted at the mark: of the block before, or of the round before in a ring."""
        if store.ring is not None:
            return position >= store.ring
        # Later ones of a block that began since the mark: too many are kept, which changes nothing.
        is_next = self._before is not None and self._before.length == self.length
        return position > 0 and (slot == 0 or not is_next)

    def runs(self, count: int) -> list[tuple[int, int]]:
        """New tokens in runs that lie in one block of every level; single ones with a window, whose rings forget."""
        if count == 1:
            return [(0, 1)]
        is_single = any(part.window is not None for part in self.parts)
        pads = [(row, pad) for row, _, pad in self.rows]
        levels = [level for part in self.parts for level in part.levels]
        edges = [
            step
            for step in range(1, count)
            if is_single
            or any(
                level.start(at, row) == at
                for row, pad in pads
                for level in levels
                if (at := self.length + step - pad) > 0
            )
        ]
        return list(pairwise([0, *edges, count]))

    def held(self) -> Held:
        """What a decoding step reads; the last tokens lie in one block of every level of every row."""
        return Held(
            parts=self.parts,
            keys=self.keys,
            values=list(zip(self.values, self.value_levels, strict=True)),
            latent=self.latent,
            places=[(row, self.length - 1 - pad) for row, _, pad in self.rows],
            kept_factors=self._factors,
        )

    def dense(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys (or states) and values as dense tensors, zero where nothing is kept, with new ones behind."""
        count = self.length
        past = [
            k.new_zeros((k.shape[0], k.shape[1], count, k.shape[3])),
            v.new_zeros((v.shape[0], v.shape[1], count, v.shape[3])),
        ]
        for x, stores in zip(past, (self.keys[: 1 if self.latent else None], self.values), strict=True):
            levels = self.key_levels if x is past[0] else self.value_levels
            dim = 0
            for store, level in zip(stores, levels, strict=False):
                for row, batch, pad in self.rows:
                    last = count - 1 - pad
                    if last < 0:
                        continue
                    start = level.start(last, row)
                    first = max(store.oldest[row], 0)
                    if first <= last:
                        found = store.read(batch, first, last + 1, start)
                        x[batch, :, first + pad : count, dim : dim + store.dim] = found.transpose(2, 3)
                dim += store.dim
        return torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)

    def check_crop(self, length: int) -> list[list[int]]:
        """The oldest position of each store and row after ``crop``; raises what that would raise, and changes nothing."""
        oldest = []
        for store, level in self.stores():
            kept = []
            for row, _, pad in self.rows:
                following = length - pad  # the position of the token that comes next
                needed = max(0, self._first_needed(level, following, row))
                if needed < following and store.oldest[row] > needed:
                    raise CacheError(
                        f"cannot crop from {self.length} to {length} tokens: level {level.number} would need the positions from "
                        f"{needed} on, and keeps those from {store.oldest[row]} on; crop to a length of at least "
                        f"{self._shortest()}, or reset() and start again"
                    )
                kept.append(max(0, min(following, store.oldest[row])))
            oldest.append(kept)
        return oldest

    def _first_needed(self, level: Level, following: int, row: int) -> int:
        """The first position that a token at ``following``, which is not known, may share a level with and see."""
        needed = level.first_needed(following, row)
        if needed < following or following < 1 or not self._may_go_on(level):
            return needed
        return level.first_needed(following - 1, row)

    def _may_go_on(self, level: Level) -> bool:
        """Whether another token than there was may belong to the segment before: words begin with their own token."""
        return self.text is not None and level.number > 1 and self.text.units[level.number - 2] == "word"

    def _shortest(self) -> int:
        """The smallest length above 0 from which on every crop works."""
        length = self.length
        while length > 1 and all(
            (needed := max(0, self._first_needed(level, length - 1 - pad, row))) >= length - 1 - pad
            or store.oldest[row] <= needed
            for store, level in self.stores()
            for row, _, pad in self.rows
        ):
            length -= 1
        return length

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``; see ``LevelCache.crop``."""
        oldest = self.check_crop(length)
        for (store, _), kept in zip(self.stores(), oldest, strict=True):
            store.oldest = kept
        self.length = length
        if self.text is not None and isinstance(self.layout, LevelLayout) and self.layout.boundaries is not None:
            pads = self.padding or (0,) * len(self.layout.boundaries)
            cut = tuple(
                tuple(tuple(start for start in starts if start < max(1, length - pad)) for starts in levels)
                for levels, pad in zip(self.layout.boundaries, pads, strict=False)
            )
            self.layout = replace(self.layout, boundaries=cut)
            self._set_levels()

    def select(self, indices: Tensor) -> None:
        """Row b becomes row ``indices[b]``."""
        rows, was_uniform = indices.tolist(), self.is_uniform
        pages = [store.selected(indices) for store, _ in self.stores()]  # all memory is taken before anything changes
        if self.padding is not None:
            self.padding = tuple(self.padding[row] for row in rows)
        if isinstance(self.layout, LevelLayout):
            self.layout = self.layout.select_rows(rows)
        self.shape = replace(self.shape, batch=len(rows))
        for (store, _), own in zip(self.stores(), pages, strict=True):
            store.pages = own
            if not was_uniform:
                store.oldest = [store.oldest[row] for row in rows[: 1 if self.is_uniform else None]]
        self._set_levels()


_TEXT_PAGE = 256  # slots of a page of a paragraph, line or word, whose lengths nobody knows


def _check_layout(shape: Shape, layout: Layout | None, latent: Latent | None) -> None:
    if layout is not None and latent is None and layout.head_dim != shape.keys[1]:
        raise ShapeError(
            f"the ranks of the layout must sum to the head dimension: expected {shape.keys[1]}, got "
            f"{'|'.join(map(str, layout.ranks))} = {layout.head_dim}"
        )
    value_ranks = layout.value_ranks if isinstance(layout, LevelLayout) else None
    if value_ranks is not None and sum(value_ranks) != shape.values[1]:
        raise ShapeError(
            f"the value_ranks of the layout must sum to the value dimension: expected {shape.values[1]}, got "
            f"{'|'.join(map(str, value_ranks))} = {sum(value_ranks)}"
        )
    if isinstance(layout, LevelLayout) and layout.num_rows not in (None, shape.batch):
        raise ShapeError(
            f"boundaries per row need one entry per batch row: expected {shape.batch}, got {layout.num_rows}"
        )
