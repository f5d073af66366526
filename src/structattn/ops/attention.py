"""``structured_attention``: the checks of its arguments and the only place where a backend is chosen."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from structattn.errors import BackendUnavailableError, ConfigError, ShapeError, nearest_name
from structattn.layout import GlobalWindowLayout, Layout, LevelLayout
from structattn.ops import custom_op, reference
from structattn.ops.call import Call

Backend = Literal["auto", "reference", "blocked", "triton"]
Choice = Literal["auto", "reference", "blocked", "triton", "scaled_dot_product_attention"]
# Up to so many scores the dense definition is the fastest on a CPU (docs/speed.md).
_DENSE_SCORES = 2**18


def _one_level_scale(layout: LevelLayout, scale: float | None) -> float:
    """The scale of a layout with one level, where every scaling is one number."""
    if scale is not None:
        return scale
    rank = layout.ranks[0]
    match layout.scaling:
        case "variance":
            return 1 / math.sqrt(rank)
        case "mup":
            return 8 / rank
        case "paper" | "paper_sum":
            return 1 / rank


def _one_query(q: Tensor, call: Call) -> bool:
    return q.shape[2] == 1 and call.is_causal  # the last position sees every key


def _needs_mask(q: Tensor, k: Tensor, call: Call) -> bool:
    """Whether PyTorch's kernels could run one level only with a T x S mask that says what ``is_causal`` cannot."""
    if call.window is not None or call.cu_seqlens is not None or call.left_padding is not None:
        return True
    return call.is_causal and q.shape[2] != k.shape[2] and not _one_query(q, call)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """One level without ``_needs_mask`` by PyTorch's own kernels."""
    mask, is_causal = call.attn_bias, call.is_causal and not _one_query(q, call)
    if mask is not None:
        mask = mask.to(q.dtype)
        if is_causal:
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            mask, is_causal = mask.masked_fill(later, -torch.inf), False
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (1, 1, q.shape[2], k.shape[2])))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=is_causal,
        scale=_one_level_scale(call.layout, call.scale),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _reference(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):  # the definition is in float32 at least
        return reference.attention(
            q,
            k,
            v,
            call.layout,
            is_causal=call.is_causal,
            scale=call.scale,
            window=call.window,
            attn_bias=call.attn_bias,
            dropout_p=call.dropout_p,
            cu_seqlens=call.cu_seqlens,
            left_padding=call.left_padding,
        )


def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (CUDA builds of PyTorch bring it); use backend='auto' or 'blocked'"
    if not torch.cuda.is_available() and not _is_interpreted():
        return "PyTorch finds no CUDA device; use backend='auto' or 'blocked'"
    return None


