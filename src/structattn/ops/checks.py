"""The checks of the arguments of ``structured_attention``: every mistake is named with both values.

A message is made only once it is needed: a compiler that puts a length into text fixes the program to this
length.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import custom_op
from torch.nn import Parameter

from structattn.checks import (
    MAX_LENGTH,
    check_bool,
    check_lengths,
    check_number,
    check_size,
    check_tensor,
    check_type,
    is_autocast,
    is_exporting,
    no_autocast,
)
from structattn.errors import ConfigError, ShapeError
from structattn.layout.checks import check_sum
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.ops.call import Pairs
from structattn.ops.terms import DTYPES, ScoreTerms

_NOTHING = nullcontext()
_PLAIN = (Tensor, Parameter)  # exactly these, no other subclass


def taken_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the op takes a tensor: its own, or that of autocast, as PyTorch's attention does."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as the op takes them: under autocast in its dtype."""
    return tensors if no_autocast() else tuple([x.to(taken_dtype(x)) for x in tensors])


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """The tensors have autocast's dtype already, and scores have float32 at least. The meta device has no
    autocast.
    """
    return _NOTHING if no_autocast() or x.is_meta else torch.autocast(x.device.type, enabled=False)


def is_eager(x: Tensor) -> bool:
    """Whether operations on a tensor run as they are: no compiler, tracer or counter takes part, no subclass
    of tensors and no device without numbers.
    """
    if torch.compiler.is_compiling():
        return False
    return type(x) in _PLAIN and not x.is_meta and torch._C._len_torch_dispatch_stack() == 0


def is_quiet() -> bool:
    """Whether nothing changes what operations do: no compiler, tracer, counter or transform, no autocast."""
    return no_autocast() and torch._C._len_torch_dispatch_stack() == 0 and not is_transformed()


