"""Which keys one process gets from others and sends to them, and where they lie in its tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
        keys: in the tensors of the sender, the first and the one after the last.
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
        held: the shards that it holds: of each its number, and where its tokens lie in the tensors of the
            process.
        spans: the keys that its shards get, with queries counted in the tensors of the process.
        received, sent: of each process, what comes from it and what goes to it.
        local: what one shard of this process gets from another one of it.
        is_silent: whether no process sends anything.
    """

    shards: Shards
    layout: LevelLayout
    value_dim: int
    process: int
    held: tuple[tuple[int, slice], ...]
    spans: tuple[KeySpan, ...]
    received: tuple[tuple[Chunk, ...], ...]
    sent: tuple[tuple[Chunk, ...], ...]
    local: tuple[Chunk, ...]
    is_silent: bool

    def dims(self, level: int) -> tuple[int, int]:
        """The dimensions of keys and of values in the first levels."""
        value_ranks = self.layout.value_ranks
        return sum(self.layout.ranks[:level]), self.value_dim if value_ranks is None else sum(value_ranks[:level])

    def own(self, k: Tensor, v: Tensor) -> Views:
        """Views of what other processes get of keys and values, or of where their gradients belong."""
        return [self._given(chunks, k, v) for chunks in self.sent]

    def _given(self, chunks: Sequence[Chunk], k: Tensor, v: Tensor) -> list[Tensor]:
        views = []
        for chunk in chunks:
            batch, keys = slice(*chunk.span.batch), slice(*chunk.keys)
            dims = self.dims(chunk.span.level)
            views += [x[batch, :, keys, :dim] for x, dim in zip((k, v), dims, strict=True)]
        return views

    def empty(self, k: Tensor) -> list[Tensor]:
        """Memory for the keys and values that this process gets: of each span (rows, G, keys, R) and (rows,
        G, keys, V).
        """
        return [
            k.new_empty((span.batch[1] - span.batch[0], k.shape[1], span.tokens[1] - span.tokens[0], dim))
            for span in self.spans
            for dim in self.dims(span.level)
        ]

    def arrived(self, tensors: Sequence[Tensor]) -> Views:
        """Views of what came from each process in tensors as those of ``empty``."""
        return [_taken(chunks, tensors) for chunks in self.received]

    def here(self, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of what one shard of this process gets from another one of it: in keys and values, and in
        tensors as those of ``empty``.
        """
        return zip(self._given(self.local, k, v), _taken(self.local, tensors), strict=True)


def _taken(chunks: Sequence[Chunk], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        x[:, :, chunk.offset : chunk.offset + chunk.keys[1] - chunk.keys[0]]
        for chunk in chunks
        for x in tensors[2 * chunk.number : 2 * chunk.number + 2]
    ]


@functools.lru_cache(maxsize=64)  # the layers of a model and the steps of a training ask for the same
def plan_of(shards: Shards, layout: LevelLayout, value_dim: int, process: int) -> Plan:
    """The plan of a process."""
    processes = range(max(shards.holders) + 1)
    held: list[list[tuple[int, slice]]] = [[] for _ in processes]
    places = []  # of the tokens of each shard, in the tensors of its process
    spans: list[list[KeySpan]] = [[] for _ in processes]
    for shard, (holder, length) in enumerate(zip(shards.holders, shards.lengths, strict=True)):
        place = held[holder][-1][1].stop if held[holder] else 0
        places.append(place)
        held[holder].append((shard, slice(place, place + length)))
        for span in shards.arriving(shard):
            first, stop = span.queries
            spans[holder].append(replace(span, queries=(place + first, place + stop)))
    travels: dict[tuple[int, int], list[Chunk]] = {}  # by sender and receiver
    for receiver in processes:
        for number, span in enumerate(spans[receiver]):
            for shard, start, stop in shards.owners(span):
                chunk = Chunk(
                    number,
                    span,
                    (places[shard] + start, places[shard] + stop),
                    shards.offsets[shard] + start - span.tokens[0],
                )
                travels.setdefault((shards.holders[shard], receiver), []).append(chunk)
    return Plan(
        shards=shards,
        layout=layout,
        value_dim=value_dim,
        process=process,
        held=tuple(held[process]),
        spans=tuple(spans[process]),
        received=tuple(tuple(travels.get((other, process), ())) if other != process else () for other in processes),
        sent=tuple(tuple(travels.get((process, other), ())) if other != process else () for other in processes),
        local=tuple(travels.get((process, process), ())),
        is_silent=all(sender == receiver for sender, receiver in travels),
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
