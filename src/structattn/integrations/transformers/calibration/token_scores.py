"""Which far tokens a key head needs, read from the hidden states of the tokens themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from structattn.cache.storage import FIRST_TOKENS
from structattn.errors import CalibrationError, ConfigError
from structattn.integrations.transformers.attention.arguments import POSITION_BIAS
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.attention.interface import attend
from structattn.integrations.transformers.calibration.bit_losses import GROUP_SIZES, BitLosses, rounding_losses
from structattn.integrations.transformers.calibration.discovery import FoundAttention, observed, register_observer
from structattn.integrations.transformers.calibration.methods import Method
from structattn.integrations.transformers.calibration.output_gradients import (
    AttentionOutput,
    Measure,
    losses_by_gradient,
    told_states,
)
from structattn.integrations.transformers.calibration.pass_results import PassResults
from structattn.integrations.transformers.calibration.prompts import (
    ScoredText,
    log_probabilities,
    retrieval_prompt,
    text_prompt,
)
from structattn.integrations.transformers.calibration.query_terms import weights_of_queries
from structattn.integrations.transformers.calibration.token_losses import WAYS, TokenLosses, losses_of_head
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.integrations.transformers.variant import Variant
from structattn.progress import counted

_GROUP = 64  # tokens of a group, where losses are measured
RECENTS = (64, 128, 256, 512, 1024)  # numbers of recent tokens, of these those up to half of a text
_NAME = "structattn_token_scores"
_QUERIES = 128  # whose weights are held at once
_MEASURED = 512  # queries of a text at which losses are measured
_TEXTS = 2  # on which bits alone are measured
_FAR = 128  # tokens between a query and the tokens that it looks back at; in a short text fewer
_LEAST = 1e-3  # of the mean use of a token: below this all are alike
_RIDGE = 0.01  # relative to the variance of each number of a hidden state
_SHARE = 1 / 4  # of the tokens, recent ones counted, at which the change of the predictions is measured
_FITTED_TOKENS = 8192  # enough for scorers; what heads lose varies more from text to text
SHORTEST_SCORED = 128  # tokens of a text that tokens are scored on
# Names in partial calibrations: none that files of before have, whose numbers are others.
_SUMS, _SCORERS = "sums of uses", "scorers of uses"
_CHANGES = "changes by tokens of little use"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """How key heads score tokens, and what is lost where only the highest stay.

    Attributes:
        scorers: of each layer with keys of its own, (G, E + 1) float32: the scores of a hidden state (E,)
            that reaches the layer are scorer[:, :E] states + scorer[:, E].
        losses: what the predictions lose.
    """

    scorers: tuple[Tensor, ...]
    losses: TokenLosses


@dataclass(eq=False)
class _LayerFit:
    """The normal equations of one layer.

    Attributes:
        attention: the layer.
        squares: (E + 1, E + 1), the sum of x x^T over tokens.
        products: (E + 1, G), the sum of x y^T.
        scorer: (G, E + 1), once it is known.
    """

    attention: FoundAttention
    squares: Tensor | None = None
    products: Tensor | None = None
    scorer: Tensor | None = None

    def add(self, x: Tensor, uses: Tensor) -> None:
        """Adds the states (n, E) and the uses (G, n) of the first tokens of a text."""
        x, uses = _with_one(x)[FIRST_TOKENS:], uses[:, FIRST_TOKENS:]
        y = (uses + _LEAST * uses.mean(dim=1, keepdim=True) + torch.finfo(uses.dtype).tiny).log()
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
        length: T, where the tokens are a text and its copy: the weights that both give the text are read. 0
            where a text is read with less.
        choices: (way, recent) of each head of all layers, in the order of ``fits``: which of ``WAYS`` its
            tokens stay in, and how many recent ones stay besides. ``None``: all tokens stay.
        states: of the module whose attention comes next, (T, E).
    """

    fits: dict[nn.Module, _LayerFit]
    length: int = 0
    choices: Sequence[tuple[int, int]] | None = None
    states: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


_active: ContextVar[_Pass] = ContextVar("_active")


def _attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """The attention of the model, of which the weights are read; or that over chosen tokens."""
    this = _active.get()
    fit = this.fits.get(call.module)
    if fit is None:
        return attend(call)
    _check_bias(call)
    if this.length:
        uses = _uses(call, this.length)
        fit.add(this.states[: uses.shape[1]], uses)
        return attend(call)
    if this.choices is None:
        return attend(call)
    place = list(this.fits).index(call.module)
    first = sum(other.attention.num_kv_heads for other in list(this.fits.values())[:place])
    choices = this.choices[first : first + fit.attention.num_kv_heads]
    hidden = ~_seen(fit.scores(this.states), choices)
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


