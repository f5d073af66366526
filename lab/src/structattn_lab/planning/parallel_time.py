"""The time of causal attention over a divided sequence, simulated: an extrapolation from counted FLOPs and
bytes, not a measurement.

A process computes FLOPs at one rate and sends and gets bytes at another, both at once where
``sa.parallel.context_parallel`` does. A layer ends when the last process has ended, since the next exchange
needs all of them.

    contiguous           equal shards of neighboring tokens
    uneven lengths       contiguous, with the lengths that even attention and linear layers together
                         (``LevelLayout.balanced_shards``)
    head-tail            ``order="head-tail"``: process p holds shards p and 2 N - 1 - p
    shared rectangles    contiguous; a process with little work computes queries of others against its own
                         keys: queries come, outputs go back. Simulated for comparison: the op does not have
                         it.

Source: striped attention (Brandon et al. 2023) evens causal ring attention; Llama 3 (Dubey et al. 2024,
section 3.3.2) divides a sequence into 2 N shards of which a process holds p and 2 N - 1 - p. That the work of
an idle process can be queries of others is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from structattn.checks import check_choice, check_int, check_number
from structattn.layout.levels import LevelLayout
from structattn.layout.shards import Order, checked_shards, divided, level_dims
from structattn.layout.work import first_keys, shard_pairs

Scheme = Literal["contiguous", "uneven lengths", "head-tail", "shared rectangles"]
SCHEMES: tuple[Scheme, ...] = ("contiguous", "uneven lengths", "head-tail", "shared rectangles")
ROUNDS = 20  # of dividing anew


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Processes, each with a device.

    Attributes:
        count: N.
        flops: FLOPs per second of one device, reached in attention and in linear layers.
        link: bytes per second that one device sends, while it gets as many.
        latency: seconds that an exchange takes at least.
    """

    count: int
    flops: float
    link: float
    latency: float = 50e-6

    def __post_init__(self) -> None:
        check_int("count", self.count, minimum=1)
        for name in ("flops", "link"):
            check_number(name, getattr(self, name), above=0)
        check_number("latency", self.latency, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model, and its sequence.

    Attributes:
        layout: of the attention.
        num_positions: T.
        num_heads, num_kv_heads: H and G.
        value_dim: V; ``None`` is the head dimension.
        dtype: of what travels.
        linear_flops: forward FLOPs of a token outside the attention: the projections and the MLP.
    """

    layout: LevelLayout
    num_positions: int
    num_heads: int
    num_kv_heads: int
    value_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    linear_flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer, and what limits it.

    Attributes:
        forward, backward: of one pass.
        most_tokens: of one process, which decides its memory.
        most_bytes: that one process sends, or gets, in one forward pass.
    """

    forward: float
    backward: float
    most_tokens: int
    most_bytes: int

    def step(self, *, checkpointing: bool = False) -> float:
        """A forward and a backward pass, and with activation checkpointing a second forward pass."""
        return self.forward * (2 if checkpointing else 1) + self.backward


@dataclass(frozen=True)
class _Work:
    """FLOPs, and what goes from process a to process b.

    Attributes:
        lengths: the tokens of each process.
        local, spans, helped: (2, N), FLOPs of scores and of values: of a process with its own keys, with
            those of others, and of queries of others.
        first, second: (N, N) bytes that travel before the work on them, and after it; for the passes forward
            and back.
    """

    lengths: tuple[int, ...]
    local: Tensor
    spans: Tensor
    helped: Tensor
    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]


def layer_time(layer: Layer, devices: Devices, scheme: Scheme) -> LayerTime:
    """The seconds of one layer.

    Args:
        scheme: one of ``SCHEMES``.

    Raises:
        ConfigError: an unknown scheme.

    Cost: O(L T) for the pairs of each level.
    """
    check_choice("scheme", scheme, SCHEMES)
    work = _work(layer, devices.count, scheme)
    linear = torch.tensor(work.lengths, dtype=torch.float64) * layer.linear_flops / devices.flops

    def seconds(flops: Tensor, scores: int, values: int) -> Tensor:
        return (scores * flops[0] + values * flops[1]) / devices.flops

    def exchange(sent: Tensor) -> Tensor:
        if not bool(sent.any()):
            return torch.zeros_like(linear)
        return torch.maximum(sent.sum(0), sent.sum(1)) / devices.link + devices.latency

    local, spans, helped = (seconds(x, 1, 1) for x in (work.local, work.spans, work.helped))
    helps = torch.maximum(local, exchange(work.first[0])) + helped
    forward = torch.maximum(helps + spans, _come(helps, work.second[0], exchange(work.second[0])))
    # Of the backward pass: scores are computed again, and two products for each one of the forward pass.
    local, spans, helped = (seconds(x, 3, 2) for x in (work.local, work.spans, work.helped))
    helps = torch.maximum(spans, exchange(work.first[1])) + helped
    backward = torch.maximum(helps + local, _come(helps, work.second[1], exchange(work.second[1])))
    sent = work.first[0] + work.second[0]
    return LayerTime(
        forward=float((forward + linear).max()),
        backward=float((backward + 2 * linear).max()),
        most_tokens=max(work.lengths),
        most_bytes=int(torch.maximum(sent.sum(0), sent.sum(1)).max()),
    )


