"""``structured_attention``: the checks of its arguments and the only place where a backend is chosen."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from structattn.checks import check_choice, holds
from structattn.errors import BackendUnavailableError
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.levels import LevelLayout
from structattn.ops import derivatives
from structattn.ops import operators as custom_op
from structattn.ops import small as short
from structattn.ops.call import Call
from structattn.ops.checks import (
    autocasted,
    check_bias,
    check_layout,
    check_options,
    check_tensors,
    checked_sequences,
    without_autocast,
)

Backend = Literal["auto", "reference", "blocked", "triton"]
Choice = Literal["auto", "reference", "blocked", "triton", "scaled_dot_product_attention", "short"]
# Up to so many scores the dense definition is the fastest on a CPU (docs/speed.md).
_DENSE_SCORES = 2**18
# With a bias the blocked backend goes through a batch row by row, so that short rows are dense however many there are, within this.
_DENSE_BATCH_SCORES = 2**25


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
    return call.is_causal and holds(q.shape[2] == 1)  # the last position sees every key


def _suits_sdpa(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool, backend: Backend) -> bool:
    """Whether a call is one level that PyTorch's kernels run without T x S numbers that nobody asked for."""
    if call.layout.num_levels > 1 or return_lse or _needs_mask(q, k, call):
        return False
    if call.dropout_p > 0 and (q.device.type == "cpu" or backend == "blocked"):
        return False  # on a CPU it keeps all scores, and its masks are not those of a seed
    # Its fused kernel for CPUs wants values as wide as the keys; what runs otherwise keeps all scores.
    return q.device.type != "cpu" or q.shape[3] == v.shape[3] or holds(_num_scores(q, k) <= _DENSE_SCORES)


def _num_scores(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


def _needs_mask(q: Tensor, k: Tensor, call: Call) -> bool:
    """Whether PyTorch's kernels could run one level only with a T x S mask that says what ``is_causal`` cannot."""
    if call.window is not None or call.cu_seqlens is not None or call.left_padding is not None:
        return True
    return call.is_causal and not holds(q.shape[2] == k.shape[2]) and not _one_query(q, call)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """One level without ``_needs_mask`` by PyTorch's own kernels."""
    mask, is_causal, dtype = call.attn_bias, call.is_causal and not _one_query(q, call), q.dtype
    if mask is not None:
        if mask.dtype != dtype:  # the scores keep the digits of the bias, as those of the other backends
            wide = torch.promote_types(dtype, torch.float32)
            q, k, v, mask = (x.to(wide) for x in (q, k, v, mask))
        if is_causal:
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            mask, is_causal = mask.masked_fill(later, -torch.inf), False
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, (1, 1, q.shape[2], k.shape[2])))
    scale = _one_level_scale(call.layout, call.scale)
    if scale is not None and scale <= 0:  # PyTorch's kernel would multiply the -inf of hidden pairs by it
        q, scale = q * scale, 1.0
    with without_autocast(q):
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=holds(q.shape[1] != k.shape[1]),
        )
    return out.to(dtype)


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
    check_choice("backend", backend, _WHY_NOT)
    return _WHY_NOT[backend]()


