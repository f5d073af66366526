"""What decoding costs a model: the bytes of its cache, and the time of a token."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structattn_lab.tasks.decode_time import NUM_STEPS, median_ms


def _cache_of(model: Any, tokens: Tensor, room: int) -> Any:
    """The cache after a prompt, with a capacity of ``room`` tokens: of structured attention a compressed one,
    else that of the model.
    """
    from structattn.integrations.transformers import level_cache
    from structattn.integrations.transformers.caches.model_cache import CACHE
    from structattn.integrations.transformers.structurize.classes import StructurizedModel

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    arguments = {CACHE: level_cache(base, max_length=room)} if isinstance(base, StructurizedModel) else {}
    return getattr(model(input_ids=tokens, use_cache=True, **arguments), CACHE)


def cache_bytes(model: Any, tokens: Tensor, mask: Tensor | None) -> int:
    """Bytes that the cache of the tokens of one prompt, (1, T), needs at its end: of the rows that a mask
    shows to the last token.
    """
    cache = _cache_of(model, tokens, tokens.shape[1])
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    total = sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))
    shown = tokens.shape[1] if mask is None else int(mask[-1].sum())
    return total * shown // tokens.shape[1]


def decode_ms(model: Any, tokens: Tensor) -> float:
    """Median milliseconds of one more token after a prompt, (1, T)."""
    from structattn.integrations.transformers.caches.model_cache import CACHE

    cache = {CACHE: _cache_of(model, tokens[:, :-NUM_STEPS], tokens.shape[1])}

    def step(token: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=token, use_cache=True, **cache).logits
        return logits

    return median_ms(step, tokens[:, -NUM_STEPS:])
