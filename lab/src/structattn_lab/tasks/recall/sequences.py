"""Synthetic sequences in which a key comes twice, and what follows it the second time is what followed it the
first time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor


def log_uniform(longest: int, count: int, rng: Generator) -> Tensor:
    """Distances (count,) from 1 to ``longest``: d with probability log((d + 1) / d) / log(longest + 1), so
    whole octaves are equally likely.
    """
    drawn = torch.rand(count, generator=rng, dtype=torch.float64).mul(math.log(longest + 1)).exp().long()
    return drawn.clamp(max=longest)  # where rounding reaches the end of the interval


@dataclass(frozen=True)
class Placement:
    """Where the pairs and the queries of sequences are.

    Attributes:
        pairs: positions of the keys of the pairs, (B, N); each value is one position later.
        distances: tokens from the value of a pair to the query, (B, N): the query is at
            ``pairs + 1 + distances``, its answer one later.
    """

    pairs: Tensor
    distances: Tensor

    @property
    def queries(self) -> Tensor:
        """Positions of the queries, (B, N)."""
        return self.pairs + 1 + self.distances


@dataclass(frozen=True)
class Vocabulary:
    """Token ids: fillers from 0, then keys, then values, then tokens that are a key and a value at once, if
    there are any.
    """

    num_fillers: int
    num_keys: int
    num_values: int
    has_pairs: bool

    def __len__(self) -> int:
        return self.first_pair + (self.num_keys * self.num_values if self.has_pairs else 0)

    @property
    def first_key(self) -> int:
        return self.num_fillers

    @property
    def first_value(self) -> int:
        return self.num_fillers + self.num_keys

    @property
    def first_pair(self) -> int:
        return self.first_value + self.num_values

    def pair(self, keys: Tensor, values: Tensor) -> Tensor:
        """The one token of a key and a value."""
        return self.first_pair + (keys - self.first_key) * self.num_values + values - self.first_value

    def value_of(self, tokens: Tensor) -> Tensor:
        """The value that a token is or has, -1 without one."""
        single = torch.where(tokens < self.first_value, -1, tokens)
        return torch.where(
            tokens < self.first_pair, single, self.first_value + (tokens - self.first_pair) % self.num_values
        )


@dataclass(frozen=True)
class Arrangement(ABC):
    """How pairs and queries are placed in sequences of T tokens and the one after them.

    Attributes:
        context_length: T.
        num_pairs: N, pairs of a sequence; each is asked for once.
        num_keys: different keys.
        has_joined_pairs: whether a pair is one token.
    """

    context_length: int
    num_pairs: int
    num_keys: int
    has_joined_pairs: ClassVar[bool] = False

    @property
    def longest(self) -> int:
        """The largest distance, T - 2: from the first value to a query whose answer is the last token."""
        return self.context_length - 2

    @abstractmethod
    def place(self, count: int, rng: Generator) -> Placement:
        """Positions of the pairs and queries of ``count`` sequences."""

    def write(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor, words: Vocabulary) -> None:
        """Writes pairs into the tokens."""
        tokens.scatter_(1, positions, keys).scatter_(1, positions + 1, values)


class Associative(Arrangement):
    """N pairs and their queries at random positions, which do not overlap.

    A distance is drawn, then one of the positions where it has room; where it has none, another distance is
    drawn. There is always room for some distance while 6 N <= T: fewer than T / 3 spans of two tokens always
    leave two tokens free side by side.
    """

    def place(self, count: int, rng: Generator) -> Placement:
        free = torch.ones(count, self.context_length + 1, dtype=torch.bool)
        positions = torch.arange(self.context_length)
        pairs = torch.zeros(count, self.num_pairs, dtype=torch.long)
        distances = torch.zeros_like(pairs)
        for number in range(self.num_pairs):
            rows = torch.arange(count)
            while len(rows):
                drawn = log_uniform(self.longest, len(rows), rng)
                room = free[rows, :-1] & free[rows, 1:]  # for two tokens, by the first
                queries = positions + 1 + drawn[:, None]
                fits = room & room.gather(1, queries.clamp(max=self.longest + 1)) & (queries <= self.longest + 1)
                pick = (fits * (1 - torch.rand(fits.shape, generator=rng))).argmax(1)
                has_room = fits.any(1)
                done = rows[has_room]
                pairs[done, number], distances[done, number] = pick[has_room], drawn[has_room]
                for first in (pick[has_room], pick[has_room] + 1 + drawn[has_room]):
                    free[done, first] = free[done, first + 1] = False
                rows = rows[~has_room]
        return Placement(pairs, distances)


class Joined(Associative):
    """As ``Associative``, and each pair is one token, in the place of its value.

    What is near a value is then of no use to find it, so that models learn in few steps to compare keys.
    """

    has_joined_pairs = True

    def write(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor, words: Vocabulary) -> None:
        """See ``Arrangement``."""
        tokens.scatter_(1, positions + 1, words.pair(keys, values))


class Passkey(Arrangement):
    """One pair, whose query is the last token of the context."""

    def place(self, count: int, rng: Generator) -> Placement:
        distances = log_uniform(self.longest, count, rng)[:, None]
        return Placement(self.longest - distances, distances)


def draw_tokens(kind: Arrangement, words: Vocabulary, count: int, rng: Generator) -> tuple[Tensor, Placement]:
    """Sequences (count, T + 1) and where their pairs and queries are: random fillers, different keys, and any
    values.
    """
    placement = kind.place(count, rng)
    tokens = torch.randint(words.num_fillers, (count, kind.context_length + 1), generator=rng)
    keys = torch.rand(count, words.num_keys, generator=rng).argsort(1)[:, : kind.num_pairs] + words.first_key
    values = torch.randint(words.num_values, keys.shape, generator=rng) + words.first_value
    kind.write(tokens, placement.pairs, keys, values, words)
    tokens.scatter_(1, placement.queries, keys).scatter_(1, placement.queries + 1, values)
    return tokens, placement
