"""``LevelCache``: the keys and values of one attention layer, of which each level keeps only the block that decoding is in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structattn.cache import decode, files, fused
from structattn.cache.latent import Latent
from structattn.cache.levels import Level, Part, parts_of, value_levels, widest
from structattn.cache.store import Store
from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.layout import GlobalWindowLayout, Layout, LevelLayout
from structattn.ops import Backend, structured_attention
from structattn.ops.checks import check_tensors

# So many new tokens at once are decoded one run after the other; more are computed as a stretch of a sequence.
_FEW_TOKENS = 16
PAGE_SIZE = 1024  # tokens


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What the first tokens fixed: (heads, dimension) of keys and values."""

    batch: int
    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class LevelCache:
    """Keys and values of one causal attention layer while it decodes, without what no later query can share.

    A pair of positions shares level l only inside one block of that level, so level l keeps the slices of the keys (and, with
    ``value_ranks``, of the values) of the block that decoding is in: T r_1 + sum over l > 1 of r_l min(T, block_size_l)
    numbers per key head instead of T D (``layout.key_cache_size``). With a sliding window a level keeps at most the window.

    Blocks are counted from the first real token of each row. What is kept carries no gradient.

    Args:
        layout: as of ``structured_attention``. Default ``None``: plain attention, everything is kept.
        window: sliding window in positions. Default ``None``.
        max_length: tokens for which memory is taken with the first ones; more are possible. Default ``None``: it grows by pages.
        page_size: tokens per page. What is allocated is ``layout.key_cache_size(T)`` with each level rounded up to a page (but
            never above its longest block). Default 1,024.
        left_padding: (B,) ints, leading tokens of each row that are padding. Default ``None``.
        latent: makes keys from a hidden state that all heads share; then ``attend`` is given that state in place of
            keys, and it is what is kept. Default ``None``. See ``Attention.new_cache``.

    Attributes:
        length: tokens so far, padding included.

    Raises:
        ConfigError: an option is out of its range.

    Example:
        >>> cache = LevelCache(LevelLayout.halving((4, 2, 2), 64))
        >>> q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
        >>> cache.attend(q, k, v).shape, cache.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1]).shape
        (torch.Size([1, 2, 40, 8]), torch.Size([1, 2, 1, 8]))

    Cost: a decoding step costs what it reads: the numbers that are kept, once each. Appending copies the new tokens alone.

    Source: the idea is Kuang et al. 2025, section 5 (a cache of T sum r_l / p_l); ragged rows, windows, values, latent states
    and any chunking are ours.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        *,
        window: int | None = None,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
        latent: Latent | None = None,
    ) -> None:
        for name, value in (("window", window), ("max_length", max_length), ("page_size", page_size)):
            optional = name != "page_size"
            if (value is None and optional) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
                continue
            raise ConfigError(f"{name} must be a positive int{' or None' if optional else ''}, got {value!r}")
        if window is not None and isinstance(layout, GlobalWindowLayout):
            raise ConfigError("a global-window layout has its own window: leave window at None")
        self.layout = layout
        self.window = window
        self.max_length = max_length
        self.page_size = page_size
        self.latent = latent
        self.length = 0
        self._padding = None if left_padding is None else _padding(left_padding)
        self._shape: _Shape | None = None
        self._parts: tuple[Part, ...] = ()
        self._keys: list[Store] = []
        self._values: list[Store] = []
        self._key_levels: tuple[Level, ...] = ()
        self._value_levels: tuple[Level, ...] = ()

    @property
    def batch_size(self) -> int | None:
        """B, known from the first tokens or from ``left_padding``."""
        if self._shape is not None:
            return self._shape.batch
        return None if self._padding is None else len(self._padding)

    @property
    def left_padding(self) -> tuple[int, ...] | None:
        """Leading tokens of each row that are padding; ``None`` without padding."""
        return self._padding

    @property
    def key_nbytes(self) -> int:
        """Bytes that are allocated for keys (or for the latent state)."""
        return sum(store.nbytes for store in self._keys)

    @property
    def value_nbytes(self) -> int:
        """Bytes that are allocated for values."""
        return sum(store.nbytes for store in self._values)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self.key_nbytes + self.value_nbytes

    @property
    def keeps(self) -> str:
        """What is kept of the keys: ``"key features"`` or ``"hidden state"``."""
        return "key features" if self.latent is None else "hidden state"

    def __repr__(self) -> str:
        return (
            f"LevelCache(length={self.length}, nbytes={self.nbytes:,}, keeps={self.keeps!r}, layout={self.layout}, "
            f"window={self.window})"
        )

    # Rows: one for all where they stand at the same positions with the same blocks, else one per row of the batch.

    @property
    def _is_uniform(self) -> bool:
        rows = self.layout.num_rows if isinstance(self.layout, LevelLayout) else None
        return rows is None and len(set(self._padding or (0,))) == 1

    @property
    def _rows(self) -> Iterator[tuple[int, slice, int]]:
        """(row of the layout, rows of the batch, padding) of each."""
        if self._is_uniform:
            yield 0, slice(None), (self._padding or (0,))[0]
            return
        assert self._shape is not None
        for row, pad in enumerate(self._padding or (0,) * self._shape.batch):
            yield row, slice(row, row + 1), pad

    def positions(self, count: int) -> Tensor:
        """The positions of the next tokens in their sequences, counted from the first real token.

        Args:
            count: how many.

        Returns:
            int64 (count,), or (B, count) with left padding, negative in the padding.
        """
        steps = torch.arange(self.length, self.length + count)
        return steps if self._padding is None else steps - torch.tensor(self._padding)[:, None]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, backend: Backend = "auto"
    ) -> Tensor:
        """Appends new tokens and returns the attention of their queries over all tokens so far.

        The result is that of ``structured_attention`` over all keys and values, of the last T queries.

        Args:
            q: (B, H, T, D), after rotary embedding.
            k: keys of the new tokens, (B, Gk, T, D), Gk dividing H, after rotary embedding; with ``latent`` the hidden states,
                (B, 1, T, E).
            v: (B, Gv, T, V), Gv dividing H.
            scale: as of ``structured_attention``; the same at every call.
            backend: ``"auto"`` decodes few tokens straight from what is kept (where no gradient is asked for), on a GPU by a
                fused kernel if ``max_length`` was given; so does ``"triton"``, or raises. Any other is given all keys as a
                dense tensor.

        Returns:
            (B, H, T, V).

        Raises:
            ShapeError: a shape, dtype or device does not fit, or is not that of the first tokens.
            BackendUnavailableError: the named backend cannot run here; the message says why.
        """
        self._check(q, k, v)
        kept_k, kept_v = k.detach(), v.detach()
        if self.length == 0:
            out = self._dense(q, self._made(k, 0), v, scale, backend)
            self._append(kept_k, kept_v)
            return out
        if not self._is_direct(q, k, v, backend):
            state, values = self._all(k, v)
            out = self._dense(q, self._made(state, 0), values, scale, backend)
            self._append(kept_k, kept_v)
            return out
        outs = []
        for first, end in self._runs(q.shape[2]):
            self._append(kept_k[:, :, first:end], kept_v[:, :, first:end])
            outs.append(self._decode(q[:, :, first:end], scale, backend))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _is_direct(self, q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> bool:
        """Whether new tokens are decoded straight from what is kept: few ones, past the padding, without a gradient."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return False
        makes_keys = self.latent is not None and not self.latent.can_absorb
        is_past_padding = self.length >= max(self._padding or (0,))
        return backend in ("auto", "triton") and q.shape[2] <= _FEW_TOKENS and is_past_padding and not makes_keys

    def append(self, k: Tensor, v: Tensor) -> None:
        """Appends tokens without attending; arguments as ``attend``."""
        self._check(None, k, v)
        self._append(k.detach(), v.detach())

    def _check(self, q: Tensor | None, k: Tensor, v: Tensor) -> None:
        for name, x in (("k", k), ("v", v)) if q is None else (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4 or min(x.shape) < 1 or not x.is_floating_point():
                raise ShapeError(
                    f"{name} must be floating point of shape (batch, heads, length, dim), all at least 1, got {x.dtype} "
                    f"{tuple(x.shape)}"
                )
            if x.shape[0] != k.shape[0] or x.shape[2] != k.shape[2]:
                raise ShapeError(
                    f"new tokens need one batch and length: k is {tuple(k.shape)}, {name} is {tuple(x.shape)}"
                )
            if x.dtype != k.dtype or x.device != k.device:
                raise ShapeError(
                    f"new tokens need one dtype and device: k is {k.dtype} on {k.device}, {name} {x.dtype} on {x.device}"
                )
        if q is not None:
            if any(q.shape[1] % heads for heads in (k.shape[1], v.shape[1])):
                raise ShapeError(
                    f"the query heads must be a multiple of the key and value heads, got {q.shape[1]}, {k.shape[1]}, {v.shape[1]}"
                )
            if self.latent is None and q.shape[3] != k.shape[3]:
                raise ShapeError(f"head dimensions differ: q {q.shape[3]}, k {k.shape[3]}")
        found = _Shape(
            batch=k.shape[0],
            keys=(k.shape[1], k.shape[3]),
            values=(v.shape[1], v.shape[3]),
            dtype=k.dtype,
            device=k.device,
        )
        if self._shape is None:
            if self._padding is not None and len(self._padding) != found.batch:
                raise ShapeError(
                    f"left_padding has {len(self._padding)} rows, but the tokens have {found.batch}: they need to be equal"
                )
            self._build(found)
        elif found != self._shape:
            raise ShapeError(f"the tokens must be like the first ones: expected {self._shape}, got {found}; or reset()")

    def _build(self, shape: _Shape) -> None:
        """Makes the stores, empty, for the shape of the first tokens."""
        layout = self.layout
        if layout is not None and self.latent is None and layout.head_dim != shape.keys[1]:
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
        self._shape = shape
        self._set_levels(shape)
        dims = [level.rank for level in self._key_levels]
        if self.latent is not None:
            dims = [shape.keys[1], self.latent.num_gains]
        self._keys = [self._store(dim, level) for dim, level in zip(dims, self._key_levels, strict=False)]
        self._values = [self._store(level.rank, level) for level in self._value_levels]
        if not self._is_uniform:
            for store in (*self._keys, *self._values):
                store.oldest = [0] * shape.batch

    def _set_levels(self, shape: _Shape) -> None:
        """The levels of each store."""
        self._parts = parts_of(self.layout, self.window, shape.keys[1])
        if self.latent is None:
            self._key_levels = tuple(level for part in self._parts for level in part.levels)
        else:
            self._key_levels = (widest(self._parts),) * (2 if self.latent.num_gains else 1)
        self._value_levels = value_levels(self._parts, self.layout, shape.values[1])

    def _store(self, dim: int, level: Level) -> Store:
        """An empty store for a level. A ring is used where blocks are longer than the window."""
        reserve = 0 if self.max_length is None else level.most_slots(self.max_length)
        return Store(dim, ring=level.ring, longest=level.longest, page_size=self.page_size, reserve=reserve)

    def _stores(self) -> Iterator[tuple[Store, Level]]:
        yield from zip(self._keys, self._key_levels, strict=True)
        yield from zip(self._values, self._value_levels, strict=True)

    def _made(self, state: Tensor, first: int) -> Tensor:
        """Keys from what ``attend`` was given: itself, or made from the hidden states from array index ``first`` on."""
        if self.latent is None:
            return state
        steps = torch.arange(first, first + state.shape[2], device=state.device)
        if self._padding is not None:
            steps = steps - torch.tensor(self._padding, device=state.device)[:, None]
        return self.latent.keys(state[:, 0], steps)

    def _kept(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """What goes into each store, in their order."""
        assert self._shape is not None
        if self.latent is None:
            keys = list(k.split([store.dim for store in self._keys], dim=3))
        else:
            keys = [k]
            if self.latent.num_gains:
                keys.append(self.latent.gains(k[:, 0])[:, None])
        return keys + list(v.split([store.dim for store in self._values], dim=3))

    def _append(self, k: Tensor, v: Tensor) -> None:
        count = k.shape[2]
        if count == 1 and self._is_uniform:
            self._append_alike(k, v)
        elif count == 1:
            self._append_one(k, v)
        else:
            for (store, level), x in zip(self._stores(), self._kept(k, v), strict=True):
                for row, batch, pad in self._rows:
                    first, last = self.length - pad, self.length - pad + count - 1
                    if last < 0:
                        continue
                    start = level.start(last, row)
                    oldest = max(start, 0) if store.ring is None else last - store.ring + 1
                    low = max(first, oldest, 0)
                    slots = last - start + 1 if store.ring is None else min(last + 1, store.ring)
                    store.grow(slots, x)
                    store.write(x[batch, :, low - first :], batch, low, start)
                    store.oldest[row] = max(store.oldest[row], oldest)
        self.length += count

    def _append_alike(self, k: Tensor, v: Tensor) -> None:
        """One token per row, all at one position: all levels in one operation."""
        row, _, pad = next(iter(self._rows))
        position = self.length - pad
        if position < 0:
            return
        cells, numbers = [], []
        for (store, level), x in zip(self._stores(), self._kept(k, v), strict=True):
            start = level.start(position, row)
            slot, oldest = position - start, start
            if store.ring is not None:
                slot, oldest = position % store.ring, position - store.ring + 1
            if slot >= store.capacity:
                store.grow(slot + 1, x)
            store.oldest[row] = max(store.oldest[row], oldest)
            cells.append(store.cell(slot))
            numbers.append(x.flatten(0, 2))
        torch._foreach_copy_(cells, numbers)

    def _append_one(self, k: Tensor, v: Tensor) -> None:
        """One token per row, at positions of their own."""
        for (store, level), x in zip(self._stores(), self._kept(k, v), strict=True):
            slots: list[int | None] = []
            for row, _, pad in self._rows:
                position = self.length - pad
                if position < 0:
                    slots.append(None)
                    continue
                start = level.start(position, row)
                slots.append(store.slot(position, start))
                oldest = start if store.ring is None else position - store.ring + 1
                store.oldest[row] = max(store.oldest[row], oldest)
            store.grow(max((slot + 1 for slot in slots if slot is not None), default=0), x)
            store.write_each(x, slots)

    def _runs(self, count: int) -> list[tuple[int, int]]:
        """New tokens in runs that lie in one block of every level; single ones with a window, whose rings forget."""
        if count == 1:
            return [(0, 1)]
        is_single = any(part.window is not None for part in self._parts)
        pads = [(row, pad) for row, _, pad in self._rows]
        levels = [level for part in self._parts for level in part.levels]
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

    def _decode(self, q: Tensor, scale: float | None, backend: Backend) -> Tensor:
        """Attention of the last tokens, which are appended already and lie in one block of every level."""
        places: list[tuple[int, int]] = [(row, self.length - 1 - pad) for row, _, pad in self._rows]
        held = decode.Held(
            parts=self._parts,
            keys=self._keys,
            values=list(zip(self._values, self._value_levels, strict=True)),
            latent=self.latent,
            places=places,
        )
        if backend == "triton" or (q.is_cuda and fused.why_not(q, held) is None):
            return fused.attention(q, held, scale)
        return decode.attention(q, held, scale)

    def _all(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys (or states) and values as dense tensors, with zeros where nothing is kept, and the new ones behind."""
        assert self._shape is not None
        count = self.length
        past = [
            k.new_zeros((k.shape[0], k.shape[1], count, k.shape[3])),
            v.new_zeros((v.shape[0], v.shape[1], count, v.shape[3])),
        ]
        for x, stores in zip(past, (self._keys[: 1 if self.latent else None], self._values), strict=True):
            levels = self._key_levels if x is past[0] else self._value_levels
            dim = 0
            for store, level in zip(stores, levels, strict=False):
                for row, batch, pad in self._rows:
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

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: Backend) -> Tensor:
        """Attention over dense keys and values."""
        heads = math.lcm(k.shape[1], v.shape[1])  # divides the query heads, as both do
        k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        check_tensors(q, k, v)
        padding = None
        if self._padding is not None:  # a row may still be in its padding
            padding = torch.tensor(self._padding, device=q.device).clamp(max=k.shape[2])
        return structured_attention(
            q, k, v, self.layout, scale=scale, window=self.window, left_padding=padding, backend=backend
        )

    def reset(self) -> None:
        """Forgets all tokens; memory, shape and padding stay."""
        self.length = 0
        for store, _ in self._stores():
            store.oldest = [0] * len(store.oldest)

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``.

        Args:
            length: at most ``self.length``.

        Raises:
            ConfigError: ``length`` is negative or more than there are.
            CacheError: the next token would share a level with keys that are no longer kept: those of an earlier block,
                or beyond the window. Nothing is changed then.
        """
        oldest = self.check_crop(length)
        for (store, _), kept in zip(self._stores(), oldest, strict=True):
            store.oldest = kept
        self.length = length

    def check_crop(self, length: int) -> list[list[int]]:
        """Raises what ``crop`` would raise, and changes nothing; returns the oldest position of each store and row then."""
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= self.length:
            raise ConfigError(f"crop takes a length from 0 to {self.length}, the tokens there are; got {length!r}")
        oldest = []
        for store, level in self._stores():
            kept = []
            for row, _, pad in self._rows:
                following = length - pad  # the position of the token that comes next
                needed = max(0, level.first_needed(following, row))
                if needed < following and store.oldest[row] > needed:
                    raise CacheError(
                        f"cannot crop from {self.length} to {length} tokens: level {level.number} would need the positions from "
                        f"{needed} on, and keeps those from {store.oldest[row]} on; crop to a length of at least "
                        f"{self._shortest()}, or reset() and start again"
                    )
                kept.append(max(0, min(following, store.oldest[row])))
            oldest.append(kept)
        return oldest

    def _shortest(self) -> int:
        """The smallest length above 0 from which on every crop works."""
        length = self.length
        while length > 1 and all(
            (needed := max(0, level.first_needed(length - 1 - pad, row))) >= length - 1 - pad
            or store.oldest[row] <= needed
            for store, level in self._stores()
            for row, _, pad in self._rows
        ):
            length -= 1
        return length

    def reorder(self, indices: Tensor) -> None:
        """Row b becomes row ``indices[b]``: what beam search does with its beams.

        Args:
            indices: (B,) int, each in [0, B).

        Raises:
            ShapeError: it is not of that shape, or an index is out of range.
        """
        if self.batch_size is not None and tuple(indices.shape) != (self.batch_size,):
            raise ShapeError(f"indices must have shape ({self.batch_size},), one per row, got {tuple(indices.shape)}")
        self.select(indices)

    def select(self, indices: Tensor) -> None:
        """Keeps rows ``indices``, in that order; a row may be taken several times.

        Args:
            indices: (N,) int, each in [0, B).

        Raises:
            ShapeError: it is not of that shape, or an index is out of range.
        """
        if indices.dim() != 1 or indices.is_floating_point() or indices.dtype == torch.bool or not len(indices):
            raise ShapeError(f"indices must be a 1-dimensional int tensor, got {indices.dtype} {tuple(indices.shape)}")
        size = self.batch_size
        if size is None:
            return
        rows = indices.tolist()
        if min(rows) < 0 or max(rows) >= size:
            raise ShapeError(f"indices must lie in [0, {size}), got {min(rows)} to {max(rows)}")
        was_uniform = self._is_uniform
        if self._padding is not None:
            self._padding = tuple(self._padding[row] for row in rows)
        if isinstance(self.layout, LevelLayout):
            self.layout = self.layout.select_rows(rows)
        if self._shape is None:
            return
        self._shape = replace(self._shape, batch=len(rows))
        for store, _ in self._stores():
            store.select(indices)
            if self._is_uniform and not was_uniform:
                store.oldest = store.oldest[:1]
        self._set_levels(self._shape)

    def repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one behind the other."""
        if self.batch_size is not None:
            self.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain data and tensors from which ``from_state`` makes an equal cache; the layout is not among them.

        Raises:
            CacheError: the cache is empty.
        """
        if self._shape is None or not self.length:
            raise CacheError("an empty cache has nothing to save: decode first")
        plain = {
            "window": self.window,
            "max_length": self.max_length,
            "page_size": self.page_size,
            "length": self.length,
            "left_padding": self._padding,
            "keeps": self.keeps,
            "oldest": [store.oldest for store, _ in self._stores()],
            "key_shape": self._shape.keys,
            "value_shape": self._shape.values,
        }
        return plain, {str(n): torch.cat(store.pages, dim=3) for n, (store, _) in enumerate(self._stores())}

    @classmethod
    def from_state(
        cls, plain: dict[str, Any], tensors: dict[str, Tensor], layout: Layout | None, latent: Latent | None
    ) -> LevelCache:
        """A cache from what ``state`` returned, its layout, and with a hidden state its latent."""
        if (plain["keeps"] == "hidden state") != (latent is not None):
            raise ConfigError(
                f"the cache keeps the {plain['keeps']}: "
                + ("give the latent of its layer (Attention.latent)" if latent is None else "it takes no latent")
            )
        cache = cls(
            layout,
            window=plain["window"],
            max_length=plain["max_length"],
            page_size=plain["page_size"],
            left_padding=plain["left_padding"],
            latent=latent,
        )
        first = tensors["0"]
        (key_heads, key_dim), (value_heads, value_dim) = plain["key_shape"], plain["value_shape"]
        cache._build(
            _Shape(
                batch=first.shape[0],
                keys=(key_heads, key_dim),
                values=(value_heads, value_dim),
                dtype=first.dtype,
                device=first.device,
            )
        )
        cache.length = plain["length"]
        for number, ((store, _), oldest) in enumerate(zip(cache._stores(), plain["oldest"], strict=True)):
            store.pages, store.oldest = [tensors[str(number)]], list(oldest)
        return cache

    def save(self, path: str | Path) -> None:
        """Writes the cache to a safetensors file, at once and completely or not at all; ``load`` verifies it.

        Raises:
            CacheError: it is empty.
            CheckpointError: it cannot be written.
        """
        files.save(path, [(self.state(), self.layout)])

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device | str | None = None, latent: Latent | None = None
    ) -> LevelCache:
        """Reads what ``save`` wrote; decoding goes on with the same numbers.

        Args:
            path: the file.
            device: where the tensors go. Default: the CPU.
            latent: of the layer (``Attention.latent``), for a cache that keeps hidden states.

        Raises:
            CheckpointError: the file is missing, truncated, changed, or not a cache.
            ConfigError: a latent is missing or not needed.
        """
        layers = files.load(path, device)
        if len(layers) != 1:
            raise ConfigError(f"{path} holds the caches of {len(layers)} layers: read it with LayerCaches.load")
        (state, layout) = layers[0]
        return cls.from_state(*state, layout, latent)


def _padding(given: Tensor | Sequence[int]) -> tuple[int, ...]:
    values = given.tolist() if isinstance(given, Tensor) else list(given)
    if not values or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in values):
        raise ConfigError(f"left_padding needs one int of at least 0 per batch row, got {values!r}")
    return tuple(values)
