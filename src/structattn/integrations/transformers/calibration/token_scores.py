"""Which far tokens a key head needs, read from the hidden states of the tokens themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from structattn.cache.storage import FIRST_TOKENS
from structattn.errors import CalibrationError, ConfigError
from structattn.integrations.transformers.attention.arguments import POSITION_BIAS
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.attention.interface import attend
from structattn.integrations.transformers.calibration.discovery import FoundAttention, observed, register_observer
from structattn.integrations.transformers.calibration.pass_results import PassResults
from structattn.integrations.transformers.calibration.prompts import (
    COPIES,
    ScoredText,
    log_probabilities,
    retrieval_prompt,
    text_prompt,
)
from structattn.integrations.transformers.calibration.query_terms import of_queries
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.integrations.transformers.variant import Variant
from structattn.progress import counted

# How many groups of tokens stay of how many, by the share that does.
WAYS = ((0, 8), (1, 16), *((keep, 8) for keep in range(1, 8)))
_LARGEST_EXPONENT = 2.0
_GROUP = 64  # tokens of a group, where losses are measured
RECENT = 256  # tokens that always stay there; fewer in texts that are shorter than four times as many
EXPONENT = 1.0  # of ``TokenScores`` where it was not measured: half of the recent tokens lose twice as much
_FEWER = 4  # and a fourth of them, which says how much more is lost
_NAME = "structattn_token_scores"
_QUERIES = 128  # whose weights are held at once
_LEAST = 1e-5  # of a weight: below this all are alike
_RIDGE = 0.01  # relative to the variance of each number of a hidden state
_SHARE = 1 / 8  # of the tokens, at which the change of the predictions is measured
_GROWTH = 1.5  # the power with which it grows up to there
_HELD_OUT = 5  # one text of so many
_SHORTEST = 128
_SUMS, _SCORERS, _DROPPED, _CHANGES = "token sums", "token scorers", "dropped tokens", "changes by chosen tokens"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """How key heads score tokens, and what is lost where only the highest stay.

    Attributes:
        scorers: of each layer with keys of its own, (G, E + 1) float32: the scores of a hidden state (E,)
            that reaches the layer are scorer[:, :E] states + scorer[:, E].
        losses: (heads, ways) float64, heads of all layers in their order: the expected change of the
            predictions, in nats per token, for each of ``WAYS``, where the last ``recent`` tokens stay
            too.
        recent: of ``losses``.
        exponent: with r recent tokens they are (recent / r)^exponent times as large.
        measured: the change of the predictions at which they were measured, in nats per token.
        of_text: the change of the predictions of text there, relative to ``measured``, in which copies of far
            text count as a tenth of the tokens: they lose much more.
    """

    scorers: tuple[Tensor, ...]
    losses: Tensor
    recent: int = RECENT
    exponent: float = EXPONENT
    measured: float = 0.0
    of_text: float = 1.0

    def change(self, losses: float) -> float:
        """The change of the predictions of text where the losses of all heads add up to that.

        Above ``measured`` it is of_text losses, below it of_text measured (losses / measured)^1.5: there sums
        expect too much, and squares, of which a divergence is made where changes are small, too little.
        """
        if losses < self.measured:
            return self.of_text * self.measured * (losses / self.measured) ** _GROWTH
        return self.of_text * losses

    def losses_with(self, recent: int, waiting: int = 1) -> Tensor:
        """``losses`` where another number of recent tokens stays, and as many more as have come since a block
        was decided on: from 0 to fewer than ``waiting``, each as often.
        """
        stay = recent + torch.arange(waiting, dtype=torch.float64)
        return self.losses * ((self.recent / stay) ** self.exponent).mean()


@dataclass(eq=False)
class _LayerFit:
    """The normal equations of one layer.

    Attributes:
        attention: the layer.
        squares: (E + 1, E + 1), the sum of x x^T over tokens.
        products: (E + 1, G), the sum of x y^T.
        scorer: (G, E + 1), once it is known.
        dropped: (G, ways), the sum of the largest weights of tokens that do not stay.
        tokens: how many tokens were summed.
    """

    attention: FoundAttention
    squares: Tensor | None = None
    products: Tensor | None = None
    scorer: Tensor | None = None
    dropped: Tensor | None = None
    tokens: int = 0

    def add(self, x: Tensor, weights: Tensor) -> None:
        """Adds the states (T, E) and the largest weights (G, T) of a text."""
        x = _with_one(x)[FIRST_TOKENS:]
        y = weights[:, FIRST_TOKENS:].clamp(min=_LEAST).log()
        squares, products = x.mT @ x, x.mT @ y.mT
        self.squares = squares if self.squares is None else self.squares + squares
        self.products = products if self.products is None else self.products + products

    def solve(self) -> None:
        """The scorer, by ridge regression on standardized numbers."""
        assert self.squares is not None
        assert self.products is not None
        squares, products = self.squares.double(), self.products.double()
        count = squares[-1, -1]
        mean = squares[-1] / count
        variance = squares.diagonal() / count - mean.square()
        ridge = (_RIDGE * count * variance).clamp(min=1e-6 * count * float(variance.mean()))
        ridge[-1] = 0  # of the constant
        solution = torch.linalg.solve(squares + torch.diag(ridge), products)
        if not bool(solution.isfinite().all()):
            raise CalibrationError(
                f"the hidden states of layer {self.attention.index} give no token scores: they are NaN, infinite or "
                "all alike; calibrate in float32, or with retrieval=False"
            )
        self.scorer, self.squares, self.products = solution.mT.float().contiguous(), None, None

    def scores(self, x: Tensor) -> Tensor:
        """(G, T) of the states (T, E) of tokens."""
        assert self.scorer is not None
        return self.scorer @ _with_one(x).mT

    def check(self, x: Tensor, weights: Tensor) -> None:
        """Adds what would be dropped of a text; arguments as ``add``."""
        weights, scores = weights.clone(), self.scores(x)
        weights[:, :FIRST_TOKENS] = 0
        dropped = torch.stack([(weights * ~_stays(scores, way)).sum(dim=1).double() for way in WAYS], dim=1)
        self.dropped = dropped if self.dropped is None else self.dropped + dropped
        self.tokens += x.shape[0]


def _stays(scores: Tensor, way: tuple[int, int]) -> Tensor:
    """Which tokens stay, (G, T), by scores (G, T); of a shorter text, which is one block, the same share."""
    (keep, block), length = way, scores.shape[1]
    size = min(block * _GROUP, length)
    ends = length // size * size
    rank = scores[:, :ends].unflatten(1, (-1, size)).argsort(dim=-1, descending=True).argsort(dim=-1)
    stays = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    stays[:, :ends] = (rank < round(keep * size / block)).flatten(1)
    stays[:, :FIRST_TOKENS] = True
    return stays


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x.float(), x.new_ones((len(x), 1), dtype=torch.float32)], dim=1)


@dataclass
class _Pass:
    """What the attention of a forward pass does.

    Attributes:
        fits: of each module whose tokens are scored.
        length: T, where the tokens are a text and its copy: the weights that the copy gives the text are
            read. 0 where a text is read with less.
        ways: (heads of all layers,), which of ``WAYS`` each has, in the order of ``fits``; ``None``: all
            tokens stay.
        recent: tokens that stay besides.
        is_check: whether the scorers are known, and checked.
        states: of the module whose attention comes next, (T, E).
    """

    fits: dict[nn.Module, _LayerFit]
    length: int = 0
    ways: Tensor | None = None
    recent: int = 0
    is_check: bool = False
    states: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


_active: list[_Pass] = []


def _attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """The attention of the model, of which the weights are read; or that over chosen tokens."""
    this = _active[-1]
    fit = this.fits.get(call.module)
    if fit is None:
        return attend(call)
    _check_bias(call)
    if this.length:
        weights = _largest_weights(call, this.length)
        (fit.check if this.is_check else fit.add)(this.states[: this.length], weights)
        return attend(call)
    if this.ways is None:
        return attend(call)
    place = list(this.fits).index(call.module)
    first = sum(other.attention.num_kv_heads for other in list(this.fits.values())[:place])
    ways = this.ways[first : first + fit.attention.num_kv_heads].tolist()
    hidden = ~_seen(fit.scores(this.states), ways, this.recent)
    hidden = hidden.repeat_interleave(call.query.shape[1] // len(hidden), dim=0)[None]
    terms = call.terms(call.arguments.get(POSITION_BIAS))
    bias = torch.zeros(hidden.shape, dtype=call.query.dtype, device=call.query.device).masked_fill(hidden, -torch.inf)
    terms = replace(terms, attn_mask=bias if terms.attn_mask is None else terms.attn_mask + bias)
    assert isinstance(call.key, Tensor)
    assert isinstance(call.value, Tensor)
    out = Variant().attend(call.query, call.key, call.value, terms, sequences=Sequences(), is_causal=True, dropout=0.0)
    return out.transpose(1, 2).contiguous(), None


register_observer(_NAME, _attention)


def _check_bias(call: AttentionCall) -> None:
    """Raises ``ConfigError`` where scores depend on the position of a key, which a cache that keeps some
    tokens does not remember.
    """
    terms = call.terms(call.arguments.get(POSITION_BIAS))
    if terms.alibi_slopes is not None or terms.attn_mask is not None:
        raise ConfigError(
            f"{call.name} adds a bias for the position of each key, as ALiBi does, and a cache that keeps some of the "
            "tokens does not remember their positions: calibrate with methods=('heads', 'bits')"
        )


def _largest_weights(call: AttentionCall, length: int) -> Tensor:
    """The largest weight that the tokens after the first ``length`` give each of these, over the query heads
    of a key head, (G, length).
    """
    assert isinstance(call.key, Tensor)
    terms = call.terms(call.arguments.get(POSITION_BIAS))
    q, k, heads = call.query[0].float(), call.key[0].float(), call.key.shape[1]
    largest = q.new_zeros((heads, length))
    for start in range(length, q.shape[1], _QUERIES):
        stop = min(start + _QUERIES, q.shape[1])
        if terms.has_scale_only:
            weights = _plain_weights(q[:, start:stop], k[:, :stop], terms.scale)
        else:
            of_these = of_queries(terms, 0, 0, start, stop)
            weights = Variant().weights(q[None, :, start:stop], k[None, :, :stop], of_these, sequences=Sequences())[0]
        of_heads = weights[:, :, :length].amax(dim=1).unflatten(0, (heads, -1)).amax(dim=1)
        largest = torch.maximum(largest, of_heads)
    return largest


def _plain_weights(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """The weights (H, M, S) of the last M queries (H, M, D) over keys (G, S, D), without copies of keys."""
    count, length = q.shape[1], k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    scores = (q.unflatten(0, (len(k), -1)).flatten(1, 2) * scale) @ k.mT
    scores = scores.unflatten(1, (-1, count)).flatten(0, 1)
    future = torch.ones((count, count), dtype=torch.bool, device=q.device).triu(1)
    scores[:, :, length - count :].masked_fill_(future, -torch.inf)
    return scores.softmax(dim=-1)


def _seen(scores: Tensor, ways: Sequence[int], recent: int) -> Tensor:
    """Which keys each query sees, (G, T, T), future ones or not: the last ones and those that stay."""
    stays = torch.cat([_stays(of_head[None], WAYS[way]) for of_head, way in zip(scores, ways, strict=True)])
    positions = torch.arange(scores.shape[1], device=scores.device)
    return stays[:, None] | (positions[None, :] > positions[:, None] - recent)


@contextmanager
def _running(model: PreTrainedModel, this: _Pass) -> Iterator[None]:
    """A context in which forward passes of a model do what ``this`` says."""

    def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        this.states = states[0]

    handles = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in this.fits]
    _active.append(this)
    try:
        with observed(model, _NAME):
            yield
    finally:
        _active.pop()
        for handle in handles:
            handle.remove()


def token_scores(
    model: PreTrainedModel, layers: Sequence[FoundAttention], texts: Sequence[Tensor], results: PassResults
) -> TokenScores | None:
    """Finds a linear map from the hidden state of a token to how much later tokens will look back at it, for
    each key head.

    How much a token is needed is the largest weight that it gets while the model reads its text once more,
    directly after it: there, heads look up whatever they can look up. The map predicts the logarithm of that
    weight.

    Args:
        model: a plain causal language model.
        layers: those of keys of their own.
        texts: ids (1, T) each, half as long as the model can read at most; the last fifth of them is held
            out to measure losses.
        results: what is kept of passes.

    Returns:
        ``None`` where the texts are too short.

    Cost: a forward pass of 2 T tokens of each text, and eight of T of each that is held out; for each layer
        8 E^2 bytes meanwhile.

    Source: weights of a repeated context: KVzip (arXiv 2505.23416); their prediction from hidden states:
        KVzap (2601.07891), which takes the tokens above a threshold. A fixed number of each group for each
        head, so that the bytes are known before, and the losses, are ours.
    """
    texts = [text for text in texts if text.shape[1] >= _SHORTEST]
    if not texts:
        return None
    fits = {layer.module: _LayerFit(layer) for layer in layers}
    held = texts[-max(1, len(texts) // _HELD_OUT) :]
    _fit(model, fits, texts[: -len(held)] or held, results)
    _check(model, fits, held, results)
    dropped = torch.cat([fit.dropped / fit.tokens for fit in fits.values() if fit.dropped is not None]).cpu()
    ways = _ways(dropped, _SHARE)
    recent = min(RECENT, min(text.shape[1] for text in held) // _FEWER)
    (change, of_text), (with_fewer, _) = _changes(model, fits, held, ways, (recent, recent // _FEWER), results)
    lost = float(dropped.gather(1, ways[:, None]).sum())
    exponent = math.log(with_fewer / change, _FEWER) if min(change, with_fewer) > _LEAST else EXPONENT
    return TokenScores(
        scorers=tuple(fit.scorer.cpu() for fit in fits.values() if fit.scorer is not None),
        losses=dropped * (change / max(lost, 1e-30)),
        recent=recent,
        measured=change,
        of_text=of_text / change if min(change, of_text) > _LEAST else 1.0,
        exponent=min(max(exponent, 0.0), _LARGEST_EXPONENT),
    )


def _read_twice(model: PreTrainedModel, this: _Pass, text: Tensor) -> None:
    with _running(model, this):
        model.base_model(input_ids=torch.cat([text, text], dim=1), use_cache=False)


def _fit(
    model: PreTrainedModel, fits: dict[nn.Module, _LayerFit], texts: Sequence[Tensor], results: PassResults
) -> None:
    """Finds the scorers."""
    scorers, kept = results.get(_SCORERS), results.get(_SUMS)
    for number, fit in enumerate(fits.values()):
        if scorers is not None:
            fit.scorer = scorers[f"{number}"].to(texts[0].device)
        elif kept is not None:
            fit.squares, fit.products = (kept[f"{number}.{x}"].to(texts[0].device) for x in ("squares", "products"))
    if scorers is not None:
        return
    done = results.passes(_SUMS)
    for count, text in enumerate(counted(texts[done:], "tokens that are looked back at"), start=done + 1):
        _read_twice(model, _Pass(fits, length=text.shape[1]), text)
        sums = {
            f"{number}.{x}": getattr(fit, x)
            for number, fit in enumerate(fits.values())
            for x in ("squares", "products")
        }
        results.keep(_SUMS, sums, passes=count)
    for fit in fits.values():
        fit.solve()
    found = {f"{number}": fit.scorer for number, fit in enumerate(fits.values()) if fit.scorer is not None}
    results.keep(_SCORERS, found, drop=(_SUMS,))


def _check(
    model: PreTrainedModel, fits: dict[nn.Module, _LayerFit], texts: Sequence[Tensor], results: PassResults
) -> None:
    """Finds what is dropped of texts."""
    done = results.passes(_DROPPED)
    if (kept := results.get(_DROPPED)) is not None:
        for number, fit in enumerate(fits.values()):
            fit.dropped, fit.tokens = kept[f"{number}"].to(texts[0].device), sum(x.shape[1] for x in texts[:done])
    for count, text in enumerate(counted(texts[done:], "tokens that are looked back at, held out"), start=done + 1):
        _read_twice(model, _Pass(fits, length=text.shape[1], is_check=True), text)
        dropped = {f"{number}": fit.dropped for number, fit in enumerate(fits.values()) if fit.dropped is not None}
        results.keep(_DROPPED, dropped, passes=count)


def _ways(dropped: Tensor, share: float) -> Tensor:
    """Which of ``WAYS`` every head has, (heads,), so that least is dropped where at most a share of all
    tokens stays.
    """
    shares = torch.tensor([keep / block for keep, block in WAYS], dtype=dropped.dtype)
    low, high = 0.0, float(dropped.max()) / float(shares[1]) + 1
    for _ in range(60):  # of the price of a token
        price = (low + high) / 2
        ways = (dropped + price * shares).argmin(dim=1)
        low, high = (price, high) if float(shares[ways].mean()) > share else (low, price)
    return (dropped + high * shares).argmin(dim=1)


def _changes(
    model: PreTrainedModel,
    fits: dict[nn.Module, _LayerFit],
    texts: Sequence[Tensor],
    ways: Tensor,
    recents: Sequence[int],
    results: PassResults,
) -> list[tuple[float, float]]:
    """The mean Kullback-Leibler divergence of the predictions where far tokens are chosen, in nats per token,
    for each number of recent ones: of the texts and of copies in them, and of the texts alone.
    """
    generator = torch.Generator().manual_seed(0)
    prompts: list[ScoredText] = []
    for text in texts:
        prompts += [text_prompt(text), retrieval_prompt(text, generator)]
    kept = results.get(_CHANGES)
    changes: list[list[float]] = [] if kept is None else kept["changes"].tolist()
    for prompt in counted(prompts[len(changes) :], "predictions from chosen tokens"):
        with _running(model, _Pass(fits)):
            whole = log_probabilities(model, prompt)
        changes.append([])
        for recent in recents:
            with _running(model, _Pass(fits, ways=ways, recent=recent)):
                less = log_probabilities(model, prompt)
            changes[-1].append(float((whole.exp() * (whole - less)).sum(-1).mean()))
        results.keep(_CHANGES, {"changes": torch.tensor(changes, dtype=torch.float64)})
    of_recent = torch.tensor(changes, dtype=torch.float64).view(len(texts), 2, len(recents)).mean(dim=0)
    of_text, of_copies = of_recent.clamp(min=0).tolist()
    if not bool(of_recent.isfinite().all()):
        raise CalibrationError(
            "the predictions of the model are NaN or infinite where far tokens are chosen: calibrate with "
            "retrieval=False, or in float32"
        )
    return [((1 - COPIES) * text + COPIES * copies, text) for text, copies in zip(of_text, of_copies, strict=True)]
