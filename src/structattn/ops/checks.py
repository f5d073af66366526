"""The checks of the arguments of ``structured_attention``: every mistake is named with both values."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from structattn.errors import ConfigError, ShapeError
from structattn.layout import LevelLayout


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def taken_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the op takes a tensor: its own, or that of autocast, as PyTorch's attention does."""
    kind = x.device.type
    if x.dtype == torch.float64 or not x.is_floating_point() or kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as the op takes them: under autocast in its dtype."""
    return tuple(x.to(taken_dtype(x)) for x in tensors)


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ``ShapeError`` unless q, k and v fit each other; their dtypes may differ where autocast makes them one."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(
            x.dim() == 4,
            f"{name} must be 4-dimensional (batch, heads, length, dim), got shape {tuple(x.shape)}",
        )
        _require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")
        _require(min(x.shape) >= 1, f"{name} has an empty dimension: shape {tuple(x.shape)}")
        _require(
            taken_dtype(x) == taken_dtype(q) and x.device == q.device,
            f"q, k and v need one dtype and device: q is {q.dtype} on {q.device}, {name} is {x.dtype} on {x.device}",
        )
    _require(
        q.shape[0] == k.shape[0] == v.shape[0],
        f"batch sizes differ: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}",
    )
    _require(k.shape[1] == v.shape[1], f"k has {k.shape[1]} heads but v has {v.shape[1]}")
    _require(
        q.shape[1] % k.shape[1] == 0,
        f"the query heads must be a multiple of the key/value heads, got {q.shape[1]} and {k.shape[1]}",
    )
    _require(k.shape[2] == v.shape[2], f"k has {k.shape[2]} positions but v has {v.shape[2]}")
    _require(q.shape[3] == k.shape[3], f"head dimensions differ: q {q.shape[3]}, k {k.shape[3]}")


def _check_ints(name: str, x: Tensor) -> None:
    _require(
        x.dim() == 1 and x.dtype in (torch.int32, torch.int64),
        f"{name} must be a 1-dimensional int32 or int64 tensor, got {x.dtype} of shape {tuple(x.shape)}",
    )


def _has_values(x: Tensor) -> bool:
    """Whether the numbers can be looked at: not while tracing, and not on a GPU, which would have to be waited for."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)


def check_sequences(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, left_padding: Tensor | None) -> None:
    """Raises ``ShapeError`` or ``ConfigError`` unless the borders or the padding fit q and k."""
    batch, num_queries, num_keys = q.shape[0], q.shape[2], k.shape[2]
    if cu_seqlens is not None and left_padding is not None:
        raise ConfigError("give cu_seqlens (packed sequences) or left_padding (padded batch), not both")
    if cu_seqlens is not None:
        _check_ints("cu_seqlens", cu_seqlens)
        _require(
            batch == 1 and num_queries == num_keys,
            f"cu_seqlens needs batch 1 and as many queries as keys, got batch {batch}, {num_queries} and {num_keys}",
        )
        _require(cu_seqlens.shape[0] >= 2, "cu_seqlens needs at least 2 entries, the borders of one sequence")
        if _has_values(cu_seqlens):
            ends = cu_seqlens.tolist()
            _require(
                ends[0] == 0 and ends[-1] == num_keys and all(a < b for a, b in pairwise(ends)),
                f"cu_seqlens must rise from 0 to the length {num_keys}, one entry per sequence end, got {ends[:8]}",
            )
        elif cu_seqlens.is_cuda and not torch.compiler.is_compiling():
            rises = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_keys) & (cu_seqlens.diff() > 0).all()
            torch._assert_async(rises, f"cu_seqlens must rise from 0 to the length {num_keys}")  # nothing waits for it
    if left_padding is not None:
        _check_ints("left_padding", left_padding)
        _require(
            left_padding.shape[0] == batch,
            f"left_padding needs one count per batch row: expected {batch}, got {left_padding.shape[0]}",
        )
        if _has_values(left_padding):
            low, high = int(left_padding.min()), int(left_padding.max())
            _require(low >= 0 and high <= num_keys, f"left_padding must lie in [0, {num_keys}], got {low} to {high}")


def check_layout(q: Tensor, v: Tensor, layout: LevelLayout, cu_seqlens: Tensor | None) -> None:
    """Raises ``ShapeError`` unless value ranks and per-row boundaries fit the tensors."""
    if layout.value_ranks is not None and sum(layout.value_ranks) != v.shape[3]:
        raise ShapeError(
            f"the value_ranks of the layout must sum to the value dimension: expected {v.shape[3]}, got "
            f"{'|'.join(map(str, layout.value_ranks))} = {sum(layout.value_ranks)}"
        )
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if layout.num_rows not in (None, rows):
        what = "batch row" if cu_seqlens is None else "packed sequence"
        raise ShapeError(f"boundaries per row need one entry per {what}: expected {rows}, got {layout.num_rows}")


def check_options(q: Tensor, k: Tensor, window: int | None, attn_bias: Tensor | None, dropout_p: float) -> None:
    """Raises ``ShapeError`` or ``ConfigError`` unless window, bias and dropout are in their ranges."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ConfigError(f"window must be None or an int of at least 1, got {window!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ConfigError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    if attn_bias is not None:
        target = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if not attn_bias.is_floating_point():
            raise ShapeError(
                f"attn_bias is added to the scores and must be floating point, got {attn_bias.dtype}; write a bool mask "
                "as zeros with -inf where a pair is hidden"
            )
        shape = tuple(attn_bias.shape)
        fits = len(shape) <= 4 and all(a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False))
        _require(fits, f"attn_bias of shape {shape} does not broadcast to (B, H, T, S) = {target}")
