"""The user's texts as token ids: windows of them, drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor

from structattn.checks import INT_DTYPES, check_type, describe
from structattn.errors import ConfigError, DataError
from structattn.seeds import generator


def as_texts(texts: Any, vocab_size: int) -> list[Tensor]:
    """Texts as tensors (tokens,) of int64.

    Raises:
        ConfigError: they are not ints in one or two dimensions, or not in the vocabulary.
    """
    expected = "token ids: a tensor (tokens,) or (texts, tokens), or an iterable of such tensors or lists"
    check_type("texts", texts, Iterable, expected, "tokenizer(text).input_ids makes them")
    if isinstance(texts, str):
        raise ConfigError(f"texts must be {expected}, got {describe(texts)}; tokenizer(text).input_ids makes them")
    rows: list[Any] = []
    for text in [texts] if isinstance(texts, Tensor) else texts:
        rows.extend(text if isinstance(text, Tensor) and text.dim() == 2 else [text])
    made = []
    for number, row in enumerate(rows):
        try:
            ids = row if isinstance(row, Tensor) else torch.tensor(row)
        except (TypeError, ValueError, RuntimeError):
            ids = None
        if ids is None or ids.dim() != 1 or (ids.dtype not in INT_DTYPES and len(ids)):
            raise ConfigError(
                f"texts must be {expected}, got {describe(row)} as number {number}; tokenizer(text).input_ids makes "
                "them"
            )
        ids = ids.detach().to("cpu", torch.int64)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
            raise ConfigError(
                f"text {number} has token ids from {int(ids.min())} to {int(ids.max())}, the vocabulary of the model "
                f"those from 0 to {vocab_size - 1}: make them with the tokenizer of this model"
            )
        made.append(ids)
    return made


def windows_of(texts: list[Tensor], length: int, count: int, seed: int) -> Tensor:
    """At most ``count`` windows (windows, length) that do not overlap, at random, in the order of the texts.

    Raises:
        DataError: no text has that many tokens.
    """
    check_longest(texts, length)
    windows = torch.cat([x[: len(x) // length * length].reshape(-1, length) for x in texts])
    chosen = torch.randperm(len(windows), generator=generator("windows of a text", seed))[:count]
    return windows[chosen.sort().values]


def check_longest(texts: list[Tensor], length: int) -> None:
    """Raises ``DataError`` unless one of the texts has that many tokens."""
    longest = max(map(len, texts), default=0)
    if longest < length:
        raise DataError(
            f"the longest text has {longest:,} tokens, and a window takes {length:,}: give a longer text, or a smaller "
            "context_length"
        )


def random_window(texts: list[Tensor], length: int, made: Generator) -> Tensor:
    """A new tensor (length,), a window of any text; all windows are equally probable."""
    counts = torch.tensor([max(0, len(x) - length + 1) for x in texts])
    at = int(torch.randint(int(counts.sum()), (), generator=made))
    ends = counts.cumsum(0)
    text = int(torch.searchsorted(ends, at, right=True))
    start = at - int(ends[text] - counts[text])
    return texts[text][start : start + length].clone()
