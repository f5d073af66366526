"""What is counted of a layout: pairs, FLOPs, numbers in a cache, bytes between processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from structattn.checks import check_bool, check_size
from structattn.layout.shards import CommunicationBytes, Order, communication_bytes
from structattn.layout.sliding import Windows, pairs_within
from structattn.layout.work import balanced_shards


class LevelCounts(ABC):
    """The counts of ``LevelLayout``, from its fields and from the lengths of its blocks."""

    ranks: tuple[int, ...]
    value_ranks: tuple[int, ...] | None
    windows: Windows | None
    sink_tokens: int

    @property
    @abstractmethod
    def num_levels(self) -> int: ...

    @property
    @abstractmethod
    def num_rows(self) -> int | None: ...

    @abstractmethod
    def shared_interval(
        self, level: int, position: int, num_positions: int, window: int | None = None, row: int = 0
    ) -> tuple[int, int]: ...

    @abstractmethod
    def window_of(self, level: int, window: int | None = None) -> int | None: ...

    @abstractmethod
    def lengths(self, level: int, num_positions: int, row: int = 0) -> tuple[int, ...]: ...

    @abstractmethod
    def _first_blocks(self, level: int, limit: int, num_positions: int, row: int) -> list[tuple[int, int]]: ...

    @abstractmethod
    def _length_counts(self, level: int, num_positions: int, row: int) -> dict[int, int]: ...

    @abstractmethod
    def _check_count(self, num_positions: int, row: int, maximum: int | None = None) -> None: ...

    def shared_pairs(self, num_positions: int, is_causal: bool = True, row: int = 0) -> tuple[int, ...]:
        """The number of (query, key) pairs among ``num_positions`` that share each level; T*T or T*(T+1)/2 at
        level 1.
        """
        check_bool("is_causal", is_causal)
        self._check_count(num_positions, row)
        levels = range(1, self.num_levels + 1)
        if self.windows is not None:
            pairs = [pairs_within(window, num_positions, is_causal) for window in self.windows]
        else:
            counts = (self._length_counts(level, num_positions, row) for level in levels)
            pairs = [sum(pairs_within(None, length, is_causal) * n for length, n in x.items()) for x in counts]
        sinks = (self._sink_pairs(level, num_positions, is_causal, row) for level in levels)
        return tuple(a + b for a, b in zip(pairs, sinks, strict=True))

    def _sink_pairs(self, level: int, num_positions: int, is_causal: bool, row: int) -> int:
        """The pairs of queries and sink tokens that share a level for no other reason."""
        count = min(self.sink_tokens, num_positions)
        if self.windows is not None:
            if (window := self.windows[level - 1]) is None:
                return 0
            # Query p does not reach the first p - window + 1 tokens; `count` of them are sink tokens at most.
            far = max(0, num_positions - window)
            near = min(far, count)
            earlier_pairs = near * (near + 1) // 2 + (far - near) * count
            return earlier_pairs if is_causal else earlier_pairs + sum(range(max(0, count - window) + 1))
        blocks = self._first_blocks(level, count, num_positions, row)
        earlier_pairs = sum((end - start) * start for start, end in blocks)
        earlier_pairs += count * (num_positions - max((end for _, end in blocks), default=num_positions))
        return (
            earlier_pairs
            if is_causal
            else earlier_pairs + sum((end - start) * max(0, count - end) for start, end in blocks)
        )

    def score_flops(self, num_positions: int, is_causal: bool = True, row: int = 0) -> int:
        """FLOPs of all the scores of one head over T positions, exactly: 2 * sum over levels of r_l * (pairs
        sharing l).

        2 FLOPs per multiply-add. At T = ``block_sizes[0]`` with halving, not causal: 2 T^2 * sum r_l /
        2^(l-1).
        """
        shared = self.shared_pairs(num_positions, is_causal, row)
        return sum(2 * rank * pairs for rank, pairs in zip(self.ranks, shared, strict=True))

    def value_flops(self, num_positions: int, value_dim: int, is_causal: bool = True, row: int = 0) -> int:
        """FLOPs of the weighted sums of values of one head over T positions: 2 * sum over levels of v_l *
        (pairs sharing l).

        Without ``value_ranks``: 2 * ``value_dim`` * (all pairs).
        """
        check_size("value_dim", value_dim)
        shared = self.shared_pairs(num_positions, is_causal, row)
        ranks = (value_dim,) if self.value_ranks is None else self.value_ranks
        return sum(2 * rank * pairs for rank, pairs in zip(ranks, shared, strict=False))

    def key_cache_size(self, num_positions: int, row: int = 0) -> int:
        """Numbers per key head that a cache must be able to hold while decoding up to T positions.

        Level 1 keeps all T keys, a deeper level only those of the block that decoding is in, at most its
        longest block: T r_1 + sum over l > 1 of r_l min(T, block_size_l). Sliding levels: sum of r_l min(T,
        window_l). Standard attention: T * D. Sink tokens are kept apart: min(T, sink_tokens) * D more.
        """
        return self._cache_size(self.ranks, num_positions, row)

    def value_cache_size(self, num_positions: int, value_dim: int, row: int = 0) -> int:
        """Numbers per value head that a cache must be able to hold: as the keys with ``value_ranks``, else T
        * V.
        """
        check_size("value_dim", value_dim)
        return self._cache_size(self.value_ranks or (value_dim,), num_positions, row)

    def _cache_size(self, ranks: tuple[int, ...], num_positions: int, row: int) -> int:
        self._check_count(num_positions, row)
        if self.windows is not None:
            longest = [min(num_positions, num_positions if window is None else window) for window in self.windows]
        else:
            levels = range(1, len(ranks) + 1)
            longest = [max(self._length_counts(level, num_positions, row), default=0) for level in levels]
        size = sum(rank * length for rank, length in zip(ranks, longest, strict=False))
        return size + sum(ranks) * min(num_positions, self.sink_tokens)

    def communication_bytes(
        self,
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
        """The bytes that processes send to each other in one call of ``sa.parallel.context_parallel``,
        counted from the layout.

        A process gets of each key the dimensions of the levels that one of its queries shares with it, and of
        each value those of its levels.

        Args:
            num_positions: T, of all processes together.
            num_processes: their number, for T split as evenly as possible, or the tokens of each.
            order: of the tokens, as in ``sa.parallel.context_parallel``.
            is_causal, window, cu_seqlens: as in ``structured_attention``.
            num_kv_heads: G.
            value_dim: V. Default: the sum of ``value_ranks``, or the head dimension.
            batch_size: B.
            dtype: of keys and values.

        Returns:
            A ``CommunicationBytes``: ``forward`` and ``backward`` are the bytes that each process sends,
            ``keys[a][b]`` and ``values[a][b]`` those from process a to b. The check that all processes make
            the same call is not counted.

        Raises:
            ConfigError: an argument is out of its range.

        Example:
            >>> layout = LevelLayout.halving((8,) * 8, 1024)
            >>> plain = LevelLayout.halving((64,), 1024)
            >>> keys = [sum(map(sum, x.communication_bytes(1024, 4).keys)) for x in (plain, layout)]
            >>> keys[0] / keys[1]
            6.0
        """
        return communication_bytes(
            self,
            num_positions,
            num_processes,
            order=order,
            is_causal=is_causal,
            window=window,
            cu_seqlens=cu_seqlens,
            num_kv_heads=num_kv_heads,
            value_dim=value_dim,
            batch_size=batch_size,
            dtype=dtype,
        )

    def balanced_shards(
        self,
        num_positions: int,
        num_processes: int,
        *,
        window: int | None = None,
        value_dim: int | None = None,
        other_flops: float = 0.0,
    ) -> tuple[int, ...]:
        """Lengths of contiguous shards that even the causal work of ``sa.parallel.context_parallel``: the
        most FLOPs of one are the fewest possible.

        The first shards are the longest, and memory and linear layers grow with the length: of N processes
        and one level the first one holds sqrt(N) times the mean. ``order="head-tail"`` evens both.

        Args:
            num_positions: T.
            num_processes: N.
            window: as in ``structured_attention``.
            value_dim: V. Default: the sum of ``value_ranks``, or the head dimension.
            other_flops: forward FLOPs of a token besides attention, over the number of heads. Default 0:
                attention alone is evened.

        Returns:
            N lengths, the sum is T.

        Raises:
            ConfigError: an argument is out of its range.

        Cost: O(L T).

        Example:
            >>> LevelLayout.halving((64,), 1024).balanced_shards(1024, 4)
            (512, 212, 163, 137)
        """
        return balanced_shards(
            self, num_positions, num_processes, window=window, value_dim=value_dim, other_flops=other_flops
        )
