"""Checks of what our models of transformers are called with, so that every mistake is named before a layer runs into it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from structattn.checks import check_bool, check_int, check_tensor, check_type, describe
from structattn.errors import ConfigError, ShapeError


def checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``forward`` that checks its inputs first; its signature stays, which transformers reads."""
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def checked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_inputs(self.config, {**dict(zip(names, args, strict=False)), **kwargs})
        return forward(self, *args, **kwargs)

    return checked_forward


def check_inputs(config: PreTrainedConfig, given: Mapping[str, Any]) -> None:
    """Checks the inputs of a decoder by name; what is not given is ``None``.

    Raises:
        ConfigError, ShapeError: neither or both of ``input_ids`` and ``inputs_embeds``; tokens that are no ints, or none of the
            vocabulary (on a CPU); another shape, type or dtype than expected.
    """
    ids: Any = given.get("input_ids")
    embeds: Any = given.get("inputs_embeds")
    positions: Any = given.get("position_ids")
    if (ids is None) == (embeds is None):
        raise ConfigError(f"give either input_ids or inputs_embeds, got {'neither' if ids is None else 'both'}")
    if ids is not None:
        _check_ints("input_ids", ids, "(batch, tokens)")
        _check_range("input_ids", ids, 0, config.vocab_size)
    else:
        check_tensor("inputs_embeds", embeds)
        if embeds.dim() != 3 or embeds.shape[2] != config.hidden_size or embeds.shape[1] == 0:
            raise ShapeError(
                f"inputs_embeds must be of shape (batch, tokens, {config.hidden_size}) with at least one token, got {tuple(embeds.shape)}"
            )
    batch, length = (ids if embeds is None else embeds).shape[:2]
    if positions is not None:
        if isinstance(positions, Tensor) and positions.dim() > 2:
            raise ConfigError(
                f"structured attention knows positions of shape (batch, tokens), got {tuple(positions.shape)}: positions along several axes "
                "(images, video) are not supported"
            )
        _check_ints("position_ids", positions, "(batch, tokens)")
        if positions.shape[0] not in (1, batch) or positions.shape[1] != length:
            raise ShapeError(f"position_ids must be of shape (1 or {batch}, {length}), got {tuple(positions.shape)}")
    mask = given.get("attention_mask")
    if isinstance(mask, str | int | float | list | tuple):
        raise ConfigError(f"attention_mask must be a tensor of shape (batch, tokens), got {describe(mask)}")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] != batch:
        raise ShapeError(f"attention_mask must have a row for each of {batch}, got shape {tuple(mask.shape)}")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        check_tensor("attention_mask", mask)
        if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not ((mask == 0) | (mask == 1)).all():
            raise ConfigError(
                "attention_mask must hold 1 where a token is real and 0 where it is padding, got other numbers: a mask that is added to "
                "the scores is written (mask == 0).long()"
            )
    remedy = "use level_cache(model) or leave it away"
    check_type(
        "past_key_values", given.get("past_key_values"), (Cache, type(None)), "a transformers.Cache or None", remedy
    )
    if given.get("use_cache") is not None:
        check_bool("use_cache", given["use_cache"])


def check_labels(labels: Any, logits: Tensor, vocab_size: int) -> None:
    """Raises ``ShapeError`` or ``ConfigError`` unless labels are tokens, or -100, one for each position."""
    _check_ints("labels", labels, "(batch, tokens)")
    if labels.shape != logits.shape[:2]:
        raise ShapeError(f"labels must be of shape {tuple(logits.shape[:2])}, got {tuple(labels.shape)}")
    _check_range("labels", labels.where(labels != -100, 0), 0, vocab_size)


def check_keep(logits_to_keep: Any) -> None:
    """Raises ``ConfigError`` unless ``logits_to_keep`` is an int of at least 0 or a tensor of positions."""
    if not isinstance(logits_to_keep, Tensor):
        check_int("logits_to_keep", logits_to_keep, minimum=0)


def _check_ints(name: str, x: Any, shape: str) -> None:
    check_tensor(name, x)
    if x.dim() != 2 or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool or x.shape[1] == 0:
        raise ShapeError(
            f"{name} must be an int tensor of shape {shape} with at least one token, got {x.dtype} of shape {tuple(x.shape)}"
        )


def _check_range(name: str, x: Tensor, low: int, stop: int) -> None:
    """On a CPU only: a GPU would have to be waited for, and traced code has no values."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.numel() == 0:
        return
    smallest, largest = int(x.min()), int(x.max())
    if smallest < low or largest >= stop:
        raise ConfigError(f"{name} must be from {low} to {stop - 1}, got {smallest if smallest < low else largest}")
