"""What one layer's cache keeps, by position: stores for each level, and the rows of the batch that share positions or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from structattn.cache import native_decode
from structattn.cache.decode import KeyValueView
from structattn.cache.latent import Latent
from structattn.cache.levels import Level, Softmax, softmaxes_of, value_levels, widest
from structattn.cache.native_decode import Step
from structattn.cache.store import TEXT_PAGE_SIZE, Store
from structattn.cache.undo import Before
from structattn.checks import MAX_LENGTH, check_size, check_sizes, describe
from structattn.errors import CacheError, CheckpointError, ConfigError, ShapeError
from structattn.layout.global_window import Layout
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.memory import check_memory
from structattn.ops.checks import check_layout
from structattn.ops.terms import DTYPES


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
        return cls(
            batch=first.shape[0],
            keys=(keys[0], keys[1]),
            values=(values[0], values[1]),
            dtype=first.dtype,
            device=first.device,
        )


class Contents:
    """The numbers that a cache keeps for the tokens so far.

    Args:
        shape: of the tokens.
        layout, window, chunk_size, max_length, page_size, latent: as of ``LevelCache``.
        padding: leading padding tokens of each row, or ``None``.
        text: where the segments of the layout are those of a text, of which ``set_layout`` tells the new ones.

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
        self.length = 0
        self._factors: dict[tuple[object, ...], Tensor] = {}
        self._step: Step | None = None
        self.before: Before | None = None
        self.set_levels()
        dims = [level.rank for level in self.key_levels]
        if latent is not None:
            dims = [shape.keys[1], latent.num_rstd]

        def store(dim: int, level: Level) -> Store:
            reserve, size = 0 if max_length is None else level.most_slots(max_length), page_size
            if text is not None and level.number > 1 and level.ring is None:
                reserve, size = 0, min(page_size, TEXT_PAGE_SIZE, max_length or page_size)
            return Store(dim, ring=level.ring, longest=level.longest, page_size=size, reserve=reserve)

        self.keys = [store(dim, level) for dim, level in zip(dims, self.key_levels, strict=False)]
        self.values = [store(level.rank, level) for level in self.value_levels]
        self.reset()

    def set_levels(self) -> None:
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

    def set_layout(self, layout: LevelLayout) -> None:
        """The layout from now on: other segments from the next token on, the current ones as they were, one entry per row."""
        if layout == self.layout:
            return
        was_uniform = self.is_uniform
        self.layout = layout
        self.set_levels()
        if was_uniform and not self.is_uniform:
            for store, _ in self.stores():
                store.lost = store.lost * self.shape.batch

    def stores(self) -> Iterator[tuple[Store, Level]]:
        """All stores with their levels, keys first."""
        yield from zip(self.keys, self.key_levels, strict=True)
        yield from zip(self.values, self.value_levels, strict=True)

    # Rows: one for all where they are at the same positions with the same blocks, else one per row of the batch.

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
        for store, _ in self.stores():
            store.lost = [0] * (1 if self.is_uniform else self.shape.batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_factors": {}, "_step": None, "before": None}

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
        return plain, {str(n): torch.cat(store.pages, dim=3) for n, (store, _) in enumerate(self.stores())}

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what ``state`` returned.

        Raises:
            OtherLatentError: the latent is of another layer.
            CheckpointError: a number or a tensor is not one that ``state`` returns.
        """
        stores, length, oldest = list(self.stores()), plain["length"], plain["oldest"]
        names = [str(number) for number in range(len(stores))]
        if self.latent is not None and len(tensors) == len(oldest) != len(names):
            raise OtherLatentError("the latent is of another layer: it keeps other levels than the file has")
        if sorted(tensors) != sorted(names) or len(oldest) != len(names):
            raise CheckpointError(
                f"expected {len(names)} tensors, {', '.join(names)}, got {', '.join(sorted(tensors))}"
            )
        check_size("length", length, MAX_LENGTH)
        heads = [self.shape.keys[0]] * len(self.keys) + [self.shape.values[0]] * len(self.values)
        self.length, self._step = length, None
        for name, (store, level), count, firsts in zip(names, stores, heads, oldest, strict=True):
            x = tensors[name]
            if self.latent is not None and x.dim() == 4 and x.shape[2] != store.dim:
                raise OtherLatentError(
                    "the latent is of another layer: its keys or states have other sizes than those that are kept"
                )
            if x.dim() != 4 or x.shape[:3] != (self.shape.batch, count, store.dim) or x.dtype != self.shape.dtype:
                raise CheckpointError(
                    f"tensor {name} must be {self.shape.dtype} of shape ({self.shape.batch}, {count}, {store.dim}, slots), got {x.dtype} "
                    f"{tuple(x.shape)}"
                )
            slots = min(store.page_size, store.page_size if store.longest is None else store.longest)
            check_memory(f"pages of {slots} tokens", x[..., :1].numel() * slots, x.dtype)
            rows = list(self.rows)
            if len(firsts) != len(rows):
                raise CheckpointError(f"oldest must have {len(rows)} positions for tensor {name}, got {len(firsts)}")
            for first, (row, _, pad) in zip(firsts, rows, strict=True):
                self._check_held(name, store, level, x.shape[3], first, row, pad)
            store.pages, store.lost = [x], list(firsts)
        if found := next(self._lost(length), None):
            level, needed, first = found
            raise CheckpointError(
                f"level {level.number} needs the positions from {needed} on, and keeps those from {first} on"
            )

    def _check_held(self, name: str, store: Store, level: Level, slots: int, oldest: int, row: int, pad: int) -> None:
        """Raises ``CheckpointError`` unless a tensor has a slot for each position from ``oldest`` on."""
        last = self.length - 1 - pad
        if last < 0:
            start, needed = 0, 0
        else:
            start = level.start(last, row) if store.ring is None else max(0, last - store.ring + 1)
            needed = last - start + 1 if store.ring is None else min(last + 1, store.ring)
        if not start <= oldest <= max(0, last + 1):
            raise CheckpointError(f"oldest of tensor {name} must be from {start} to {max(0, last + 1)}, got {oldest}")
        if slots < needed:
            raise CheckpointError(f"tensor {name} has {slots} slots, and {self.length} tokens need {needed}")

    def _oldest(self, store: Store, level: Level, row: int, pad: int) -> int:
        """The first position of a row from which on all are held: of the current block, or of the last round of a ring."""
        last = self.length - 1 - pad
        if last < 0:
            return store.lost[row]
        return max(store.lost[row], level.start(last, row) if store.ring is None else last - store.ring + 1)

    def grow(self, store: Store, slots: int, like: Tensor) -> None:
        """Takes pages for a store until there are ``slots``; see ``Store.grow``."""
        if slots > store.capacity:
            self._step = None
            if self.before is not None:
                self.before.pages.append((store, store.num_pages))
            store.grow(slots, like)

    def step(self, k: Tensor, v: Tensor) -> Step | None:
        """What writes the next token, and attends, in C++; ``None`` where it cannot: rows at several positions, hidden states, or no C++ code.

        Args:
            k, v: the token, (B, G, 1, D) and (B, Gv, 1, V).

        Raises:
            CacheError: there is no memory for it.
        """
        if not self.is_uniform or self.latent is not None or not native_decode.is_here(k):
            return None
        row, _, pad = next(iter(self.rows))
        position = self.length - pad
        if position < 0:
            return None
        if self._step is None or self.length not in self._step.lengths:
            for store, level in self.stores():
                self.grow(store, store.slot(position, level.start(position, row)) + 1, k if store in self.keys else v)
            self._step = Step(
                self.softmaxes,
                self.chunk_size,
                list(zip(self.keys, self.key_levels, strict=True)),
                list(zip(self.values, self.value_levels, strict=True)),
                row=row,
                pad=pad,
                length=self.length,
                k=k,
                v=v,
            )
        return self._step

    def try_step(self, q: Any, k: Any, v: Any, scale: object, order: Tensor | None) -> Tensor | None:
        """Marks, appends the next token and returns its attention, if the C++ code has just taken a token like it.

        Args:
            q, k, v, scale, order: see ``LevelCache.try_step``; they are not checked.

        Returns:
            (B, H, 1, V); ``None``, with nothing changed, where an argument differs in more than its numbers.
        """
        if self._step is None:
            return None
        mark = Before(length=self.length, layout=self.layout)
        try:
            out = self._step.try_attend(q, k, v, scale, order, self.length, mark)
            if out is not None:
                self.before = mark
                self.length += 1
            return out
        except BaseException:
            self.before = mark
            self.take_back()
            raise

    def mark(self) -> None:
        """Marks the point to which ``take_back`` returns."""
        self.before = Before(length=self.length, layout=self.layout)

    def take_back(self) -> None:
        """Makes the contents what they were at the mark, from which on tokens were appended and nothing else was done."""
        assert self.before is not None
        self.before.put_back()
        if self.before.pages:
            self._step = None
        if self.layout is not self.before.layout:
            was_uniform = self.is_uniform
            self.layout = self.before.layout
            self.set_levels()
            if self.is_uniform and not was_uniform:
                for store, _ in self.stores():
                    store.lost = store.lost[:1]
        self.length, self.before = self.before.length, None

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``; see ``LevelCache.crop``."""
        self.check_crop(length)
        for stored in self.stores():
            store, _ = stored
            store.lost = [max(0, min(length - pad, self._oldest(*stored, row, pad))) for row, _, pad in self.rows]
        self.length = length
        if self.text is not None and isinstance(self.layout, LevelLayout) and self.layout.boundaries is not None:
            pads = self.padding or (0,) * len(self.layout.boundaries)
            cut = tuple(
                tuple(tuple(start for start in starts if start < max(1, length - pad)) for starts in levels)
                for levels, pad in zip(self.layout.boundaries, pads, strict=False)
            )
            self.layout = replace(self.layout, boundaries=cut)
            self.set_levels()

    def check_crop(self, length: int) -> None:
        """Raises what ``crop`` would raise, and changes nothing."""
        for level, needed, oldest in self._lost(length):
            shortest = self.length  # from there on every crop works
            while shortest > 1 and not any(self._lost(shortest - 1)):
                shortest -= 1
            raise CacheError(
                f"cannot crop from {self.length} to {length} tokens: level {level.number} would need the positions from "
                f"{needed} on, and keeps those from {oldest} on; crop to a length of at least {shortest}, or reset() and "
                "start again"
            )

    def _lost(self, length: int) -> Iterator[tuple[Level, int, int]]:
        """(level, first position that the token after ``length`` tokens may need, oldest kept) where it is kept no longer."""
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

    def runs(self, count: int) -> list[tuple[int, int]]:
        """New tokens in runs that lie in one block of every level; single ones with a window, whose rings forget."""
        if count == 1:
            return [(0, 1)]
        is_single = any(softmax.slides for softmax in self.softmaxes)
        pads = [(row, pad) for row, _, pad in self.rows]
        levels = [level for softmax in self.softmaxes for level in softmax.levels]
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

    def view(self) -> KeyValueView:
        """What a decoding step reads; the last tokens lie in one block of every level of every row."""
        return KeyValueView(
            softmaxes=self.softmaxes,
            keys=self.keys,
            values=list(zip(self.values, self.value_levels, strict=True)),
            latent=self.latent,
            positions=[(row, self.length - 1 - pad) for row, _, pad in self.rows],
            factors_by_scale=self._factors,
        )

    def dense_keys(self, k: Tensor) -> Tensor:
        """All keys (or states) as a dense tensor, zero where nothing is kept, with the new ones at the end."""
        return self._dense(k, self.keys[: 1 if self.latent else None], self.key_levels)

    def dense_values(self, v: Tensor) -> Tensor:
        """As ``dense_keys``, of the values."""
        return self._dense(v, self.values, self.value_levels)

    def _dense(self, new: Tensor, stores: list[Store], levels: tuple[Level, ...]) -> Tensor:
        count, dim = self.length, 0
        past = new.new_zeros((new.shape[0], new.shape[1], count, new.shape[3]))
        for store, level in zip(stores, levels, strict=False):
            for row, batch, pad in self.rows:
                last = count - 1 - pad
                if last < 0:
                    continue
                start = level.start(last, row)
                first = max(self._oldest(store, level, row, pad), 0)
                if first <= last:
                    found = store.read(batch, first, last + 1, start)
                    past[batch, :, first + pad : count, dim : dim + store.dim] = found.transpose(2, 3)
            dim += store.dim
        return torch.cat([past, new], dim=2)

    def select(self, indices: Tensor) -> None:
        """Row b becomes row ``indices[b]``."""
        rows, was_uniform = indices.tolist(), self.is_uniform
        pages = [store.selected(indices) for store, _ in self.stores()]  # all memory is taken before anything changes
        if self.padding is not None:
            self.padding = tuple(self.padding[row] for row in rows)
        if isinstance(self.layout, LevelLayout):
            self.layout = self.layout.select_rows(rows)
        self.shape = self.shape._replace(batch=len(rows))
        for (store, _), own in zip(self.stores(), pages, strict=True):
            store.pages = own
            if not was_uniform:
                store.lost = [store.lost[row] for row in rows[: 1 if self.is_uniform else None]]
        self.set_levels()
