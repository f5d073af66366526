"""The ``blocked`` backend: structured attention in pure PyTorch, on any device, in memory linear in T.

It chooses a geometry for a call and runs online softmax passes over its tiles: families of blocks of whole
tensors where all sequences have the same blocks or windows, sequences padded to a few lengths for padding and
packing, spans against ranges for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from structattn.ops import dropout
from structattn.ops.blocked import families, online_softmax, work
from structattn.ops.blocked.families import Geometry
from structattn.ops.blocked.spans import SpanTiles
from structattn.ops.blocked.tiles import ScoreParameters, Tile
from structattn.ops.call import Call
from structattn.ops.costs import costs_here
from structattn.ops.sequences import SequenceSpan, sequences_of

_SHORTEST = 32  # shorter sequences are padded to this length
# Scores at once: per thread of a CPU what a core's second cache holds twice, up to a limit that keeps the
# buffers small on many cores.
_SCORES_PER_THREAD = 2**17
_SCORES_ON_CPU = 2**20
# Sliding levels have many small tiles: more scores at once are fewer calls. They hold more copies, so that
# the limit is lower.
_SLIDING_SCORES_PER_THREAD = 2**18
_SLIDING_SCORES_ON_CPU = 2**19
_SCORES_ON_DEVICE = 2**24  # enough to hide the launches
_FEW_QUERIES = 32


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, sequences: Sequence[SequenceSpan] | None = None
) -> tuple[Tensor, Tensor]:
    """Structured attention; the arguments are those of ``structured_attention``, checked.

    16-bit inputs are computed in float32.

    Args:
        sequences: the queries and keys that are there, with their positions. Default: those of the call.

    Returns:
        out (B, H, T, V) in q's dtype and lse (B, H, T), float32 or float64, base e; contiguous.

    Cost: ``layout.score_flops`` + ``layout.value_flops`` and one exponential per visible pair; memory linear
    in T. Where scores may be large, by Cauchy and Schwarz, or values are far from 1, a first pass finds the
    largest score of each row: about a third more.
    """
    dtype = _compute_dtype(q)
    if not q.numel() or not k.numel():
        return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    repeats = q.shape[1] // k.shape[1]
    q, k, v, kind = q.to(dtype), k.to(dtype), v.to(dtype), q.dtype
    bias = _bias(call, dtype)
    out = q.new_zeros(()).expand(*q.shape[:3], v.shape[3])
    lse = q.new_full((), -torch.inf).expand(*q.shape[:3], 1)
    for group in _groups(q, k, v.shape[3], call, sequences):
        parameters = _parameters(call, group, q, k, bias)
        queries, keys, values = group.queries.pad(q, repeats), group.keys.pad(k, 1), group.keys.pad(v, 1)
        # For few queries a pass over the scores costs less than one over the keys.
        is_bounded = bias is None and call.terms.alibi_slopes is None
        is_safe = is_bounded and q.shape[2] >= _FEW_QUERIES and parameters.are_small(queries, keys, values)
        offset = None if is_safe else online_softmax.row_maxima(group.tiles(), queries, keys, parameters)
        rows_out, rows_lse = online_softmax.forward(group.tiles(), queries, keys, values, offset, parameters)
        out = group.queries.unpad(out, rows_out, repeats)
        lse = group.queries.unpad(lse, rows_lse[..., None], repeats)
    return out.to(kind).contiguous(), lse[..., 0].contiguous()


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    *,
    needs_bias: bool,
    sequences: Sequence[SequenceSpan] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and, if asked, of the bias, in their dtypes and shapes, contiguous.

    Args:
        grad_out, grad_lse: of ``forward``'s results; ``grad_lse`` may be ``None``.
        q, k, v, call, sequences: as in ``forward``; the same seed.
        out, lse: what ``forward`` returned.
        needs_bias: whether the bias needs its gradient.

    Cost: three products of the score's rank and two of the value's per visible pair; memory linear in T, and
        the bias's.
    """
    if not q.numel() or not k.numel():
        no_bias = (
            None
            if call.terms.attn_bias is None
            else torch.zeros_like(call.terms.attn_bias, memory_format=torch.contiguous_format)
        )
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        return dq, dk, dv, no_bias if needs_bias else None
    dtype, repeats, kind = _compute_dtype(q), q.shape[1] // k.shape[1], q.dtype
    q, k, v, grad_out = (x.to(dtype) for x in (q, k, v, grad_out))
    # A head at a time, so that the product never takes as much memory as the output.
    pairs = zip(grad_out.flatten(0, 1), out.flatten(0, 1), strict=True)
    delta = torch.stack([(a * b).sum(-1, keepdim=True) for a, b in pairs]).view(*out.shape[:3], 1)
    if grad_lse is not None:
        delta -= grad_lse[..., None]
    bias = _bias(call, dtype)
    grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
    grad_q, grad_k, grad_v = (x.new_zeros(()).expand(x.shape) for x in (q, k, v))
    for group in _groups(q, k, v.shape[3], call, sequences):
        rows_q, rows_k, rows_v = online_softmax.backward(
            group.tiles(),
            group.queries.pad(q, repeats),
            group.keys.pad(k, 1),
            group.keys.pad(v, 1),
            group.queries.pad(lse[..., None], repeats, missing=-torch.inf)[..., 0],
            group.queries.pad(delta, repeats)[..., 0],
            group.queries.pad(grad_out, repeats),
            grad_bias,
            _parameters(call, group, q, k, bias),
        )
        grad_q = group.queries.unpad(grad_q, rows_q, repeats)
        grad_k, grad_v = group.keys.unpad(grad_k, rows_k, 1), group.keys.unpad(grad_v, rows_v, 1)
    shaped = None
    if grad_bias is not None and call.terms.attn_bias is not None:
        shaped = grad_bias.to(call.terms.attn_bias.dtype).view(call.terms.attn_bias.shape)
    dq, dk, dv = (x.to(kind).contiguous() for x in (grad_q, grad_k, grad_v))
    return dq, dk, dv, shaped


