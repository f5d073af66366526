"""Recall by distance: multi-query associative recall, and a passkey."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from structattn.cache import Storage
from structattn.checks import check_choice, check_field_types, check_int
from structattn.errors import ConfigError
from structattn.layers.rotary import Rotary
from structattn.models.language_model import LanguageModel
from structattn.parallel.processes import Processes
from structattn.parallel.shard import SequenceShard
from structattn.seeds import generator
from structattn_lab.tasks.base import Baseline, Batch, Split, Task, check_sizes_of, on_device_of
from structattn_lab.tasks.octaves import by_octave, octaves
from structattn_lab.tasks.recall.sequences import Arrangement, Associative, Joined, Passkey, Vocabulary, draw_tokens

# Sequences of an evaluation that are drawn, and given to the model, at a time: another number would give
# other sequences.
_CHUNK = 64
_TOKENS_PER_PAIR = 6  # of the context, at least: see ``Associative``
_SHORTEST = 8  # tokens of context for which near, middle and far differ
_RANGES = ("near", "middle", "far")

KINDS: dict[str, Callable[[RecallConfig], Arrangement]] = {
    "associative": lambda config: Associative(config.context_length, config.num_pairs, config.num_keys),
    "joined": lambda config: Joined(config.context_length, config.num_pairs, config.num_keys),
    "passkey": lambda config: Passkey(config.context_length, num_pairs=1, num_keys=1),
}


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """The sequences and the model.

    Args:
        kind: ``"associative"``: pairs of a key and a value at random positions, and later each key once more,
            where the model is asked for the value; ``"joined"``: the same, with each pair as one token, which
            is learned in much fewer steps; or ``"passkey"``: one pair, always of the same key, which the last
            token asks for.
        context_length: T, tokens that the model sees.
        num_pairs: pairs of an associative sequence, of different keys.
        num_keys: different keys of associative sequences.
        num_values: different values: guessing is right in one of ``num_values`` answers.
        num_fillers: different tokens between pairs and queries, which are neither keys nor values.
        embed_dim: width of the model.
        num_layers: blocks of the model.
        num_heads: attention heads of a block.
        rotary: text form of rotary positions (see ``layers.rotary``); empty: learned positions.
        eval_sequences: fresh sequences of each evaluation.

    Raises:
        ConfigError: an unknown kind, a number below 1, a context below 8 tokens or below 6 per pair, more
            pairs than keys, one value, heads that do not divide the width, or an unknown form of rotary
            positions.
    """

    kind: str = "associative"
    context_length: int = 128
    num_pairs: int = 8
    num_keys: int = 32
    num_values: int = 32
    num_fillers: int = 16
    embed_dim: int = 64
    num_layers: int = 2
    num_heads: int = 2
    rotary: str = "low_far"
    eval_sequences: int = 512

    def __post_init__(self) -> None:
        check_field_types(self, "task.")
        check_choice("task.kind", self.kind, KINDS)
        check_int("task.context_length", self.context_length, minimum=_SHORTEST)
        check_int("task.num_values", self.num_values, minimum=2)
        check_sizes_of(self, "num_pairs", "num_keys", "num_fillers", "embed_dim", "num_layers", "num_heads")
        check_sizes_of(self, "eval_sequences")
        kind = self.sequences()
        if kind.num_pairs > kind.num_keys:
            raise ConfigError(
                f"task.num_keys: expected at least {kind.num_pairs}, one for each pair (task.num_pairs), got "
                f"{kind.num_keys}: raise it, or ask for "
                "fewer pairs"
            )
        if kind.num_pairs * _TOKENS_PER_PAIR > self.context_length:
            raise ConfigError(
                f"task.num_pairs: expected at most {self.context_length // _TOKENS_PER_PAIR} in {self.context_length} "
                f"tokens (task.context_length), got {kind.num_pairs}: lower it, or give a context of at least "
                f"{kind.num_pairs * _TOKENS_PER_PAIR}"
            )
        self.rotary_value()

    def sequences(self) -> Arrangement:
        """How pairs and queries are placed."""
        return KINDS[self.kind](self)

    def rotary_value(self) -> Rotary | None:
        """The rotary positions, ``None`` for learned ones."""
        return Rotary.parse(self.rotary) if self.rotary else None


class Answers(NamedTuple):
    """What a model answers to all queries of a split, each (number of queries,)."""

    nats: Tensor
    is_right: Tensor
    distances: Tensor


class RecallTask(Task):
    """Mean cross entropy of the values that queries ask for, in nats.

    Only these are trained and scored: everything else in a sequence is random, so that no model can predict
    it, and learning its frequencies would only add noise to the gradients. The distance is counted from the
    value to the query: it is how far back attention must reach.
    """

    name = "recall"
    divides_sequences = True
    config_class = RecallConfig
    metric = "nats_per_answer"
    metric_label = "cross entropy of the value that a query asks for, nats"
    question = (
        "How far back does a language model find the value of a key, when far tokens are compared in fewer dimensions?"
    )

    config: RecallConfig

    def __init__(self, config: RecallConfig) -> None:
        super().__init__(config)
        self.kind = config.sequences()
        self.words = Vocabulary(config.num_fillers, self.kind.num_keys, config.num_values, self.kind.has_joined_pairs)

    def data_summary(self) -> dict[str, str]:
        kind, words = self.kind, self.words
        return {
            "data": (
                f"random sequences, drawn anew at each step: {words.num_keys} keys, {words.num_values} values, "
                f"{words.num_fillers} fillers"
            ),
            "sequence": (
                f"{kind.context_length} tokens of context, {kind.num_pairs} of the keys asked for ({self.config.kind})"
            ),
            "distances": ", ".join(f"{name} {low} to {high}" for name, (low, high) in self.ranges().items()),
        }

    def build_model(self, spec: str) -> LanguageModel:
        """A causal language model over fillers, keys and values."""
        self.check_spec(spec)
        config = self.config
        return LanguageModel(
            len(self.words),
            spec,
            num_layers=config.num_layers,
            embed_dim=config.embed_dim,
            num_heads=config.num_heads,
            context_length=config.context_length,
            rotary=config.rotary_value(),
        )

    def _sequences(self, count: int, rng: Generator) -> Batch:
        tokens, placement = draw_tokens(self.kind, self.words, count, rng)
        return {"tokens": tokens, "queries": placement.queries, "distances": placement.distances}

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Fresh sequences, a function of (seed, step).

        Returns:
            ``tokens`` (B, T + 1); ``queries`` (B, N), the positions of the keys that are asked for, whose
            answer is the token after each; and ``distances`` (B, N) from the values to them.
        """
        return self._sequences(batch_size, generator(self.name, "train", seed, step))

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean cross entropy of the answers."""
        logits, targets = _answers(model(batch["tokens"][:, :-1]), batch)
        return F.cross_entropy(logits, targets)

    def loss_of_shard(self, model: nn.Module, batch: Batch, step: int, mesh: DeviceMesh) -> Tensor:
        """See ``Task``: the answers to the queries among the tokens of this process."""
        logits, targets, _ = _answers_of_shard(model, batch, mesh)
        return F.cross_entropy(logits, targets, reduction="sum") / batch["queries"].numel()

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """T."""
        return self.config.context_length

    def ranges(self) -> dict[str, tuple[int, int]]:
        """The first and last distance of ``near``, ``middle`` and ``far``: equal parts of the logarithms of 1
        ... T - 2.
        """
        longest = self.kind.longest
        ends = [math.floor(longest ** (i / 3) + 1e-9) for i in (1, 2)] + [longest]
        return dict(zip(_RANGES, zip([1, *(end + 1 for end in ends)], ends, strict=False), strict=True))

    def eval_batches(self, split: Split) -> list[Batch]:
        """The sequences of a split, the same for every model, 64 at a time."""
        rng, left = generator(self.name, split), self.config.eval_sequences
        sizes = [min(_CHUNK, left - start) for start in range(0, left, _CHUNK)]
        return [self._sequences(size, rng) for size in sizes]

    @torch.no_grad()
    def answers(self, model: nn.Module, predict: Callable[[Tensor], Tensor], split: Split) -> Answers:
        """What is answered to the queries of a split.

        Args:
            model: whose device the sequences are given on.
            predict: logits (B, T, V) of tokens (B, T).
            split: of the sequences.
        """
        batches = []
        for batch in self.eval_batches(split):
            logits, targets = _answers(predict(on_device_of(model, batch)["tokens"][:, :-1]).cpu(), batch)
            nats = F.cross_entropy(logits.double(), targets, reduction="none")
            batches.append((nats, logits.argmax(-1) == targets, batch["distances"].flatten()))
        return Answers(*map(torch.cat, zip(*batches, strict=True)))

    def _scores(self, answers: Answers) -> dict[str, float]:
        right = answers.is_right.double()
        scores = {self.metric: float(answers.nats.mean()), "accuracy": float(right.mean())}
        for name, (low, high) in self.ranges().items():
            inside = (answers.distances >= low) & (answers.distances <= high)
            if inside.any():
                scores[f"accuracy_{name}"] = float(right[inside].mean())
        return scores

    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``nats_per_answer``, ``accuracy``, and ``accuracy_near``, ``_middle`` and ``_far`` (see ``ranges``;
        without a query there, left out).
        """
        return self._scores(self.answers(model, model, split))

    @torch.no_grad()
    def evaluate_shard(self, model: nn.Module, split: Split, mesh: DeviceMesh) -> dict[str, float]:
        """See ``Task``; no process has the logits of a whole sequence."""
        scored = []
        for batch in self.eval_batches(split):
            logits, targets, is_own = _answers_of_shard(model, on_device_of(model, batch), mesh)
            local = F.cross_entropy(logits.double(), targets, reduction="none"), (logits.argmax(-1) == targets).double()
            answers = local[0].new_zeros(2, *is_own.shape)
            answers[:, is_own] = torch.stack(local)
            nats, right = Processes(mesh).summed(answers).flatten(1).cpu()
            scored.append((nats, right > 0, batch["distances"].flatten()))
        return self._scores(Answers(*map(torch.cat, zip(*scored, strict=True))))

    def evaluate_cached(
        self, model: nn.Module, split: Split, chunk: int = 64, *, storage: Storage | None = None
    ) -> dict[str, float]:
        """As ``evaluate``, with each sequence read through the key/value cache: the same numbers, up to
        rounding and what a storage changes.

        Args:
            model: in eval mode.
            split: which sequences.
            chunk: tokens per step.
            storage: bits of the cache; see ``sa.Storage``. Default ``None``: those of the model.

        Raises:
            ConfigError: the storage does not fit the model.
        """
        language_model = cast(LanguageModel, model)

        def predict(tokens: Tensor) -> Tensor:
            caches = language_model.new_cache(max_length=tokens.shape[1], storage=storage)
            return torch.cat([language_model(part, caches=caches) for part in tokens.split(chunk, dim=1)], dim=1)

        return self._scores(self.answers(language_model, predict, split))

    def by_distance(self, model: nn.Module) -> dict[str, Any]:
        """``accuracy_by_distance`` and ``loss_by_distance`` on the test split, by ``octaves`` of 1 ... T -
        2.
        """
        nats, right, distances = self.answers(model, model, "test")
        longest, counts = self.kind.longest, torch.ones_like(nats)
        return {
            "octaves": octaves(longest),
            "accuracy_by_distance": by_octave(right.double(), distances, longest, counts),
            "loss_by_distance": by_octave(nats, distances, longest, counts),
        }

    def details(self, model: nn.Module) -> dict[str, Any]:
        """Those of ``by_distance``."""
        return self.by_distance(model)

    def baselines(self) -> list[Baseline]:
        """Guessing among all values; and where a sequence has several, among those that came before the
        query.
        """
        size = self.config.num_values
        shares = {"accuracy": 1 / size} | {f"accuracy_{name}": 1 / size for name in _RANGES}
        rows = [Baseline(name="chance", metrics={self.metric: math.log(size)} | shares, note="guesses any value")]
        if self.kind.num_pairs > 1:
            note = "guesses one of the values before the query, as often as they came"
            batches = self.eval_batches("test")
            shares_of_answers = torch.cat([_share_of_answers(batch, self.words) for batch in batches])
            metrics = {self.metric: -float(shares_of_answers.log().mean()), "accuracy": float(shares_of_answers.mean())}
            rows.append(Baseline(name="values before", metrics=metrics, note=note))
        return rows


