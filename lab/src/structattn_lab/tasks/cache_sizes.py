"""What the presets ``cache-map`` compare: attention variants by the size of their key/value caches."""

from __future__ import annotations


def cache_map(length: int, head_dim: int) -> tuple[str, ...]:
    """Specs for ``length`` tokens and 4 heads: a whole cache, then about a half, a quarter, an eighth of it,
    and a constant state.

    Args:
        length: T, a multiple of 64: windows are parts of it.
        head_dim: of each head, a multiple of 16: ranks are parts of it.
    """
    part = head_dim // 16
    half = f"sliding:{6 * part}|{10 * part}@-|{length // 5},values={6 * part}|{10 * part}"
    quarter = f"sliding:{2 * part}|{14 * part}@-|{length // 7},values={2 * part}|{14 * part}"
    equal = "|".join([str(4 * part)] * 4)
    return (
        "standard",
        # a half
        "standard,kv_heads=2",
        half,
        f"mlr:{equal},values={equal}",
        f"mla:{56 * part},rope={8 * part}",
        f"[recent:{length // 8 - 4},sinks=4,standard]",
        # a quarter
        "standard,kv_heads=1",
        quarter,
        f"standard,kv_heads=2+{half}",
        f"mla:{24 * part},rope={8 * part}",
        f"recent:{length // 4 - 4},sinks=4",
        f"pooled:8,window={length // 8}",
        "tpa:1",
        # an eighth
        f"standard,kv_heads=2+{quarter}",
        f"mla:{12 * part},rope={4 * part}",
        f"recent:{length // 8 - 4},sinks=4",
        f"pooled:16,window={length * 3 // 64}",
        # a constant state
        f"gated-delta:{16 * part}",
    )
