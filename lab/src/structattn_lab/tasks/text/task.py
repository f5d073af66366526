"""Language modelling on the packaged excerpt, the user's text file, or a prepared corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from structattn.cache import Storage
from structattn.checks import check_field_types
from structattn.errors import DataError
from structattn.files import absolute
from structattn.layers.rotary import Rotary
from structattn.models.language_model import LanguageModel
from structattn.parallel.processes import Processes
from structattn.parallel.shard import SequenceShard
from structattn.progress import counted
from structattn.seeds import generator
from structattn.typed_records import read_as
from structattn_lab.data.corpus import Tokenizer, Windows, text_units, tokenizer_from
from structattn_lab.data.text_data import open_text_data
from structattn_lab.old_formats import recorded_tokenizer
from structattn_lab.tasks.base import (
    Baseline,
    Batch,
    DataOption,
    Split,
    Task,
    TextModel,
    check_sizes_of,
    on_device_of,
)
from structattn_lab.tasks.octaves import by_octave, octaves
from structattn_lab.tasks.text.details import attention_by_distance, positions_in_documents

_NONE = -100  # a target that is not scored
_MOST_COUNTED = 2**25  # tokens of the training text that the baselines count
_LARGEST_PAIR_TABLE = 1024  # tokens whose pairs are counted
_LOOKED_AT = 4  # spans of text whose attention is measured


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text and the model.

    Args:
        data: the folder of a corpus from ``structattn data prepare text``; or a text file or a file of JSON
            lines (see ``Source``) of newlines and printable ASCII, whose first 90 % of characters train, the
            next 5 % validate, the last 5 % test; empty: the packaged excerpt. Made absolute.
        context_length: T, tokens of a window that predict the one after each.
        embed_dim: width of the model.
        num_layers: blocks of the model.
        num_heads: attention heads of a block.
        rotary: text form of rotary positions (see ``layers.rotary``); empty: learned positions.
        eval_windows: most windows of each evaluation; fixed, spread evenly over the split, and not
            overlapping.

    Raises:
        ConfigError: a number below 1, heads that do not divide the width, or an unknown form of rotary
            positions.
    """

    data: str = ""
    context_length: int = 256
    embed_dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    rotary: str = ""
    eval_windows: int = 128

    def __post_init__(self) -> None:
        check_field_types(self, "task.")
        object.__setattr__(self, "data", absolute(self.data))
        check_sizes_of(self, "context_length", "embed_dim", "num_layers", "num_heads", "eval_windows")
        self.rotary_value()

    def rotary_value(self) -> Rotary | None:
        """The rotary positions, ``None`` for learned ones."""
        return Rotary.parse(self.rotary) if self.rotary else None

    def build_model(self, spec: str, tokenizer: Tokenizer) -> LanguageModel:
        """The model; needs no data, so that it can generate where the text is not."""
        return LanguageModel(
            tokenizer.vocab_size,
            spec,
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            context_length=self.context_length,
            rotary=self.rotary_value(),
            text_units=text_units(tokenizer),
        )