def _is_interpreted() -> bool:
    """Whether Triton's interpreter was asked for, which runs kernels on a CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# A backend by its public name, and the reason why it cannot run on this machine, or None.
_WHY_NOT: dict[str, Callable[[], str | None]] = {
    "reference": lambda: None,
    "blocked": lambda: None,
    "triton": _no_triton,
}


def why_not(backend: str) -> str | None:
    """The reason why a named backend cannot run on this machine, or ``None`` when it can.

    Raises:
        ConfigError: there is no such backend.
    """
    if backend not in _WHY_NOT:
        raise ConfigError(f"unknown backend {backend!r}: {nearest_name(backend, get_args(Backend))}")
    return _WHY_NOT[backend]()


def _why_not_triton(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """The reason why the fused kernels cannot run a call, or ``None``."""
    reason = why_not("triton")
    if reason is not None:
        return reason
    from structattn.ops import triton_attention

    return triton_attention.why_not(
        call.layout,
        device=q.device,
        dtype=q.dtype,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        has_bias=call.attn_bias is not None,
        dropout_p=call.dropout_p,
        has_left_padding=call.left_padding is not None,
        num_queries=q.shape[2],
        num_keys=k.shape[2],
    )


def _choose(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool) -> tuple[Choice, str]:
    """What ``backend="auto"`` runs, and why: the one place that chooses."""
    one_level = call.layout.num_levels == 1
    if one_level and not return_lse and not _needs_mask(q, k, call):
        return "scaled_dot_product_attention", "one level needs nothing else"
    subject = "one level with a mask or a log-sum-exp" if one_level else f"{call.layout.num_levels} levels"
    reason = _why_not_triton(q, k, v, call) if q.device.type == "cuda" else "the tensors are not on a CUDA device"
    if reason is None:
        return "triton", f"{subject}, fused"
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if scores <= _DENSE_SCORES:
        return "reference", f"{scores} scores are few: dense products beat many small ones (no fused kernel: {reason})"
    return "blocked", f"{subject} in linear memory (no fused kernel: {reason})"


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    left_padding: Tensor | None = None,
    return_lse: bool = False,
) -> str:
    """Which code ``backend="auto"`` runs for a call, and why, in one line: ``"blocked: 8 levels in linear memory (...)"``.

    Args: those of ``structured_attention``; only shapes, dtype and device of the tensors are looked at, so that
        ``torch.empty(..., device="meta")`` will do.
    """
    if isinstance(layout, GlobalWindowLayout):
        parts = (
            explain(q, k, v, None, is_causal, None, window, attn_bias, dropout_p, cu_seqlens, left_padding)
            for window in (None, layout.window)
        )
        return "two softmaxes, added: " + "; ".join(parts)
    call = Call(
        layout=layout or _plain(q, k),
        is_causal=is_causal,
        scale=scale,
        window=window,
        attn_bias=attn_bias,
        dropout_p=dropout_p,
        cu_seqlens=cu_seqlens,
        left_padding=left_padding,
    )
    choice, reason = _choose(q, k, v, call, return_lse)
    return f"{choice}: {reason}"


def _plain(q: Tensor, k: Tensor) -> LevelLayout:
    """Plain attention as a layout of one level."""
    return LevelLayout((q.shape[3],), (max(q.shape[2], k.shape[2]),))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(
            x.dim() == 4,
            f"{name} must be 4-dimensional (batch, heads, length, dim), got shape {tuple(x.shape)}",
        )
        _require(x.is_floating_point(), f"{name} must be floating point, got {x.dtype}")
        _require(min(x.shape) >= 1, f"{name} has an empty dimension: shape {tuple(x.shape)}")
        _require(
            x.dtype == q.dtype and x.device == q.device,
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


def _check_sequences(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, left_padding: Tensor | None) -> None:
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


def _check_layout(q: Tensor, v: Tensor, layout: LevelLayout, cu_seqlens: Tensor | None) -> None:
    if layout.value_ranks is not None and sum(layout.value_ranks) != v.shape[3]:
        raise ShapeError(
            f"the value_ranks of the layout must sum to the value dimension: expected {v.shape[3]}, got "
            f"{'|'.join(map(str, layout.value_ranks))} = {sum(layout.value_ranks)}"
        )
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if layout.num_rows not in (None, rows):
        what = "batch row" if cu_seqlens is None else "packed sequence"
        raise ShapeError(f"boundaries per row need one entry per {what}: expected {rows}, got {layout.num_rows}")


def _check_options(q: Tensor, k: Tensor, window: int | None, attn_bias: Tensor | None, dropout_p: float) -> None:
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


@overload
def structured_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    left_padding: Tensor | None = None,
    backend: Backend = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def structured_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    left_padding: Tensor | None = None,
    backend: Backend = "auto",
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def structured_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    left_padding: Tensor | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose score matrix has the structure of a layout.

        out_i = sum_j softmax_j(score(i, j) + bias(i, j)) v_j, with score(i, j) as ``LevelLayout`` defines it.

    Args:
        q: queries, (B, H, T, D), floating point. When T < S they are the last T of the S positions (decoding); when
            T > S the first T - S queries stand before the first key.
        k: keys, (B, G, S, D); G divides H, and query head h reads key head h // (H // G).
        v: values, (B, G, S, V).
        layout: ``LevelLayout`` or ``GlobalWindowLayout``; ``None`` is one level: plain attention.
        is_causal: hide keys later than the query. Default ``True``.
        scale: a number that replaces the layout's scaling: scale * (sum over shared levels of q.k). Default ``None``.
        window: key j is visible to query i when 0 <= i - j < window (causal) or |i - j| < window (not causal).
        attn_bias: added to the scaled scores, broadcastable to (B, H, T, S), floating point; -inf hides a pair.
        dropout_p: probability of dropping an attention weight, from torch's global generator. Default 0.
        cu_seqlens: (N + 1,) int32 or int64, the borders of N packed sequences (B = 1, T = S): pairs of different
            sequences are hidden and blocks start anew in each.
        left_padding: (B,) int32 or int64, the number of leading padding positions of each row: they are hidden, and
            blocks are counted from the first real token.
        backend: ``"auto"`` chooses (see ``explain``); a named backend runs or raises.
        return_lse: also return the log-sum-exp of each row's scores, with its gradient. Default ``False``.

    Returns:
        out (B, H, T, V) in q's dtype; with ``return_lse`` also lse (B, H, T), base e, float32 for 16-bit inputs. A query
        that sees no key has output 0 and lse -inf.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit; the message has both values.
        ConfigError: an option is out of its range, or two exclude each other.
        BackendUnavailableError: the named backend cannot run here; the message says why.

    Cost: ``layout.score_flops(T)`` + 2 V (visible pairs) FLOPs per head are needed; the ``reference`` backend spends
    2 T S (D + V) per head and memory for T x S scores.

    Source: Kuang et al. 2025, section 5. Windows, ragged lengths, grouped heads and the variance scaling are ours.
    """
    _check_tensors(q, k, v)
    _check_options(q, k, window, attn_bias, dropout_p)
    _check_sequences(q, k, cu_seqlens, left_padding)
    if layout is not None and layout.head_dim != q.shape[3]:
        raise ShapeError(
            f"the ranks of the layout must sum to the head dimension: expected {q.shape[3]}, got "
            f"{'|'.join(map(str, layout.ranks))} = {layout.head_dim}"
        )
    if backend != "auto":
        reason = why_not(backend)
        if reason is not None:
            raise BackendUnavailableError(f"backend {backend!r} cannot run: {reason}")
    if isinstance(layout, GlobalWindowLayout):
        if return_lse:
            raise ConfigError("a global-window layout adds two softmaxes and has no single log-sum-exp")
        if scale is not None or window is not None:
            raise ConfigError("a global-window layout has its own scale and window: leave scale and window at None")
        split = layout.ranks[0]
        parts = [(slice(None, split), None), (slice(split, None), layout.window)]
        far, near = (
            structured_attention(
                q[..., part],
                k[..., part],
                v,
                is_causal=is_causal,
                window=part_window,
                attn_bias=attn_bias,
                dropout_p=dropout_p,
                cu_seqlens=cu_seqlens,
                left_padding=left_padding,
                backend=backend,
            )
            for part, part_window in parts
        )
        return far + near
    layout = layout or _plain(q, k)
    _check_layout(q, v, layout, cu_seqlens)
    call = Call(
        layout=layout,
        is_causal=is_causal,
        scale=scale,
        window=window,
        attn_bias=attn_bias,
        dropout_p=dropout_p,
        cu_seqlens=cu_seqlens,
        left_padding=left_padding,
        # From torch's global generator, so that torch.manual_seed governs this backend too.
        seed=torch.randint(2**62, (), dtype=torch.int64) if dropout_p > 0 else None,
    )
    choice = _choose(q, k, v, call, return_lse)[0] if backend == "auto" else backend
    if choice == "scaled_dot_product_attention":
        return _sdpa(q, k, v, call)
    if choice == "triton" and (reason := _why_not_triton(q, k, v, call)) is not None:
        raise BackendUnavailableError(f"backend 'triton' cannot run this call: {reason}")
    out, lse = _reference(q, k, v, call) if choice == "reference" else custom_op.attention(q, k, v, call, choice)
    return (out, lse) if return_lse else out
