"""Reads the mask functions of transformers, which say which pairs may attend, and makes a ``StructuredMask``
of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from structattn.errors import ConfigError
from structattn.integrations.transformers.masks.structured_mask import StructuredMask

# The mask functions of transformers are closures: each is known by the code of what its maker returns.
_one = torch.zeros(1, 1, dtype=torch.int64)
_AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_SYMMETRIC = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(_one).__code__
_CHUNKED = masking_utils.chunked_overlay(1, _one).__code__
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # later than 5.17
_REMAPPED = None if _remap is None else _remap(masking_utils.causal_mask_function, _one).__code__


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    """What a mask function means.

    Attributes:
        is_causal: whether later keys are hidden.
        window: keys at this distance or farther are hidden; with ``is_past``, only those before the query.
        chunk_size, packed: see ``StructuredMask``.
    """

    is_causal: bool = False
    window: int | None = None
    is_past: bool = False
    chunk_size: int | None = None
    packed: Tensor | None = None


def _read(function: Callable[..., Any]) -> _Pattern:
    """The meaning of a mask function of transformers; ``ConfigError`` for one that is not known."""
    if function is masking_utils.causal_mask_function:
        return _Pattern(is_causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return _Pattern()
    code = getattr(function, "__code__", None)
    cells = {} if code is None else _cells(function)
    if code is _AND:
        parts = [_read(part) for part in cells["mask_functions"]]
        windows = [part.window for part in parts if part.window is not None]
        chunks = [part.chunk_size for part in parts if part.chunk_size is not None]
        if len(set(chunks)) > 1:
            raise ConfigError(f"this model masks attention by chunks of several sizes, {chunks}, and only one is known")
        packed = [part.packed for part in parts if part.packed is not None]
        return _Pattern(
            is_causal=any(part.is_causal for part in parts),
            window=min(windows, default=None),
            is_past=any(part.is_past for part in parts),
            chunk_size=chunks[0] if chunks else None,
            packed=packed[0] if packed else None,
        )
    if code is _SLIDING:
        return _Pattern(window=cells["sliding_window"], is_past=True)
    if code is _SYMMETRIC:  # it shows the distance that it names
        return _Pattern(window=cells["sliding_window"] + 1)
    if code is _PACKED:
        return _Pattern(packed=cells["packed_sequence_mask"])
    if code is _CHUNKED:  # counted from the first real token, as `attention_mask` shows it
        return _Pattern(chunk_size=cells["chunk_size"])
    if code is not None and code is _REMAPPED:
        return _read(cells["mask_function"])
    raise ConfigError(
        f"this model masks attention by {getattr(function, '__qualname__', function)!r}, which structured attention "
        "does not know, and a mask that is left out would leak: known are masks of all pairs, causal masks, sliding "
        "windows, chunks, padding and packed sequences"
    )


def _assert_pattern(
    function: Callable[..., Any],
    batch: int,
    num_queries: int,
    num_keys: int,
    window: int | None,
    *,
    is_causal: bool,
    is_custom: bool,
    device: torch.device | str,
) -> _Pattern:
    """The meaning of a mask function that torch.compile traces, which cannot look into closures.

    It is taken for one with that window and causality, and the compiled code asserts, over all pairs, that it
    is: transformers wraps the mask of every uncompiled batch that could be packed, and that this one is not
    packed is known at run time only.
    """
    if is_custom:
        raise ConfigError(
            "structured attention in transformers knows masks of all pairs, causal masks and sliding windows, and this "
            "is another"
        )
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[None, None, :, None]
    keys = torch.arange(num_keys, device=device)[None, None, None, :]
    rows = torch.arange(batch, device=device)[:, None, None, None]
    if window is not None and not is_causal:
        window += 1  # see _read
    distance = queries - keys
    expected = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        expected = expected & (distance.abs() < window)
    torch._assert_async(
        (function(rows, torch.zeros_like(rows), queries, keys) == expected).all(),
        f"the mask of this batch is not {'causal' if is_causal else 'of all pairs or a window'}: sequences packed by "
        "position_ids and masks of other kinds cannot be compiled: leave this batch uncompiled",
    )
    return _Pattern(is_causal=is_causal, window=window)


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function closes over."""
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}


def structured_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> StructuredMask:
    """The mask function of structured attention, for ``transformers.AttentionMaskInterface``.

    It never returns ``None``, so that a mask that the model dropped is detected.

    Args:
        q_length, kv_length: T and S.
        q_offset, kv_offset: tokens before the queries, and keys that the cache has dropped.
        mask_function: which pairs may attend, without padding.
        attention_mask: (B, S).
        local_size: sliding window that the mask function has.
        use_vmap: whether the mask function is custom.
        device: of the model's inputs.
        **options: of other mask functions; ``allow_is_bidirectional_skip`` is only given with masks that are
            not causal.

    Raises:
        ConfigError: the mask is one that structured attention does not know; see ``read_padding``.
    """
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if torch.compiler.is_compiling() and mask_function not in plain:
        pattern = _assert_pattern(
            mask_function,
            batch_size,
            q_length,
            kv_length,
            local_size,
            is_causal="allow_is_bidirectional_skip" not in options,
            is_custom=use_vmap,
            device=device,
        )
    else:
        pattern = _read(mask_function)
    if pattern.is_past and not pattern.is_causal:
        raise ConfigError(
            "this model masks attention by a window that hides keys before a query and none after it, which structured "
            "attention does not know"
        )
    if isinstance(q_offset, Tensor) or kv_offset != 0 or kv_length != q_offset + q_length:
        raise ConfigError(
            f"structured attention needs all keys in order, and this cache returns {kv_length} keys from position "
            f"{kv_offset} on for {q_length} queries: a static cache, or a sliding-window cache that dropped keys. Pass "
            "cache=level_cache(model) (structattn.integrations.transformers)"
            if pattern.is_causal
            else "structured attention needs queries and keys of the same tokens, and this mask is for "
            f"{q_length} queries and {kv_length} keys: cross attention and prefixes are not supported"
        )
    return StructuredMask(
        num_queries=q_length,
        num_keys=kv_length,
        attention_mask=attention_mask,
        is_causal=pattern.is_causal,
        window=pattern.window,
        chunk_size=pattern.chunk_size,
        packed=pattern.packed,
    )
