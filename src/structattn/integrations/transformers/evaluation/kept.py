"""The bytes that any cache of transformers keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from structattn.integrations.transformers.caches.layer_cache import LevelCacheLayer


def cache_nbytes(cache: Any) -> int:
    """The bytes that a cache has allocated: ``nbytes`` of our layers, and the memory of all tensors of those
    of transformers.

    A tensor that is a view counts with the whole of its memory, and memory that several share counts once.
    """
    total, storages = 0, {}
    for x in _kept(cache):
        if isinstance(x, LevelCacheLayer):
            total += x.nbytes
        else:
            storage = x.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return total + sum(storages.values())


def _kept(cache: Any) -> Iterator[Tensor | LevelCacheLayer]:
    waiting = [cache]
    while waiting:
        x = waiting.pop()
        if isinstance(x, LevelCacheLayer):
            yield x
            waiting += (states for states in vars(x).values() if isinstance(states, Mapping))  # of a recurrence
        elif hasattr(x, "__tensor_flatten__"):  # of quanto: codes, scales and shifts, the codes packed in one more
            waiting += [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        elif isinstance(x, Tensor):
            yield x
        elif isinstance(x, Cache | CacheLayerMixin):
            waiting += vars(x).values()
        elif isinstance(x, Mapping):  # of hqq: scales and zeros beside the codes
            waiting += x.values()
        elif isinstance(x, list | tuple):
            waiting += x