def _why_not_triton(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """The reason why the fused kernels cannot run a call, or ``None``."""
    reason = why_not("triton")
    if reason is not None:
        return reason
    from structattn.ops.triton import attention as triton_attention

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


def _choose(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool) -> tuple[Choice, Callable[[], str]]:
    """What ``backend="auto"`` runs, and a function that says why: the one place that chooses.

    The reason is not made here, since a compiler that puts a length into text fixes the program to this length.
    """
    scores = _num_scores(q, k)
    transformed = derivatives.transforms_are_active()
    # A compiler can trace no other backend inside of a transform.
    if transformed and (torch.compiler.is_compiling() or holds(scores <= _DENSE_BATCH_SCORES)):
        return (
            "reference",
            lambda: f"{scores} scores inside of a transform of functions, which the definition takes at every order",
        )
    if not transformed and not return_lse and short.suits(q, k, v, call):
        return "short", lambda: f"one level of {q.shape[2]} x {k.shape[2]} scores, written out"
    if not transformed and _suits_sdpa(q, k, v, call, return_lse, "auto"):
        return "scaled_dot_product_attention", lambda: "one level needs nothing else"
    levels = call.layout.num_levels
    subject = "one level with a mask, a log-sum-exp or narrow values" if levels == 1 else f"{levels} levels"
    reason = _why_not_triton(q, k, v, call) if q.device.type == "cuda" else "the tensors are not on a CUDA device"
    if reason is None:
        return "triton", lambda: f"{subject}, fused"
    per_row = scores if call.attn_bias is None else scores // q.shape[0]
    # Packed sequences together make many hidden pairs, and one after another many small products.
    if call.cu_seqlens is None and holds(per_row <= _DENSE_SCORES) and holds(scores <= _DENSE_BATCH_SCORES):
        few = "scores are few: dense products beat many small ones (no fused kernel:"
        return "reference", lambda: f"{scores} {few} {reason})"
    return "blocked", lambda: f"{subject} in linear memory (no fused kernel: {reason})"


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
    q, k, v, calls = _read(
        q, k, v, layout, is_causal, scale, window, attn_bias, dropout_p, cu_seqlens, left_padding, return_lse
    )
    choices = [_choose(q[..., part], k[..., part], v, call, return_lse) for part, call in calls]
    lines = [f"{choice}: {reason()}" for choice, reason in choices]
    return lines[0] if len(lines) == 1 else "two softmaxes, added: " + "; ".join(lines)


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None,
    is_causal: bool,
    scale: float | None,
    window: int | None,
    attn_bias: Tensor | None,
    dropout_p: float,
    cu_seqlens: Tensor | None,
    left_padding: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, list[tuple[slice, Call]]]:
    """The arguments, checked: q, k, v, and the calls whose outputs are added, each with the dimensions that it takes."""
    check_options(layout, is_causal, scale, window, dropout_p, return_lse)
    check_tensors(q, k, v)
    if attn_bias is not None:
        check_bias(q, k, attn_bias)
    cu_seqlens, left_padding = checked_sequences(q, k, cu_seqlens, left_padding)
    if layout is not None:
        check_layout(q, v, layout, cu_seqlens)
    scale = float(scale) if isinstance(scale, int) else scale  # an int may be larger than any that a tensor takes
    parts: list[tuple[slice, LevelLayout, float | None, int | None]] = []
    if isinstance(layout, GlobalWindowLayout):
        split = layout.ranks[0]
        for part, part_scale, part_window in zip(
            (slice(split), slice(split, None)), layout.scales, (None, layout.window), strict=True
        ):
            parts.append((part, _plain(q[..., part]), part_scale, part_window))
    else:
        parts.append((slice(None), layout or _plain(q), scale, window))
    calls = [
        Call(
            layout=levels,
            is_causal=is_causal,
            scale=part_scale,
            window=part_window,
            attn_bias=attn_bias,
            dropout_p=dropout_p,
            cu_seqlens=cu_seqlens,
            left_padding=left_padding,
        )
        for _, levels, part_scale, part_window in parts
    ]
    q, k, v = autocasted(q, k, v)
    return q, k, v, [(part[0], call) for part, call in zip(parts, calls, strict=True)]


def _plain(q: Tensor) -> LevelLayout:
    """Plain attention as a layout of one level, which every pair shares at any length."""
    dim = q.shape[3]
    if torch.compiler.is_compiling():  # the size may be symbolic, and a compiler does not read the dict
        return LevelLayout((dim,), (2**30,))
    if dim not in _PLAIN:
        _PLAIN[dim] = LevelLayout((dim,), (2**30,))
    return _PLAIN[dim]


