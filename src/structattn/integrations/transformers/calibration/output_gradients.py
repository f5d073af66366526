"""What key heads lose by a small change of their output: by the gradient of the predictions.

With the gradient g of the log-probability of a token that is drawn from the predictions, half of the mean of
(g . change)^2 is the divergence of the predictions to second order (the Fisher information of the output).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from structattn.errors import CalibrationError
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.attention.interface import attend
from structattn.integrations.transformers.calibration.discovery import FoundAttention, observed, register_observer
from structattn.integrations.transformers.calibration.pass_results import PassResults
from structattn.integrations.transformers.calibration.prompts import (
    ScoredText,
    check_predictions,
    log_probabilities,
    parameters_without_gradients,
)
from structattn.progress import counted

_NAME = "structattn_output_gradients"
_LOST = "losses by the gradient of the predictions"  # in partial calibrations


@dataclass(frozen=True)
class AttentionOutput:
    """The attention of a layer in a forward pass.

    Attributes:
        call: its queries, keys and values.
        states: the hidden states of its tokens, (T, E).
        change: zeros (1, T, H, V) that are added to its output, whose gradient is asked for.
    """

    call: AttentionCall
    states: Tensor
    change: Tensor


# (G, ...) of the G key heads of a layer and the gradient by its output, (T, H, V): a sum over queries.
Measure = Callable[[AttentionOutput, Tensor], Tensor]


@dataclass
class _MeasuredPass:
    """A forward pass: its modules, what their attention was so far, and the states that reached the last."""

    modules: frozenset[nn.Module]
    outputs: list[AttentionOutput]
    states: Tensor


_active: ContextVar[_MeasuredPass] = ContextVar("_active")


def _attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """The attention of the model, which is kept."""
    this = _active.get()
    whole, weights = attend(call)
    if call.module not in this.modules:
        return whole, weights
    change = torch.zeros_like(whole, requires_grad=True)
    this.outputs.append(AttentionOutput(call, this.states, change))
    return whole + change, None


register_observer(_NAME, _attention)


@contextmanager
def told_states(modules: Sequence[nn.Module], tell: Callable[[Tensor], None]) -> Iterator[None]:
    """A context in which ``tell`` gets the hidden states (T, E) of the first row that reach each module."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tell((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0])

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def losses_by_gradient(
    model: PreTrainedModel,
    layers: Sequence[FoundAttention],
    prompts: Sequence[ScoredText],
    measures: Mapping[str, Measure],
    results: PassResults,
) -> dict[str, Tensor]:
    """What the heads of all layers lose, in nats per token, by each of the measures.

    Args:
        model: a plain causal language model.
        layers: those of keys of their own.
        prompts: a text and copies, in turn.
        measures: by name.
        results: what is kept of passes.

    Returns:
        (2, heads, ...) float64 each, of texts and of copies.

    Raises:
        CalibrationError: gradients are NaN or infinite.

    Cost: a forward and a backward pass of each prompt, with the memory of its activations; and the measures.
    """
    kept, done = results.get(_LOST), results.passes(_LOST)
    sums = {} if kept is None else {name: kept[name] for name in measures}
    for count, prompt in enumerate(counted(prompts[done:], "what heads lose by small changes"), start=done):
        pairs = _outputs(model, [layer.module for layer in layers], prompt, count)
        for name, measure in measures.items():
            lost = torch.cat([measure(output, slope) for output, slope in pairs]).double().cpu()
            if not bool(lost.isfinite().all()):
                raise CalibrationError(
                    "the gradients of the predictions of the model are NaN or infinite: calibrate with "
                    "retrieval=False, or in float32"
                )
            total = sums.setdefault(name, torch.zeros((2, *lost.shape), dtype=torch.float64))
            total[count % 2] += lost / len(prompt.scored)
        results.keep(_LOST, sums, passes=count + 1)
    return {name: total / (len(prompts) / 2) for name, total in sums.items()}


def _outputs(
    model: PreTrainedModel, modules: Sequence[nn.Module], prompt: ScoredText, seed: int
) -> list[tuple[AttentionOutput, Tensor]]:
    """The attention of each module, and the gradient by its output."""
    this = _MeasuredPass(frozenset(modules), [], torch.zeros(0, 0))
    token = _active.set(this)
    try:
        with parameters_without_gradients(model), observed(model, _NAME), torch.enable_grad():
            with told_states(modules, lambda states: setattr(this, "states", states)):
                found = log_probabilities(model, prompt)
            check_predictions(found.detach())
            # Drawn from the predictions, so that squared gradients are what a divergence grows with.
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.multinomial(found.detach().exp().cpu(), 1, generator=generator).to(found.device)
            slopes = torch.autograd.grad(found.gather(1, drawn).sum(), [one.change for one in this.outputs])
    finally:
        _active.reset(token)
    return [(output, slope[0]) for output, slope in zip(this.outputs, slopes, strict=True)]
