"""Checks of the inputs of our transformers models, so that errors name the wrong argument before a layer
fails.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from structattn.checks import INT_DTYPES, check_bool, check_int, check_int_tensor, check_tensor, check_type, describe
from structattn.errors import ConfigError, ShapeError
from structattn.integrations.transformers.attention.adapters import has_adapter
from structattn.integrations.transformers.attention.registration import asking_for_weights
from structattn.integrations.transformers.caches.model_cache import CACHE, CACHE_NAMES, number_layers, take_cache
from structattn.integrations.transformers.masks.structured_mask import StructuredMask

# What `check_inputs` reads, and what it found right in the call of a model that is running.
_CHECKED = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "cache", "use_cache")
_checked_inputs: ContextVar[tuple[Any, ...] | None] = ContextVar("_checked_inputs", default=None)


def checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``forward`` that checks its inputs first and takes a cache by either name; its signature
    stays, which transformers reads.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    own_cache = next((name for name in CACHE_NAMES if name in names), CACHE)

    @functools.wraps(forward)
    def checked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (cache := take_cache(kwargs)) is not None:
            kwargs[own_cache] = cache
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        named["cache"] = named.get(own_cache)
        if torch.compiler.is_compiling():  # a compiled program cannot keep what is known
            number_layers(named["cache"])
            check_inputs(self.config, named)
            return run(self, named, args, kwargs)
        seen = (self.config, *(named.get(name) for name in _CHECKED))
        last = _checked_inputs.get()
        if last is None or any(a is not b for a, b in zip(seen, last, strict=True)):
            check_inputs(self.config, named)
        token = _checked_inputs.set(seen)  # the model within a model for a task is given the same
        try:
            return run(self, named, args, kwargs)
        finally:
            _checked_inputs.reset(token)

    def run(self: Any, named: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if named.get("inputs_embeds") is not None:
            _check_as_weights(named["inputs_embeds"], self.get_input_embeddings().weight)
        tokens = named["input_ids"] if named.get("input_ids") is not None else named["inputs_embeds"]
        if "logits_to_keep" in names:  # a causal language model
            check_keep(named.get("logits_to_keep", 0))
            check_loss(named, tokens, self.config.vocab_size)
        elif isinstance(self, GenericForTokenClassification):
            check_loss(named, tokens, self.config.num_labels)
        elif isinstance(self, GenericForSequenceClassification):
            if self.config.pad_token_id is None and tokens.shape[0] > 1:
                raise ConfigError(
                    f"a batch of {tokens.shape[0]} rows needs config.pad_token_id, from which the last token of each "
                    "row is found"
                )
            if named.get("labels") is not None:
                check_classes(named["labels"], tokens.shape[0], self.config)
        asked = named.get("output_attentions")
        if (self.config.output_attentions if asked is None else asked) and has_adapter(type(self)):
            with asking_for_weights():
                return forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return checked_forward


def check_inputs(config: PreTrainedConfig, inputs: Mapping[str, Any]) -> None:
    """Checks the inputs of a decoder by name; missing ones are ``None``.

    Raises:
        ConfigError, ShapeError: neither or both of ``input_ids`` and ``inputs_embeds``; tokens that are not
            ints, or not in the vocabulary (on a CPU); another shape, type or dtype than expected.
    """
    ids: Any = inputs.get("input_ids")
    embeds: Any = inputs.get("inputs_embeds")
    positions: Any = inputs.get("position_ids")
    if (ids is None) == (embeds is None):
        raise ConfigError(f"give either input_ids or inputs_embeds, got {'neither' if ids is None else 'both'}")
    if ids is not None:
        _check_ints("input_ids", ids, (torch.int32, torch.int64))
        _check_range("input_ids", ids, 0, config.vocab_size)
    else:
        check_tensor("inputs_embeds", embeds)
        is_float = embeds.is_floating_point() and embeds.element_size() > 1
        if not is_float or embeds.dim() != 3 or embeds.shape[2] != config.hidden_size or 0 in embeds.shape:
            raise ShapeError(
                "inputs_embeds must be floating point (of 16, 32 or 64 bits) of shape (batch, tokens, "
                f"{config.hidden_size}) with at least one token, got {embeds.dtype} of shape {tuple(embeds.shape)}"
            )
    tokens = ids if embeds is None else embeds
    batch, length = tokens.shape[:2]
    if positions is not None:
        if isinstance(positions, Tensor) and positions.dim() > 2:
            raise ConfigError(
                f"structured attention knows positions of shape (batch, tokens), got {tuple(positions.shape)}: "
                "positions along several axes (images, video) are not supported"
            )
        _check_ints("position_ids", positions, INT_DTYPES)
        _check_numbers("position_ids", positions, tokens)
        if positions.shape[0] not in (1, batch) or positions.shape[1] != length:
            raise ShapeError(f"position_ids must be of shape (1 or {batch}, {length}), got {tuple(positions.shape)}")
    mask = inputs.get("attention_mask")
    made = tuple(mask.values()) if isinstance(mask, dict) else (mask,)  # transformers makes one for each kind of layer
    if not made or not all(isinstance(x, Tensor | StructuredMask | None) for x in made):
        raise ConfigError(f"attention_mask must be a tensor of shape (batch, tokens), got {describe(mask)}")
    if isinstance(mask, Tensor):
        check_tensor("attention_mask", mask)
        _check_numbers("attention_mask", mask, tokens)
        _check_mask(mask, batch)
    remedy = "use level_cache(model) or leave it away"
    check_type("cache", inputs.get("cache"), (Cache, type(None)), "a transformers.Cache or None", remedy)
    if inputs.get("use_cache") is not None:
        check_bool("use_cache", inputs["use_cache"])


def _check_mask(mask: Tensor, batch: int) -> None:
    if mask.dim() not in (2, 4):
        raise ShapeError(f"attention_mask must be of shape ({batch}, tokens), got {tuple(mask.shape)}")
    if mask.shape[0] != batch and not (mask.dim() == 4 and mask.shape[0] == 1):
        raise ShapeError(f"attention_mask must have a row for each of {batch}, got shape {tuple(mask.shape)}")
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        return
    has_other_numbers = not ((mask == 0) | (mask == 1)).all()
    if mask.dim() == 2 and has_other_numbers:
        raise ConfigError(
            "attention_mask must hold 1 where a token is real and 0 where it is padding, got other numbers: a mask "
            "that is added to the scores is written (mask == 0).long()"
        )
    if mask.dim() == 4 and mask.is_floating_point() and not has_other_numbers and mask.any():
        raise ConfigError(
            "a 4-dimensional attention_mask of floating point is added to the scores, and this one holds 1 where "
            "others hold 0: a mask that shows pairs is bool, mask != 0"
        )


def check_loss(inputs: Mapping[str, Any], tokens: Tensor, vocab_size: int) -> None:
    """Checks the inputs of a loss by name; missing ones are ``None``.

    Raises:
        ConfigError, ShapeError: ``labels`` or ``shift_labels`` are not one token, or ``ignore_index``, for
            each position; or ``ignore_index`` is no int.
    """
    ignored = inputs.get("ignore_index", -100)
    check_int("ignore_index", ignored)
    for name in ("labels", "shift_labels"):
        labels = inputs.get(name)
        if labels is None:
            continue
        _check_ints(name, labels, (torch.int64,))
        _check_numbers(name, labels, tokens)
        if labels.shape != tokens.shape[:2]:
            raise ShapeError(f"{name} must be of shape {tuple(tokens.shape[:2])}, got {tuple(labels.shape)}")
        _check_range(name, labels.where(labels != ignored, 0), 0, vocab_size)


def check_classes(labels: Any, rows: int, config: PreTrainedConfig) -> None:
    """Raises ``ShapeError`` or ``ConfigError`` unless labels are a class for each row, or floating point
    numbers for each row.
    """
    check_tensor("labels", labels)
    count, problem = config.num_labels, config.problem_type
    is_class = problem == "single_label_classification" or (
        problem is None and count > 1 and not labels.is_floating_point()
    )
    shapes = [(rows,)] if is_class else [(rows, count), *([(rows,)] if count == 1 else [])]
    fits = labels.dtype == torch.int64 if is_class else labels.is_floating_point()
    if not fits or tuple(labels.shape) not in shapes:
        raise ShapeError(
            f"labels of {problem or 'a classification'} with num_labels={count} must be "
            f"{'int64' if is_class else 'floating point'} of shape "
            f"{shapes[0]}, got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if is_class:
        _check_range("labels", labels.where(labels != -100, 0), 0, count)


def check_keep(logits_to_keep: Any) -> None:
    """Raises ``ConfigError`` unless ``logits_to_keep`` is an int of at least 0 or a tensor of positions."""
    if isinstance(logits_to_keep, Tensor):
        check_int_tensor("logits_to_keep", logits_to_keep, (None,))
    else:
        check_int("logits_to_keep", logits_to_keep, minimum=0)


def _check_ints(name: str, x: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    check_tensor(name, x)
    if x.dim() != 2 or x.dtype not in dtypes or 0 in x.shape:
        raise ShapeError(
            f"{name} must be {dtypes[-1]} of shape (batch, tokens) with at least one token, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )


def _check_as_weights(embeds: Tensor, weight: Tensor) -> None:
    if embeds.is_meta != weight.is_meta or (embeds.dtype == torch.float64) != (weight.dtype == torch.float64):
        raise ShapeError(
            f"inputs_embeds must be like the weights of the model, {weight.dtype} on {weight.device}, got "
            f"{embeds.dtype} on {embeds.device}"
        )


def _check_numbers(name: str, x: Tensor, tokens: Tensor) -> None:
    if x.is_meta and not tokens.is_meta:
        raise ShapeError(
            f"{name} is on the meta device, where tensors have no numbers, and the tokens on {tokens.device}"
        )


def _check_range(name: str, x: Tensor, low: int, stop: int) -> None:
    """On a CPU only: a GPU would have to be waited for, and traced code has no values."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() == 0:
        return
    smallest, largest = int(x.min()), int(x.max())
    if smallest < low or largest >= stop:
        raise ConfigError(f"{name} must be from {low} to {stop - 1}, got {smallest if smallest < low else largest}")