def _uses(call: AttentionCall, length: int) -> Tensor:
    """How much later tokens look back at each of a text of ``length`` tokens, which a copy follows: the mean
    square of the weights of the text, and that of the copy, over the query heads of a key head, (G, n). Not
    of the last tokens, which the text hardly looks back at.
    """
    assert isinstance(call.key, Tensor)
    heads, end = call.key.shape[1], call.query.shape[2]
    far = min(_FAR, length // 8)
    place = torch.arange(length, device=call.query.device)
    squares = torch.zeros((2, heads, length), device=call.query.device)  # by the text, and by its copy
    starts = [*range(0, length, _QUERIES), *range(length, end, _QUERIES)]
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        last = min(stop, length)
        weights = weights_of_queries(call, start, stop)[:, :, :last].unflatten(0, (heads, -1))
        is_far = place[:last] <= torch.arange(start, stop, device=place.device)[:, None] - far
        squares[int(start >= length), :, :last] += (weights * is_far).square().mean(dim=1).sum(dim=1)
    count = length - 2 * far
    in_text = (length - far - place[:count]).clamp(min=1)
    return squares[0, :, :count] / in_text + squares[1, :, :count] / length


def _seen(scores: Tensor, choices: Sequence[tuple[int, int]]) -> Tensor:
    """Which keys each query sees, (G, T, T), future ones or not: the last ones and those that stay."""
    stays = torch.cat([_stays(of_head[None], WAYS[way]) for of_head, (way, _) in zip(scores, choices, strict=True)])
    positions = torch.arange(scores.shape[1], device=scores.device)
    recent = torch.tensor([recent for _, recent in choices], device=scores.device)[:, None, None]
    return stays[:, None] | (positions > positions[:, None] - recent)


@contextmanager
def _running(model: PreTrainedModel, this: _Pass) -> Iterator[None]:
    """A context in which forward passes of a model do what ``this`` says."""

    token = _active.set(this)
    try:
        with observed(model, _NAME), told_states([*this.fits], lambda states: setattr(this, "states", states)):
            yield
    finally:
        _active.reset(token)


def head_losses(
    model: PreTrainedModel,
    layers: Sequence[FoundAttention],
    texts: Sequence[Tensor],
    methods: set[Method],
    results: PassResults,
) -> tuple[TokenScores | None, BitLosses | None]:
    """Finds a linear map from the hidden state of a token to how much later tokens will look back at it, for
    each key head; what heads lose where only some tokens stay; and what they lose by fewer bits.

    How much a token is needed is the mean square of the weights that later tokens give it: those of its
    text, and of the same text read once more, directly after it, where heads look up whatever they can look
    up. What the output of a head loses without a token grows with that square. The map predicts its
    logarithm.

    Args:
        model: a plain causal language model.
        layers: those of keys of their own.
        texts: ids (1, T) each, half as long as the model can read at most. Scorers are fitted to the first
            8,192 tokens, or half of the texts; the others measure losses. Without scorers two of them do.
        methods: with ``"tokens"`` tokens are scored; with ``"bits"`` losses by bits are measured.
        results: what is kept of passes.

    Returns:
        ``None`` for what was not asked for, and for tokens where the texts are too short.

    Cost: a forward pass of 2 T tokens of each text, and the weights that all of them give its T. Of each that
        is held out, two times (as it is, and with copies in it): a forward and a backward pass of T, sums
        over the weights of 512 queries for each of ``WAYS``, or for each group size of bits, and two forward
        passes of T. Memory: the activations of a backward pass; for each layer 8 E^2 bytes before that.

    Source: weights of a repeated context: KVzip (arXiv 2505.23416); their prediction from hidden states:
        KVzap (2601.07891), which takes the tokens above a threshold. A fixed number of each group for each
        head, so that the bytes are known before, and the losses, are ours.
    """
    measures: dict[str, Measure] = {"bits": rounding_losses} if "bits" in methods else {}
    held = texts[:_TEXTS]
    fits: dict[nn.Module, _LayerFit] = {}
    recents: tuple[int, ...] = ()
    if long := [text for text in texts if text.shape[1] >= SHORTEST_SCORED and "tokens" in methods]:
        fits = {layer.module: _LayerFit(layer) for layer in layers}
        fitted, held = _divided(long)
        _fit(model, fits, fitted, results)
        recents = tuple(recent for recent in RECENTS if 2 * recent <= min(text.shape[1] for text in held))
        measures["tokens"] = lambda output, slope: _lost(fits[output.call.module], output, slope, recents)
    if not measures:
        return None, None
    generator = torch.Generator().manual_seed(0)
    prompts: list[ScoredText] = []
    for text in held:
        prompts += [text_prompt(text), retrieval_prompt(text, generator)]
    found = losses_by_gradient(model, layers, prompts, measures, results)
    tokens, bits = None, None
    if "bits" in found:
        of_kinds = found["bits"].permute(0, 2, 3, 1).contiguous()
        for size in reversed(range(len(GROUP_SIZES) - 1)):  # short texts have no whole group that is far
            if not of_kinds[:, size].any():
                of_kinds[:, size] = of_kinds[:, size + 1]
        bits = BitLosses(group_sizes=GROUP_SIZES, text=of_kinds[0], copies=of_kinds[1])
    if "tokens" in found:
        losses = TokenLosses(recents=recents, text=found["tokens"][0], copies=found["tokens"][1])
        choices = losses.choices(_SHARE, min(text.shape[1] for text in held))
        tokens = TokenScores(
            scorers=tuple(fit.scorer.cpu() for fit in fits.values() if fit.scorer is not None),
            losses=losses.scaled(choices, *_changes(model, fits, prompts, choices, results)),
        )
    return tokens, bits


def _divided(texts: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The texts to fit scorers to, and those that measure losses; one alone does both."""
    count, tokens = 0, 0
    while tokens < _FITTED_TOKENS and 2 * count < len(texts):
        tokens += texts[count].shape[1]
        count += 1
    return texts[:count], texts[count:] or texts


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


@torch.no_grad()
def _lost(fit: _LayerFit, output: AttentionOutput, slope: Tensor, recents: Sequence[int]) -> Tensor:
    """What the heads of a layer lose, (G, ways, recents), summed over the queries of the second half."""
    call, scores = output.call, fit.scores(output.states)
    value = call.value
    assert isinstance(value, Tensor)
    heads, length = scores.shape
    stays = torch.stack([_stays(scores, way) for way in WAYS], dim=1)
    step = max(1, (length - length // 2) // _MEASURED)
    total = torch.zeros((heads, len(WAYS), len(recents)), dtype=torch.float64, device=scores.device)
    for start in range(length // 2, length, _QUERIES * step):
        stop = min(start + _QUERIES * step, length)
        rows = torch.arange(start, stop, step, device=scores.device)
        weights = weights_of_queries(call, start, stop)[:, ::step].unflatten(0, (heads, -1))
        of_rows = slope[rows].float().transpose(0, 1).unflatten(0, (heads, -1))
        for head in range(heads):
            v = value[0, head * value.shape[1] // heads, :stop].float()
            total[head] += losses_of_head(weights[head], of_rows[head] @ v.mT, ~stays[head, :, :stop], rows, recents)
    return step * total


def _changes(
    model: PreTrainedModel,
    fits: dict[nn.Module, _LayerFit],
    prompts: Sequence[ScoredText],
    choices: Sequence[tuple[int, int]],
    results: PassResults,
) -> tuple[float, float]:
    """The mean Kullback-Leibler divergence of the predictions where far tokens are chosen, in nats per token:
    of text, and of copies in it.
    """
    kept = results.get(_CHANGES)
    changes: list[float] = [] if kept is None else kept["changes"].tolist()
    for prompt in counted(prompts[len(changes) :], "predictions from chosen tokens"):
        with _running(model, _Pass(fits)):
            whole = log_probabilities(model, prompt)
        with _running(model, _Pass(fits, choices=choices)):
            less = log_probabilities(model, prompt)
        changes.append(float((whole.exp() * (whole - less)).sum(-1).mean()))
        results.keep(_CHANGES, {"changes": torch.tensor(changes, dtype=torch.float64)})
    text, copies = torch.tensor(changes, dtype=torch.float64).view(-1, 2).mean(dim=0).tolist()
    if not math.isfinite(text + copies):
        raise CalibrationError(
            "the predictions of the model are NaN or infinite where far tokens are chosen: calibrate with "
            "retrieval=False, or in float32"
        )
    return text, copies
