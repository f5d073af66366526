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
class KeyTransfer:
    """The keys of one span that come from one process.

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
class ExchangePlan:
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
    received: tuple[tuple[KeyTransfer, ...], ...]
    sent: tuple[tuple[KeyTransfer, ...], ...]
    local: tuple[KeyTransfer, ...]
    is_silent: bool

    def dims(self, level: int) -> tuple[int, int]:
        """The dimensions of keys and of values in the first levels."""
        value_ranks = self.layout.value_ranks
        return sum(self.layout.ranks[:level]), self.value_dim if value_ranks is None else sum(value_ranks[:level])

    def outgoing(self, k: Tensor, v: Tensor) -> Views:
        """Views of what other processes get of keys and values, or of where their gradients belong."""
        return [self._in_keys(transfers, k, v) for transfers in self.sent]

    def _in_keys(self, transfers: Sequence[KeyTransfer], k: Tensor, v: Tensor) -> list[Tensor]:
        views = []
        for transfer in transfers:
            batch, keys = slice(*transfer.span.batch), slice(*transfer.keys)
            dims = self.dims(transfer.span.level)
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

    def incoming(self, tensors: Sequence[Tensor]) -> Views:
        """Views of what came from each process in tensors as those of ``empty``."""
        return [_in_spans(transfers, tensors) for transfers in self.received]

    def kept(self, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of what one shard of this process gets from another one of it: in keys and values, and in
        tensors as those of ``empty``.
        """
        return zip(self._in_keys(self.local, k, v), _in_spans(self.local, tensors), strict=True)


def _in_spans(transfers: Sequence[KeyTransfer], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        x[:, :, transfer.offset : transfer.offset + transfer.keys[1] - transfer.keys[0]]
        for transfer in transfers
        for x in tensors[2 * transfer.number : 2 * transfer.number + 2]
    ]


@functools.lru_cache(maxsize=64)  # the layers of a model and the steps of a training ask for the same
def exchange_plan(shards: Shards, layout: LevelLayout, value_dim: int, process: int) -> ExchangePlan:
    """The plan of a process in a call."""
    processes = range(max(shards.holders) + 1)
    held: list[list[tuple[int, slice]]] = [[] for _ in processes]
    offsets = []  # of the first token of each shard, in the tensors of its process
    spans: list[list[KeySpan]] = [[] for _ in processes]
    for shard, (holder, length) in enumerate(zip(shards.holders, shards.lengths, strict=True)):
        offset = held[holder][-1][1].stop if held[holder] else 0
        offsets.append(offset)
        held[holder].append((shard, slice(offset, offset + length)))
        for span in shards.arriving(shard):
            first, stop = span.queries
            spans[holder].append(replace(span, queries=(offset + first, offset + stop)))
    travels: dict[tuple[int, int], list[KeyTransfer]] = {}  # by sender and receiver
    for receiver in processes:
        for number, span in enumerate(spans[receiver]):
            for shard, start, stop in shards.owners(span):
                transfer = KeyTransfer(
                    number,
                    span,
                    (offsets[shard] + start, offsets[shard] + stop),
                    shards.offsets[shard] + start - span.tokens[0],
                )
                travels.setdefault((shards.holders[shard], receiver), []).append(transfer)
    return ExchangePlan(
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
    return [sum(x.numel() for x in tensors_of_process) for tensors_of_process in views]


def packed(views: Views, like: Tensor) -> Tensor:
    """The numbers of all views, concatenated."""
    numbers = like.new_empty(sum(sizes(views)))
    for view, tensors_of_process in unpacked(numbers, views):
        tensors_of_process.copy_(view)
    return numbers


def unpacked(numbers: Tensor, views: Views) -> list[tuple[Tensor, Tensor]]:
    """Each view, and its numbers among those of all, in its shape."""
    flat = [x for tensors_of_process in views for x in tensors_of_process]
    ends = accumulate(x.numel() for x in flat)
    return [(x, numbers[end - x.numel() : end].view(x.shape)) for x, end in zip(flat, ends, strict=True)]