_PLAIN: dict[int, LevelLayout] = {}  # by head dimension: a layout is a value, and is checked once


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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...
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
            T > S the first T - S queries are before the first key: they share level 1 with every key.
        k: keys, (B, G, S, D); G divides H, and query head h reads key head h // (H // G).
        v: values, (B, G, S, V).
        layout: ``LevelLayout`` or ``GlobalWindowLayout``; ``None`` is one level: plain attention.
        is_causal: hide keys later than the query. Default ``True``.
        scale: a number that replaces the layout's scaling: scale * (sum over shared levels of q.k). Default ``None``.
        window: key j is visible to query i when 0 <= i - j < window (causal) or |i - j| < window (not causal).
        attn_bias: added to the scaled scores, broadcastable to (B, H, T, S), floating point; -inf hides a pair. Scores are
            float32, or float64 where q is, and so is the bias then.
        dropout_p: probability of dropping a weight, to 16 bits. A seed from torch's global CPU generator, batch row, head, query
            and key decide: every backend drops the same, but for PyTorch's kernels (one level on a GPU, ``"auto"``). Default 0.
        cu_seqlens: (N + 1,) int32 or int64, the borders of N packed sequences (B = 1, T = S): pairs of different
            sequences are hidden and blocks start anew in each.
        left_padding: (B,) int32 or int64, the number of leading padding positions of each row: their keys and queries are
            hidden, and blocks are counted from the first real token. Queries before the first key are not padding.
        backend: ``"auto"`` chooses (see ``explain``); a named backend runs or raises.
        return_lse: also return the log-sum-exp of each row's scores, with its gradient. Default ``False``.

    Returns:
        out (B, H, T, V) in q's dtype; with ``return_lse`` also lse (B, H, T), base e, float32 for 16-bit inputs. A query
        that sees no key has output 0 and lse -inf. Under autocast q, k and v are cast first, as
        ``torch.nn.functional.scaled_dot_product_attention`` does: all but float64 have autocast's dtype then.
        Padding and other packed sequences reach no output or gradient, even as NaN; what causality, a window or a bias of -inf
        hides can, as 0 times NaN, as in PyTorch's kernels.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit; the message has both values.
        ConfigError: an option is out of its range, or two exclude each other.
        BackendUnavailableError: the named backend cannot run here; the message says why.

    Cost: ``layout.score_flops(T)`` + 2 V (visible pairs) FLOPs per head are needed; the ``reference`` backend spends
    2 T S (D + V) per head and memory for T x S scores.

    Source: Kuang et al. 2025, section 5. Windows, ragged lengths, grouped heads and the variance scaling are ours.
    """
    check_choice("backend", backend, get_args(Backend))
    if backend != "auto" and (reason := why_not(backend)) is not None:
        raise BackendUnavailableError(f"backend {backend!r} cannot run: {reason}")
    q, k, v, calls = _read(
        q, k, v, layout, is_causal, scale, window, attn_bias, dropout_p, cu_seqlens, left_padding, return_lse
    )
    if len(calls) == 1:
        out, lse = _run(q, k, v, calls[0][1], backend, return_lse)
        return out if lse is None else (out, lse)
    far, near = (_run(q[..., part], k[..., part], v, call, backend, False)[0] for part, call in calls)
    return far + near


def _run(
    q: Tensor, k: Tensor, v: Tensor, call: Call, backend: Backend, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The output of a checked call and, if asked for, its log-sum-exp."""
    if call.dropout_p > 0:  # from torch's global generator, so that torch.manual_seed governs every backend
        call = replace(call, seed=torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    choice = _choose(q, k, v, call, return_lse)[0] if backend == "auto" else backend
    if (
        choice == "blocked"
        and not derivatives.transforms_are_active()
        and _suits_sdpa(q, k, v, call, return_lse, backend)
    ):
        choice = "scaled_dot_product_attention"  # linear in memory too, and one level has nothing to gain
    if choice == "scaled_dot_product_attention":
        return derivatives.with_further_derivatives(_sdpa(q, k, v, call), call, q, k, v), None
    if choice == "short":
        return short.attention(q, k, v, call, _one_level_scale(call.layout, call.scale)), None
    if choice == "triton" and (reason := _why_not_triton(q, k, v, call)) is not None:
        raise BackendUnavailableError(f"backend 'triton' cannot run this call: {reason}")
    out, lse = (
        derivatives.definition(q, k, v, call) if choice == "reference" else custom_op.attention(q, k, v, call, choice)
    )
    return out, lse if return_lse else None