@functools.lru_cache(maxsize=64)  # for one layer at many link speeds
def _work(layer: Layer, count: int, scheme: Scheme) -> _Work:
    lengths = checked_shards(layer.num_positions, count)
    if scheme == "shared rectangles":
        return _helped(layer, lengths)
    if scheme == "uneven lengths":
        other = layer.linear_flops / layer.num_heads
        lengths = layer.layout.balanced_shards(layer.num_positions, count, value_dim=layer.value_dim, other_flops=other)
    return _divided(layer, lengths, "head-tail" if scheme == "head-tail" else "contiguous")


def _come(ready: Tensor, sent: Tensor, seconds: Tensor) -> Tensor:
    """When what is sent to each process has come: after the last sender was ready."""
    return torch.where(sent > 0, ready[:, None], 0.0).amax(0) + seconds


def _dims(layer: Layer) -> Tensor:
    """(2, L): the dimensions of keys and values of each level."""
    return torch.tensor(level_dims(layer.layout, layer.value_dim), dtype=torch.float64).T


def _sent_keys(layer: Layer, lengths: Sequence[int], order: Order) -> Tensor:
    sent = layer.layout.communication_bytes(
        layer.num_positions,
        lengths,
        order=order,
        num_kv_heads=layer.num_kv_heads,
        value_dim=layer.value_dim,
        dtype=layer.dtype,
    )
    return torch.tensor(sent.keys, dtype=torch.float64) + torch.tensor(sent.values, dtype=torch.float64)


def _flops(layer: Layer, lengths: Sequence[int]) -> Tensor:
    """(2, C, C): FLOPs of scores and of values, of the queries of each shard and the keys of each shard."""
    pairs = shard_pairs(layer.layout, lengths).double()
    return 2 * layer.num_heads * torch.einsum("dl,lij->dij", _dims(layer), pairs)


def _divided(layer: Layer, lengths: tuple[int, ...], order: Order) -> _Work:
    """Each process computes its own queries."""
    shards, holders = divided(lengths, order)
    flops, keys = _flops(layer, shards), _sent_keys(layer, lengths, order)
    none = torch.zeros_like(keys)
    processes = torch.tensor(holders)
    local, spans = (torch.zeros(2, len(lengths), dtype=torch.float64) for _ in range(2))
    local.index_add_(1, processes, flops.diagonal(dim1=1, dim2=2))
    spans.index_add_(1, processes, flops.sum(2) - flops.diagonal(dim1=1, dim2=2))
    return _Work(lengths, local, spans, torch.zeros_like(local), (keys, none), (none, keys.T))


def _helped(layer: Layer, lengths: tuple[int, ...]) -> _Work:
    """Processes with little work compute queries of those with much, against their own keys."""
    flops, keys = _flops(layer, lengths), _sent_keys(layer, lengths, "contiguous")
    share = _shares(flops.sum(0))
    moved = flops * share
    count = len(lengths)
    # Of the queries of shard i those that share each level with some key of shard j, of all heads.
    seeing = torch.zeros(layer.layout.num_levels, count, count, dtype=torch.float64)
    ends = torch.tensor(lengths).cumsum(0)
    for level in range(1, layer.layout.num_levels + 1):
        for i, first in enumerate(first_keys(layer.layout, level, layer.num_positions).split(list(lengths))):
            seeing[level - 1, i, :i] = torch.searchsorted(first.contiguous(), ends[:i]).double()
    queries, outputs = (
        layer.dtype.itemsize * layer.num_heads * torch.einsum("dl,lij->dij", _dims(layer), seeing) * share
    )
    numbers = 4 * layer.num_heads * seeing[0] * share  # one float32 for each query
    kept = keys * (share.T < 1)  # no key travels where all queries do
    return _Work(
        lengths,
        flops.diagonal(dim1=1, dim2=2),
        (flops - moved).tril(-1).sum(2),
        moved.sum(1),
        (kept + queries, outputs + 2 * numbers),  # back: the gradient, the log-sum-exp, and rowsum(grad_out * out)
        (outputs.T + numbers.T, kept.T + queries.T),
    )


def _shares(flops: Tensor) -> Tensor:
    """(N, N): the share of the queries of process i against the keys of process j that process j computes.

    From the last process on, which has the most work, each gives away what is above the mean, to those that
    have the least. Where pairs share too few levels for that, what two processes share is divided anew
    between them, until the work is even.
    """
    pair, load = flops.tolist(), flops.sum(1).tolist()
    mean, shares = sum(load) / len(load), [[0.0] * len(load) for _ in load]

    def move(i: int, j: int, wanted: float) -> None:
        moved = max(-shares[i][j], min(wanted, pair[i][j] - shares[i][j]))
        shares[i][j] += moved
        load[i] -= moved
        load[j] += moved

    for i in range(len(load) - 1, 0, -1):
        for j in sorted(range(i), key=load.__getitem__):
            move(i, j, max(0.0, min(load[i] - mean, mean - load[j])))
    for _ in range(ROUNDS):
        if max(load) < 1.01 * mean:
            break
        for i in range(len(load) - 1, 0, -1):
            for j in sorted(range(i), key=load.__getitem__):
                move(i, j, (load[i] - load[j]) / 2)
    return torch.where(flops > 0, torch.tensor(shares, dtype=torch.float64) / flops, 0.0)
