"""A sequence that is divided among processes: which keys of others the queries of a process see, in how many
levels, and how many bytes that is.

A shard is neighboring tokens of a sequence, or of several packed ones; a process holds one, or two
(``Order``). The positions that share a level with a query are one interval around it, and the queries of a
shard are neighbors: of the keys before a shard its first query sees every one that any of its queries sees,
in as many levels, and of the keys after it its last query does. So what must arrive is, at each level, one
interval that touches the shard, and the sink tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Protocol

import torch
from torch import Tensor

from structattn.checks import MAX_LENGTH, check_bool, check_choice, check_int, check_size, describe, is_int
from structattn.errors import ConfigError

Order = Literal["contiguous", "head-tail"]
ORDERS: tuple[Order, ...] = ("contiguous", "head-tail")


class Sharing(Protocol):
    """What of a ``LevelLayout`` decides which keys travel."""

    @property
    def num_levels(self) -> int: ...
    @property
    def num_rows(self) -> int | None: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def value_ranks(self) -> tuple[int, ...] | None: ...
    @property
    def sink_tokens(self) -> int: ...
    def shared_interval(
        self, level: int, position: int, num_positions: int, window: int | None = None, row: int = 0
    ) -> tuple[int, int]: ...


@dataclass(frozen=True, kw_only=True)
class KeySpan:
    """Neighboring keys of other shards that queries of one shard see, in the same number of levels at most.

    Attributes:
        batch: the batch rows, the first and the one after the last.
        row: which segments of a free partition these have.
        level: the number of levels whose dimensions arrive.
        queries: of the shard, the first that sees one of the keys and the one after the last.
        first_query, first_key: the positions of the first query and the first key in their sequence.
        tokens: the first key and the one after the last, among all T tokens.
    """

    batch: tuple[int, int]
    row: int
    level: int
    queries: tuple[int, int]
    first_query: int
    first_key: int
    tokens: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A batch of T tokens that is divided among processes.

    Attributes:
        layout: any with levels.
        lengths: how many tokens each shard has, in the order of the tokens; 0 is allowed.
        holders: the process that holds each shard.
        seqlens: the boundaries of packed sequences, (0, T) without.
        batch: B.
        is_causal, window: as in ``structured_attention``.
    """

    layout: Sharing
    lengths: tuple[int, ...]
    holders: tuple[int, ...]
    seqlens: tuple[int, ...]
    batch: int
    is_causal: bool
    window: int | None

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first token of each shard, and T."""
        return (0, *accumulate(self.lengths))

    @property
    def rows(self) -> list[tuple[tuple[int, int], int | None]]:
        """Batch rows with the same blocks, each with its row of a free partition; ``None`` where that is the
        packed sequence.
        """
        if self.layout.num_rows is None or len(self.seqlens) != 2:
            return [((0, self.batch), None)]
        return [((n, n + 1), n) for n in range(self.batch)]

    def row(self, row: int | None, sequence: int) -> int:
        """The row of a free partition that a packed sequence, or a batch row, has; 0 where all have the same
        blocks.
        """
        return (sequence if row is None else row) if self.layout.num_rows else 0

    def sequences(self, shard: int) -> Iterator[tuple[int, int, int]]:
        """The packed sequences in a shard: the number of each, its first token among all T, and the one after
        its last.
        """
        offsets = self.offsets
        start, stop = offsets[shard : shard + 2]
        number = bisect_right(self.seqlens, start) - 1
        while start < stop:
            end = min(stop, self.seqlens[number + 1])
            if start < end:
                yield number, start, end
            start, number = end, number + 1

    def arriving(self, shard: int) -> tuple[KeySpan, ...]:
        """The keys that a shard gets from others: first those before it, in rising order, then those after
        it.
        """
        sequences = list(self.sequences(shard))
        spans: list[KeySpan] = []
        for batch, row in self.rows if sequences else ():
            spans += self._arriving(shard, *sequences[0], batch, row, is_before=True)
            if not self.is_causal:
                spans += self._arriving(shard, *sequences[-1], batch, row, is_before=False)
        return tuple(spans)

    def _arriving(
        self,
        shard: int,
        sequence: int,
        start: int,
        stop: int,
        batch: tuple[int, int],
        row: int | None,
        *,
        is_before: bool,
    ) -> Iterator[KeySpan]:
        """The keys of a packed sequence before, or after, the tokens start ... stop of it that a shard
        has.
        """
        begin, end = self.seqlens[sequence : sequence + 2]
        low, high, row = start - begin, stop - begin, self.row(row, sequence)

        def shared(level: int, position: int) -> tuple[int, int]:
            return self.layout.shared_interval(level, position, end - begin, self.window, row)

        levels = range(1, self.layout.num_levels + 1)
        if is_before:
            sinks = 0, min(self.layout.sink_tokens, low)
            edges = [max(sinks[1], min(low, shared(level, low)[0])) for level in levels]
            spans = list(zip(levels, pairwise([*edges, low]), strict=True))
        else:
            sinks = high, max(high, min(self.layout.sink_tokens, end - begin))
            edges = [max(sinks[1], shared(level, high - 1)[1]) for level in levels]
            spans = list(zip(reversed(levels), pairwise([sinks[1], *reversed(edges)]), strict=True))
        if sinks[0] < sinks[1]:
            yield self._span(shard, sequence, batch, row, levels[-1], sinks, (low, high))
        for level, (first, last) in spans:
            if first < last:
                queries = max(low, shared(1, first)[0]), min(high, shared(1, last - 1)[1])
                yield self._span(shard, sequence, batch, row, level, (first, last), queries)

    def _span(
        self,
        shard: int,
        sequence: int,
        batch: tuple[int, int],
        row: int,
        level: int,
        keys: tuple[int, int],
        queries: tuple[int, int],
    ) -> KeySpan:
        """Keys of a packed sequence that some queries of a shard see, both by their positions in it."""
        begin = self.seqlens[sequence]
        offset = begin - self.offsets[shard]
        return KeySpan(
            batch=batch,
            row=row,
            level=level,
            queries=(queries[0] + offset, queries[1] + offset),
            first_query=queries[0],
            first_key=keys[0],
            tokens=(begin + keys[0], begin + keys[1]),
        )

    def owners(self, span: KeySpan) -> Iterator[tuple[int, int, int]]:
        """The shards that have the keys of a span: each, its first key in the shard, and the one after its
        last.
        """
        offsets = self.offsets
        for shard in range(bisect_right(offsets, span.tokens[0]) - 1, len(self.lengths)):
            start, stop = (min(max(x, offsets[shard]), offsets[shard + 1]) for x in span.tokens)
            if start < stop:
                yield shard, start - offsets[shard], stop - offsets[shard]
            if stop == span.tokens[1]:
                return


@dataclass(frozen=True, kw_only=True)
class CommunicationBytes:
    """What processes send to each other in one call of ``sa.parallel.context_parallel``.

    Attributes:
        keys, values: ``keys[a][b]`` are the bytes of keys that process a sends to process b in the forward
            pass; in the backward pass process b sends as many bytes of their gradients to process a.
    """

    keys: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]

    @property
    def forward(self) -> tuple[int, ...]:
        """The bytes that each process sends in the forward pass."""
        return tuple(sum(keys) + sum(values) for keys, values in zip(self.keys, self.values, strict=True))

    @property
    def backward(self) -> tuple[int, ...]:
        """The bytes that each process sends in the backward pass: as many as it received."""
        columns = (zip(*table, strict=True) for table in (self.keys, self.values))
        return tuple(sum(keys) + sum(values) for keys, values in zip(*columns, strict=True))


def communication_bytes(
    layout: Sharing,
    num_positions: int,
    num_processes: int | Sequence[int],
    *,
    order: Order = "contiguous",
    is_causal: bool = True,
    window: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    num_kv_heads: int = 1,
    value_dim: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
) -> CommunicationBytes:
    """See ``LevelLayout.communication_bytes``."""
    shard_lengths = checked_shards(num_positions, num_processes)
    check_choice("order", order, ORDERS)
    check_bool("is_causal", is_causal)
    if window is not None:
        check_size("window", window, MAX_LENGTH)
    check_size("num_kv_heads", num_kv_heads)
    check_size("batch_size", batch_size)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype must be a floating-point dtype of torch, got {describe(dtype)}")
    seqlens = (0, num_positions) if cu_seqlens is None else _checked_boundaries(num_positions, cu_seqlens)
    dims = level_dims(layout, value_dim)
    num_rows = batch_size if cu_seqlens is None else len(seqlens) - 1
    if layout.num_rows is not None and layout.num_rows != num_rows:
        raise ConfigError(f"the layout has boundaries for {layout.num_rows} rows, and the batch has {num_rows}")
    lengths, holders = divided(shard_lengths, order)
    shards = Shards(
        layout=layout,
        lengths=lengths,
        holders=holders,
        seqlens=seqlens,
        batch=batch_size,
        is_causal=is_causal,
        window=window,
    )
    keys, values = ([[0] * len(shard_lengths) for _ in shard_lengths] for _ in range(2))
    for shard, process in enumerate(holders):
        for span in shards.arriving(shard):
            for owning_shard, start, stop in shards.owners(span):
                if (owner := holders[owning_shard]) != process:
                    vectors = (span.batch[1] - span.batch[0]) * num_kv_heads * (stop - start) * dtype.itemsize
                    keys[owner][process] += vectors * sum(rank for rank, _ in dims[: span.level])
                    values[owner][process] += vectors * sum(rank for _, rank in dims[: span.level])
    return CommunicationBytes(keys=tuple(map(tuple, keys)), values=tuple(map(tuple, values)))


def level_dims(layout: Sharing, value_dim: int | None) -> list[tuple[int, int]]:
    """The dimensions of keys and of values that each level has; without ``value_ranks`` level 1 has all
    values.

    Args:
        value_dim: V; ``None`` is the head dimension, or the sum of the ``value_ranks``.
    """
    values = layout.value_ranks
    if values is None:
        if value_dim is not None:
            check_size("value_dim", value_dim)
        values = (sum(layout.ranks) if value_dim is None else value_dim, *(0,) * (layout.num_levels - 1))
    elif value_dim not in (None, sum(values)):
        raise ConfigError(
            f"value_dim must be {sum(values)}, the sum of the value_ranks of the layout, got {describe(value_dim)}"
        )
    return list(zip(layout.ranks, values, strict=True))


def divided(lengths: Sequence[int], order: Order) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many tokens each shard has, in the order of the tokens, and the process that holds it.

    Args:
        lengths: the tokens of each process.
        order: ``"contiguous"``: one shard for each process, in their order. ``"head-tail"``: two for each,
            the first half of its tokens (rounded up) counted from the start of the sequence, the others from
            its end: of N processes, process p holds shards p and 2 N - 1 - p.
    """
    processes = range(len(lengths))
    if order == "contiguous":
        return tuple(lengths), tuple(processes)
    heads, tails = [length - length // 2 for length in lengths], [length // 2 for length in lengths]
    return (*heads, *reversed(tails)), (*processes, *reversed(processes))


def checked_shards(num_positions: int, num_processes: int | Sequence[int]) -> tuple[int, ...]:
    """The tokens of each process, from their number or from the processes: then the first ones have one more
    where T is no multiple.
    """
    check_size("num_positions", num_positions, MAX_LENGTH)
    if isinstance(num_processes, int) and not isinstance(num_processes, bool):
        check_size("num_processes", num_processes, MAX_LENGTH)
        base_length, remainder = divmod(num_positions, num_processes)
        return tuple(base_length + (n < remainder) for n in range(num_processes))
    if not isinstance(num_processes, Sequence) or isinstance(num_processes, str | bytes):
        raise ConfigError(f"num_processes must be an int, or the lengths of the shards, got {describe(num_processes)}")
    for number, length in enumerate(num_processes):
        check_int(f"num_processes: the shard of process {number}", length, minimum=0)
    if sum(num_processes) != num_positions:
        raise ConfigError(f"the shards must have {num_positions} positions together, got {sum(num_processes)}")
    return tuple(num_processes)


def _checked_boundaries(num_positions: int, cu_seqlens: Sequence[int] | Tensor) -> tuple[int, ...]:
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    is_list = isinstance(ends, tuple | list) and len(ends) > 1 and all(is_int(x) for x in ends)
    if not is_list or ends[0] != 0 or ends[-1] != num_positions or any(a > b for a, b in pairwise(ends)):
        raise ConfigError(
            f"cu_seqlens must rise or stay the same from 0 to the length {num_positions}, got {describe(cu_seqlens)}"
        )
    return tuple(ends)
