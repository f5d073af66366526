"""Whether the rotary pairs of a model are the ones that ``register_attention`` permutes: i and i + D / 2, all of them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from structattn.errors import ConfigError

# Names for the number of rotated dimensions in attention modules of transformers and their configs.
_ROTATED_DIMS = ("qk_rope_head_dim", "rope_head_dim", "rotary_ndims", "rotary_dim")
# The projection to keys and values of multi-head latent attention, which rotates only some dimensions of each key.
_LATENT = ("kv_a_proj", "kv_b_proj")


def check_rotation(module: nn.Module, head_dim: int) -> None:
    """Raises ``ConfigError`` unless an attention module rotates no dimensions, or every pair (i, i + D / 2) of a head.

    Unknown cases are refused: a slice that cuts a rotary pair scores by positions instead of distances.
    """
    what = _other_rotation(module, head_dim)
    if what is not None:
        raise ConfigError(
            f"{type(module).__name__} rotates {what}, which cannot be permuted into levels, so that a level's score would depend on "
            "positions and not on distances: choose another model, a spec of one level ('standard', 'window:512'), or register the attention "
            "with rotary_split=None and train the model with slices that cut through rotary pairs"
        )


def _other_rotation(module: nn.Module, head_dim: int) -> str | None:
    """What a module rotates if that is not every pair (i, i + D / 2); ``None`` if it is, or if nothing is rotated."""
    config = getattr(module, "config", None)
    for owner in (module, config):
        for name in _ROTATED_DIMS:
            count = getattr(owner, name, None)
            if isinstance(count, int) and count != head_dim:
                return f"only {count} of each head's {head_dim} dimensions ({name})"
    for name, _ in module.named_children():
        if name.startswith(_LATENT):
            return f"only some dimensions of each head (multi-head latent attention, {name})"
    parameters = getattr(config, "rope_parameters", None) or {}
    # "proportional" rotates all pairs, the rest of them by an angle of 0.
    parts = [part for part in _parts(parameters, module) if part.get("rope_type") != "proportional"]
    shares = [part.get("partial_rotary_factor") for part in parts]
    for share in (getattr(config, "partial_rotary_factor", None), *shares):
        if share not in (None, 1, 1.0):
            return f"only {share} of each head's dimensions"
    pairs_halves = _pairs_halves(type(module), head_dim)
    if pairs_halves is False:
        return "other pairs than i and i + D / 2"
    has_rotary = bool(parameters) or getattr(config, "rope_theta", None) is not None or hasattr(module, "rotary_emb")
    if pairs_halves is None and has_rotary:
        return "pairs that are not known (its file has no function rotate_half)"
    return None


def _parts(parameters: dict[str, Any], module: nn.Module) -> list[dict[str, Any]]:
    """The ``rope_parameters`` of a module: a config has one dict, or one for each kind of layer."""
    if not any(isinstance(value, dict) for value in parameters.values()):
        return [parameters]
    kinds = getattr(module.config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    own = parameters.get(kinds[layer]) if kinds and isinstance(layer, int) and layer < len(kinds) else None
    return [own] if isinstance(own, dict) else [part for part in parameters.values() if isinstance(part, dict)]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _pairs_halves(kind: type[nn.Module], head_dim: int) -> bool | None:
    """Whether the file with a module's ``forward`` rotates by pairing i with i + D / 2; ``None`` where it has no such function."""
    file = next(base.__module__ for base in kind.__mro__ if "forward" in vars(base))
    rotate = getattr(sys.modules.get(file), "rotate_half", None)
    if rotate is None:
        return None
    x = torch.arange(1.0, head_dim + 1)
    half = head_dim // 2
    return bool(torch.equal(rotate(x), torch.cat([-x[half:], x[:half]])))
