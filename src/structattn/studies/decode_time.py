"""The time of a decoding step: one more token through a key/value cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structattn.models.language_model import LanguageModel

NUM_STEPS = 16


def median_ms(step: Callable[[Tensor], Any], tokens: Tensor) -> float:
    """Median milliseconds of a step.

    Args:
        step: takes the next token, (1, 1), and returns a tensor that depends on it.
        tokens: (1, N), one for each step.
    """
    times = []
    for token in tokens.split(1, dim=1):
        start = time.perf_counter()
        float(step(token).flatten()[0])  # waits for the device
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


@torch.no_grad()
def decode_ms(model: LanguageModel, tokens: Tensor) -> float | None:
    """Median milliseconds of one more token at the end of a text, over ``NUM_STEPS`` of them.

    Args:
        model: in eval mode.
        tokens: (1, T) token ids on its device.

    Returns:
        ``None`` for texts that are too short.
    """
    if tokens.shape[1] <= NUM_STEPS:
        return None
    caches = model.new_cache(max_length=tokens.shape[1])
    model(tokens[:, :-NUM_STEPS], caches=caches)
    return median_ms(lambda token: model(token, caches=caches), tokens[:, -NUM_STEPS:])