class TextTask(Task):
    """Mean cross entropy of the next token over fixed windows, in nats per character (or per byte, which is
    comparable between tokenizers).

    Where a window of a corpus holds several documents they are packed: no token attends to another document,
    positions start at 0 in each, and the first token of a document is not predicted.
    """

    name = "text"
    config_class = TextConfig
    data_options: ClassVar[dict[str, DataOption]] = {
        "data": DataOption("data", "a text file, or a folder from `structattn data prepare text`")
    }
    reads_text = True
    divides_sequences = True
    question = "Does a language model get better when near characters are compared in more dimensions than far ones?"

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config)
        self.tokenizer, self.splits, self.data_sha256, source = open_text_data(config.data)
        unit = "char" if self.tokenizer.unit == "char" else "byte"
        self.metric = f"nats_per_{unit}"
        self.metric_label = (
            "cross entropy of the next character, nats" if unit == "char" else "cross entropy, nats per byte"
        )
        self._unit_sizes = torch.from_numpy(self.tokenizer.token_sizes())
        for name, part in self.splits.items():
            if part.num_documents == len(part) > 1:
                raise DataError(
                    f"{source}: expected documents of more than one token, got {len(part)} of one token for {name}: "
                    "there is nothing to predict"
                )
            if len(part) <= config.context_length:
                units = {"char": "characters", "byte": "bytes", "token": "tokens"}[self.tokenizer.unit]
                raise DataError(
                    f"{source}: expected more than {config.context_length} {units} in each split "
                    f"(task.context_length), got {len(part)} of {sum(map(len, self.splits.values()))} for {name}. Give "
                    f"a text of at least {20 * (config.context_length + 1)} {units}, or a shorter context"
                )

    def data_summary(self) -> dict[str, str]:
        return {
            "data": self.config.data or "a public-domain excerpt, in the package",
            "tokens": ", ".join(f"{len(tokens):,} {split}" for split, tokens in self.splits.items()),
            "window": f"{self.config.context_length} tokens of context",
        }

    def build_model(self, spec: str) -> LanguageModel:
        """A causal language model over the tokens."""
        return self.config.build_model(spec, self.tokenizer)

    @classmethod
    def text_model(cls, config: dict[str, Any], record: dict[str, Any]) -> TextModel:
        """See ``Task``."""
        tokenizer = tokenizer_from(recorded_tokenizer(record))
        settings = read_as(TextConfig, config, "the settings of the run")
        return TextModel(tokenizer=tokenizer, build=partial(settings.build_model, tokenizer=tokenizer))

    def record(self) -> dict[str, Any]:
        """The tokenizer, so that the model can be given text where the corpus is not."""
        return {"tokenizer": self.tokenizer.description()}

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Windows of T + 1 tokens at random positions of the training text, a function of (seed, step); where
        one of them holds several documents, also their numbers."""
        text, length = self.splits["train"], self.config.context_length + 1
        starts = torch.randint(
            len(text) - length + 1, (batch_size,), generator=generator(self.name, "train", seed, step)
        )
        return _as_batch(text.windows(starts, length))

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean cross entropy of tokens 2 ... T + 1 of each window. Those that begin a document count as 0, so
        that the mean over micro-batches is that of the batch."""
        return _mean_of_batch(batch, *_predictions(model, batch))

    def loss_of_shard(self, model: nn.Module, batch: Batch, step: int, mesh: DeviceMesh) -> Tensor:
        """See ``Task``; packed documents are divided together, as the one row that they are."""
        return _mean_of_batch(batch, *_predictions(model, batch, mesh))

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """T, the tokens that predict the one after each."""
        return self.config.context_length

    def eval_windows(self, split: Split) -> Windows:
        """The windows of a split, of T + 1 tokens, the same for every model."""
        text, length = self.splits[split], self.config.context_length + 1
        count = min(self.config.eval_windows, len(text) // length)
        return text.windows(torch.linspace(0, len(text) - length, count, dtype=torch.float64).long(), length)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """The metric over all predicted tokens of all windows."""
        return {self.metric: self._mean(_predictions(model, batch) for batch in self._eval_batches(model, split))}

    @torch.no_grad()
    def evaluate_shard(self, model: nn.Module, split: Split, mesh: DeviceMesh) -> dict[str, float]:
        """See ``Task``; no process has the logits of a whole window."""
        scored = (_predictions(model, batch, mesh) for batch in self._eval_batches(model, split))
        return {self.metric: self._mean(scored, mesh)}

    @torch.no_grad()
    def evaluate_cached(
        self, model: nn.Module, split: Split, chunk: int = 64, *, storage: Storage | None = None
    ) -> dict[str, float]:
        """As ``evaluate``, with each document of each window read through the key/value cache: the same
        number, up to rounding and what a storage changes.

        Args:
            model: in eval mode.
            split: which text.
            chunk: tokens per step.
            storage: bits of the cache; see ``sa.Storage``. Default ``None``: those of the model.

        Raises:
            ConfigError: the storage does not fit the model.
        """
        language_model = cast(LanguageModel, model)
        scored = (
            _read_cached(language_model, _spans(batch), chunk, storage) for batch in self._eval_batches(model, split)
        )
        return {self.metric: self._mean(scored)}

    def _eval_batches(self, model: nn.Module, split: Split) -> Iterator[Batch]:
        """The windows of a split, 16 at a time, on the device of the model."""
        windows = self.eval_windows(split)
        parts = list(zip(windows.tokens.split(16), windows.documents.split(16), strict=True))
        for tokens, documents in counted(parts, f"scoring the {split} windows"):
            yield on_device_of(model, _as_batch(Windows(tokens, documents)))

    def _mean(self, scored: Iterable[tuple[Tensor, Tensor]], mesh: DeviceMesh | None = None) -> float:
        """Nats per unit over logits and targets, which the processes of a mesh may have divided."""
        nats, units = 0.0, 0
        for logits, targets in scored:
            nats += float(F.cross_entropy(logits, targets, ignore_index=_NONE, reduction="sum"))
            units += int(self._unit_sizes[targets[targets != _NONE].cpu()].sum())
        if mesh is not None:
            nats, units = Processes(mesh).summed(torch.tensor([nats, units], dtype=torch.float64)).tolist()
        if not units:
            raise DataError(
                "expected text to score, got windows in which every token begins a document: give documents of more "
                "than one token, or more task.eval_windows"
            )
        return nats / units

    @torch.no_grad()
    def details(self, model: nn.Module) -> dict[str, Any]:
        """What the model does with its context, on the test windows, by ``octaves`` of 1 ... T.

        Returns:
            ``loss_by_position``: the metric by the position in the document; ``attention_by_distance``: for
            each layer the shares of the token itself and of each range of distances, on four of the longest
            spans.
        """
        length = self.config.context_length
        losses, sizes, positions, spans = [], [], [], []
        for batch in self._eval_batches(model, "test"):
            logits, targets = (part.cpu() for part in _predictions(model, batch))
            scored = targets != _NONE
            losses.append(F.cross_entropy(logits[scored], targets[scored], reduction="none"))
            sizes.append(self._unit_sizes[targets[scored]])
            documents = batch.get("documents", torch.zeros_like(batch["tokens"])).cpu()
            positions.append(positions_in_documents(documents[:, :-1]).flatten()[scored])
            spans += [span[:length] for span in _spans(batch)]
        longest = sorted(spans, key=len, reverse=True)[:_LOOKED_AT]
        loss = by_octave(torch.cat(losses), torch.cat(positions), length, torch.cat(sizes))
        return {
            "octaves": octaves(length),
            "loss_by_position": loss,
            "attention_by_distance": attention_by_distance(cast(LanguageModel, model), longest),
        }

    def baselines(self) -> list[Baseline]:
        """Frequencies of tokens, and where there are few different ones of pairs, in the training text (its
        first 2^25 tokens), each count raised by one, on the test windows."""
        size = self.tokenizer.vocab_size
        counts_pairs = size <= _LARGEST_PAIR_TABLE
        single = np.ones(size, dtype=np.int64)
        pairs = np.ones(size * size if counts_pairs else 0, dtype=np.int64)
        train = self.splits["train"]
        end = min(len(train), _MOST_COUNTED)
        for start in range(0, end, 2**20):
            part = train.read(start, min(end, start + 2**20 + 1))  # one more, for the pair across the boundary
            single += np.bincount(part[: 2**20], minlength=size)
            if counts_pairs:
                pairs += np.bincount(part[:-1] * size + part[1:], minlength=size * size)
        windows = self.eval_windows("test")
        context, target = windows.tokens[:, :-1], windows.tokens[:, 1:]
        scored = windows.documents[:, 1:] == windows.documents[:, :-1]
        units = int(self._unit_sizes[target[scored]].sum())

        def score(logs: Tensor) -> float:
            return -float(logs[scored].sum()) / units

        frequency = torch.from_numpy(single).double()
        nats = score((frequency / frequency.sum()).log()[target])
        note = f"how often each {self.tokenizer.unit} comes"
        rows = [Baseline(name="unigram", metrics={self.metric: nats}, note=note)]
        if counts_pairs:
            table = torch.from_numpy(pairs).double().view(size, size)
            logs = (table / table.sum(dim=1, keepdim=True)).log()[context, target]
            note = f"how often each {self.tokenizer.unit} follows the one before it"
            rows.append(Baseline(name="bigram", metrics={self.metric: score(logs)}, note=note))
        return rows


def _as_batch(windows: Windows) -> Batch:
    """Tokens, and the numbers of the documents where that of a window's end is not that of its beginning."""
    batch = {"tokens": windows.tokens}
    if bool((windows.documents[:, 0] != windows.documents[:, -1]).any()):
        batch["documents"] = windows.documents
    return batch


def _mean_of_batch(batch: Batch, logits: Tensor, targets: Tensor) -> Tensor:
    """The part of a batch's mean cross entropy that these logits and targets give."""
    nats = F.cross_entropy(logits, targets, ignore_index=_NONE, reduction="sum")
    return nats / batch["tokens"][:, 1:].numel()


def _predictions(model: nn.Module, batch: Batch, mesh: DeviceMesh | None = None) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and targets (N,) of all tokens of all windows but the first of each; targets that begin a
    document are ``_NONE``. Of a mesh whose processes divide the sequences, those of this process."""
    tokens, documents = batch["tokens"], batch.get("documents")
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    options: dict[str, Any] = {}
    if documents is not None:
        changes = documents[:, 1:] != documents[:, :-1]
        begins = F.pad(changes[:, :-1], (1, 0), value=True).flatten()
        options["cu_seqlens"] = F.pad(begins.nonzero().flatten(), (0, 1), value=inputs.numel())
        inputs, targets = inputs.reshape(1, -1), targets.masked_fill(changes, _NONE).reshape(1, -1)
    if mesh is not None:
        options["shard"] = shard = SequenceShard(mesh, inputs.shape[1], order="head-tail")
        inputs, targets = shard.take(inputs), shard.take(targets)
    return model(inputs, **options).flatten(0, 1), targets.flatten()


def _spans(batch: Batch) -> list[Tensor]:
    """The spans of the documents in the windows; those of one token have nothing to predict."""
    tokens, documents = batch["tokens"], batch.get("documents")
    if documents is None:
        return list(tokens)
    spans = []
    for row, numbers in zip(tokens, documents, strict=True):
        sizes: list[int] = numbers.unique_consecutive(return_counts=True)[1].tolist()
        spans += [span for span in row.split(sizes) if len(span) > 1]
    return spans


def _read_cached(
    model: LanguageModel, spans: list[Tensor], chunk: int, storage: Storage | None
) -> tuple[Tensor, Tensor]:
    """Logits and targets of spans of text, one in each row, left-padded, read through the key/value cache."""
    length, device = max(map(len, spans)), spans[0].device
    padding = [length - len(span) for span in spans]
    tokens = torch.stack([F.pad(span, (pad, 0)) for span, pad in zip(spans, padding, strict=True)])
    caches = model.new_cache(max_length=length, left_padding=padding if any(padding) else None, storage=storage)
    logits = torch.cat([model(part, caches=caches) for part in tokens[:, :-1].split(chunk, dim=1)], dim=1)
    is_padding = torch.arange(length - 1, device=device) < torch.tensor(padding, device=device)[:, None]
    return logits.flatten(0, 1), tokens[:, 1:].masked_fill(is_padding, _NONE).flatten()
