"""Makes our attention implementations take effect or raise, and leaves a model unchanged after one of our
errors.

transformers logs a line, and the model keeps its own attention, where a model does not run through
``AttentionInterface`` (Bloom, Falcon, GPT-J). There is no public hook to change this, so the two methods by
which a model gets an implementation, when it is made and later, are wrapped: for our names they raise
instead. Other names are passed through.

Drafting by early exit (``generate(assistant_early_exit=...)``) sets the number of layers in the model's
config for a moment, and an error in that call would leave it there: it is restored.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator
from transformers.utils import output_capturing

from structattn.checks import quoted
from structattn.errors import ConfigError

_NAMES: set[str] = set()
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what every model file that runs through the interface imports


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Registers an attention function and its mask function with transformers, under a name that takes effect
    or raises.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _NAMES.add(name)


def is_registered(implementation: object) -> bool:
    """Whether an implementation is one of ours."""
    return implementation in _NAMES


def record_outputs(model: PreTrainedModel) -> None:
    """Notes what ``output_hidden_states`` and ``output_attentions`` collect, for the class of a model that
    was changed after it was made.

    transformers notes it by class, when a model is made; up to 5.17 by the text of the class.
    """
    registry: Any = output_capturing._CAN_RECORD_REGISTRY
    key = str(type(model)) if type(registry) is dict else model
    registry[key] = model._can_record_outputs


_asks_for_weights: ContextVar[bool] = ContextVar("_asks_for_weights", default=False)


@contextmanager
def asking_for_weights() -> Iterator[None]:
    """A context for the call of a model that collects attention weights in its own code, where its attention
    is not told so.
    """
    token = _asks_for_weights.set(True)
    try:
        yield
    finally:
        _asks_for_weights.reset(token)


def collects_weights() -> bool:
    """Whether the call of a model that is running collects attention weights, by an argument or by its
    config.
    """
    if not torch.compiler.is_compiling() and _asks_for_weights.get():
        return True
    collector: Any = output_capturing._active_collector
    if (
        torch.compiler.is_compiling() and not collector.compiling
    ):  # a part of a model is compiled, where nothing is known of the call
        return False
    kept = collector.get()
    return kept is not None and "attentions" in kept


def _refuse(model: PreTrainedModel, name: str) -> None:
    raise ConfigError(
        f"{type(model).__name__} does not run its attention through transformers' AttentionInterface, so "
        f"attn_implementation={quoted(name)} "
        "would have no effect: use a model that does, such as Llama, Qwen3, Mistral or GPT-2"
    )


def _asked(config: PreTrainedConfig, implementation: Any) -> Iterator[tuple[PreTrainedConfig, str]]:
    """The configs, of a model or of its parts, for which ``set_attn_implementation`` is asked for a name of
    ours, and the name.
    """
    if isinstance(implementation, dict):
        for key, value in implementation.items():
            part = getattr(config, key, None) if key else config
            if isinstance(part, PreTrainedConfig):
                yield from _asked(part, value)
    elif isinstance(implementation, str) and implementation in _NAMES:
        yield config, implementation


_check = PreTrainedModel._check_and_adjust_attn_implementation
_set = PreTrainedModel.set_attn_implementation


@functools.wraps(_check)
def _checked(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    if (
        isinstance(attn_implementation, str)
        and attn_implementation in _NAMES
        and not self._can_set_attn_implementation()
    ):
        _refuse(self, attn_implementation)
    return _check(self, attn_implementation, *args, **kwargs)


@functools.wraps(_set)
def _set_or_refuse(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    for config, name in _asked(self.config, attn_implementation):
        for module in self.modules():
            is_asked = isinstance(attn_implementation, str) or getattr(module, "config", None) is config
            if is_asked and isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
                _refuse(module, name)
        # transformers assumes that a model whose file contains no attention supports it, such as Mamba.
        if not any(hasattr(sys.modules.get(type(module).__module__), _INTERFACE) for module in self.modules()):
            _refuse(self, name)
    return _set(self, attn_implementation, *args, **kwargs)


_draft = EarlyExitCandidateGenerator.get_candidates


@functools.wraps(_draft)
def _draft_and_restore(self: EarlyExitCandidateGenerator, *args: Any, **kwargs: Any) -> Any:
    config = self.assistant_model.base_model.config
    count = config.num_hidden_layers
    try:
        return _draft(self, *args, **kwargs)
    finally:
        config.num_hidden_layers = count


EarlyExitCandidateGenerator.get_candidates = _draft_and_restore
PreTrainedModel._check_and_adjust_attn_implementation = _checked
PreTrainedModel.set_attn_implementation = _set_or_refuse
