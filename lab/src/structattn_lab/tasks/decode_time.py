"""The time of a decoding step: one more token through a key/value cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from structattn.models.language_model import LanguageModel

NUM_STEPS = 16
_IN_TURN = 64  # steps of each of several models


def median_ms(step: Callable[[Tensor], Any], tokens: Tensor) -> float:
    """Median milliseconds of a step.

    Args:
        step: takes the next token, (1, 1), and returns a tensor that depends on it.
        tokens: (1, N), one for each step.
    """
    return statistics.median(_milliseconds(step, token) for token in tokens.split(1, dim=1))


def _milliseconds(step: Callable[[Tensor], Any], token: Tensor) -> float:
    start = time.perf_counter()
    float(step(token).flatten()[0])  # waits for the device
    return 1000 * (time.perf_counter() - start)


@torch.no_grad()
def decode_times(models: Mapping[str, LanguageModel]) -> dict[str, float]:
    """Median milliseconds of one more token at the end of the context, over the last 64, or the second half
    of a short one.

    The models take their steps in turn, so that what disturbs the machine disturbs all. Weights and tokens do
    not matter.

    Args:
        models: by name, of one length of context, at least 2.
    """
    rounds = zip(*(_steps(model.eval()) for model in models.values()), strict=True)
    return dict(zip(models, map(statistics.median, zip(*rounds, strict=True)), strict=False))


def _steps(model: LanguageModel) -> Iterator[float]:
    """Milliseconds of each of the last steps."""
    tokens = torch.zeros((1, model.context_length), dtype=torch.int64, device=model.embedding.weight.device)
    caches = model.new_cache(max_length=model.context_length)
    count = min(_IN_TURN, model.context_length // 2)
    model(tokens[:, :-count], caches=caches)
    for token in tokens[:, -count:].split(1, dim=1):
        yield _milliseconds(lambda token: model(token, caches=caches), token)
