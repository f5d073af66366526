"""New tokens into the stores of a cache: one token of all rows in a few operations, since decoding does nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from structattn.cache.contents import Contents
from structattn.cache.store import Store


def _per_store(contents: Contents, k: Tensor, v: Tensor) -> list[Tensor]:
    """What goes into each store, in their order: slices of the last axis."""
    if contents.latent is None:
        keys = list(k.split([store.dim for store in contents.keys], dim=-1))
    else:
        keys = [k]
        if contents.latent.num_rstd:
            with torch.no_grad():
                keys.append(contents.latent.rstd(k[:, 0])[:, None].to(k.dtype))
    return keys + list(v.split([store.dim for store in contents.values], dim=-1))


def append(contents: Contents, k: Tensor, v: Tensor) -> None:
    """Adds tokens: keys (or states) and values as ``LevelCache.attend`` takes them."""
    count = k.shape[2]
    if k.shape[0] == 0 or count == 0:
        pass  # nothing to keep
    elif count == 1 and contents.is_uniform:
        _append_alike(contents, k, v)
    elif count == 1:
        _append_one(contents, k, v)
    else:
        _append_many(contents, k, v)
    contents.length += count


def _append_alike(contents: Contents, k: Tensor, v: Tensor) -> None:
    """One token per row, all at one position: all levels in one operation."""
    row, _, pad = next(iter(contents.rows))
    position = contents.length - pad
    if position < 0:
        return
    if (step := contents.step(k, v)) is not None:
        step.write(k, v, contents.length, contents.before)
        return
    flat = (k.flatten(0, 2), v.flatten(0, 2)) if contents.latent is None else (k, v)
    numbers = [x.flatten(0, -2) for x in _per_store(contents, *flat)]
    cells: list[Tensor] = []
    for store, level in contents.stores():
        slot = store.slot(position, level.start(position, row))
        contents.grow(store, slot + 1, k if len(cells) < len(contents.keys) else v)
        page, place = store.place(slot)
        cells.append(page.select(2, place))
        if contents.before is not None and _writes_over(contents, store, position, slot):
            contents.before.keep(cells[-1])
    torch._foreach_copy_(cells, numbers)


def _append_one(contents: Contents, k: Tensor, v: Tensor) -> None:
    """One token per row, at positions of their own."""
    for (store, level), x in zip(contents.stores(), _per_store(contents, k, v), strict=True):
        slots: list[int | None] = []
        lost: list[int | None] = []
        for row, _, pad in contents.rows:
            position = contents.length - pad
            if position < 0:
                slots.append(None)
                lost.append(None)
                continue
            slot = store.slot(position, level.start(position, row))
            slots.append(slot)
            lost.append(slot if _writes_over(contents, store, position, slot) else None)
        contents.grow(store, max((slot + 1 for slot in slots if slot is not None), default=0), x)
        if contents.before is not None:
            for page, index in store.locate(lost):
                contents.before.keep(page, index)
        store.write_each(x, slots)


def _append_many(contents: Contents, k: Tensor, v: Tensor) -> None:
    """Several tokens, row by row."""
    count = k.shape[2]
    for (store, level), x in zip(contents.stores(), _per_store(contents, k, v), strict=True):
        for row, batch, pad in contents.rows:
            first, last = contents.length - pad, contents.length - pad + count - 1
            if last < 0:
                continue
            start = level.start(last, row)
            oldest = max(start, 0) if store.ring is None else last - store.ring + 1
            low = max(first, oldest, 0)
            slots = last - start + 1 if store.ring is None else min(last + 1, store.ring)
            contents.grow(store, slots, x)
            if first > 0 and contents.before is not None:
                lost, end = max(low, store.ring or 0), last + 1
                if store.ring is None and contents.length == contents.before.length:
                    before = level.start(first - 1, row)  # its block is written over, if it is another
                    end = low if before == start else min(end, start + first - before)
                for span in store.spans(lost, end, start):
                    contents.before.keep(span.rows(batch))
            store.write(x[batch, :, low - first :], batch, low, start)


def _writes_over(contents: Contents, store: Store, position: int, slot: int) -> bool:
    """Whether a slot may hold a position that was wanted at the mark: of the block before, or of the round before in a ring."""
    if store.ring is not None:
        return position >= store.ring
    # Later ones of a block that began since the mark: too many are kept, which changes nothing.
    is_next = contents.before is not None and contents.before.length == contents.length
    return position > 0 and (slot == 0 or not is_next)
