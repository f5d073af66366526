"""Attention of the tokens of many requests in one row, whose keys are in the pages of a server."""

from __future__ import annotations

from torch import Tensor

from structattn.cache.paged import PackedCache
from structattn.errors import ConfigError
from structattn.layers.attention import Attention
from structattn.layers.checks import check_states
from structattn.layers.scaled_queries import scaled_queries
from structattn.layout.text import TextLayout
from structattn.ops.terms import ScoreTerms


def attend_packed(attention: Attention, cache: PackedCache, layer: int, x: Tensor, positions: Tensor) -> Tensor:
    """``attention`` of new tokens of many requests, concatenated: (1, T, E) to (1, T, E).

    Args:
        attention: the module, without dropout.
        cache: such as a ``PagedCache``, which knows the request of each token, and keeps the keys as
            features.
        layer: number of the module in the cache.
        x: (1, T, E).
        positions: int (T,), of each token in its request.

    Raises:
        ConfigError: the attention is not causal, or has a ``TextLayout``.
        CacheError: see ``PagedCache.attend``.
    """
    layout = attention.layout
    if not attention.is_causal or isinstance(layout, TextLayout):
        raise ConfigError(
            f"a paged cache is for causal attention with equal blocks: this module has is_causal={attention.is_causal} "
            f"and layout {layout}"
        )
    scoring = attention.scoring
    check_states("x", x, attention.embed_dim, next(scoring.matrix.parameters()))
    q = scoring.queries(x, scoring.cached_order)
    if attention.rotary is not None:
        q = attention.rotary(q, positions)
    k = attention.latent.keys(x, positions)
    v = attention.value_proj(x).unflatten(-1, (attention.num_kv_heads, attention.head_dim)).transpose(1, 2)
    q, scale = scaled_queries(scoring, layout, q)
    q, k = q.to(v.dtype), k.to(v.dtype)
    out = cache.attend(layer, q, k, v, ScoreTerms(scale=scale), layout=layout, window=attention.window)
    projected: Tensor = attention.out_proj(out.transpose(1, 2).flatten(-2))
    return projected
