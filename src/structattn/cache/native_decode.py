"""A decoding step in C++: one call writes the token of all levels and attends, where Python would make some
sixty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from structattn.cache.levels import Level, Softmax
from structattn.cache.storage import GroupStore, LevelStore, Storage
from structattn.layout.scaling import Scaling, score_factors
from structattn.ops.checks import is_plain, is_quiet

_NEVER = 2**62


@functools.lru_cache(maxsize=64)
def step_factors(
    levels: tuple[tuple[tuple[int, ...], Scaling], ...], scale: float | None, dtype: torch.dtype
) -> Tensor:
    """For ranks and scaling of each softmax: what each dimension of a query is multiplied by, and then, for
    each level, its sum with those before.

    A level that is added changes the scale of the sum so far: 0 where there is none.
    """
    of_dims: list[float] = []
    of_levels: list[float] = []
    for ranks, scaling in levels:
        previous = 0.0
        for number, (rank, of_level, of_count) in enumerate(
            zip(ranks, *score_factors(ranks, scaling, scale), strict=True)
        ):
            of_dims += [of_level * of_count] * rank
            of_levels.append(0.0 if number == 0 else of_count / previous if previous else 1.0)
            previous = of_count
    with torch.inference_mode(False):
        return torch.tensor(of_dims + of_levels, dtype=dtype, device="cpu")


class Step:
    """What the C++ code reads of a cache whose rows are all at one position: its pages, and how positions lie
    in them.

    It holds until pages are added, moved or taken away.

    Args:
        softmaxes, chunk_size: of the cache.
        keys, values: its stores, with their levels; each has a slot for the next position.
        sinks: its sink tokens, keys and values, all of which are there.
        groups, storage: its quantized tokens, for each of keys and values, and how they are stored.
        row, pad: of the layout, and the padding of all rows.
        length: tokens so far, padding included.
        k, v: the next token, (B, G, 1, D) and (B, Gv, 1, V), of the dtype of what is kept.

    Attributes:
        lengths: of the cache, at which every store has a slot for the next token.
    """

    def __init__(
        self,
        softmaxes: Sequence[Softmax],
        chunk_size: int | None,
        keys: Sequence[tuple[LevelStore, Level]],
        values: Sequence[tuple[LevelStore, Level]],
        *,
        sinks: Sequence[LevelStore] = (),
        groups: Sequence[GroupStore | None] = (),
        storage: Storage | None = None,
        row: int,
        pad: int,
        length: int,
        k: Tensor,
        v: Tensor,
    ) -> None:
        self._stores, self._row, self._pad = [*keys, *values], row, pad
        quantized = list(groups) or [None] * len(self._stores)
        self._pages = []
        for (store, _), codes in (
            *zip(self._stores, quantized, strict=True),
            *(((sink, None), None) for sink in sinks),
        ):
            self._pages += [buffer.flatten(0, 1) for page in store.pages for buffer in page.buffers]
            if codes is not None:
                self._pages += [x.flatten(0, 1) for page in codes.pages for x in page]
        position = length - pad
        stop = position + 1 if any(level.has_segments for _, level in self._stores) else _NEVER
        num_sinks = softmaxes[0].layout.sink_tokens
        size, residual = (1, 0) if storage is None else (storage.group_size, storage.residual)
        plan = [-1, chunk_size or 0, num_sinks, size, residual, len(softmaxes)]
        plan += [len(softmax.levels) for softmax in softmaxes]
        if storage is not None:  # from there on another group is quantized
            stop = min(stop, storage.first_exact(position) + size + residual - 1)
        for (store, level), codes in zip(self._stores, quantized, strict=True):
            start = level.start(position, row)
            block, begins = (0, start) if level.has_segments else (level.block_size, -1)
            plan += (block, begins, store.ring or 0, level.window or 0, store.dim, store.num_pages)
            plan += (0, 0, 0) if codes is None else (codes.format.bits, codes.ring or 0, len(codes.pages))
            if store.longest is None or store.capacity < store.longest:
                stop = min(stop, store.capacity + (0 if store.ring is not None else start))
        for store in sinks:
            plan += (0, -1, 0, 0, store.dim, store.num_pages, 0, 0, 0)
        self.lengths = range(length, stop + pad)
        self._levels = tuple((softmax.layout.ranks, softmax.layout.scaling) for softmax in softmaxes)
        self._shapes = k.shape, v.shape
        self._dtype = k.dtype
        self._number = 0  # of the calls
        with torch.inference_mode(False):
            self._plan = torch.tensor(plan, device="cpu")
            self._old = k.new_empty(k.numel() + v.numel())
        self._last: tuple[torch.Size, float | None] | None = None  # shape of the queries and scale of the last call
        self._factors = k  # for that scale

    def write(self, k: Tensor, v: Tensor, length: int, overwritten: list[Callable[[], object]] | None) -> None:
        """Writes the next token.

        Args:
            length: tokens so far.
            overwritten: gets a function that writes back what was there.
        """
        self._call(None, k, v, self._factors, length, overwritten)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        length: int,
        overwritten: list[Callable[[], object]] | None,
    ) -> Tensor:
        """Writes the next token, and returns its attention to all tokens there are, (B, H, 1, V).

        Args:
            q: (B, H, 1, D), of the dtype of what is kept.
            scale: of the call.
            length, overwritten: see ``write``.
        """
        if self._last is None or self._last[1] is not scale:
            self._factors = step_factors(self._levels, scale, torch.promote_types(self._dtype, torch.float32))
        self._last = q.shape, scale
        return self._call(q, k, v, self._factors, length, overwritten)

    def try_attend(
        self,
        q: Any,
        k: Any,
        v: Any,
        scale: object,
        order: Tensor | None,
        length: int,
        overwritten: list[Callable[[], object]],
    ) -> Tensor | None:
        """``attend`` without other checks; ``None``, with nothing written, where an argument differs from the
        last ones in more than its numbers.

        Args:
            order: of the dimensions of queries and keys, see ``LevelCache.try_step``.
        """
        if self._last is None or length not in self.lengths or torch.is_grad_enabled() or not is_quiet():
            return None
        shape, last_scale = self._last
        if scale is not last_scale and not (type(scale) is float and scale == last_scale):
            return None
        for x, expected in ((q, shape), (k, self._shapes[0]), (v, self._shapes[1])):
            if not (is_plain(x) and x.shape == expected and x.dtype is self._dtype and x.is_cpu):
                return None
        return self._call(q, k, v, self._factors, length, overwritten, order)

    def _call(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        factors: Tensor,
        length: int,
        overwritten: list[Callable[[], object]] | None,
        order: Tensor | None = None,
    ) -> Tensor:
        position = length - self._pad
        self._number += 1
        if overwritten is not None:
            if overwritten:  # several tokens since the mark: what they write over is kept for each
                self._old, self._plan = torch.empty_like(self._old), self._plan.clone()
            overwritten.append(functools.partial(self._put_back, position, self._number, self._old, self._plan))
        out: Tensor = torch.ops.structattn_native.step(
            q, k, v, factors, order, self._pages, self._plan, self._old, position, self._number
        )
        return out

    def _put_back(self, position: int, number: int, old: Tensor, plan: Tensor) -> None:
        """Writes back what a call has written over; nothing, if it broke off before it did."""
        if int(plan[0]) != number:
            return
        sizes = [shape.numel() for shape in self._shapes]
        parts = [x.view(shape[0] * shape[1], -1) for x, shape in zip(old.split(sizes), self._shapes, strict=True)]
        stores, places, numbers = iter(self._stores), [], []
        for x in parts:
            first = 0
            while first < x.shape[1]:
                store, level = next(stores)
                places.append(store.place(store.slot(position, level.start(position, self._row))))
                numbers.append(x.narrow(1, first, store.dim))
                first += store.dim
        places[0][0].write_token(places, numbers)
