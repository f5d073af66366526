"""Which keys one process gets from others and sends to them, and where they lie in its tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.layout.shards import KeySpan, Shards

Views = list[list[Tensor]]  # of each process, what it gets or gives, in the order in which it travels


@dataclass(frozen=True)
class Chunk:
    """The keys of one span that one process has.

    Attributes:
        number: of the span, among those of the process that gets it.
        span: the span.
        keys: in the shard of the sender, the first and the one after the last.
        offset: of the first of them in the span.
    """

    number: int
    span: KeySpan
    keys: tuple[int, int]
    offset: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one process gets and sends in a call.

    Attributes:
        shards: the call, as all processes see it.
        layout: its layout.
        value_dim: V.
        process: which process this is.
        spans: the keys that it gets.
        received, sent: of each process, what comes from it and what goes to it.
        is_silent: whether no process sends anything.
    """

    shards: Shards
    layout: LevelLayout
    value_dim: int
    process: int
    spans: tuple[KeySpan, ...]
    received: tuple[tuple[Chunk, ...], ...]
    sent: tuple[tuple[Chunk, ...], ...]
    is_silent: bool

    def dims(self, level: int) -> tuple[int, int]:
        """The dimensions of keys and of values in the first levels."""
        value_ranks = self.layout.value_ranks
        return sum(self.layout.ranks[:level]), self.value_dim if value_ranks is None else sum(value_ranks[:level])

    def own(self, k: Tensor, v: Tensor) -> Views:
        """Views of what other processes get of keys and values, or of where their gradients belong."""
        views: Views = []
        for chunks in self.sent:
            views.append([])
            for chunk in chunks:
                batch, keys = slice(*chunk.span.batch), slice(*chunk.keys)
                dims = self.dims(chunk.span.level)
                views[-1] += [x[batch, :, keys, :dim] for x, dim in zip((k, v), dims, strict=True)]
        return views

    def empty(self, k: Tensor) -> list[Tensor]:
        """Memory for the keys and values that this process gets: of each span (rows, G, keys, R) and (rows, G, keys, V)."""
        return [
            k.new_empty((span.batch[1] - span.batch[0], k.shape[1], span.tokens[1] - span.tokens[0], dim))
            for span in self.spans
            for dim in self.dims(span.level)
        ]

    def arrived(self, tensors: Sequence[Tensor]) -> Views:
        """Views of what came from each process in tensors as those of ``empty``."""
        return [
            [
                x[:, :, chunk.offset : chunk.offset + chunk.keys[1] - chunk.keys[0]]
                for chunk in chunks
                for x in tensors[2 * chunk.number : 2 * chunk.number + 2]
            ]
            for chunks in self.received
        ]


@functools.lru_cache(maxsize=64)  # the layers of a model and the steps of a training ask for the same
def plan_of(shards: Shards, layout: LevelLayout, value_dim: int, process: int) -> Plan:
    """The plan of a process."""
    world, offsets = len(shards.lengths), shards.offsets
    received: list[list[Chunk]] = [[] for _ in range(world)]
    sent: list[list[Chunk]] = [[] for _ in range(world)]
    spans = [shards.arriving(receiver) for receiver in range(world)]
    for number, span in enumerate(spans[process]):
        for owner, start, stop in shards.owners(span):
            received[owner].append(Chunk(number, span, (start, stop), offsets[owner] + start - span.tokens[0]))
    low, high = offsets[process : process + 2]
    for receiver in range(world):
        for number, span in enumerate(spans[receiver]):
            start, stop = max(low, span.tokens[0]), min(high, span.tokens[1])
            if start < stop:
                sent[receiver].append(Chunk(number, span, (start - low, stop - low), start - span.tokens[0]))
    return Plan(
        shards=shards,
        layout=layout,
        value_dim=value_dim,
        process=process,
        spans=spans[process],
        received=tuple(map(tuple, received)),
        sent=tuple(map(tuple, sent)),
        is_silent=not any(spans),
    )


def sizes(views: Views) -> list[int]:
    """How many numbers the views of each process have."""
    return [sum(x.numel() for x in some) for some in views]


def packed(views: Views, like: Tensor) -> Tensor:
    """The numbers of all views one after the other."""
    numbers = like.new_empty(sum(sizes(views)))
    for view, some in unpacked(numbers, views):
        some.copy_(view)
    return numbers


def unpacked(numbers: Tensor, views: Views) -> list[tuple[Tensor, Tensor]]:
    """Each view, and its numbers among those of all, in its shape."""
    flat = [x for some in views for x in some]
    ends = accumulate(x.numel() for x in flat)
    return [(x, numbers[end - x.numel() : end].view(x.shape)) for x, end in zip(flat, ends, strict=True)]
