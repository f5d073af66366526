"""How many pairs of positions a mask leaves visible, and how many of them share each level: what costs are
counted from.
"""

from __future__ import annotations

import functools

import torch

from structattn.layout.levels import LevelLayout


@functools.lru_cache(maxsize=4096)  # the training loop asks at every step
def visible_pairs(num_queries: int, num_keys: int, window: int | None, is_causal: bool) -> int:
    """The number of (query, key) pairs that a mask leaves visible, the last T of S positions being the
    queries.

    Args:
        num_queries: T.
        num_keys: S.
        window: as in ``structured_attention``; ``None`` is unlimited.
        is_causal: whether later keys are hidden.

    Returns:
        The count, an int; T * S when not causal and without a window.
    """
    reach = max(num_queries, num_keys) if window is None else window
    positions = torch.arange(num_keys - num_queries, num_keys, device="cpu")
    first = (positions - reach + 1).clamp(0, num_keys)
    last = positions if is_causal else (positions + reach - 1)
    return int(((last + 1).clamp(0, num_keys) - first).clamp(min=0).sum())


@functools.lru_cache(maxsize=4096)
def visible_pairs_per_level(
    layout: LevelLayout, num_queries: int, num_keys: int, window: int | None, is_causal: bool, row: int = 0
) -> tuple[int, ...]:
    """The number of visible pairs that share each level; the first is all of them. Arguments as
    ``visible_pairs``.

    Args:
        layout: the levels.
        num_queries, num_keys, window, is_causal: as ``visible_pairs``.
        row: the batch row, where rows have different segments.

    Cost: O((T + S) L).
    """
    levels = range(1, layout.num_levels + 1)
    if layout.windows is not None and not layout.sink_tokens:
        return tuple(visible_pairs(num_queries, num_keys, layout.window_of(n, window), is_causal) for n in levels)
    with torch.device("cpu"):  # numbers are counted, also while a model is built on the meta device
        queries, keys = torch.arange(num_keys - num_queries, num_keys), torch.arange(num_keys)
    end = queries.clamp(max=num_keys - 1) + 1 if is_causal else torch.full_like(queries, num_keys)
    counts = []
    for level in levels:
        low, high = torch.zeros_like(queries), end.clamp(min=0)
        if (reach := layout.window_of(level, window)) is not None:
            low, high = torch.maximum(low, queries - reach + 1), torch.minimum(high, queries + reach)
        if level > 1 and layout.windows is None:
            of_keys, of_queries = (layout.blocks(level, x, row) for x in (keys, queries))
            low = torch.maximum(low, torch.searchsorted(of_keys, of_queries))
            high = torch.minimum(high, torch.searchsorted(of_keys, of_queries, right=True))
        low, high = low.clamp(max=num_keys), torch.maximum(high, low.clamp(max=num_keys))
        sinks = end.clamp(0, min(layout.sink_tokens, num_keys))  # that a query sees, and of them those in the interval
        inside = (torch.minimum(high, sinks) - torch.minimum(low, sinks)).clamp(min=0)
        counts.append(int((high - low + sinks - inside).sum()))
    return tuple(counts)
