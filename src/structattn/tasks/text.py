"""Language modelling by the character: the packaged excerpt, or a text file of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.errors import ConfigError, DataError
from structattn.layers.rotary import Rotary
from structattn.models.language_model import LanguageModel
from structattn.seeds import generator
from structattn.tasks.base import Baseline, Batch, Split, Task

# The paper's 96 symbols: newline and printable ASCII.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_TABLE = bytes(max(CHARACTERS.find(chr(byte)), 0) for byte in range(256))


def _token_bytes(text: str, source: str) -> bytes:
    """Token ids of a text as bytes."""
    unknown = set(text) - set(CHARACTERS)
    if not unknown:
        return text.encode("ascii").translate(_TABLE)
    place = min(map(text.index, unknown))
    line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
    more = f" (and {len(unknown) - 1} other such characters after it)" if len(unknown) > 1 else ""
    raise DataError(
        f"{source}: expected newlines and printable ASCII, got {text[place]!r} (U+{ord(text[place]):04X}) in line {line}, column "
        f"{column}{more}. Replace or remove it, for example tabs by spaces and curly quotes by straight ones"
    )


def encode(text: str, source: str = "the text") -> list[int]:
    """Characters as token ids, 0 ... 95.

    Args:
        text: newline and printable ASCII.
        source: where it is from, for the error message.

    Raises:
        DataError: another character; named with its place.
    """
    return list(_token_bytes(text, source))


def decode(tokens: list[int]) -> str:
    """Token ids as characters, the inverse of ``encode``."""
    return "".join(CHARACTERS[token] for token in tokens)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text and the model.

    Args:
        data: a text file of newlines and printable ASCII; empty: the packaged excerpt. Its first 90 % of characters train, the next
            5 % validate, the last 5 % test.
        context_length: T, characters of a window that predict the one after each.
        embed_dim, num_layers, num_heads: of the model.
        rotary: text form of rotary positions (see ``layers.rotary``); empty: learned positions.
        eval_windows: most windows of each evaluation; fixed, spread evenly over the split, and not overlapping.

    Raises:
        ConfigError: a number below 1, heads that do not divide the width, or an unknown form of rotary positions.
    """

    data: str = ""
    context_length: int = 256
    embed_dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    rotary: str = ""
    eval_windows: int = 128

    def __post_init__(self) -> None:
        for name in ("context_length", "embed_dim", "num_layers", "num_heads", "eval_windows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"task.{name} must be at least 1, got {getattr(self, name)}")
        if self.embed_dim % self.num_heads:
            raise ConfigError(f"task.num_heads must divide embed_dim: got {self.num_heads} and {self.embed_dim}")
        self.rotary_value()

    def rotary_value(self) -> Rotary | None:
        """The rotary positions, ``None`` for learned ones."""
        return Rotary.parse(self.rotary) if self.rotary else None

    def build_model(self, spec: str) -> LanguageModel:
        """The model; needs no data, so that it can generate where the file is not."""
        return LanguageModel(
            len(CHARACTERS),
            spec,
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            context_length=self.context_length,
            rotary=self.rotary_value(),
        )


class TextTask(Task):
    """Mean cross entropy of the next character over fixed windows, in nats."""

    name = "text"
    metric = "nats_per_char"
    metric_label = "cross entropy of the next character, nats"
    question = "Does a language model by the character get better when near characters are compared in more dimensions than far ones?"

    def __init__(self, config: TextConfig) -> None:
        self.config = config
        text, source = _read(config.data)
        if not text:
            raise DataError(f"{source}: expected text, got an empty file. Check how it was written")
        tokens = torch.frombuffer(bytearray(_token_bytes(text, source)), dtype=torch.uint8)
        edges = (0, 9 * len(tokens) // 10, 19 * len(tokens) // 20, len(tokens))
        names = ("train", "validation", "test")
        self.splits = {name: tokens[a:b] for name, (a, b) in zip(names, pairwise(edges), strict=True)}
        for name, part in self.splits.items():
            if len(part) <= config.context_length:
                raise DataError(
                    f"{source}: expected more than {config.context_length} characters in each split (task.context_length), got "
                    f"{len(part)} of {len(tokens)} for {name}. Give a text of at least {20 * (config.context_length + 1)} characters, "
                    "or a shorter context"
                )

    def build_model(self, spec: str) -> LanguageModel:
        """A causal language model over 96 characters."""
        return self.config.build_model(spec)

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Windows of T + 1 characters at random places of the training text, a function of (seed, step)."""
        text, length = self.splits["train"], self.config.context_length + 1
        starts = torch.randint(
            len(text) - length + 1, (batch_size,), generator=generator(self.name, "train", seed, step)
        )
        return {"tokens": _windows(text, starts, length)}

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean cross entropy of characters 2 ... T + 1 of each window."""
        return _cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    def eval_tokens(self, split: Split) -> Tensor:
        """The windows of a split, (N, T + 1) int64, the same for every model."""
        text, length = self.splits[split], self.config.context_length + 1
        count = min(self.config.eval_windows, len(text) // length)
        starts = torch.linspace(0, len(text) - length, count, dtype=torch.float64).long()
        return _windows(text, starts, length)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``nats_per_char`` over all characters of all windows."""
        device = next(model.parameters()).device
        windows = self.eval_tokens(split)
        total = 0.0
        for chunk in windows.split(16):
            total += float(self.loss(model, {"tokens": chunk.to(device)}, 0)) * len(chunk)
        return {self.metric: total / len(windows)}

    @torch.no_grad()
    def evaluate_cached(self, model: LanguageModel, split: Split, chunk: int = 64) -> dict[str, float]:
        """As ``evaluate``, with each window read through the key/value cache: the same number, up to rounding.

        Args:
            model: in eval mode.
            split: which text.
            chunk: characters per step.
        """
        device = next(model.parameters()).device
        windows = self.eval_tokens(split)
        total = 0.0
        for part in windows.to(device).split(16):
            caches = model.new_cache(max_length=self.config.context_length)
            logits = [model(piece, caches=caches) for piece in part[:, :-1].split(chunk, dim=1)]
            total += float(_cross_entropy(torch.cat(logits, dim=1), part[:, 1:])) * len(part)
        return {self.metric: total / len(windows)}

    def baselines(self) -> list[Baseline]:
        """Frequencies of characters and of pairs in the training text, each count raised by one, on the test windows."""
        size, train = len(CHARACTERS), self.splits["train"].long()
        windows = self.eval_tokens("test")
        context, target = windows[:, :-1], windows[:, 1:]
        single = torch.bincount(train, minlength=size).double() + 1
        pairs = torch.bincount(train[:-1] * size + train[1:], minlength=size * size).double().view(size, size) + 1
        unigram = -(single / single.sum()).log()[target].mean()
        bigram = -(pairs / pairs.sum(dim=1, keepdim=True)).log()[context, target].mean()
        return [
            Baseline(name="unigram", metrics={self.metric: float(unigram)}, note="how often each character comes"),
            Baseline(
                name="bigram", metrics={self.metric: float(bigram)}, note="how often it comes after the one before"
            ),
        ]


def _read(path: str) -> tuple[str, str]:
    """The text and where it is from, for messages."""
    if not path:
        return files("structattn.tasks").joinpath("data", "peps.txt").read_text(encoding="ascii"), "the packaged text"
    try:
        return Path(path).read_text(encoding="utf-8-sig"), path
    except FileNotFoundError:
        raise DataError(f"expected a text file at {path}, got no such file. Check the path") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected text in UTF-8, got: {error}. Save it as plain text") from error
    except OSError as error:
        raise DataError(f"expected a readable text file at {path}, got: {error}. Check that it is a file") from error


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
