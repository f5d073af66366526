"""Whether the options of a cache are in their ranges, and new tokens, and what is given with them, fit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from structattn.cache.contents import TokenShape
from structattn.cache.latent import Latent
from structattn.cache.storage import LayerStorage, Storage, storage_of_heads
from structattn.checks import MAX_LENGTH, check_int_tensor, check_size, check_tensor, check_type, describe, is_int
from structattn.errors import ConfigError, ShapeError
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.ops.checks import is_transformed, taken_dtype
from structattn.ops.terms import DTYPES


def checked_shape(q: Tensor | None, k: Tensor, v: Tensor, latent: Latent | None) -> TokenShape:
    """What new tokens need of a cache.

    Args:
        q, k, v, latent: as of ``LevelCache.attend``; q is ``None`` where the tokens are only appended.

    Raises:
        ShapeError: they are no tensors of that shape, or of different batches, lengths, dtypes or devices.
        ConfigError: ``torch.vmap`` gives other keys or values to each of its calls.
    """
    named_tensors = (("k", k), ("v", v)) if q is None else (("q", q), ("k", k), ("v", v))
    for name, x in named_tensors:
        check_tensor(name, x)
        shape = x.shape  # every step pays for this
        if len(shape) != 4 or not shape[1] or not shape[3] or x.dtype not in DTYPES:
            raise ShapeError(
                f"{name} must be floating point of shape (batch, heads, length, dim), of 16, 32 or 64 bits, with at "
                f"least 1 head and dim, got {x.dtype} {tuple(x.shape)}"
            )
    (batch, key_heads, length, key_dim), dtype, device = k.shape, taken_dtype(k), k.device
    for name, x in named_tensors:
        if x is k:
            continue
        shape = x.shape
        if shape[0] != batch or shape[2] != length:
            raise ShapeError(f"new tokens need one batch and length: k is {tuple(k.shape)}, {name} is {tuple(x.shape)}")
        if taken_dtype(x) != dtype or x.device != device:
            raise ShapeError(
                f"new tokens need one dtype and device: k is {k.dtype} on {k.device}, {name} {x.dtype} on {x.device}"
            )
    if q is not None:
        _check_queries(q, k, v, latent)
    if is_transformed() and any(torch._C._functorch.is_batchedtensor(x) for x in (k, v)):
        raise ConfigError(
            "a cache cannot keep other keys and values for each call that torch.vmap makes: give what vmap maps over "
            "as rows of the batch"
        )
    if latent is not None and key_heads != 1:
        raise ShapeError(
            "a cache that keeps hidden states is given those in place of keys, (batch, 1, length, E), got "
            f"{tuple(k.shape)}"
        )
    return TokenShape(
        batch=batch,
        keys=(key_heads, key_dim),
        values=(v.shape[1], v.shape[3]),
        dtype=dtype,
        device=device,
    )


def _check_queries(q: Tensor, k: Tensor, v: Tensor, latent: Latent | None) -> None:
    if q.shape[1] % k.shape[1] or q.shape[1] % v.shape[1]:
        raise ShapeError(
            f"the query heads must be a multiple of the key and value heads, got {q.shape[1]}, {k.shape[1]}, "
            f"{v.shape[1]}"
        )
    if latent is None and q.shape[3] != k.shape[3]:
        raise ShapeError(f"head dimensions differ: q {q.shape[3]}, k {k.shape[3]}")
    if latent is not None and q.shape[3] != latent.key_dim:
        raise ShapeError(f"queries need the dimension of the keys, {latent.key_dim}, got {q.shape[3]}")


def check_layout_of_call(
    layout: LevelLayout | None, text: TextLayout | None, cache_layout: AnyLayout | None, batch: int
) -> None:
    """Raises unless a call is given the segments of its tokens where the layout is that of a ``text``, else
    no layout.
    """
    if layout is not None and text is None:
        raise ConfigError(
            f"the layout of this cache is always {cache_layout}: leave layout at None, got {describe(layout)}"
        )
    if text is not None:
        if layout is None or not text.fits(layout):
            raise ConfigError(
                f"a cache with {text} needs its levels with the segments that the tokens see: got {describe(layout)}"
            )
        if len(layout.boundaries or ()) != max(batch, 1):
            raise ShapeError(
                f"segments need one entry per batch row: expected {batch}, got {len(layout.boundaries or ())}"
            )


def checked_padding(left_padding: Tensor | Sequence[int]) -> tuple[int, ...]:
    """``left_padding`` as ints, one per row; or ``ConfigError``."""
    if isinstance(left_padding, Tensor):
        check_int_tensor("left_padding", left_padding, (None,))
    paddings = left_padding.tolist() if isinstance(left_padding, Tensor) and not left_padding.is_meta else left_padding
    is_valid = isinstance(paddings, list | tuple) and all(is_int(x) and 0 <= x <= MAX_LENGTH for x in paddings)
    if not (is_valid and paddings):
        raise ConfigError(f"left_padding needs one int of at least 0 per batch row, got {describe(left_padding)}")
    return tuple(paddings)


def _check_storage(storage: Storage, layout: Any, latent: Any) -> None:
    """Raises ``ConfigError`` unless numbers can be stored in other bits."""
    if latent is not None:
        raise ConfigError("a cache that keeps hidden states stores them as they are: leave storage at None")
    if isinstance(layout, TextLayout) or (isinstance(layout, LevelLayout) and layout.boundaries is not None):
        raise ConfigError(
            "groups of tokens are quantized together, and segments end anywhere: give blocks (LevelLayout.halving), or "
            "leave storage at None"
        )
    if storage.keep is not None and layout is not None:
        raise ConfigError(
            f"far tokens are chosen (keep={storage.keep}) by heads of plain attention: leave layout at None, or keep, "
            f"got {describe(layout)}"
        )
    levels = layout.num_levels if isinstance(layout, LevelLayout) else 1 if layout is None else len(layout.ranks)
    values = len(layout.value_ranks) if isinstance(layout, LevelLayout) and layout.value_ranks else 1
    storage.bits("key_bits", levels)
    storage.bits("value_bits", values)


def check_options(layout: Any, latent: Any, storage: LayerStorage, **sizes: Any) -> None:
    """Raises ``ConfigError`` unless the options of a ``LevelCache`` are in their ranges; only its
    ``page_size`` is never ``None``.
    """
    if isinstance(layout, HeadLayouts):
        if latent is not None:
            raise ConfigError("a cache that keeps hidden states has one layout for all heads: leave latent at None")
        of_heads = zip(layout.layouts, storage_of_heads(storage, layout.num_heads), strict=True)
        for head_layout, head_storage in dict.fromkeys(of_heads):
            check_options(head_layout, None, head_storage, **sizes)
        return
    if isinstance(storage, tuple):
        if latent is not None:
            raise ConfigError("a cache that keeps hidden states stores them as they are: leave storage at None")
        for head_storage in dict.fromkeys(storage):
            check_options(layout, None, head_storage, **sizes)
        return
    layout_types = (LevelLayout, GlobalWindowLayout, TextLayout, type(None))
    check_type("layout", layout, layout_types, "a LevelLayout, GlobalWindowLayout, HeadLayouts, TextLayout or None")
    for name, value in sizes.items():
        if value is not None or name == "page_size":
            check_size(name, value, MAX_LENGTH)
    if storage is not None:
        _check_storage(storage, layout, latent)
        if storage.keep is not None and any(sizes.get(name) is not None for name in ("window", "chunk_size")):
            raise ConfigError("a window or chunks forget far tokens: leave window and chunk_size at None, or keep")
    if latent is not None and not all(hasattr(latent, name) for name in ("key_dim", "num_rstd", "can_absorb")):
        raise ConfigError(f"latent must be a Latent, such as Attention.latent, or None, got {describe(latent)}")
    if sizes.get("chunk_size") is not None and isinstance(layout, LevelLayout | TextLayout) and layout.sink_tokens:
        raise ConfigError("tokens of a chunk see no other chunk, and so no sink tokens: leave chunk_size at None")
    if sizes.get("window") is not None and isinstance(layout, GlobalWindowLayout):
        raise ConfigError("a global-window layout has its own window: leave window at None")
