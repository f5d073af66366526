"""The use of a cache in a program that ``torch.compile`` makes: one operator, which runs what runs without a
compiler.

Operators change the tensor with the number of the cache, as far as a compiler knows, so that it neither
leaves one out, nor takes two for one, nor runs them in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structattn.cache.attend import over_dense
from structattn.cache.level_cache import LevelCache
from structattn.cache.numbers import numbered
from structattn.errors import ConfigError
from structattn.ops.checks import autocasted
from structattn.ops.terms import ScoreTerms, needs_gradient

_LIBRARY = torch.library.Library("structattn", "FRAGMENT")


def define(schema: str, function: Any, fake: Any) -> None:
    """Makes an operator of the namespace ``structattn`` that looks up caches.

    Args:
        schema: with its name; it has to change ``cache``.
        function: what it does, outside of autograd.
        fake: the same for shapes only.
    """
    tags = [tag for name in ("cudagraph_unsafe",) if (tag := getattr(torch.Tag, name, None)) is not None]
    _LIBRARY.define(schema, tags=tags)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, torch.no_grad()(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"structattn::{name}", fake, lib=_LIBRARY)


def _attend(
    cache: Tensor,
    layer: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    num_past: int,
    scale: float | None,
    backend: Any,
) -> Tensor:
    level_cache, module = numbered(cache), numbered(layer)
    with level_cache.uncounted(num_past):
        module.check_cache(level_cache)
        level_cache.bind(module)
        if q is None:
            level_cache.append(k, v)
            return k.new_empty(0)
        out: Tensor = level_cache.attend(q, k, v, scale=scale, backend=backend, attn_mask=attn_mask)
        return out.contiguous()


def empty_output(q: Tensor | None, v: Tensor) -> Tensor:
    """(B, H, T, V) without numbers, contiguous, as an operator returns it."""
    return v.new_empty(0) if q is None else q.new_empty((*q.shape[:3], v.shape[3]))


define(
    "attend_cache(Tensor(a!) cache, Tensor layer, Tensor? q, Tensor k, Tensor v, Tensor? attn_mask, SymInt num_past, "
    "float? scale, str backend) -> Tensor",
    _attend,
    lambda cache, layer, q, k, v, *_: empty_output(q, v),
)


def _dense_past(cache: Tensor, k: Tensor, v: Tensor, num_past: int) -> tuple[Tensor, Tensor]:
    level_cache = numbered(cache)
    with level_cache.uncounted(num_past):
        keys, values = level_cache.dense_past(k, v)
    return keys.contiguous(), values.contiguous()


define(
    "dense_past(Tensor(a!) cache, Tensor k, Tensor v, SymInt num_past) -> (Tensor, Tensor)",
    _dense_past,
    lambda cache, k, v, num_past: tuple(x.new_empty((*x.shape[:2], num_past, x.shape[3])) for x in (k, v)),
)


def with_past(number: Tensor | None, k: Tensor, v: Tensor, num_past: int) -> tuple[Tensor, Tensor]:
    """Keys (or hidden states) and values of all tokens, the new ones with their gradients."""
    past = torch.ops.structattn.dense_past(number, k.detach(), v.detach(), num_past)
    keys, values = (torch.cat([old, new], dim=2) for old, new in zip(past, (k, v), strict=True))
    return keys, values


def attend_compiled(
    cache: LevelCache,
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    backend: Any,
    attn_mask: Tensor | None,
) -> Tensor:
    """``LevelCache.attend`` in code that ``torch.compile`` traces.

    Args:
        cache: without text units.
        layer: the layer of the cache, with a ``number``.
        q, k, v, scale, backend, attn_mask: see ``LevelCache.attend``.
    """
    q, k, v = autocasted(q, k, v)
    number, num_past, attend_cache = cache.number, cache.length, torch.ops.structattn.attend_cache
    if not needs_gradient(q, k, v, attn_mask):
        out: Tensor = attend_cache(number, layer.number, q, k, v, attn_mask, num_past, scale, backend)
    else:
        if cache.text is not None:
            raise ConfigError("text units as levels cannot be compiled with a cache and gradients: use torch.no_grad()")
        keys, values, padding = k, v, cache.padding_tensor
        if num_past > 0:
            keys, values = with_past(number, k, v, num_past)
        if cache.latent is not None:
            positions = torch.arange(num_past + k.shape[2])
            positions = positions if padding is None else positions - padding[:, None]
            keys = cache.latent.keys(keys[:, 0], positions.to(k.device))
        out = over_dense(
            q,
            keys,
            values,
            ScoreTerms(scale=scale, attn_mask=attn_mask),
            layout=cache.layout,
            window=cache.window,
            left_padding=None if padding is None else padding.to(q.device).clamp(max=keys.shape[2]),
            backend=backend,
            chunk_size=cache.chunk_size,
        )
        attend_cache(number, layer.number, None, k.detach(), v.detach(), None, num_past, scale, backend)
    cache.count_traced(num_past + k.shape[2])
    return out
