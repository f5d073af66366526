"""Finds which dimensions of a head the rotary positions of a model of transformers rotate together."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from structattn.errors import ConfigError
from structattn.layers.rotary_order import Pairing, Rotation
from structattn.tracing import constant_when_traced

# Names for the number of rotated dimensions in attention modules of transformers and their configs.
_ROTATED_DIMS = ("qk_rope_head_dim", "rope_head_dim", "rotary_ndims", "rotary_dim")
# The projection to keys and values of multi-head latent attention, which rotates only some dimensions of each
# key.
LATENT = ("kv_a_proj", "kv_b_proj")


def read_rotation(module: nn.Module, head_dim: int) -> Rotation | None:
    """The rotation of an attention module, read from its names, its config and its file; ``None`` if nothing
    is rotated.

    Raises:
        ConfigError: it is not known. A slice that cuts a rotary pair would score by positions instead of
            distances.
    """
    config = getattr(module, "config", None)
    if any(name.startswith(LATENT) for name, _ in module.named_children()):
        raise _unknown(module, "some dimensions of each head (multi-head latent attention)")
    parameters = getattr(config, "rope_parameters", None) or {}
    has_rotary = bool(parameters) or getattr(config, "rope_theta", None) is not None or hasattr(module, "rotary_emb")
    pairing = _pairing(type(module), head_dim)
    if pairing == "other" or (pairing is None and has_rotary):
        raise _unknown(
            module, "pairs that are not known" if pairing is None else "other pairs than halves and neighbours"
        )
    return None if pairing is None else Rotation(pairing, _rotated(module, config, parameters, head_dim))


def _unknown(module: nn.Module, what: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} rotates {what}, which cannot be permuted into levels, so that a level's score would "
        "depend on positions and not on distances: choose another model, a spec of one level ('standard', "
        "'window:512'), structurize(), or register "
        "the attention with rotary_split=None and train the model with slices that cut through rotary pairs"
    )


def _rotated(module: nn.Module, config: Any, parameters: dict[str, Any], head_dim: int) -> int:
    for owner in (module, config):
        for name in _ROTATED_DIMS:
            count = getattr(owner, name, None)
            if isinstance(count, int):
                return min(count, head_dim)
    # "proportional" rotates all pairs, the rest of them by an angle of 0.
    parts = [part for part in _parts(parameters, module) if part.get("rope_type") != "proportional"]
    shares = [part.get("partial_rotary_factor") for part in parts]
    share = next((s for s in (*shares, getattr(config, "partial_rotary_factor", None)) if s is not None), 1.0)
    return int(head_dim * share)


def _parts(parameters: dict[str, Any], module: nn.Module) -> list[dict[str, Any]]:
    """The ``rope_parameters`` of a module: a config has one dict, or one for each kind of layer."""
    if not any(isinstance(value, dict) for value in parameters.values()):
        return [parameters]
    kinds = getattr(module.config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    layer_parameters = parameters.get(kinds[layer]) if kinds and isinstance(layer, int) and layer < len(kinds) else None
    if isinstance(layer_parameters, dict):
        return [layer_parameters]
    return [part for part in parameters.values() if isinstance(part, dict)]


@constant_when_traced
def _pairing(kind: type[nn.Module], head_dim: int) -> Pairing | Literal["other"] | None:
    """How the file with a module's ``forward`` pairs dimensions; ``None`` where it has no function that says
    so.
    """
    return _computed_pairing(kind, head_dim)  # type: ignore[arg-type]  # mypy takes no class for hashable


@cache
def _computed_pairing(kind: type[nn.Module], head_dim: int) -> Pairing | Literal["other"] | None:
    # torch.export calls this with tensors that have no values. What does that to them belongs to one thread.
    with ThreadPoolExecutor(max_workers=1) as another_thread:
        return another_thread.submit(_compute_pairing, kind, head_dim).result()


def _compute_pairing(kind: type[nn.Module], head_dim: int) -> Pairing | Literal["other"] | None:
    file = next(
        base.__module__ for base in kind.__mro__ if "forward" in vars(base) and "structattn" not in base.__module__
    )
    rotate = getattr(sys.modules.get(file), "rotate_half", None)
    if rotate is None:
        return None
    x = torch.arange(1.0, head_dim + 1)
    half, turned = head_dim // 2, rotate(x)
    if torch.equal(turned, torch.cat([-x[half:], x[:half]])):
        return "halves"
    return "adjacent" if torch.equal(turned, torch.stack([-x[1::2], x[::2]], dim=-1).flatten()) else "other"
