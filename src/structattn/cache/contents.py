"""What one layer's cache keeps, by position, and all that changes it: new tokens, undo, moving rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from structattn.cache.attend import over_dense, over_view, why_not_fused
from structattn.cache.decode import KeyValueView
from structattn.cache.latent import Latent
from structattn.cache.levels import (
    Level,
    RecentLevel,
    SinkLevel,
    Softmax,
    sink_level,
    softmaxes_of,
    stored_levels,
    value_levels,
    widest,
)
from structattn.cache.native_decode import Step
from structattn.cache.over_quantized import check_no_gradient, over_quantized
from structattn.cache.storage import TEXT_PAGE_SIZE, GroupStore, LevelStore, Page, Storage
from structattn.checks import MAX_LENGTH, check_choice, check_size, check_sizes, describe
from structattn.errors import CacheError, CheckpointError, ConfigError, ShapeError
from structattn.layout.global_window import Layout
from structattn.layout.heads import with_whole_values
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.memory import check_memory
from structattn.ops import Backend
from structattn.ops.backends import NAMED
from structattn.ops.checks import autocasted, check_layout, is_transformed
from structattn.ops.native.library import is_here
from structattn.ops.terms import DTYPES, ScoreTerms, needs_gradient

# Up to this many new tokens are decoded from the pages, run by run; more are computed over dense keys.
_FEW_TOKENS = 16
_LONGEST_RUN = 8  # what the fused kernel takes at once


class OtherLatentError(ConfigError):
    """The latent that was given with a file is of another layer: the file may be all right."""


class TokenShape(NamedTuple):
    """What the first tokens fixed: batch size, (heads, dimension) of keys and values, dtype and device."""

    batch: int
    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_state(cls, plain: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        """The shape of contents that were saved; see ``Contents.state``.

        Raises:
            CheckpointError: there is no first tensor, or one that no cache keeps.
        """
        first = tensors.get("0")
        if first is None or first.dim() != 4 or first.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor 0 must be floating point of shape (batch, heads, dim, slots), got {describe(first)}"
            )
        keys, values = (check_sizes(name, plain[name]) for name in ("key_shape", "value_shape"))
        padding = plain.get("left_padding")
        return cls(
            batch=first.shape[0] if padding is None else len(padding),  # a tensor may be of one row
            keys=(keys[0], keys[1]),
            values=(values[0], values[1]),
            dtype=first.dtype,
            device=first.device,
        )


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """What new tokens change, as it was before them.

    Attributes:
        length, layout: of the contents.
        pages: stores that have taken pages since, with the number of those that they had.
        overwritten: functions that write back numbers that are still wanted and were written over. Within a
            block tokens go to free slots, so that there are some only where a block is left, or in a ring.
        groups: stores of quantized tokens, with the pages and the positions that they had.
        before: the mark that ``undo`` leaves.
    """

    length: int
    layout: Layout | None
    pages: list[tuple[LevelStore, int]] = field(default_factory=list)
    overwritten: list[Callable[[], object]] = field(default_factory=list)
    groups: list[tuple[GroupStore, int, list[int], list[int]]] = field(default_factory=list)
    before: _Mark | None = None

    def put_back(self) -> None:
        """Writes the numbers back, the last ones first, and gives back the pages."""
        with torch.inference_mode():  # pages may be views that were made in that mode
            for write_back in reversed(self.overwritten):
                write_back()
        for store, count in self.pages:
            store.set_pages(store.pages[:count])
        for groups, count, end, first in self.groups:
            groups.pages = groups.pages[:count]
            groups.end, groups.first = end, first


class Contents:
    """The numbers that a cache keeps for the tokens so far, and the only class that changes them.

    ``append``, ``attend`` and ``try_step`` add tokens; ``undo`` returns to the last ``set_mark``. The other
    changes are ``crop``, ``select``, ``reset``, ``restore``, ``set_layout`` and ``set_latent``.

    Args:
        shape: of the tokens.
        layout, window, chunk_size, max_length, page_size, latent, storage: as of ``LevelCache``.
        padding: leading padding tokens of each row, or ``None``.
        text: where the segments of the layout are those of a text, of which ``set_layout`` tells the new
            ones.

    Attributes:
        length: tokens so far, padding included.

    Raises:
        ShapeError: the layout does not fit the shape.
    """

    def __init__(
        self,
        shape: TokenShape,
        *,
        layout: Layout | None,
        window: int | None,
        chunk_size: int | None,
        max_length: int | None,
        page_size: int,
        padding: tuple[int, ...] | None,
        latent: Latent | None,
        text: TextLayout | None = None,
        storage: Storage | None = None,
    ) -> None:
        if padding is not None and len(padding) != shape.batch:
            raise ShapeError(
                f"left_padding has {len(padding)} rows, but the tokens have {shape.batch}: they need to be equal"
            )
        if layout is not None:
            check_layout(layout, None if latent else shape.keys[1], shape.values[1], shape.batch)
        self.shape = shape
        self.layout = layout
        self.window = window
        self.chunk_size = chunk_size
        self.padding = padding
        self.latent = latent
        self.text = text
        self.storage = storage
        self.length = 0
        self._factors: dict[tuple[object, ...], Tensor] = {}
        self._step: Step | None = None
        self._mark: _Mark | None = None
        self._set_levels()
        dims = [level.rank for level in self.key_levels]
        if latent is not None:
            dims = [shape.keys[1], latent.num_rstd]

        def store(dim: int, level: Level) -> LevelStore:
            reserve, size = 0 if max_length is None else level.most_slots(max_length), page_size
            if text is not None and level.number > 1 and level.ring is None:
                reserve, size = 0, min(page_size, TEXT_PAGE_SIZE, max_length or page_size)
            return LevelStore(dim, ring=level.ring, longest=level.longest, page_size=size, reserve=reserve)

        self.keys = [store(dim, level) for dim, level in zip(dims, self.key_levels, strict=False)]
        self.values = [store(level.rank, level) for level in self.value_levels]
        self.key_groups = self._new_groups(self.key_levels, page_size, max_length)
        self.value_groups = self._new_groups(self.value_levels, page_size, max_length)
        self.sink_keys: list[LevelStore] = []  # of the sink tokens, in all dimensions; with a latent as of the keys
        self.sink_values: list[LevelStore] = []
        if self.sinks is not None:
            of_keys = [shape.keys[1]] if latent is None else dims
            self.sink_keys = [store(dim, self.sinks) for dim in of_keys]
            self.sink_values = [store(shape.values[1], self.sinks)]
        self.reset()

    def _set_levels(self) -> None:
        """The levels of each store."""
        self._step = None
        head_dim = self.shape.keys[1] if self.latent is None else self.latent.key_dim
        self.softmaxes: tuple[Softmax, ...] = softmaxes_of(self.layout, self.window, head_dim, self.chunk_size)
        self.key_levels: tuple[Level, ...]
        if self.latent is None:
            self.key_levels = tuple(level for softmax in self.softmaxes for level in softmax.levels)
        else:
            self.key_levels = (widest(self.softmaxes),) * (2 if self.latent.num_rstd else 1)
        self.value_levels = value_levels(self.softmaxes, self.layout, self.shape.values[1])
        self.key_levels = stored_levels(self.key_levels, self.storage, "key_bits")
        self.value_levels = stored_levels(self.value_levels, self.storage, "value_bits")
        self.sinks: SinkLevel | None = sink_level(self.layout, head_dim)

    def _new_groups(self, levels: tuple[Level, ...], page_size: int, max_length: int | None) -> list[GroupStore | None]:
        """Stores for what is quantized of each level."""
        stores: list[GroupStore | None] = []
        for level in levels:
            if not isinstance(level, RecentLevel):
                stores.append(None)
                continue
            of_block, ring, size = level.of_block, level.ring_of_window, level.format.group_size
            ring = None if ring is None else -(-(ring - level.storage.residual) // size) + 2
            longest = ring if ring is not None else None if of_block is None else of_block // size
            reserve = None if max_length is None else -(-max_length // size)
            store = GroupStore(
                level.format, ring=ring, longest=longest, page_size=max(1, page_size // size), reserve=reserve
            )
            stores.append(store)
        return stores

    @property
    def groups(self) -> Iterator[tuple[GroupStore, RecentLevel]]:
        """The stores of quantized tokens with their levels, keys first."""
        for stores, levels in ((self.key_groups, self.key_levels), (self.value_groups, self.value_levels)):
            for store, level in zip(stores, levels, strict=True):
                if store is not None:
                    assert isinstance(level, RecentLevel)
                    yield store, level

    @property
    def is_quantized(self) -> bool:
        """Whether numbers are stored in fewer bits."""
        return any(store is not None for store in (*self.key_groups, *self.value_groups))

    def set_layout(self, layout: LevelLayout) -> None:
        """The layout from now on: other segments from the next token on, the current ones as they were, one
        entry per row.
        """
        if layout == self.layout:
            return
        was_uniform = self.is_uniform
        self.layout = layout
        self._set_levels()
        if was_uniform and not self.is_uniform:
            for store, _ in self.stores():
                store.lost = store.lost * self.shape.batch

    def set_latent(self, latent: Latent) -> None:
        """Makes keys by this from now on: the same sizes, of another module."""
        self.latent = latent

    def stores(self) -> Iterator[tuple[LevelStore, Level]]:
        """All stores with their levels: keys, values, then the sink tokens of keys and values."""
        yield from zip(self.keys, self.key_levels, strict=True)
        yield from zip(self.values, self.value_levels, strict=True)
        if self.sinks is not None:
            yield from ((store, self.sinks) for store in (*self.sink_keys, *self.sink_values))

    def _of_each(self, of_keys: Any, of_values: Any) -> list[Any]:
        """What belongs to keys and what belongs to values, for each of ``stores``."""
        counts = [(self.keys, of_keys), (self.values, of_values)]
        counts += [(self.sink_keys, of_keys), (self.sink_values, of_values)]
        return [x for stores, x in counts for _ in stores]

    @property
    def key_nbytes(self) -> int:
        """Bytes that are allocated for keys (or for the latent state)."""
        quantized = sum(store.nbytes for store in self.key_groups if store is not None)
        return quantized + sum(store.nbytes for store in (*self.keys, *self.sink_keys))

    @property
    def value_nbytes(self) -> int:
        """Bytes that are allocated for values."""
        quantized = sum(store.nbytes for store in self.value_groups if store is not None)
        return quantized + sum(store.nbytes for store in (*self.values, *self.sink_values))

    def most_nbytes(self, length: int) -> int:
        """Bytes that are allocated at most while a sequence grows to ``length`` tokens, in whatever calls, of
        layouts whose blocks are known in advance. Nothing is allocated.
        """
        like = torch.empty(0, dtype=self.shape.dtype, device=self.shape.device)
        heads = self._of_each(self.shape.keys[0], self.shape.values[0])
        total = sum(
            store.nbytes_of(level.most_slots(length), (self.shape.batch, count), like)
            for (store, level), count in zip(self.stores(), heads, strict=True)
        )
        for stores, (count, _) in ((self.key_groups, self.shape.keys), (self.value_groups, self.shape.values)):
            for store in stores:
                if store is not None:
                    assert self.storage is not None
                    slots = self.storage.first_exact(length) // store.format.group_size  # as the next token reads
                    total += store.nbytes_of(slots, (self.shape.batch, count), self.shape.dtype)
        return total

    # Rows: one for all where they are at the same positions with the same blocks, else one per row of the
    # batch.

    @property
    def is_uniform(self) -> bool:
        """Whether all rows are at the same positions with the same blocks."""
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
        rows = 1 if self.is_uniform else self.shape.batch
        for store, _ in self.stores():
            store.lost = [0] * rows
        for groups, _ in self.groups:
            groups.end, groups.first = [0] * rows, [0] * rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_factors": {}, "_step": None, "_mark": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if pages := self.keys[0].pages:  # torch.load may have moved them
            self.shape = self.shape._replace(device=pages[0].device)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain data and tensors from which ``restore`` makes equal contents."""
        if any(not store.pages for store, _ in self.stores()):
            raise CacheError("the cache holds nothing but padding so far: save it when a row has a real token")
        plain = {
            "length": self.length,
            "oldest": [[self._oldest(*stored, row, pad) for row, _, pad in self.rows] for stored in self.stores()],
            "key_shape": self.shape.keys,
            "value_shape": self.shape.values,
        }
        tensors = {str(n): store.read_all() for n, (store, _) in enumerate(self.stores())}
        plain["quantized"] = [(store.end, store.first) for store, _ in self.groups]
        for n, (store, _) in enumerate(self.groups):
            tensors |= {f"group {n} {name}": x for name, x in store.state().items()}
        return plain, tensors

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what ``state`` returned.

        Raises:
            OtherLatentError: the latent is of another layer.
            CheckpointError: a number or a tensor is not one that ``state`` returns.
        """
        tensors = dict(tensors)
        of_groups = {name: tensors.pop(name) for name in list(tensors) if name.startswith("group ")}
        stores, length, oldest = list(self.stores()), plain["length"], plain["oldest"]
        names = [str(number) for number in range(len(stores))]
        if self.latent is not None and len(tensors) == len(oldest) != len(names):
            raise OtherLatentError("the latent is of another layer: it keeps other levels than the file has")
        if sorted(tensors) != sorted(names) or len(oldest) != len(names):
            raise CheckpointError(
                f"expected {len(names)} tensors, {', '.join(names)}, got {', '.join(sorted(tensors))}"
            )
        check_size("length", length, MAX_LENGTH)
        heads = self._of_each(self.shape.keys[0], self.shape.values[0])
        self.length, self._step = length, None
        for name, (store, level), count, firsts in zip(names, stores, heads, oldest, strict=True):
            x = tensors[name]
            if self.latent is not None and x.dim() == 4 and x.shape[2] != store.dim:
                raise OtherLatentError(
                    "the latent is of another layer: its keys or states have other sizes than those that are kept"
                )
            if x.dim() != 4 or x.shape[:3] != (self.shape.batch, count, store.dim) or x.dtype != self.shape.dtype:
                raise CheckpointError(
                    f"tensor {name} must be {self.shape.dtype} of shape ({self.shape.batch}, {count}, {store.dim}, "
                    f"slots), got {x.dtype} {tuple(x.shape)}"
                )
            slots = min(store.page_size, store.page_size if store.longest is None else store.longest)
            check_memory(f"pages of {slots} tokens", x[..., :1].numel() * slots, x.dtype)
            rows = list(self.rows)
            if len(firsts) != len(rows):
                raise CheckpointError(f"oldest must have {len(rows)} positions for tensor {name}, got {len(firsts)}")
            for first, (row, _, pad) in zip(firsts, rows, strict=True):
                self._check_held(name, store, level, x.shape[3], first, row, pad)
            store.set_pages((store.page_type.of(x),))
            store.lost = list(firsts)
        self._restore_groups(plain["quantized"], of_groups)
        if missing := next(self._lost(length), None):
            level, needed, first = missing
            raise CheckpointError(
                f"level {level.number} needs the positions from {needed} on, and keeps those from {first} on"
            )

    def _restore_groups(self, positions: Sequence[Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what ``state`` says of quantized tokens; raises ``CheckpointError`` where it is not
        that.
        """
        stores = list(self.groups)
        if len(positions) != len(stores):
            raise CheckpointError(f"expected {len(stores)} entries of quantized tokens, got {len(positions)}")
        keys = sum(store is not None for store in self.key_groups)
        names = set(tensors)
        for n, ((store, level), (end, first)) in enumerate(zip(stores, positions, strict=True)):
            heads = (self.shape.keys if n < keys else self.shape.values)[0]
            pages = {name: tensors[key] for name in store.names if (key := f"group {n} {name}") in tensors}
            names -= {f"group {n} {name}" for name in pages}
            store.restore(pages, (self.shape.batch, heads), self.shape.dtype, list(end), list(first))
            rows = list(self.rows)
            if not len(rows) == len(end) == len(first):
                raise CheckpointError(f"quantized tokens need {len(rows)} positions, got {len(end)} and {len(first)}")
            for number, (row, _, pad) in enumerate(rows):
                position, size, storage = self.length - pad, store.format.group_size, level.storage
                least = storage.first_exact(position - 1) if position > 0 else 0
                most = max(least, min(storage.first_exact(position), max(0, position) // size * size))
                if end[number] % size or first[number] % size or not least <= end[number] <= most:
                    raise CheckpointError(
                        f"quantized tokens must end from {least} to {most}, at a multiple of {size}, got {end[number]}"
                    )
                begin = max(first[number] // size, level.first_group(position, row))
                slots = [store.slot(at, level.start(at * size, row)) for at in range(begin, end[number] // size)]
                if slots and max(slots) >= store.capacity:
                    raise CheckpointError(
                        f"quantized tokens have {store.capacity} groups, and {max(slots) + 1} are needed"
                    )
        if names:
            raise CheckpointError(f"expected no tensor {sorted(names)[0]!r}")

    def _check_held(
        self, name: str, store: LevelStore, level: Level, slots: int, oldest: int, row: int, pad: int
    ) -> None:
        """Raises ``CheckpointError`` unless a tensor has a slot for each position from ``oldest`` on."""
        last = self.length - 1 - pad
        if last < 0:
            start, needed = 0, 0
        else:
            start = level.start(last, row) if store.ring is None else max(0, last - store.ring + 1)
            needed = level.end(last) - start if store.ring is None else min(last + 1, store.ring)
        if not start <= oldest <= max(0, last + 1):
            raise CheckpointError(f"oldest of tensor {name} must be from {start} to {max(0, last + 1)}, got {oldest}")
        if slots < needed:
            raise CheckpointError(f"tensor {name} has {slots} slots, and {self.length} tokens need {needed}")

    def _oldest(self, store: LevelStore, level: Level, row: int, pad: int) -> int:
        """The first position of a row from which on all are held: of the current block, or of the last round
        of a ring.
        """
        last = self.length - 1 - pad
        if last < 0:
            return store.lost[row]
        return max(store.lost[row], level.start(last, row) if store.ring is None else last - store.ring + 1)

    def _grow(self, store: LevelStore, slots: int, like: Tensor) -> None:
        """Takes pages for a store until there are ``slots``, which ``undo`` gives back."""
        if slots > store.capacity:
            self._step = None
            if self._mark is not None:
                self._mark.pages.append((store, store.num_pages))
            store.grow(slots, like)

    @property
    def _overwritten(self) -> list[Callable[[], object]] | None:
        """What ``undo`` writes back, to which the C++ code adds; ``None`` where nothing is marked."""
        return None if self._mark is None else self._mark.overwritten

    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds tokens: keys (or states) and values as ``LevelCache.attend`` takes them."""
        if self.is_quantized and k.shape[0] and k.shape[2]:
            self._quantize(self.length + k.shape[2], k, v)
        self._append(k, v)

    def _append(self, k: Tensor, v: Tensor) -> None:
        """``append`` of tokens before which all is quantized that has left the residual."""
        count = k.shape[2]
        if k.shape[0] == 0 or count == 0:
            pass  # nothing to keep
        elif count == 1 and self.is_uniform:
            self._append_alike(k, v)
        elif count == 1:
            self._append_one(k, v)
        else:
            self._append_many(k, v)
        self.length += count

    def _append_alike(self, k: Tensor, v: Tensor) -> None:
        """One token per row, all at one position: all levels in one operation."""
        row, _, pad = next(iter(self.rows))
        position = self.length - pad
        if position < 0:
            return
        if (step := self._next_step(k, v)) is not None:
            step.write(k, v, self.length, self._overwritten)
            return
        flat = (k.flatten(0, 2), v.flatten(0, 2)) if self.latent is None else (k, v)
        places: list[tuple[Page, int]] = []
        numbers: list[Tensor] = []
        of_stores = zip(self.stores(), self._per_store(*flat), self._of_each(k, v), strict=True)
        for (store, level), x, like in of_stores:
            if position >= level.end(position):
                continue
            slot = store.slot(position, level.start(position, row))
            self._grow(store, slot + 1, like)
            page, place = store.place(slot)
            places.append((page, place))
            numbers.append(x.flatten(0, -2))
            if self._mark is not None and self._writes_over(store, position, slot):
                self._mark.overwritten.append(page.kept(slice(None), place, 1))
        self.keys[0].page_type.write_token(places, numbers)

    def _append_one(self, k: Tensor, v: Tensor) -> None:
        """One token per row, at different positions."""
        for (store, level), x in zip(self.stores(), self._per_store(k, v), strict=True):
            slots: list[int | None] = []
            lost: list[int | None] = []
            for row, _, pad in self.rows:
                position = self.length - pad
                if not 0 <= position < level.end(position):
                    slots.append(None)
                    lost.append(None)
                    continue
                slot = store.slot(position, level.start(position, row))
                slots.append(slot)
                lost.append(slot if self._writes_over(store, position, slot) else None)
            self._grow(store, max((slot + 1 for slot in slots if slot is not None), default=0), x)
            if self._mark is not None:
                self._mark.overwritten.extend(store.kept_each(lost))
            store.write_each(x, slots)

    def _append_many(self, k: Tensor, v: Tensor) -> None:
        """Several tokens, row by row."""
        count = k.shape[2]
        for (store, level), x in zip(self.stores(), self._per_store(k, v), strict=True):
            for row, batch, pad in self.rows:
                first, last = self.length - pad, self.length - pad + count - 1
                if last < 0:
                    continue
                start, end = level.start(last, row), level.end(last)
                oldest = max(start, 0) if store.ring is None else last - store.ring + 1
                low = max(first, oldest, 0)
                if low >= end:
                    continue
                slots = end - start if store.ring is None else min(end, store.ring)
                self._grow(store, slots, x)
                if first > 0 and self._mark is not None:
                    lost, stop = max(low, store.ring or 0), end
                    if store.ring is None and self.length == self._mark.length:
                        previous = level.start(first - 1, row)  # its block is written over, if it is another
                        stop = low if previous == start else min(stop, start + first - previous)
                    self._mark.overwritten.extend(store.kept(batch, lost, stop, start))
                store.write(x[batch, :, low - first : end - first], batch, low, start)

    def _writes_over(self, store: LevelStore, position: int, slot: int) -> bool:
        """Whether a slot may hold a position that was wanted at the mark: of the block before, or of the
        round before in a ring.
        """
        if store.ring is not None:
            return position >= store.ring
        # Later ones of a block that began since the mark: too many are kept, which changes nothing.
        is_next = self._mark is not None and self._mark.length == self.length
        return position > 0 and (slot == 0 or not is_next)

    def _per_store(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """What goes into each store, in their order: slices of the last axis."""
        if self.latent is None:
            keys = list(k.split([store.dim for store in self.keys], dim=-1))
        else:
            keys = [k]
            if self.latent.num_rstd:
                with torch.no_grad():
                    keys.append(self.latent.rstd(k[:, 0])[:, None].to(k.dtype))
        values = list(v.split([store.dim for store in self.values], dim=-1))
        if self.sinks is None:
            return keys + values
        return keys + values + ([k] if self.latent is None else keys) + [v]

    def _next_step(self, k: Tensor, v: Tensor) -> Step | None:
        """What writes the next token, and attends, in C++; ``None`` where it cannot: rows at several
        positions, hidden states, or no C++ code.

        Args:
            k, v: the token, (B, G, 1, D) and (B, Gv, 1, V).

        Raises:
            CacheError: there is no memory for it.
        """
        if not self.is_uniform or self.latent is not None or not is_here(k):
            return None
        row, _, pad = next(iter(self.rows))
        position = self.length - pad
        if position < (0 if self.sinks is None else self.sinks.layout.sink_tokens):
            return None
        if self.is_quantized:
            assert self.storage is not None
            if self.storage.first_exact(position) > position:  # the token itself is read as codes
                return None
            self._quantize(self.length + 1)
        if self._step is None or self.length not in self._step.lengths:
            for (store, level), like in zip(self.stores(), self._of_each(k, v), strict=True):
                if position < level.end(position):
                    self._grow(store, store.slot(position, level.start(position, row)) + 1, like)
            self._step = Step(
                self.softmaxes,
                self.chunk_size,
                list(zip(self.keys, self.key_levels, strict=True)),
                list(zip(self.values, self.value_levels, strict=True)),
                sinks=(*self.sink_keys, *self.sink_values),
                groups=(*self.key_groups, *self.value_groups),
                storage=self.storage if self.is_quantized else None,
                row=row,
                pad=pad,
                length=self.length,
                k=k,
                v=v,
            )
        return self._step

    def try_step(self, q: Any, k: Any, v: Any, scale: object, order: Tensor | None) -> Tensor | None:
        """Marks, appends the next token and returns its attention, if the C++ code has just taken a token
        like it.

        Args:
            q, k, v, scale, order: see ``LevelCache.try_step``; they are not checked.

        Returns:
            (B, H, 1, V); ``None``, with nothing changed, where an argument differs in more than its numbers.
        """
        if self._step is None:
            return None
        mark = _Mark(length=self.length, layout=self.layout)
        try:
            out = self._step.try_attend(q, k, v, scale, order, self.length, mark.overwritten)
            if out is not None:
                self._mark = mark
                self.length += 1
            return out
        except BaseException:
            self._mark = mark
            self.undo()
            raise

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> Tensor:
        """Appends new tokens and computes their attention; see ``LevelCache.attend``."""
        check_choice("backend", backend, NAMED)
        q, k, v = autocasted(q, k, v)
        kept_k, kept_v = k.detach(), v.detach()
        if q.shape[0] == 0 or q.shape[2] == 0:
            self.append(kept_k, kept_v)
            return q.new_zeros((*q.shape[:3], v.shape[3]))
        if self.is_quantized:
            check_no_gradient(q, k, v, options)
            is_single = q.shape[2] == 1 and backend == "auto" and options.has_scale_only and not is_transformed()
            if is_single and (step := self._next_step(kept_k, kept_v)) is not None:
                out = step.attend(q, kept_k, kept_v, options.scale, self.length, self._overwritten)
                self.length += 1
                return out
            if self._is_fused(q, options, backend):
                return self._by_runs(q, kept_k, kept_v, options, "triton")
            keys, values = self.dense_keys(kept_k), self.dense_values(kept_v)
            out = self._over_quantized(q, keys, values, values, self.layout, options, backend)
            self._append(kept_k, kept_v)
            return out
        if self.length == 0 or not self._is_direct(q, k, v, options, backend):
            values = v if self.length == 0 else self.dense_values(v)
            out = self._over_dense(q, self._all_keys(k), values, self.layout, options, backend)
            self.append(kept_k, kept_v)
            return out
        return self._by_runs(q, kept_k, kept_v, options, backend)

    def _by_runs(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> Tensor:
        """Appends new tokens and computes their attention straight from the pages, run by run."""
        runs, num_keys = self.runs(q.shape[2]), self.length + q.shape[2]
        if len(runs) == 1:
            of_run = options.of_queries(0, q.shape[2], q.shape[2], num_keys)
            return self._decoded(q, k, v, of_run, backend)
        outs = []
        for first, end in runs:
            of_run = options.of_queries(first, end, q.shape[2], num_keys)
            query, key, value = (x[:, :, first:end] for x in (q, k, v))
            outs.append(self._decoded(query, key, value, of_run, backend))
        return torch.cat(outs, dim=2)

    def _decoded(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> Tensor:
        """The attention of tokens of one run, straight from the pages."""
        is_single = q.shape[2] == 1 and backend == "auto" and options.has_scale_only
        if is_single and (step := self._next_step(k, v)) is not None:
            out = step.attend(q, k, v, options.scale, self.length, self._overwritten)
            self.length += 1
            return out
        self.append(k, v)
        return over_view(q, self.view(), options, backend)

    def weights(self, q: Tensor, k: Tensor, options: ScoreTerms) -> Tensor:
        """The weights of new tokens, which are not appended; see ``LevelCache.weights``."""
        q, k = autocasted(q, k)
        layout = self.layout
        keys = self.dense_keys(k.detach()) if self.is_quantized else self._all_keys(k)
        each = torch.eye(keys.shape[2], dtype=keys.dtype, device=keys.device).expand(*keys.shape[:2], -1, -1)
        layout = with_whole_values(layout)
        if self.is_quantized:
            check_no_gradient(q, k, k, options)
            return self._over_quantized(q, keys, None, each, layout, options, "reference")
        return self._over_dense(q, keys, each, layout, options, "reference")

    def _over_quantized(
        self,
        q: Tensor,
        keys: Tensor,
        stored_values: Tensor | None,
        values: Tensor,
        layout: Layout | None,
        options: ScoreTerms,
        backend: Backend,
    ) -> Tensor:
        """Attention of new tokens, each over the numbers that it sees, and what is quantized on the way.

        Args:
            keys: of all tokens, the new ones too, whose numbers are changed to those that are read.
            stored_values: likewise, as they are kept; ``None``: no values are quantized.
            values: of all tokens, that are summed.
        """
        assert self.storage is not None
        outs = []
        for number, (_, batch, pad) in enumerate(self.rows):
            quantize = partial(self._quantize_row, number, batch, pad, keys=keys, values=stored_values)
            of_rows = over_quantized(
                q[batch],
                keys[batch],
                values[batch],
                options.of_rows(batch),
                quantize,
                storage=self.storage,
                layout=layout,
                window=self.window,
                pad=pad,
                chunk_size=self.chunk_size,
                backend=backend,
            )
            outs.append(of_rows)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def requantize(self) -> None:
        """Quantizes what the next token reads so, and what ``crop`` has made recent is not yet again."""
        if self.is_quantized:
            self._quantize(self.length + 1)

    def _quantize(self, length: int, k: Tensor | None = None, v: Tensor | None = None) -> None:
        """Quantizes what a query reads so that is the last of ``length`` tokens, from those so far and new
        ones, (B, G, T, D) and (B, Gv, T, V).
        """
        for stores, groups, levels, new in (
            (self.keys, self.key_groups, self.key_levels, k),
            (self.values, self.value_groups, self.value_levels, v),
        ):
            dim = 0
            for store, quantized, level in zip(stores, groups, levels, strict=True):
                dims = slice(dim, dim + store.dim)
                dim += store.dim
                if quantized is None:
                    continue
                assert isinstance(level, RecentLevel)
                for number, (_, batch, pad) in enumerate(self.rows):
                    position, first, held = length - 1 - pad, quantized.end[number], max(0, self.length - pad)
                    if level.storage.first_exact(position) <= first:
                        continue
                    numbers = []
                    if first < held:
                        numbers.append(store.read(batch, first, held, 0).transpose(2, 3))
                    if new is not None:
                        numbers.append(new[batch, :, max(0, pad - self.length) :, dims])
                    self._quantize_level(quantized, level, number, batch, -first, position, torch.cat(numbers, dim=2))

    def _quantize_row(
        self, number: int, batch: slice, pad: int, position: int, keys: Tensor, values: Tensor | None
    ) -> None:
        """Quantizes the groups of a row that a query at ``position`` reads so, and writes what is read of
        them into dense keys and values.
        """
        assert self.storage is not None
        exact = self.storage.first_exact(position)
        for stores, levels, dense in (
            (self.key_groups, self.key_levels, keys),
            (self.value_groups, self.value_levels, values),
        ):
            dim = 0
            for store, level in zip(stores, levels, strict=True):
                dims = slice(dim, dim + level.rank)
                dim += level.rank
                if store is None or dense is None or store.end[number] >= exact:
                    continue
                assert isinstance(level, RecentLevel)
                self._quantize_level(store, level, number, batch, pad, position, dense[batch, ..., dims])

    def _quantize_level(
        self,
        store: GroupStore,
        level: RecentLevel,
        number: int,
        batch: slice,
        offset: int,
        position: int,
        dense: Tensor,
    ) -> None:
        """``_quantize_row`` of one level.

        Args:
            offset: of position 0 in ``dense``.
            dense: (rows, heads, tokens, rank) of these rows, changed to what is read.
        """
        self._step = None
        exact = level.storage.first_exact(position)
        size, sinks = store.format.group_size, 0 if self.sinks is None else self.sinks.layout.sink_tokens
        if self._mark is not None and not any(store is marked for marked, *_ in self._mark.groups):
            self._mark.groups.append((store, len(store.pages), list(store.end), list(store.first)))
        overwritten = None if self._mark is None else self._mark.overwritten
        begin, needed = store.end[number] // size, level.first_group(position, number)
        if needed > begin:  # no query sees the others any more
            store.first[number], store.end[number] = needed * size, max(store.end[number], min(needed * size, exact))
        groups = range(max(begin, needed), exact // size)
        while groups:
            start = level.start(groups[0] * size, number)
            run = groups[: store.ring]  # a ring has no place for more at once
            if level.start(run[-1] * size, number) != start:
                run = run[: next(n for n, group in enumerate(run) if level.start(group * size, number) != start)]
            groups = groups[len(run) :]
            at = slice(offset + run[0] * size, offset + (run[-1] + 1) * size)
            slots = [store.slot(group, start) for group in run]
            store.grow(max(slots) + 1, self.shape.batch, dense)
            stored = store.format.from_tokens(dense[:, :, at], [group * size for group in run], sinks)
            store.write(stored, batch, run[0], start, overwritten)
            store.end[number] = (run[-1] + 1) * size
            if store.ring is not None:
                store.first[number] = max(store.first[number], (run[-1] + 1 - store.ring) * size)
            elif slots[0] == 0:
                store.first[number] = run[0] * size

    def _is_direct(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> bool:
        """Whether new tokens are decoded straight from what is kept: few ones, past the padding, without a
        gradient.
        """
        if is_transformed() or options.needs_gradient or needs_gradient(q, k, v):
            return False
        makes_keys = self.latent is not None and not self.latent.can_absorb
        is_past_padding = self.length >= self.most_padding
        return backend in ("auto", "triton") and q.shape[2] <= _FEW_TOKENS and is_past_padding and not makes_keys

    def _is_fused(self, q: Tensor, options: ScoreTerms, backend: Backend) -> bool:
        """Whether the fused kernel decodes new tokens over quantized ones: where it can, and every row has a
        token besides sink tokens.
        """
        if not (backend == "triton" or (backend == "auto" and q.is_cuda)) or q.shape[2] > _FEW_TOKENS:
            return False
        if is_transformed():
            return False
        sinks = 0 if self.sinks is None else self.sinks.layout.sink_tokens
        if self.length < self.most_padding + max(1, sinks) or torch.compiler.is_compiling():
            return False
        for first, end in self.runs(q.shape[2]):
            for row, _, pad in self.rows:
                position = self.length + end - 1 - pad
                for store, level in zip(
                    (*self.keys, *self.values), (*self.key_levels, *self.value_levels), strict=True
                ):
                    slots = position + 1 - level.start(position, row) if store.ring is None else store.ring
                    if store.capacity < min(slots, position + 1):
                        return False  # another page would be allocated
            if why_not_fused(q[:, :, first:end], self.view(), options) is not None:
                return False
        return True

    def _all_keys(self, k: Tensor) -> Tensor:
        """The keys of all tokens, with the new ones at the end: from keys, or made from hidden states."""
        state = k if self.length == 0 else self.dense_keys(k)
        if self.latent is None:
            return state
        positions = torch.arange(state.shape[2], device=state.device)
        if self.padding is not None:
            positions = positions - torch.tensor(self.padding, device=state.device)[:, None]
        return self.latent.keys(state[:, 0], positions)

    def _over_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout | None,
        options: ScoreTerms,
        backend: Backend,
    ) -> Tensor:
        """Attention over the dense keys and values of a cache."""
        padding = None
        if self.padding is not None and any(self.padding):  # a row may still be in its padding
            padding = torch.tensor(self.padding, device=q.device).clamp(max=k.shape[2])
        return over_dense(
            q,
            k,
            v,
            options,
            layout=layout,
            window=self.window,
            left_padding=padding,
            backend=backend,
            chunk_size=self.chunk_size,
        )

    def set_mark(self, is_inner: bool = False) -> None:
        """Marks the point to which ``undo`` returns; an inner one returns to the mark before it next."""
        self._mark = _Mark(length=self.length, layout=self.layout, before=self._mark if is_inner else None)

    @property
    def num_marks(self) -> int:
        """How many marks there are, each inside of the one before."""
        marks, mark = 0, self._mark
        while mark is not None:
            marks, mark = marks + 1, mark.before
        return marks

    def undo(self) -> None:
        """Makes the contents what they were at the mark, from which on tokens were appended and nothing else
        was done.
        """
        assert self._mark is not None
        self._mark.put_back()
        if self._mark.pages or self._mark.groups:
            self._step = None
        if self.layout is not self._mark.layout:
            was_uniform = self.is_uniform
            self.layout = self._mark.layout
            self._set_levels()
            if self.is_uniform and not was_uniform:
                for store, _ in self.stores():
                    store.lost = store.lost[:1]
        self.length, self._mark = self._mark.length, self._mark.before

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``; see ``LevelCache.crop``."""
        self.check_crop(length)
        for stored in self.stores():
            store, _ = stored
            store.lost = [max(0, min(length - pad, self._oldest(*stored, row, pad))) for row, _, pad in self.rows]
        for groups, level in self.groups:  # what is seen exactly again is quantized again, to the same numbers
            size, after = groups.format.group_size, [max(0, length - pad) for _, _, pad in self.rows]
            groups.end = [
                min(end, level.storage.first_exact(position), position // size * size)
                for end, position in zip(groups.end, after, strict=True)
            ]
        self.length = length
        if self.text is not None and isinstance(self.layout, LevelLayout) and self.layout.boundaries is not None:
            pads = self.padding or (0,) * len(self.layout.boundaries)
            cut = tuple(
                tuple(tuple(start for start in starts if start < max(1, length - pad)) for starts in levels)
                for levels, pad in zip(self.layout.boundaries, pads, strict=False)
            )
            self.layout = replace(self.layout, boundaries=cut)
            self._set_levels()

    def read_plain(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions first ... end - 1 of plain attention over rows at one position, (B, G,
        n, dim), as a query reads them that is much later.
        """
        found = []
        for store, groups in ((self.keys[0], self.key_groups[0]), (self.values[0], self.value_groups[0])):
            if groups is None:
                found.append(store.read(slice(None), first, end, 0).transpose(2, 3).clone())
            else:
                size = groups.format.group_size
                x = groups.read(slice(None), first // size, end // size, 0, self.shape.dtype)
                found.append(x)
        k, v = found
        return k, v

    def replace_plain(
        self, first: int, end: int, k: Tensor, v: Tensor, overwritten: list[Callable[[], object]]
    ) -> None:
        """Puts fewer tokens in the place of positions first ... end - 1, of plain attention over rows at one
        position. Where numbers are quantized these are whole groups, and all of their numbers were. What
        follows moves up and stays what it is.

        Args:
            k, v: (B, G, n, dim).
            overwritten: gets functions that make it what it was, the last one first.
        """
        length, shift = self.length, end - first - k.shape[2]
        moves = []
        for store, level, groups, x in (
            (self.keys[0], self.key_levels[0], self.key_groups[0], k),
            (self.values[0], self.value_levels[0], self.value_groups[0], v),
        ):
            held = first if groups is None else max(end, self._oldest(store, level, 0, 0))
            old = store.read(slice(None), held, length, 0).transpose(2, 3).clone()
            if groups is None:
                moves.append((store, torch.cat([x, old[:, :, end - first :]], dim=2), first, store.lost, old, held))
                continue
            assert groups.end[0] >= end
            size = groups.format.group_size
            stored = groups.format.from_tokens(x.clone(), range(x.shape[2] // size), 0)
            groups.replace(first // size, end // size, stored, overwritten)
            moves.append((store, old, held - shift, [held - shift], old, held))

        def end_with(count: int) -> None:
            self.length, self._step = count, None

        overwritten.append(partial(end_with, length))
        for store, x, at, lost, old, held in moves:
            overwritten.append(partial(_put, store, old, held, store.lost))
            _put(store, x, at, lost)
        end_with(length - shift)

    def check_crop(self, length: int) -> None:
        """Raises what ``crop`` would raise, and changes nothing."""
        for level, needed, oldest in self._lost(length):
            shortest = self.length  # from there on every crop works
            while shortest > 1 and not any(self._lost(shortest - 1)):
                shortest -= 1
            raise CacheError(
                f"cannot crop from {self.length} to {length} tokens: level {level.number} would need the positions "
                f"from {needed} on, and keeps those from {oldest} on; crop to a length of at least {shortest}, or "
                "reset() and start again"
            )

    def _lost(self, length: int) -> Iterator[tuple[Level, int, int]]:
        """(level, first position that the token after ``length`` tokens may need, oldest kept) where it is
        kept no longer.
        """
        for store, level in self.stores():
            # A word begins with its own token: the next one may belong to the last word.
            may_go_on = self.text is not None and level.number > 1 and self.text.units[level.number - 2] == "word"
            for row, _, pad in self.rows:
                following = length - pad
                needed = level.first_needed(following, row)
                if may_go_on and needed >= following >= 1:
                    needed = level.first_needed(following - 1, row)
                needed = max(0, needed)
                oldest = self._oldest(store, level, row, pad)
                if needed < following and oldest > needed:
                    yield level, needed, oldest
        for groups, quantized in self.groups:
            for number, (row, _, pad) in enumerate(self.rows):
                following = length - pad
                needed = quantized.first_group(following, row) * groups.format.group_size
                if needed < quantized.storage.first_exact(following) and groups.first[number] > needed:
                    yield quantized, needed, groups.first[number]

    def runs(self, count: int) -> list[tuple[int, int]]:
        """New tokens in runs of a few that lie in one block of every level; single ones with a window, whose
        rings forget.
        """
        if count == 1:
            return [(0, 1)]
        is_single = any(softmax.slides for softmax in self.softmaxes)
        pads = [(row, pad) for row, _, pad in self.rows]
        levels = [level for softmax in self.softmaxes for level in softmax.levels]
        edges = [0]
        for step in range(1, count):
            if (
                is_single
                or step - edges[-1] == _LONGEST_RUN
                or any(self._reads_more(self.length + step - pad) for _, pad in pads)
                or any(
                    level.start(at, row) == at
                    for row, pad in pads
                    for level in levels
                    if (at := self.length + step - pad) > 0
                )
            ):
                edges.append(step)
        return list(pairwise([*edges, count]))

    def _reads_more(self, position: int) -> bool:
        """Whether a query at a position reads more tokens as codes than the one before it."""
        if self.storage is None or not self.is_quantized:
            return False
        return self.storage.first_exact(position) > self.storage.first_exact(position - 1)

    def view(self) -> KeyValueView:
        """What a decoding step reads; the last tokens lie in one block of every level of every row."""
        return KeyValueView(
            softmaxes=self.softmaxes,
            keys=self.keys,
            values=list(zip(self.values, self.value_levels, strict=True)),
            sink_keys=self.sink_keys,
            sink_values=self.sink_values,
            key_groups=self.key_groups,
            value_groups=self.value_groups,
            storage=self.storage if self.is_quantized else None,
            latent=self.latent,
            positions=[(row, self.length - 1 - pad) for row, _, pad in self.rows],
            factors_by_scale=self._factors,
        )

    def dense_keys(self, k: Tensor) -> Tensor:
        """All keys (or states) as a dense tensor, zero where nothing is kept, with the new ones at the
        end.
        """
        count = 1 if self.latent else None
        return self._dense(k, self.keys[:count], self.key_levels, self.key_groups, self.sink_keys[:count])

    def dense_values(self, v: Tensor) -> Tensor:
        """As ``dense_keys``, of the values."""
        return self._dense(v, self.values, self.value_levels, self.value_groups, self.sink_values)

    def _read_groups(self, store: GroupStore, level: RecentLevel, past: Tensor) -> None:
        """Writes the quantized numbers that the next query sees into those of all tokens (B, G, S, rank)."""
        size = store.format.group_size
        for number, (row, batch, pad) in enumerate(self.rows):
            position = self.length - pad
            end = min(store.end[number], level.storage.first_exact(position))
            first = max(level.first_group(position, row) * size, store.first[number])
            if first < end:
                start = level.start(end - 1, row)
                past[batch, :, first + pad : end + pad] = store.read(
                    batch, first // size, end // size, start, past.dtype
                )

    def _dense(
        self,
        new: Tensor,
        stores: list[LevelStore],
        levels: tuple[Level, ...],
        quantized: list[GroupStore | None],
        sinks: list[LevelStore],
    ) -> Tensor:
        count, dim = self.length, 0
        past = new.new_zeros((new.shape[0], new.shape[1], count, new.shape[3]))
        for store, level, groups in zip(stores, levels, quantized, strict=False):
            for row, batch, pad in self.rows:
                last = count - 1 - pad
                if last < 0:
                    continue
                start = level.start(last, row)
                first = max(self._oldest(store, level, row, pad), 0)
                if first <= last:
                    numbers = store.read(batch, first, last + 1, start)
                    past[batch, :, first + pad : count, dim : dim + store.dim] = numbers.transpose(2, 3)
            if groups is not None:
                assert isinstance(level, RecentLevel)
                self._read_groups(groups, level, past[..., dim : dim + store.dim])
            dim += store.dim
        for store in sinks:
            assert self.sinks is not None
            for _, batch, pad in self.rows:
                if (end := self.sinks.end(count - 1 - pad)) > 0:
                    past[batch, :, pad : pad + end] = store.read(batch, 0, end, 0).transpose(2, 3)
        return torch.cat([past, new], dim=2)

    def selection(self, indices: Tensor) -> Callable[[], None]:
        """What makes row b row ``indices[b]``, once it is called, and cannot fail: all memory is taken
        before.
        """
        rows, was_uniform = indices.tolist(), self.is_uniform
        selected = [tuple(page.selected(indices) for page in store.pages) for store, _ in self.stores()]
        of_groups = [groups.selected(indices) for groups, _ in self.groups]

        def take() -> None:
            stores, groups_of = list(self.stores()), list(self.groups)
            if self.padding is not None:
                self.padding = tuple(self.padding[row] for row in rows)
            if isinstance(self.layout, LevelLayout):
                self.layout = self.layout.select_rows(rows)
            self.shape = self.shape._replace(batch=len(rows))
            picked = None if was_uniform else rows[: 1 if self.is_uniform else None]
            for (store, _), pages in zip(stores, selected, strict=True):
                store.set_pages(pages)
                if picked is not None:
                    store.lost = [store.lost[row] for row in picked]
            for (groups, _), group_pages in zip(groups_of, of_groups, strict=True):
                groups.take(group_pages, picked)
            self._set_levels()

        return take


def _put(store: LevelStore, x: Tensor, first: int, lost: list[int]) -> None:
    """Numbers (B, heads, n, dim) as the positions from ``first`` on."""
    store.write(x, slice(None), first, 0)
    store.lost = lost
