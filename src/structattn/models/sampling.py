"""How the next token is chosen from logits: greedily or at random, each row from its own stream of random
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structattn.checks import check_int, check_number, check_tensor
from structattn.errors import ConfigError, GenerationError, ShapeError
from structattn.seeds import generator


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """From logits to the next token.

        p = softmax(logits / temperature), cut to ``top_k`` and then to ``top_p``, and renormalised.

    Args:
        temperature: 0 is greedy, the largest logit. Default 1.
        top_k: only the k most likely tokens; of equal ones those with the lower numbers. More than there are:
            all. Default ``None``: all.
        top_p: only the fewest most likely tokens whose probabilities (after ``top_k``) sum to at least that.
            Default ``None``: all.

    Raises:
        ConfigError: a number out of its range, or a cut with temperature 0, where it has no effect.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, minimum=0)
        if self.top_k is not None:
            check_int("top_k", self.top_k, minimum=1)
        if self.top_p is not None:
            check_number("top_p", self.top_p, above=0, maximum=1)
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

        Raises:
            ShapeError: no logits.
            GenerationError: a largest logit is not a finite number: some are NaN or infinite, or all -inf.
        """
        check_tensor("logits", logits)
        if logits.dim() < 1 or not logits.shape[-1] or logits.is_complex() or logits.is_meta:
            raise ShapeError(
                f"logits must be real numbers, not on the meta device, of shape (..., V), got {logits.dtype} of shape "
                f"{tuple(logits.shape)}"
            )
        logits = logits.double()
        if not bool(logits.amax(-1).isfinite().all()):
            raise GenerationError(
                "no token can be chosen: the logits hold NaN or infinity, or are -inf for every token"
            )
        if self.is_greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # The largest becomes 0 before the division, which a tiny temperature would otherwise take to
        # infinity.
        p = ((logits - logits.amax(-1, keepdim=True)) / float(self.temperature)).softmax(-1)
        if self.top_k is None and self.top_p is None:
            return p
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[..., self.top_k :] = 0
        if self.top_p is not None:
            mass_before = ordered.cumsum(-1) - ordered
            ordered[mass_before >= self.top_p * ordered.sum(-1, keepdim=True)] = 0
        p = torch.zeros_like(p).scatter_(-1, index, ordered)
        return p / p.sum(-1, keepdim=True)


GREEDY = Sampling.greedy()


class RowSampler:
    """Draws one token per row and step, by inversion: the first token at which the summed probabilities pass
    a uniform number.

    A row's uniform numbers depend on the seed, the row's prompt and the step, not on the other rows nor on
    how logits were computed; the k-th of several equal prompts has its own stream. Rounding differences in
    logits change a token only where a uniform number falls within them.

    Args:
        sampling: what is drawn with.
        prompts: token ids of each row.
        seed: any int.
    """

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]], seed: int) -> None:
        self.sampling = sampling
        copies: Counter[tuple[int, ...]] = Counter()
        self._streams = []
        self._step = 0
        for prompt in prompts:
            key = tuple(prompt)
            self._streams.append(generator(seed, copies[key], *key))
            copies[key] += 1

    def draw(self, logits: Tensor, wanted: Sequence[bool] | None = None) -> list[int]:
        """The next token of each row.

        Args:
            logits: (B, V).
            wanted: (B,), whether the token of a row is used. Default: all.

        Raises:
            GenerationError: the largest logit of a row that is wanted is not a finite number.
        """
        self._step += 1
        logits = logits if self.sampling.is_greedy else logits.cpu()
        tokens, finite = self._largest(logits, wanted)
        if self.sampling.is_greedy:
            return tokens
        sums = self.sampling.probabilities(logits.masked_fill(~finite[:, None], 0.0)).cumsum(-1)
        uniform = torch.stack([torch.rand(1, generator=stream, dtype=torch.float64) for stream in self._streams])
        # Tokens of probability 0 add nothing to the sums, so none is the first that passes; the product stays
        # below the last sum.
        below = sums <= torch.minimum(uniform * sums[:, -1:], sums[:, -1:].nextafter(torch.zeros(1, dtype=sums.dtype)))
        drawn: list[int] = below.sum(-1).tolist()
        return drawn

    def _largest(self, logits: Tensor, wanted: Sequence[bool] | None) -> tuple[list[int], Tensor]:
        """The token with the largest logit of each row, and whether that is a finite number (of NaN and
        infinity it is neither).
        """
        choice = logits.argmax(-1, keepdim=True)
        finite = logits.gather(-1, choice).isfinite()
        tokens, fine = torch.cat([choice, finite.long()], dim=-1).T.tolist()  # the device is waited for once
        for row, is_fine in enumerate(fine):
            if not is_fine and (wanted is None or wanted[row]):
                value = float(logits[row].amax())
                raise GenerationError(
                    f"step {self._step}: the largest logit of prompt {row} is {value}, so that no token can be chosen: "
                    "the weights or the numbers computed with them are not finite"
                )
        return tokens, finite[:, 0]
