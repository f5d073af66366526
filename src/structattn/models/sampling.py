"""How the next token is chosen from logits: greedily or at random, each row from its own stream of random numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structattn.errors import ConfigError
from structattn.seeds import generator


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """From logits to the next token.

        p = softmax(logits / temperature), cut to ``top_k`` and then to ``top_p``, and renormalised.

    Args:
        temperature: 0 is greedy, the largest logit. Default 1.
        top_k: only the k most likely tokens; of equal ones those with the lower numbers. More than there are: all. Default
            ``None``: all.
        top_p: only the fewest most likely tokens whose probabilities (after ``top_k``) sum to at least that. Default ``None``:
            all.

    Raises:
        ConfigError: a number out of its range, or a cut with temperature 0, where it has no effect.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be finite and not negative (0 is greedy), got {self.temperature}")
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise ConfigError(f"top_k must be None or an int of at least 1, got {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be None or lie in (0, 1], got {self.top_p}")
        if self.is_greedy and (self.top_k is not None or self.top_p is not None):
            raise ConfigError("temperature 0 always takes the largest logit: leave top_k and top_p at None")

    @classmethod
    def greedy(cls) -> Sampling:
        """Always the largest logit."""
        return cls(temperature=0.0)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """What tokens are drawn with; for greedy sampling all on the largest logit (the first of equal ones).

        Args:
            logits: (..., V).

        Returns:
            (..., V), float64.
        """
        logits = logits.double()
        if self.is_greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # The largest becomes 0 before the division, which a tiny temperature would otherwise take to infinity.
        p = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p is None:
            return p
        ordered, places = p.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[..., self.top_k :] = 0
        if self.top_p is not None:
            before = ordered.cumsum(-1) - ordered
            ordered[before >= self.top_p * ordered.sum(-1, keepdim=True)] = 0
        p = torch.zeros_like(p).scatter_(-1, places, ordered)
        return p / p.sum(-1, keepdim=True)


GREEDY = Sampling.greedy()


class RowSampler:
    """Draws one token per row and step, by inversion: the first token at which the summed probabilities pass a uniform number.

    A row's uniform numbers depend on the seed, the row's prompt and the step, not on the other rows nor on how logits were
    computed; the k-th of several equal prompts has a stream of its own. Rounding differences in logits change a token only
    where a uniform number falls within them.

    Args:
        sampling: what is drawn with.
        prompts: token ids of each row.
        seed: any int.
    """

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]], seed: int) -> None:
        self.sampling = sampling
        copies: Counter[tuple[int, ...]] = Counter()
        self._streams = []
        for prompt in prompts:
            key = tuple(prompt)
            self._streams.append(generator(seed, copies[key], *key))
            copies[key] += 1

    def draw(self, logits: Tensor) -> list[int]:
        """The next token of each row.

        Args:
            logits: (B, V).
        """
        if self.sampling.is_greedy:
            tokens: list[int] = logits.argmax(-1).tolist()
            return tokens
        sums = self.sampling.probabilities(logits.cpu()).cumsum(-1)
        uniform = torch.stack([torch.rand(1, generator=stream, dtype=torch.float64) for stream in self._streams])
        # Tokens of probability 0 add nothing to the sums, so none is the first that passes; the product stays below the last sum.
        below = sums <= torch.minimum(uniform * sums[:, -1:], sums[:, -1:].nextafter(torch.zeros(1, dtype=sums.dtype)))
        drawn: list[int] = below.sum(-1).tolist()
        return drawn
