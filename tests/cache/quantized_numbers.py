"""The definition of what a cache that stores fewer bits reads: group by group, of dense keys or values."""

import torch
from torch import Tensor

import structattn as sa
from structattn.cache.levels import softmaxes_of, value_levels
from structattn.cache.storage.quantize import quantized


def read(x: Tensor, bits: int, size: int, *, per_token: bool) -> Tensor:
    """The numbers of a group x (B, G, g, d) as they are read."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = x.split(size, dim=3) if per_token else (x,)
    found = []
    for part in parts:
        codes, scale, zero = quantized(part, bits, 3 if per_token else 2)
        found.append(zero.to(wide) + scale.to(wide) * codes.to(wide))
    return torch.cat(found, dim=3).to(x.dtype)


def seen(x: Tensor, levels, bits, storage: sa.Storage, position: int, sinks: int, *, per_token: bool) -> Tensor:
    """Keys or values (B, G, S, d) as a query at a position sees them."""
    out, size, first = x.clone(), storage.group_size, 0
    for level, of_level in zip(levels, bits, strict=True):
        dims = slice(first, first + level.rank)
        first += level.rank
        if of_level == 16 or storage.stays_exact(level.longest):
            continue
        for start in range(0, storage.first_exact(position), size):
            hidden = min(max(0, sinks - start), size)
            if hidden == size:
                continue
            group = x[:, :, start : start + size, dims].clone()
            group[:, :, :hidden] = group[:, :, hidden : hidden + 1]
            group = read(group, of_level, size, per_token=per_token)
            out[:, :, start + hidden : start + size, dims] = group[:, :, hidden:]
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout, window, storage: sa.Storage | None, position: int, **terms
) -> Tensor:
    """What a query (B, H, 1, D) at a position gets from the tokens up to its own, in one layout."""
    if storage is None:
        return sa.structured_attention(q, k, v, layout, window=window, backend="reference", **terms)
    softmaxes = softmaxes_of(layout, window, q.shape[3])
    keys = [level for softmax in softmaxes for level in softmax.levels]
    values = value_levels(softmaxes, layout, v.shape[3])
    sinks = layout.sink_tokens if isinstance(layout, sa.LevelLayout) else 0
    k = seen(k, keys, storage.bits("key_bits", len(keys)), storage, position, sinks, per_token=False)
    v = seen(v, values, storage.bits("value_bits", len(values)), storage, position, sinks, per_token=True)
    if q.dtype.itemsize == 2:
        q, k, v = q.double(), k.double(), v.double()
    return sa.structured_attention(q, k, v, layout, window=window, backend="reference", **terms)
