"""Structured attention by fused Triton kernels: the launches, and the choice of tiles.

Positions of one tile share a prefix of the levels, so most pairs need only a prefix of the head dimension:
the kernels read and multiply no more than that (see ``plan``). Scores never reach memory, sums are float32,
and results are deterministic: no program adds to rows of another.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from structattn.ops.call import Call
from structattn.ops.terms import all_but
from structattn.ops.triton.backward import gradient_kernel, row_kernel
from structattn.ops.triton.config import (
    SHARED_MEMORY,
    KernelConfig,
    capability_of,
    default_config,
    no_room,
    shared_memory,
    why_not_on,
)
from structattn.ops.triton.decode import decode_kernel, merge, num_splits_for, partial_results
from structattn.ops.triton.forward import forward_kernel
from structattn.ops.triton.plan import KernelPlan, Tiles, make_plan
from structattn.ops.triton.sink_tokens import SinkTokens

_DECODE_QUERIES = 16  # as many queries or fewer, over many more keys, are decoding
_LACKING = all_but("scale", "softcap", "sinks", "attn_mask", "alibi_slopes")
_DECODE_ROWS = 64  # rows of a tile, being the queries of all heads that share a key


def _config(q: Tensor, v: Tensor, call: Call, config: KernelConfig | None) -> KernelConfig:
    if config is None:
        masked, capability = call.terms.attn_mask is not None, capability_of(q.device)
        config = default_config(call.layout, q.dtype, v.shape[3], masked, capability)
    if config is None:
        raise AssertionError("no tiles fit this call: why_not says so")
    return config


def why_not(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """The reason why these kernels cannot run a call, as a sentence for the user, or ``None`` when they
    can.
    """
    layout, value_dim, length = call.layout, v.shape[3], max(q.shape[2], k.shape[2])
    masked = call.terms.attn_mask is not None or call.layout.sink_tokens > 0
    if (reason := why_not_on(q.device, q.dtype, layout.ranks, value_dim, length)) is not None:
        return reason
    lacking = call.terms.first_of(_LACKING)
    for name, is_asked in (
        (lacking, lacking is not None),
        ("dropout", call.dropout_p > 0),
        ("left_padding", call.left_padding is not None),
    ):
        if is_asked:
            return f"the Triton kernels have no {name}"
    if layout.boundaries is not None:
        return "the Triton kernels have no free partitions (boundaries), only block sizes"
    config = default_config(layout, q.dtype, value_dim, masked, capability_of(q.device))
    return no_room(layout.ranks) if config is None else None


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device: make it that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _rows(x: Tensor) -> Tensor:
    """The same tensor with contiguous rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _mask(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor | None, int, int, int, int]:
    """The mask as bytes, and its strides: 0 along dimensions that it does not have."""
    if call.terms.attn_mask is None:
        return None, 0, 0, 0, 0
    mask = call.terms.attn_mask.expand(*q.shape[:3], k.shape[2]).view(torch.uint8)
    return mask, *mask.stride()  # type: ignore[return-value]


def _slopes(q: Tensor, call: Call) -> Tensor | None:
    """The ALiBi slopes as (B, H) float32 numbers in a row."""
    return (
        None if call.terms.alibi_slopes is None else call.terms.alibi_slopes.float().expand(*q.shape[:2]).contiguous()
    )


def _window(call: Call, num_queries: int, num_keys: int) -> int:
    return 0 if call.window is None else min(call.window, num_queries + num_keys)


def _tile_map(plan: KernelPlan, num_tiles: int, first: Tensor, stop: Tensor) -> Tensor:
    """The sequence of each tile and its number therein, (2 * num_tiles,) int32; surplus tiles have sequence
    N.

    Computed on the device, so that the host need not wait for it.

    Args:
        first, stop: (N,) the positions of the rows of each sequence.
    """
    first_block, last_block = (torch.div(x, plan.anchor, rounding_mode="floor") for x in (first, stop - 1))
    of_last = torch.div(stop - last_block * plan.anchor + plan.own - 1, plan.own, rounding_mode="floor")
    ends = ((last_block - first_block) * plan.per_anchor + of_last).cumsum(0)
    tiles = torch.arange(num_tiles, device=first.device, dtype=ends.dtype)
    sequence = torch.searchsorted(ends, tiles, right=True)
    begins = torch.cat((ends.new_zeros(1), ends))
    return torch.cat((sequence, tiles - begins[sequence])).to(torch.int32)