def is_plain(x: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor that ``check_tensor`` lets pass, of no other subclass than a parameter."""
    return type(x) in _PLAIN and not x.is_nested and x.layout is torch.strided  # type: ignore[attr-defined]


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward mode is active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_onnx_export() -> bool:
    """Whether ``torch.onnx.export`` traces: ONNX has none of our operators."""
    return is_exporting() and torch.onnx.is_in_onnx_export()


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ``ShapeError`` unless q, k and v fit each other; their dtypes may differ where autocast makes
    them one.

    Any number of rows, heads, queries and keys may be 0, as PyTorch's attention allows it, but no dimension
    of a vector.
    """
    device = dtype = None
    for name, x in (("q", q), ("k", k), ("v", v)):  # every call pays for this: no message is made that is not needed
        if type(x) not in _PLAIN or x.layout is not torch.strided or x.is_nested:
            check_tensor(name, x)
        if x.dim() != 4:
            raise ShapeError(f"{name} must be 4-dimensional (batch, heads, length, dim), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ShapeError(f"{name} must be floating point, of 16, 32 or 64 bits, got {x.dtype}")
        if device is None:
            device, dtype = x.device, x.dtype
        elif x.device != device or (x.dtype != dtype and taken_dtype(x) != taken_dtype(q)):
            raise ShapeError(
                f"q, k and v need one dtype and device: q is {q.dtype} on {q.device}, {name} is {x.dtype} on {x.device}"
            )
    (batch, heads, _, dim), (key_batch, key_heads, num_keys, key_dim) = q.shape, k.shape
    value_batch, value_heads, num_values, value_dim = v.shape
    if dim < 1 or key_dim < 1 or value_dim < 1:
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if x.shape[3] < 1)
        raise ShapeError(f"{name} has vectors of 0 dimensions: shape {tuple(x.shape)}")
    if not batch == key_batch == value_batch:
        raise ShapeError(f"batch sizes differ: q {batch}, k {key_batch}, v {value_batch}")
    if key_heads != value_heads:
        raise ShapeError(f"k has {key_heads} heads but v has {value_heads}")
    if (heads == 0) != (key_heads == 0) or (heads > 0 and heads % key_heads != 0):
        raise ShapeError(f"the query heads must be a multiple of the key/value heads, got {heads} and {key_heads}")
    if num_keys != num_values:
        raise ShapeError(f"k has {num_keys} positions but v has {num_values}")
    if dim != key_dim:
        raise ShapeError(f"head dimensions differ: q {dim}, k {key_dim}")


def _check_ints(name: str, x: Any, q: Tensor, remedy: str = "") -> None:
    check_tensor(name, x)
    if not (x.dim() == 1 and x.dtype in (torch.int32, torch.int64)):
        raise ShapeError(
            f"{name} must be a 1-dimensional int32 or int64 tensor, got {x.dtype} of shape {tuple(x.shape)}{remedy}"
        )
    if x.is_meta > q.is_meta:
        raise ShapeError(f"{name} has no numbers: it is on the meta device, q on {q.device}")


def checked_pairs(q: Tensor, k: Tensor, pairs: Pairs) -> Pairs:
    """Which pairs are visible, with boundaries and padding that fit q and k; their numbers are checked at run
    time where they are not known.

    Raises:
        ShapeError: shapes, dtypes, devices or numbers do not fit.
        ConfigError: packed sequences and left padding.
    """
    of_queries, of_keys, left_padding = pairs["cu_seqlens"], pairs["cu_seqlens_k"], pairs["left_padding"]
    if of_queries is None and of_keys is None and left_padding is None:
        return pairs
    batch, num_queries, num_keys = q.shape[0], q.shape[2], k.shape[2]
    if of_queries is not None and left_padding is not None:
        raise ConfigError("give cu_seqlens (packed sequences) or left_padding (padded batch), not both")
    if of_queries is None and of_keys is not None:
        raise ConfigError("cu_seqlens_k are the boundaries of the keys: give cu_seqlens, those of the queries, too")
    if of_queries is not None:
        _check_ints("cu_seqlens", of_queries, q)
        if batch != 1 or (of_keys is None and num_queries != num_keys):
            raise ShapeError(
                f"cu_seqlens needs batch 1 and as many queries as keys, got batch {batch}, {num_queries} and "
                f"{num_keys}; other boundaries of the keys are cu_seqlens_k"
            )
        if of_queries.shape[0] < 2:
            raise ShapeError("cu_seqlens needs at least 2 entries, the boundaries of one sequence")
        of_queries = checked_lengths(of_queries, "cu_seqlens", num_queries, are_offsets=True)
        if of_keys is not None:
            _check_ints("cu_seqlens_k", of_keys, q)
            if of_keys.shape != of_queries.shape:
                raise ShapeError(
                    f"cu_seqlens and cu_seqlens_k must be of as many sequences: got {of_queries.shape[0]} and "
                    f"{of_keys.shape[0]} entries"
                )
            of_keys = checked_lengths(of_keys, "cu_seqlens_k", num_keys, are_offsets=True)
    if left_padding is not None:
        _check_ints("left_padding", left_padding, q, "; of an attention mask it is (mask == 0).sum(1)")
        if left_padding.shape[0] != batch:
            raise ShapeError(
                f"left_padding needs one count per batch row: expected {batch}, got {left_padding.shape[0]}"
            )
        left_padding = checked_lengths(left_padding, "left_padding", num_keys, are_offsets=False)
    return pairs | {"cu_seqlens": of_queries, "cu_seqlens_k": of_keys, "left_padding": left_padding}


def check_boundaries(name: str, x: Any, q: Tensor) -> None:
    """Raises ``ShapeError`` unless these may be the boundaries of packed sequences, of which q holds some of
    the tokens.
    """
    _check_ints(name, x, q)
    if q.shape[0] != 1 or x.shape[0] < 2:
        raise ShapeError(
            f"{name} needs batch 1 and at least 2 entries, the boundaries of one sequence, got batch {q.shape[0]} and "
            f"{x.shape[0]} entries"
        )


def checked_lengths(lengths: Tensor, name: str, total: int, *, are_offsets: bool) -> Tensor:
    """The tensor, its numbers checked: at once, or in a compiled program, or inside of a transform, whenever
    it runs.

    Args:
        lengths: int32 or int64; boundaries of packed sequences (N + 1,), or numbers of padding positions
            (B,).
        name: of the argument.
        total: T or S.
        are_offsets: they rise or stay the same from 0 to the total; those of an empty sequence are equal.
            Padding is from 0 to the total each.

    Raises:
        ShapeError: numbers that do not fit; on a GPU, which is not waited for, the device reports it later.
    """
    if is_onnx_export():
        return lengths
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(lengths):
        result: Tensor = torch.ops.structattn.checked_numbers(lengths, name, total, are_offsets)
        return result
    if not isinstance(lengths, FakeTensor):
        _check_lengths(lengths, name, total, are_offsets)
    return lengths


def _check_lengths(lengths: Tensor, name: str, total: int, are_offsets: bool) -> None:
    if lengths.is_cuda:
        if are_offsets:
            fits = (lengths[0] == 0) & (lengths[-1] == total) & (lengths.diff() >= 0).all()
        else:
            fits = ((lengths >= 0) & (lengths <= total)).all()
        torch._assert_async(fits, f"{name} does not fit the length {total}")  # nothing waits for it
    elif lengths.device.type == "cpu":
        check_lengths(name, lengths.tolist(), total, are_offsets=are_offsets)


def _checked_copy(lengths: Tensor, name: str, total: int, are_offsets: bool) -> Tensor:
    _check_lengths(lengths, name, total, are_offsets)
    return lengths.clone()  # an operator may not return its input


_lengths_operator = custom_op(
    "structattn::checked_numbers",
    _checked_copy,
    mutates_args=(),
    schema="(Tensor lengths, str name, SymInt total, bool are_offsets) -> Tensor",
)


@_lengths_operator.register_fake
def _(lengths: Tensor, name: str, total: int, are_offsets: bool) -> Tensor:
    return torch.empty_like(lengths)


@_lengths_operator.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], lengths: Tensor, name: str, total: int, are_offsets: bool
) -> tuple[Tensor, int]:
    rows = lengths.movedim(in_dims[0] or 0, 0)
    return torch.stack([checked_lengths(row, name, total, are_offsets=are_offsets) for row in rows]), 0


