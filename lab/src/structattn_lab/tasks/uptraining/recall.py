"""Recall by distance: a passage comes twice in a window, and the second time its tokens can be looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from structattn.errors import ConfigError
from structattn.seeds import generator

MOST_LOOKED_UP = 32  # windows whose recall is measured during training
_CUE = 4  # tokens of a random passage that are not scored: they say which passage it is
_FEWEST = 2  # scored tokens of a window at each distance, if need be of several passages one by one


class Passages(Protocol):
    """Passages of one size."""

    @property
    def scored(self) -> Tensor:
        """(size,) of bool: the tokens to look up."""

    def draw(self, count: int, made: Generator) -> Tensor:
        """Passages (count, size), at random."""


@dataclass(frozen=True)
class RandomPassages:
    """Tokens drawn from ``vocab``, so that nothing but the first passage tells them: frequent ones come more
    often.
    """

    vocab: Tensor
    size: int

    @property
    def scored(self) -> Tensor:
        return torch.arange(self.size) >= min(_CUE, self.size - 1)

    def draw(self, count: int, made: Generator) -> Tensor:
        return self.vocab[torch.randint(len(self.vocab), (count, self.size), generator=made)]


@dataclass(frozen=True)
class KnownPassages:
    """One of ``tokens`` (N, size): what is not the same in all of them is looked up."""

    tokens: Tensor

    @classmethod
    def of(cls, text: str, values: Sequence[str], encode: Callable[[str], Sequence[int]]) -> KnownPassages:
        """A text whose ``{}`` is one of several values.

        Raises:
            ConfigError: the values have different numbers of tokens, or all the same ones.
        """
        tokens = [list(encode(text.replace("{}", value))) for value in values]
        odd = next((value for value, row in zip(values, tokens, strict=True) if len(row) != len(tokens[0])), None)
        if odd is not None:
            raise ConfigError(
                f"task.recall_values: expected values of equally many tokens, got {odd!r}, of another number than "
                f"{values[0]!r}: give others"
            )
        if len({tuple(row) for row in tokens}) < 2:
            raise ConfigError(
                "task.recall_values: expected values that differ in their tokens, got the same for all: give others"
            )
        return cls(torch.tensor(tokens))

    @property
    def scored(self) -> Tensor:
        return (self.tokens != self.tokens[0]).any(0)

    def draw(self, count: int, made: Generator) -> Tensor:
        return self.tokens[torch.randint(len(self.tokens), (count,), generator=made)]


def distances(context_length: int, size: int) -> list[int]:
    """Powers of two from the length of a passage to the longest distance at which both passages fit into the
    context.
    """
    shown = []
    distance = 1
    while distance + size <= context_length:
        if distance >= size:
            shown.append(distance)
        distance *= 2
    return shown


def recall(
    predict: Callable[[Tensor], Tensor], windows: Tensor, passages: Passages, at: Sequence[int]
) -> dict[int, float]:
    """The share of right first guesses in the second passage, by the distance between the two.

    A passage replaces tokens of a window of text, once at a random position and once ``distance`` later.

    Args:
        predict: logits (B, T, V) of tokens (B, T).
        windows: text, (N, T).
        passages: to draw from.
        at: distances between the beginnings of the two passages.

    Returns:
        By distance, of the tokens that are ``scored``.
    """
    scored = passages.scored.nonzero()[:, 0]
    size = len(passages.scored)
    windows = windows.repeat(-(-_FEWEST // len(scored)), 1)
    count, length = windows.shape
    shares = {}
    for distance in at:
        made = generator("recall", distance)
        drawn = passages.draw(count, made)
        first = torch.randint(length - distance - size + 1, (count,), generator=made)
        positions = first[:, None] + torch.arange(size)
        tokens = windows.clone()
        for start in (positions, positions + distance):
            tokens.scatter_(1, start, drawn)
        guesses = torch.cat([predict(part).argmax(-1).cpu() for part in tokens.split(16)])
        right = guesses.gather(1, (positions + distance)[:, scored] - 1) == drawn[:, scored]
        shares[distance] = float(right.double().mean())
    return shares