def _packed(q: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
    """The boundaries of packed queries and keys on the device."""
    if call.cu_seqlens is None:
        return None
    of_queries = call.cu_seqlens.to(q.device).contiguous()  # kernels read them side by side
    return of_queries, of_queries if call.cu_seqlens_k is None else call.cu_seqlens_k.to(q.device).contiguous()


def _grid(
    plan: KernelPlan, first: int, stop: int, packed: tuple[Tensor, Tensor] | None, *, own_is_key: bool = False
) -> tuple[int, int, Tensor | None]:
    """The number of own tiles for positions first ... stop, the anchor block of the first, and the map of
    packed ones.
    """
    if packed is not None:
        num_queries, num_keys = (x.diff() for x in packed)
        firsts = torch.zeros_like(num_keys) if own_is_key else num_keys - num_queries
        # As many blocks as rows may touch; they touch one more where they do not begin as a block does.
        begins_inside = not (packed[0] is packed[1] or own_is_key)
        most_blocks = (stop - first) // plan.anchor + len(num_keys) * (2 if begins_inside else 1)
        num_tiles = most_blocks * plan.per_anchor
        if not begins_inside:  # of a block that ends early, only the tiles that have rows
            num_tiles = min(num_tiles, (stop - first) // plan.own + most_blocks)
        return num_tiles, 0, _tile_map(plan, num_tiles, firsts, num_keys)
    first_block, last_block = first // plan.anchor, (stop - 1) // plan.anchor
    of_last = math.ceil((stop - last_block * plan.anchor) / plan.own)
    return (last_block - first_block) * plan.per_anchor + of_last, first_block, None


def _constants(plan: KernelPlan, call: Call) -> dict[str, Any]:
    """The constants of a forward or gradient kernel, beside its tiles."""
    return {
        "PLAN": plan.constants,
        "ANCHOR": plan.anchor,
        "PER_ANCHOR": plan.per_anchor,
        "ALIGNED": plan.aligned,
        "IS_CAUSAL": call.is_causal,
        "HAS_WINDOW": call.window is not None,
        "PACKED": call.cu_seqlens is not None,
    }


def _launch(tiles: Tiles) -> dict[str, int]:
    return {"OWN": tiles.own, "WALK": tiles.walk, **tiles.options}


def _decode(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, config: KernelConfig) -> None:
    batch, num_heads, num_queries, _ = q.shape
    num_groups, num_keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
    heads_per_group = num_heads // num_groups
    rows = heads_per_group * num_queries
    own = max(config.decode.own, min(_DECODE_ROWS, triton.next_power_of_2(rows)))
    first, last = num_keys - num_queries, num_keys - 1
    num_coarse = 1 + sum(first // size == last // size for size in call.layout.block_sizes[1:])
    mask, *mask_strides = _mask(q, k, call)
    while True:
        tiles = replace(config.decode, own=own)
        plan = make_plan(call.layout, call.terms.scale, value_dim, tiles, num_coarse, call.terms.softcap)
        if (
            own <= config.decode.own
            or shared_memory(plan, tiles, q.itemsize, is_gradient=False, masked=mask is not None) <= SHARED_MEMORY
        ):
            break
        own //= 2
    num_tiles = math.ceil(rows / own)
    programs = batch * num_groups * num_tiles
    num_splits = config.num_splits or num_splits_for(programs, num_keys // tiles.walk)
    chunk = math.ceil(math.ceil(num_keys / num_splits) / tiles.walk) * tiles.walk
    num_splits = math.ceil(num_keys / chunk)
    num_rows = batch * num_heads * num_queries
    partial, partial_lse = partial_results(num_splits, num_rows, value_dim, q.device)
    decode_kernel[(num_splits * programs,)](
        q, k, v, partial, partial_lse, mask, _slopes(q, call), *_strides(q), *_strides(k), *_strides(v), *mask_strides,
        num_queries, num_keys, chunk, num_splits, _window(call, num_queries, num_keys), num_rows, value_dim, num_tiles,
        num_groups, heads_per_group,
        PLAN=plan.constants, IS_CAUSAL=call.is_causal, HAS_WINDOW=call.window is not None, **_launch(tiles),
    )  # fmt: skip
    merge(partial, partial_lse, out, lse)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, config: KernelConfig | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the arguments are those of ``structured_attention``, already checked.

    Args:
        q: queries, (B, H, T, D); float32, float16 or bfloat16; any strides.
        k: keys, (B, G, S, D).
        v: values, (B, G, S, V).
        call: the layout and the options.
        config: tiles; default ``default_config``.

    Returns:
        out (B, H, T, V) in q's dtype and lse (B, H, T) float32, base e. A query that sees no key has 0 and
        -inf.

    Cost: about ``layout.score_flops(T)`` + ``layout.value_flops(T, V)`` FLOPs per head, a dimension being
    rounded up to a multiple of 16, and whole products in the blocks smaller than a tile. No scores in memory.
    Up to 16 queries over at least 512 keys split the keys among programs.

    Source: Dao et al. 2022 (tiled softmax), Kuang et al. 2025, section 5 (levels); the walk by levels is
        ours.
    """
    if call.layout.sink_tokens:
        sinks = SinkTokens(q, k, v, call)
        return sinks.add(*forward(q, k, v, sinks.remaining_call, config))
    q, k, v = _rows(q), _rows(k), _rows(v)
    packed = _packed(q, call)
    of_queries, of_keys = (None, None) if packed is None else packed
    batch, num_heads, num_queries, _ = q.shape
    num_keys, value_dim = k.shape[2], v.shape[3]
    config = _config(q, v, call, config)
    out = torch.empty((batch, num_heads, num_queries, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, num_heads, num_queries), dtype=torch.float32, device=q.device)
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(-torch.inf)
    with _on(q):
        has_few_queries = num_queries <= min(_DECODE_QUERIES, num_keys)
        if has_few_queries and num_keys >= config.decode_keys and packed is None:
            _decode(q, k, v, out, lse, call, config)
            return out, lse
        mask, *mask_strides = _mask(q, k, call)
        plan = make_plan(call.layout, call.terms.scale, value_dim, config.forward, softcap=call.terms.softcap)
        num_tiles, first_block, tile_map = _grid(plan, num_keys - num_queries, num_keys, packed)
        forward_kernel[(num_tiles * batch * num_heads,)](
            q, k, v, out, lse, of_queries, of_keys, tile_map, mask, _slopes(q, call),
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), *mask_strides,
            num_queries, num_keys, first_block, num_tiles, _window(call, num_queries, num_keys),
            0 if of_queries is None else len(of_queries) - 1, num_heads, num_heads // k.shape[1],
            **_constants(plan, call), **_launch(config.forward),
        )  # fmt: skip
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    config: KernelConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, in their dtypes.

    Args:
        grad_out: gradient of out, (B, H, T, V).
        grad_lse: gradient of lse, (B, H, T), or ``None``.
        q, k, v, call: as in ``forward``.
        out, lse: what ``forward`` returned.
        config: tiles; default ``default_config``.

    Returns:
        grad_q (B, H, T, D), grad_k (B, G, S, D), grad_v (B, G, S, V). A row that sees no key gives and gets
        nothing.

    Cost: 3.5 times the forward's FLOPs: scores and dP are computed twice, once per side. Deterministic.

    Source: Dao 2023 (backward pass by recomputation).
    """
    if call.layout.sink_tokens:
        sinks = SinkTokens(q, k, v, call)
        delta = (grad_out.float() * out.float()).sum(-1)
        delta = delta if grad_lse is None else delta - grad_lse
        grads = backward(grad_out, grad_lse, q, k, v, out, lse, sinks.remaining_call, config)
        return sinks.add_gradients(grad_out, delta, lse, grads)
    grad_out, q, k, v, out = _rows(grad_out.to(q.dtype)), _rows(q), _rows(k), _rows(v), _rows(out)
    packed = _packed(q, call)
    of_queries, of_keys = (None, None) if packed is None else packed
    lse = lse.contiguous()
    batch, num_heads, num_queries, _ = q.shape
    num_groups, num_keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
    config = _config(q, v, call, config)
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    delta, base, slopes = torch.empty_like(lse), torch.empty_like(lse), _slopes(q, call)
    mask, *mask_strides = _mask(q, k, call)
    options = (
        _window(call, num_queries, num_keys),
        0 if of_queries is None else len(of_queries) - 1,
    )
    with _on(q):
        row_tiles = math.ceil(num_queries / 64)
        row_kernel[(row_tiles * batch * num_heads,)](
            grad_out, out, lse, None if grad_lse is None else grad_lse.to(torch.float32).contiguous(), delta, base,
            *_strides(grad_out), *_strides(out), num_queries, row_tiles, num_heads, value_dim,
            OWN=64, WIDTH=32, HAS_GRAD_LSE=grad_lse is not None, enable_fp_fusion=True,
        )  # fmt: skip
        plan = make_plan(call.layout, call.terms.scale, value_dim, config.grad_queries, softcap=call.terms.softcap)
        num_tiles, first_block, tile_map = _grid(plan, num_keys - num_queries, num_keys, packed)
        gradient_kernel[(num_tiles * batch * num_heads,)](
            q, grad_out, k, v, grad_q, grad_q, base, delta, of_queries, of_keys, tile_map, mask, slopes,
            *_strides(q), *_strides(grad_out), *_strides(k), *_strides(v), *_strides(grad_q), *_strides(grad_q),
            *mask_strides,
            num_queries, num_keys, first_block, num_tiles, *options, num_heads, num_heads // num_groups,
            OWN_IS_KEY=False, WHOLE=packed is None and num_keys % config.grad_queries.walk == 0,
            **_constants(plan, call), **_launch(config.grad_queries),
        )  # fmt: skip
        plan = make_plan(call.layout, call.terms.scale, value_dim, config.grad_keys, softcap=call.terms.softcap)
        num_tiles, first_block, tile_map = _grid(plan, 0, num_keys, packed, own_is_key=True)
        gradient_kernel[(num_tiles * batch * num_groups,)](
            k, v, q, grad_out, grad_k, grad_v, base, delta, of_queries, of_keys, tile_map, mask, slopes,
            *_strides(k), *_strides(v), *_strides(q), *_strides(grad_out), *_strides(grad_k), *_strides(grad_v),
            *mask_strides,
            num_queries, num_keys, first_block, num_tiles, *options, num_groups, num_heads // num_groups,
            OWN_IS_KEY=True,
            WHOLE=packed is None and num_queries == num_keys and num_queries % config.grad_keys.walk == 0,
            **_constants(plan, call), **_launch(config.grad_keys),
        )  # fmt: skip
    return grad_q, grad_k, grad_v