@dataclass(frozen=True)
class NoPadding:
    """All sequences as they are: (B * G, length * repeats, d), a view where the strides allow.

    Rows of one position are neighbours: with R query heads per key head, row t * R + r is head r at position
    t, so that the keys are never repeated and a span of positions is a span of rows.
    """

    def pad(self, x: Tensor, repeats: int, missing: float | None = None) -> Tensor:
        """(B, G * repeats, length, d) to rows, (..., d).

        Args:
            repeats: query heads per key head; 1 for keys and values.
            missing: what padding holds. Default: what the first position of its sequence holds.
        """
        batch, heads, length, dim = x.shape
        if repeats > 1:
            x = x.unflatten(1, (heads // repeats, repeats)).transpose(2, 3)
        return x.reshape(batch * heads // repeats, length * repeats, dim)

    def unpad(self, x: Tensor, rows: Tensor, repeats: int) -> Tensor:
        """Rows into x (B, G * repeats, length, d), which may be written to; returns the result, contiguous or
        not.
        """
        batch, heads, length, dim = x.shape
        rows = rows.view(batch, heads // repeats, length, repeats, dim)
        return rows.transpose(2, 3).reshape(batch, heads, length, dim)


@dataclass(frozen=True)
class Padded:
    """Spans of positions, padded to one length C: (N * G, C * repeats, d); otherwise as ``NoPadding``.

    Attributes:
        index: (N, C) int64 into the B * length positions; where ``is_real`` is false, any.
        is_real: bool (N, C), false for padding.
    """

    index: Tensor
    is_real: Tensor

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor) -> Padded:
        """Spans from their starts in the B * length positions and their lengths, (N,) int64 each."""
        steps = torch.arange(int(lengths.max()), device=starts.device)
        is_real = steps[None, :] < lengths[:, None]
        return cls(starts[:, None] + torch.where(is_real, steps[None, :], 0), is_real)

    def pad(self, x: Tensor, repeats: int, missing: float | None = None) -> Tensor:
        batch, heads, length, dim = x.shape
        flat = x.transpose(1, 2).reshape(batch * length, heads, dim)
        rows = flat[self.index]
        if missing is not None:
            rows = rows.masked_fill(~self.is_real[..., None, None], missing)
        rows = rows.unflatten(2, (heads // repeats, repeats)).transpose(1, 2)  # N, G, C, R, d
        return rows.reshape(rows.shape[0] * rows.shape[1], -1, dim)

    def unpad(self, x: Tensor, rows: Tensor, repeats: int) -> Tensor:
        """As ``NoPadding``; positions of no span keep what x has."""
        batch, heads, length, dim = x.shape
        count, size = self.index.shape
        rows = rows.view(count, heads // repeats, size, repeats, dim).transpose(1, 2).reshape(count, size, heads, dim)
        flat = x.transpose(1, 2).contiguous().view(batch * length, heads, dim)
        flat[self.index[self.is_real]] = rows[self.is_real]
        return flat.view(batch, length, heads, dim).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Sequences that are computed together.

    Attributes:
        queries, keys: how their rows are grouped and padded.
        tiles: makes the tiles of a pass.
    """

    queries: NoPadding | Padded
    keys: NoPadding | Padded
    tiles: Callable[[], Iterator[Tile]]


def forward_time(q: Tensor, k: Tensor, v: Tensor, call: Call) -> float | None:
    """What a forward pass takes on this CPU by counted work, in nanoseconds; ``None`` where it is not
    counted.

    Counted are calls without padding, packed sequences, free segments, bias and mask, unless they are empty.
    """
    if not (q.is_cpu and _is_even(call) and q.numel() and k.numel()):
        return None
    return _cheapest(q, k, v.shape[3], call, (q.shape[0], q.shape[2], k.shape[2]))[1]


def _is_even(call: Call) -> bool:
    """Whether all sequences have the same pairs."""
    return call.cu_seqlens is None and call.left_padding is None and _is_regular(call)


def _is_regular(call: Call) -> bool:
    """Whether all pairs follow from equal blocks or windows."""
    is_equal = call.layout.boundaries is None and not call.layout.sink_tokens
    return is_equal and call.terms.attn_bias is None and call.terms.attn_mask is None


def _geometry(q: Tensor, k: Tensor, value_dim: int, call: Call, size: tuple[int, int, int]) -> Geometry:
    """The pairs of some sequences.

    Args:
        size: how many sequences there are, and the queries and keys of each.
    """
    if q.is_cpu:
        return _cheapest(q, k, value_dim, call, size)[0]
    return work.geometry(call.layout, *size[1:], call.is_causal, call.window)


def _cheapest(q: Tensor, k: Tensor, value_dim: int, call: Call, size: tuple[int, int, int]) -> tuple[Geometry, float]:
    return work.cheapest(
        call.layout,
        *size[1:],
        call.is_causal,
        call.window,
        sequences=size[0] * k.shape[1],
        repeats=q.shape[1] // k.shape[1],
        value_dim=value_dim,
        per_unit=costs_here(),
    )


def _groups(
    q: Tensor, k: Tensor, value_dim: int, call: Call, sequences: Sequence[SequenceSpan] | None
) -> Iterator[_Group]:
    heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
    is_placed = sequences is not None  # blocks are then not counted from the first key
    if _is_even(call) and not is_placed:
        geometry = _geometry(q, k, value_dim, call, (q.shape[0], q.shape[2], k.shape[2]))
        tiles = partial(families.tiles, geometry, k.shape[0] * heads, repeats, q.device)
        yield _Group(queries=NoPadding(), keys=NoPadding(), tiles=tiles)
        return
    if sequences is None:
        sequences = sequences_of(q, k, call)
    if not sequences:
        return
    # As many queries as keys may also be those before the padding of a row, at other positions and with keys
    # that other queries have too.
    is_square = all(item.num_queries == item.num_keys and item.first_query == 0 for item in sequences)
    if _is_regular(call) and not is_placed and is_square:
        buckets: dict[int, list[SequenceSpan]] = {}
        for item in sequences:  # lengths within a factor of sqrt 2 are padded to the longest of them
            buckets.setdefault(math.ceil(2 * math.log2(max(item.num_keys, _SHORTEST))), []).append(item)
        for _, items in sorted(buckets.items()):
            lengths, of_queries, of_keys = (
                torch.tensor(x, device=q.device)
                for x in (
                    [item.num_keys for item in items],
                    [item.batch * q.shape[2] + item.queries for item in items],
                    [item.batch * k.shape[2] + item.keys for item in items],
                )
            )
            queries, keys = Padded.of(of_queries, lengths), Padded.of(of_keys, lengths)
            size = keys.index.shape[1]
            is_even = call.is_causal or bool((lengths == size).all())  # later keys are hidden from every real query
            tiles = partial(
                families.tiles,
                _geometry(q, k, value_dim, call, (len(items), size, size)),
                len(items) * heads,
                repeats,
                q.device,
                None if is_even else lengths.repeat_interleave(heads),
            )
            yield _Group(queries=queries, keys=keys, tiles=tiles)
        return
    spans = SpanTiles(
        layout=call.layout,
        sequences=tuple(sequences),
        is_causal=call.is_causal,
        window=call.window,
        num_groups=heads,
        repeats=repeats,
        device=q.device,
    )
    yield _Group(queries=NoPadding(), keys=NoPadding(), tiles=spans.tiles)


def _parameters(call: Call, group: _Group, q: Tensor, k: Tensor, bias: Tensor | None) -> ScoreParameters:
    dropped = None
    if call.seed is not None:
        dropped = dropout.Dropout(
            p=call.dropout_p,
            seed=int(call.seed),
            queries=group.queries.pad(dropout.query_positions(q), q.shape[1] // k.shape[1]),
            keys=group.keys.pad(dropout.key_positions(k), 1),
        )
    if not q.is_cpu:
        budget = _SCORES_ON_DEVICE
    elif call.layout.windows is None:
        budget = min(_SCORES_PER_THREAD * torch.get_num_threads(), _SCORES_ON_CPU)
    else:
        budget = min(_SLIDING_SCORES_PER_THREAD * torch.get_num_threads(), _SLIDING_SCORES_ON_CPU)
    terms = replace(call.terms, attn_bias=bias, attn_mask=_mask(call), alibi_slopes=_slopes(call, group, q, k))
    return ScoreParameters(layout=call.layout, terms=terms, dropout=dropped, budget=budget)


def _compute_dtype(q: Tensor) -> torch.dtype:
    return q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32


def _bias(call: Call, dtype: torch.dtype) -> Tensor | None:
    """The bias in 4 dimensions, contiguous."""
    if call.terms.attn_bias is None:
        return None
    bias = call.terms.attn_bias.to(dtype)
    return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)).contiguous()


def _mask(call: Call) -> Tensor | None:
    """The mask in 4 dimensions: a view."""
    mask = call.terms.attn_mask
    return None if mask is None else mask[(None,) * (4 - mask.dim())]


def _slopes(call: Call, group: _Group, q: Tensor, k: Tensor) -> Tensor | None:
    """The slope of each query as a group has the queries: as many numbers as the log-sum-exp."""
    if call.terms.alibi_slopes is None:
        return None
    slopes = call.terms.alibi_slopes.to(q.dtype)[:, :, None, None].expand(*q.shape[:3], 1)
    return group.queries.pad(slopes, q.shape[1] // k.shape[1])