def check_layout(
    layout: Layout, head_dim: int | None, value_dim: int, num_rows: int, row_name: str = "batch row"
) -> None:
    """Raises ``ShapeError`` unless ranks, value ranks and per-row boundaries fit; ``head_dim`` is ``None``
    where it is not known.
    """
    if head_dim is not None and layout.head_dim != head_dim:
        check_sum("the ranks of the layout", layout.ranks, head_dim, "the head dimension", ShapeError)
    if isinstance(layout, GlobalWindowLayout):
        return
    if layout.value_ranks is not None:
        check_sum("the value_ranks of the layout", layout.value_ranks, value_dim, "the value dimension", ShapeError)
    if layout.num_rows is not None and layout.num_rows != num_rows:
        raise ShapeError(
            f"a layout with boundaries per row needs one entry per {row_name}: expected {num_rows}, got "
            f"{layout.num_rows}"
        )


def check_options(layout: Any, terms: ScoreTerms, pairs: Pairs, return_lse: Any) -> None:
    """Raises ``ConfigError`` unless everything but the tensors is of its type and in its range."""
    window, dropout_p = pairs["window"], pairs["dropout_p"]
    if isinstance(layout, Tensor):
        raise ConfigError(
            "layout, the fourth argument, must be a layout or None, got a tensor: a mask is attn_mask=..., "
            "bool (True: visible) or added to the scores, as attn_bias=... is"
        )
    if layout is not None and type(layout) is not LevelLayout:
        check_type(
            "layout",
            layout,
            (LevelLayout, GlobalWindowLayout, HeadLayouts),
            "a LevelLayout, a GlobalWindowLayout, HeadLayouts or None",
            "LevelLayout.halving((32, 16), 1024) makes one from ranks, Attention.from_spec takes text, TextLayout.at "
            "gives the layout of a text",
        )
    check_bool("is_causal", pairs["is_causal"])
    check_bool("return_lse", return_lse)
    terms.check_numbers()
    if window is not None:
        check_size("window", window, MAX_LENGTH)
    if type(dropout_p) is not float or dropout_p != 0.0:
        check_number("dropout_p", dropout_p, minimum=0, below=1)
    if isinstance(layout, GlobalWindowLayout):
        if return_lse:
            raise ConfigError("a global-window layout adds two softmaxes and has no single log-sum-exp")
        if terms.scale is not None or window is not None:
            raise ConfigError("a global-window layout has its own scale and window: leave scale and window at None")