def _answers(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (B N, V) at the queries, of logits (B, T, V), and the answers (B N,)."""
    queries, tokens = batch["queries"], batch["tokens"]
    rows = torch.arange(len(queries), device=queries.device)[:, None]
    return logits[rows, queries].flatten(0, 1), tokens[rows, queries + 1].flatten()


def _answers_of_shard(model: nn.Module, batch: Batch, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """As ``_answers``, of the queries among the tokens of this process; and which these are, (B, N)."""
    queries, tokens = batch["queries"], batch["tokens"]
    inputs = tokens[:, :-1]
    shard = SequenceShard(mesh, inputs.shape[1], order="head-tail")
    logits = model(shard.take(inputs), shard=shard)
    local = shard.local(queries)
    is_own = local >= 0
    rows = is_own.nonzero()[:, 0]
    return logits[rows, local[is_own]], tokens[rows, queries[is_own] + 1], is_own


def _share_of_answers(batch: Batch, words: Vocabulary) -> Tensor:
    """How many of the values before a query are its answer, as a share, (B N,)."""
    tokens, queries = batch["tokens"], batch["queries"]
    answers = tokens.gather(1, queries + 1)
    is_before = torch.arange(tokens.shape[1]) < queries[..., None]
    values = words.value_of(tokens)[:, None]
    same = is_before & (values == answers[..., None])
    return (same.sum(-1).double() / (is_before & (values >= 0)).sum(-1)).flatten()
