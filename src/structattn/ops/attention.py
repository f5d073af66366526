"""``structured_attention``: its signature, the checks of its arguments, and ``explain``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from structattn.checks import check_choice
from structattn.errors import BackendUnavailableError
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.ops import backends, by_heads, operators, reference
from structattn.ops.backends import Backend
from structattn.ops.call import Call, Options, Pairs
from structattn.ops.checks import autocasted, check_layout, check_options, check_tensors, checked_pairs
from structattn.ops.terms import ScoreTerms, all_but

_TERMS = all_but()


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnyLayout | None = None,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    left_padding: Tensor | None = None,
    return_lse: bool = False,
    attn_mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> str:
    """Which code ``backend="auto"`` runs for a call, and why, in one line:
    ``"blocked: 8 levels in memory linear in ... (...)"``.

    Args: those of ``structured_attention`` except ``backend``. Only the shape, dtype and device of tensors
        matter, and whether they need gradients; the numbers in ``cu_seqlens`` and ``left_padding`` are
        checked. Tensors of the meta device (``torch.empty(..., device="meta")``) give the choice for a device
        that is not a CPU.

    Raises:
        ShapeError, ConfigError: as ``structured_attention``.
    """
    terms = ScoreTerms(
        scale=scale, softcap=softcap, sinks=sinks, attn_mask=attn_mask, attn_bias=attn_bias, alibi_slopes=alibi_slopes
    )
    pairs: Pairs = {  # a compiler cannot call the type
        "is_causal": is_causal,
        "window": window,
        "dropout_p": dropout_p,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
        "left_padding": left_padding,
    }
    if isinstance(layout, HeadLayouts):
        group_calls = _by_heads(q, k, v, layout, terms, pairs, return_lse)
        lines = [explain(*arguments, return_lse=return_lse, **options) for arguments, options in group_calls]
        counts = [len(group.heads) for group in layout.groups]
        named = [f"{count} key {'head' if count == 1 else 'heads'}" for count in counts]
        return "; ".join(f"{heads}: {line}" for heads, line in zip(named, lines, strict=True))
    v, calls = _read(q, k, v, layout, terms, pairs, return_lse)
    choices = [backends.choose(query, key, v, call, return_lse) for query, key, call in calls]
    lines = [f"{row.name}: {reason()}" for row, reason in choices]
    return lines[0] if len(lines) == 1 else "two softmaxes, added: " + "; ".join(lines)


def _read(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout | None, terms: ScoreTerms, pairs: Pairs, return_lse: bool
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Call]]]:
    """The arguments, checked: v, and the calls whose outputs are added, each with its queries and keys."""
    check_options(layout, terms, pairs, return_lse)
    check_tensors(q, k, v)
    terms, pairs = terms.of_call(q, k.shape[2]), checked_pairs(q, k, pairs)
    cu_seqlens = pairs["cu_seqlens"]
    if layout is not None:
        if cu_seqlens is None:
            check_layout(layout, q.shape[3], v.shape[3], q.shape[0])
        else:
            check_layout(layout, q.shape[3], v.shape[3], cu_seqlens.shape[0] - 1, "packed sequence")
    levels = layout if isinstance(layout, LevelLayout) else _plain(q.shape[3])
    pairs["window"] = levels.window_of(1, pairs["window"])
    if levels.sink_tokens and levels.num_levels == 1 and pairs["window"] is None:
        levels = replace(levels, sink_tokens=0)  # all pairs share the one level
    call = Call(layout=levels, terms=terms, **pairs)
    q, k, v = autocasted(q, k, v)
    if not isinstance(layout, GlobalWindowLayout):
        return v, [(q, k, call)]
    (far, near), (far_scale, near_scale) = layout.ranks, layout.scales
    everywhere = replace(call.with_terms(scale=far_scale), layout=_plain(far))
    in_window = replace(call.with_terms(scale=near_scale), layout=_plain(near), window=layout.window)
    return v, [(q[..., :far], k[..., :far], everywhere), (q[..., far:], k[..., far:], in_window)]


def _by_heads(
    q: Tensor, k: Tensor, v: Tensor, layout: HeadLayouts, terms: ScoreTerms, pairs: Pairs, return_lse: bool
) -> list[tuple[tuple[Tensor, Tensor, Tensor, Layout | None], dict[str, Any]]]:
    """The arguments of the call of each group of heads, checked as a whole."""
    check_options(layout, terms, pairs, return_lse)
    check_tensors(q, k, v)
    by_heads.check_key_heads(layout, k, v)
    terms.of_call(q, k.shape[2])
    calls: list[tuple[tuple[Tensor, Tensor, Tensor, Layout | None], dict[str, Any]]] = []
    for group in layout.groups:
        queries = by_heads.query_heads(group.heads, q.shape[1] // layout.num_heads)
        tensors = (
            by_heads.select_heads(q, queries),
            by_heads.select_heads(k, group.heads),
            by_heads.select_heads(v, group.heads),
        )
        of_group = by_heads.terms_of(terms, queries)
        named = {name: getattr(of_group, name) for name in _TERMS}
        calls.append(((*tensors, group.layout), {**named, **pairs}))
    return calls


def _plain(dim: int) -> LevelLayout:
    """Plain attention as a layout of one level, which every pair shares at any length."""
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
    layout: AnyLayout | None = None,
    *,
    backend: Backend = "auto",
    return_lse: Literal[False] = False,
    sinks: Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def structured_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnyLayout | None = None,
    *,
    backend: Backend = "auto",
    return_lse: Literal[True],
    sinks: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def structured_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnyLayout | None = None,
    *,
    backend: Backend = "auto",
    return_lse: bool = False,
    sinks: Tensor | None = None,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def structured_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnyLayout | None = None,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    left_padding: Tensor | None = None,
    backend: Backend = "auto",
    return_lse: bool = False,
    attn_mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose score matrix has the structure of a layout.

        out_i = sum_j softmax_j(score(i, j) + bias(i, j)) v_j, with score(i, j) as ``LevelLayout`` defines it.

    With a soft cap c a score s is c tanh(s / c), before biases and masks. With ALiBi slopes m the bias of
    head h has one term more, -m_h |i - j|, with the positions of query and key in their sequence. With sinks
    the denominator of a row of head h has one term more, exp(sink_h), which has no value: weights then sum to
    less than 1.

    Options after ``layout`` are given by name.

    Args:
        q: queries, (B, H, T, D), floating point. When T < S they are the last T of the S positions
            (decoding); when T > S the first T - S queries are before the first key: they share level 1 with
            every key, and sliding levels by distance.
        k: keys, (B, G, S, D); G divides H, and query head h reads key head h // (H // G).
        v: values, (B, G, S, V).
        layout: ``LevelLayout`` or ``GlobalWindowLayout``; ``None`` is one level: plain attention; or
            ``HeadLayouts``, one of these for each of G key heads.
        is_causal: hide keys later than the query. Default ``True``.
        scale: a number that replaces the layout's scaling: scale * (sum over shared levels of q.k). Default
            ``None``.
        window: key j is visible to query i when 0 <= i - j < window (causal) or |i - j| < window (not
            causal). With a first window of sliding levels the smaller of the two counts. It hides no sink
            tokens of the layout.
        attn_bias: added to the scaled scores, broadcastable to (B, H, T, S), floating point; -inf hides a
            pair. Scores are float32, or float64 where q is, and so is the bias then. A row whose scores all
            lie near one number beyond 1e6 has inexact gradients, as with PyTorch's kernels: hide pairs by
            -inf or a mask.
        dropout_p: probability of dropping a weight, to 16 bits. A seed from torch's global CPU generator,
            batch row, head, query and key decide: every backend drops the same, but for PyTorch's kernels
            (one level on a GPU, ``"auto"``). Default 0.
        cu_seqlens: (N + 1,) int32 or int64, the boundaries of N packed sequences (B = 1; T = S unless
            ``cu_seqlens_k`` is given): pairs of different sequences are hidden and blocks start anew in each.
            A sequence may be empty: its two boundaries are equal.
        left_padding: (B,) int32 or int64, the number of leading padding positions of each row: their keys and
            queries are hidden, and blocks are counted from the first real token. Queries before the first key
            are not padding.
        backend: ``"auto"`` chooses (see ``explain``); a named backend runs or raises.
        return_lse: also return the log-sum-exp of each row's scores, with its gradient; sinks are in it.
            Default ``False``.
        attn_mask: bool, ``True`` where a query may attend to a key, broadcastable to (B, H, T, S) and never
            expanded; with every other option a pair must be visible to both. (B, 1, 1, S) is a padding mask,
            on any side; it moves no block, which ``left_padding`` does. A floating point mask is an
            ``attn_bias``, as in PyTorch.
        softcap: c > 0, caps the scaled scores softly to (-c, c), as Gemma 2 does. Default ``None``.
        sinks: (H,), floating point: a learned logit of each query head, as gpt-oss has it; gradients reach
            it. A global-window layout has it in both softmaxes. Default ``None``.
        alibi_slopes: (H,) or (B, H), floating point: the slope m of each query head; the bias -m |i - j|
            never takes T x S numbers. Slopes are constants and get no gradient. A global-window layout has it
            in both softmaxes. Default ``None``.
        cu_seqlens_k: (N + 1,) int32 or int64, the boundaries of the keys of packed sequences where they are
            not those of the queries, which ``cu_seqlens`` are then (cross-attention). Of each sequence the
            queries are the last positions, as without packing; it may have no queries, or no keys. Default
            ``None``: those of the queries.

    Returns:
        out (B, H, T, V) in q's dtype; with ``return_lse`` also lse (B, H, T), base e, float32 for 16-bit
        inputs. As PyTorch's own kernels, some backends keep the order in memory of q, so that out may not be
        contiguous. A query that sees no key has output 0 and lse -inf (the sink, where there are sinks).
        Under autocast q, k and v are cast first, as ``torch.nn.functional.scaled_dot_product_attention``
        does: all but float64 have autocast's dtype then. Padding and other packed sequences reach no output
        or gradient, even as NaN; what causality, a window, a mask or a bias of -inf hides can, as 0 times
        NaN, as in PyTorch's kernels.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit; the message has both values.
        ConfigError: an option is out of its range, or two exclude each other.
        BackendUnavailableError: the named backend cannot run here; the message says why.

    Cost: ``layout.score_flops(T)`` + 2 V (visible pairs) FLOPs per head are needed; the ``reference`` backend
    spends 2 T S (D + V) per head and memory for T x S scores. A soft cap costs a tanh per pair, ALiBi a
    multiply-add per pair, sinks one more pass over the output (or one more key, where all scores are kept);
    PyTorch's own kernels, which compute one level on a GPU and, where they are faster than the C++ code, on
    a CPU, have none of them.

    Source: Kuang et al. 2025, section 5. Soft cap: Gemma Team 2024 (Gemma 2). Sinks: OpenAI 2025 (gpt-oss),
    after Xiao et al. 2023 (StreamingLLM). ALiBi: Press et al. 2022. Windows, ragged lengths, grouped heads
    and the variance scaling are ours.
    """
    check_choice("backend", backend, backends.NAMED)
    if backend != "auto" and (reason := backends.why_not(backend)) is not None:
        raise BackendUnavailableError(f"backend {backend!r} cannot run: {reason}")
    terms = ScoreTerms(
        scale=scale, softcap=softcap, sinks=sinks, attn_mask=attn_mask, attn_bias=attn_bias, alibi_slopes=alibi_slopes
    )
    pairs: Pairs = {  # a compiler cannot call the type
        "is_causal": is_causal,
        "window": window,
        "dropout_p": dropout_p,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_k": cu_seqlens_k,
        "left_padding": left_padding,
    }
    if isinstance(layout, HeadLayouts):
        group_calls = _by_heads(q, k, v, layout, terms, pairs, return_lse)
        outs = [
            structured_attention(*arguments, backend=backend, return_lse=return_lse, **options)
            for arguments, options in group_calls
        ]
        per_key_head = q.shape[1] // layout.num_heads
        if not return_lse:
            return by_heads.joined(outs, layout, per_key_head)  # type: ignore[arg-type]
        joined, joined_lse = (by_heads.joined(x, layout, per_key_head) for x in zip(*outs, strict=True))
        return joined, joined_lse
    v, calls = _read(q, k, v, layout, terms, pairs, return_lse)
    out: Tensor | None = None
    for query, key, call in calls:
        if dropout_p > 0:  # from torch's global generator, so that torch.manual_seed governs every backend
            call = replace(call, seed=torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        if backend == "auto":
            row = backends.choose(query, key, v, call, return_lse)[0]
        else:
            row = backends.named(backend, query, key, v, call)
        adds_sinks = sinks is not None and not row.takes_sinks
        result, lse = operators.attention(query, key, v, call.with_terms(sinks=None) if adds_sinks else call, row)
        if adds_sinks:
            assert sinks is not None
            assert lse is not None
            result, lse = reference.with_sinks(result, lse, sinks)
        if return_lse:
            assert lse is not None
            return result, lse
        out = result if out is None else out + result
    assert out is not None
    return out
