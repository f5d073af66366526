"""Recall by distance: a passage comes twice in a window, and the second time its tokens can be looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from structattn.seeds import generator

MOST_LOOKED_UP = 32  # windows whose recall is measured during training
_CUE = 4  # tokens of the second passage that are not scored: they say which passage it is


def distances(context_length: int, size: int) -> list[int]:
    """Powers of two from the length of a passage to the longest distance at which both passages fit into the context."""
    found = []
    distance = 1
    while distance + size <= context_length:
        if distance >= size:
            found.append(distance)
        distance *= 2
    return found


def recall(
    predict: Callable[[Tensor], Tensor], windows: Tensor, size: int, vocab: Tensor, at: Sequence[int]
) -> dict[int, float]:
    """The share of right first guesses in the second passage, by the distance between the two.

    A passage is ``size`` tokens drawn from ``vocab``, so that nothing but the first passage tells them. It replaces tokens of a window
    of text, once at a random place and once ``distance`` later.

    Args:
        predict: logits (B, T, V) of tokens (B, T).
        windows: text, (N, T).
        size: tokens of a passage.
        vocab: tokens to draw from, such as those of a text: frequent ones come more often.
        at: distances between the beginnings of the two passages.

    Returns:
        By distance; the first tokens of the second passage, 4 at most, are a cue and are not scored.
    """
    count, length = windows.shape
    found = {}
    for distance in at:
        made = generator("recall", distance)
        passages = vocab[torch.randint(len(vocab), (count, size), generator=made)]
        first = torch.randint(length - distance - size + 1, (count,), generator=made)
        places = first[:, None] + torch.arange(size)
        tokens = windows.clone()
        for start in (places, places + distance):
            tokens.scatter_(1, start, passages)
        cue = min(_CUE, size - 1)
        scored = (places + distance)[:, cue:]
        guesses = torch.cat([predict(part).argmax(-1).cpu() for part in tokens.split(16)])
        right = guesses.gather(1, scored - 1) == passages[:, cue:]
        found[distance] = float(right.double().mean())
    return found
