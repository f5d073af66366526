"""Texts on which the predictions of a model are compared, and those predictions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from structattn.errors import CalibrationError

COPIES = 0.1  # of the tokens that a model predicts, the share that is taken to be copied from far back
_SCORED = 512  # positions of a text at which predictions are compared: logits are many numbers
_SPAN, _CUE = 16, 4  # tokens of a span that comes again, and how many of them say which one it is
_MOST_SPANS = 16


@dataclass(frozen=True)
class ScoredText:
    """Tokens (1, T), and the positions (n,) at which predictions are compared."""

    ids: Tensor
    scored: Tensor


def text_prompt(ids: Tensor) -> ScoredText:
    """A text, with its last positions."""
    return ScoredText(ids, torch.arange(max(0, ids.shape[1] - _SCORED), ids.shape[1], device=ids.device))


def retrieval_prompt(ids: Tensor, generator: torch.Generator) -> ScoredText:
    """A text in whose end spans from all of it come again, half of them made of its tokens in random order.

    What follows the first tokens of a copy can be read nowhere but at the original.
    """
    ids, length = ids.clone(), ids.shape[1]
    count = min(_MOST_SPANS, length // (4 * _SPAN))
    kept = length - count * _SPAN  # the copies follow
    slots = torch.randperm(kept // _SPAN, generator=generator)[:count] * _SPAN
    for place in slots[::2].tolist():
        taken = torch.randint(kept, (_SPAN,), generator=generator)
        ids[0, place : place + _SPAN] = ids[0, taken.to(ids.device)]
    order = slots[torch.randperm(count, generator=generator)]
    at = (order[:, None] + torch.arange(_SPAN)).flatten()
    ids[0, kept:] = ids[0, at.to(ids.device)]
    scored = torch.arange(kept, length).view(count, _SPAN)[:, _CUE - 1 : -1].flatten()  # each predicts the next token
    return ScoredText(ids, scored.to(ids.device))


def log_probabilities(model: PreTrainedModel, prompt: ScoredText) -> Tensor:
    """(n, V) of the scored positions."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=prompt.ids, use_cache=False, logits_to_keep=prompt.scored).logits[0]
    else:
        logits = model(input_ids=prompt.ids, use_cache=False).logits[0, prompt.scored]
    return logits.float().log_softmax(-1)


def check_predictions(found: Tensor) -> None:
    """Raises ``CalibrationError`` for log probabilities (or features) that are NaN."""
    if bool(found.isnan().any()):
        raise CalibrationError(
            "the predictions of the model for a text are NaN: its weights are, or its dtype is too narrow for its "
            "numbers; calibrate in float32 or bfloat16"
        )


@contextmanager
def parameters_without_gradients(model: PreTrainedModel) -> Iterator[None]:
    """A context in which no parameter of a model asks for a gradient: those of activations take less."""
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in required:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in required:
            parameter.requires_grad_(True)
