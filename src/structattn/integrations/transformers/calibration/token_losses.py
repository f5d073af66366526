"""What the predictions of a model lose where key heads keep some of the far tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from structattn.integrations.transformers.calibration.prompts import COPIES

# How many groups of tokens stay of how many, by the share that does.
WAYS = ((0, 8), (1, 16), *((keep, 8) for keep in range(1, 8)))
_SMALLEST = 1e-12  # of a loss in nats: below this all are alike
_SEGMENT = 64  # tokens that are summed before all that come before one are
_LEAST_LEFT = 1e-4  # of the weight of a query: where less stays, it is as if so much did
_LARGEST_FACTOR = 8.0  # between what is measured and what was expected to second order
_STEEPEST = 2.0  # power with which losses fall with the recent tokens, between numbers that were measured and beyond


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLosses:
    """The expected change of the predictions, for each head, each of ``WAYS`` and each number of recent
    tokens that stay besides: in nats per token, to be added over heads.

    Attributes:
        recents: ascending.
        text: (heads, ways, recents) float64, heads of all layers in their order; on the user's text.
        copies: likewise; on tokens that are a copy of what the context has.
    """

    recents: tuple[int, ...]
    text: Tensor
    copies: Tensor

    @classmethod
    def of_file(cls, losses: Tensor, *, recent: int, exponent: float, of_text: float) -> TokenLosses:
        """Those of a calibration of before: of text and copies together, with one number of recent tokens.

        Args:
            losses: (heads, ways).
            recent: of ``losses``.
            exponent: with r recent tokens they are (recent / r)^exponent times as large.
            of_text: those of text, relative to all.
        """
        recents = (64, 128, 256)
        factors = (recent / torch.tensor(recents, dtype=torch.float64)) ** exponent
        both = losses[..., None] * factors
        text = both * of_text
        return cls(recents=recents, text=text, copies=(both - (1 - COPIES) * text).clamp(min=0) / COPIES)

    @property
    def both(self) -> Tensor:
        """Of text in which copies are a tenth of the tokens, (heads, ways, recents)."""
        return (1 - COPIES) * self.text + COPIES * self.copies

    def choices(self, share: float, length: int) -> list[tuple[int, int]]:
        """(way, recent) of each head, so that least is lost where at most a share of all tokens stays.

        Args:
            share: of the tokens of all heads.
            length: of the text.
        """
        kept = torch.tensor([keep / block for keep, block in WAYS], dtype=torch.float64)[:, None]
        near = (torch.tensor(self.recents, dtype=torch.float64) / length).clamp(max=1)
        shares, losses = (kept * (1 - near) + near).flatten(), self.both.flatten(1)
        low, high = 0.0, float(losses.max()) / float(shares.diff().abs().max()) + 1
        for _ in range(60):  # of the price of a token
            price = (low + high) / 2
            at = (losses + price * shares).argmin(dim=1)
            low, high = (price, high) if float(shares[at].mean()) > share else (low, price)
        found = (losses + high * shares).argmin(dim=1).tolist()
        return [(number // len(self.recents), self.recents[number % len(self.recents)]) for number in found]

    def scaled(self, choices: Sequence[tuple[int, int]], of_text: float, of_copies: float) -> TokenLosses:
        """So that those of some choices add up to what was measured of them, on text and on copies."""
        heads, ways = range(len(choices)), [way for way, _ in choices]
        at = [self.recents.index(recent) for _, recent in choices]

        def factor(losses: Tensor, measured: float) -> float:
            expected = float(losses[list(heads), ways, at].sum())
            return min(max(measured / max(expected, _SMALLEST), 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)

        text, copies = factor(self.text, of_text), factor(self.copies, of_copies)
        return replace(self, text=text * self.text, copies=copies * self.copies)

    def with_recent(self, recent: int, waiting: int = 1) -> TokenLosses:
        """Where another number of recent tokens stays, and as many more as have come since a block was
        decided on: from 0 to fewer than ``waiting``, each as often. Its tensors are (heads, ways, 1).

        Between two numbers that were measured, and beyond them, losses change by a power of the recent
        tokens.
        """
        stay = (recent + torch.arange(waiting, dtype=torch.float64)).log()
        known = torch.tensor(self.recents, dtype=torch.float64).log()

        def mean(losses: Tensor) -> Tensor:
            logs = losses.clamp(min=_SMALLEST).log()
            if len(known) == 1:
                return (logs - (stay - known)).exp().mean(-1, keepdim=True)
            place = (torch.searchsorted(known, stay, right=True) - 1).clamp(0, len(known) - 2)
            slopes = ((logs[..., 1:] - logs[..., :-1]) / known.diff()).clamp(-_STEEPEST, 0)
            inside = slopes[..., place]
            found = torch.where(stay <= known[place + 1], logs[..., place], logs[..., place + 1])
            start = torch.where(stay <= known[place + 1], known[place], known[place + 1])
            return (found + inside * (stay - start)).exp().mean(-1, keepdim=True)

        return replace(self, recents=(recent,), text=mean(self.text), copies=mean(self.copies))


def losses_of_head(weights: Tensor, worth: Tensor, lost: Tensor, rows: Tensor, recents: Sequence[int]) -> Tensor:
    """Half of the squares of what the outputs of a key head change by, along the gradient of the predictions.

    Without some tokens, whose weights a_j add up to A, the output o of a query becomes

        (o - sum over these j of a_j v_j) / (1 - A),

    and with the gradient g of the log-probability of a token that is drawn from the predictions, half of the
    mean of (g . change)^2 is the divergence to second order (the Fisher information of the output).

    Args:
        weights: a, (R, M, S) of M queries of the R query heads of a key head.
        worth: g . v_j, (R, M, S).
        lost: (ways, S), tokens that go where they are not recent.
        rows: (M,), the positions of the queries.
        recents: numbers of recent tokens, which stay.

    Returns:
        (ways, recents) float64, summed over the queries.
    """
    counts = (rows[:, None] - torch.tensor(recents, device=rows.device) + 1).clamp(min=0)  # tokens not recent
    of_way = F.pad(lost.to(weights), (0, -lost.shape[1] % _SEGMENT)).unflatten(-1, (-1, _SEGMENT))
    place = (counts // _SEGMENT).clamp(max=of_way.shape[1] - 1)  # the segment that may be recent in part
    within = torch.arange(_SEGMENT, device=rows.device) < (counts - place * _SEGMENT)[..., None]
    of_part = of_way[:, place] * within

    def lost_of(x: Tensor) -> Tensor:
        """The sums (R, M, ways, recents) over the tokens that go: of whole segments, and of one in part."""
        x = F.pad(x, (0, -x.shape[-1] % _SEGMENT)).unflatten(-1, (-1, _SEGMENT))
        before = F.pad(torch.einsum("rmnk,wnk->rmwn", x, of_way).cumsum(-1), (1, 0))
        before = before.gather(-1, place[None, :, None].expand(len(x), -1, len(lost), -1))
        part = x.gather(2, place[None, :, :, None].expand(len(x), -1, -1, _SEGMENT))
        return before + torch.einsum("rmek,wmek->rmwe", part, of_part)

    shares = weights * worth
    whole = shares.sum(-1)[..., None, None]
    change = (whole - lost_of(shares)) / (1 - lost_of(weights)).clamp(min=_LEAST_LEFT) - whole
    return change.sum(0).double().square().sum(0) / 2  # of all query heads together
