"""Maximal-update parametrisation (muP): initial values and AdamW by the roles of parameters.

``initialize`` draws parameters by their roles, and ``adamw`` gives every one the learning rate of its role,
so that a rate tuned on a small model holds for a wide one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from structattn.checks import check_number, describe
from structattn.errors import ConfigError
from structattn.optim.roles import BASE_FAN_IN, draws_factors, reach, resolved_roles, roles_of


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Draws every parameter by its role, from torch's global generator. Frozen parameters too; padding rows
    of embeddings stay 0.

    Call it before FSDP shards the model: butterflies are drawn whole.

    The scores of attention follow muP by the scaling of their spec (``"standard,scaling=mup"``), which is not
    changed here.

    Args:
        model: any module whose parameters all have roles.

    Raises:
        ConfigError: see ``roles_of``; or a parameter of a lazy module has no size yet. Nothing is changed
            then.
    """
    roles_of(model)  # raises first, before anything is changed
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(f"{name} has no size yet: run the model once before it is initialised")
    roles = resolved_roles(model)
    drawn: set[int] = set()
    for module in model.modules():
        owner: object = module
        if draws_factors(owner):
            factors = {name: reach(module, name) for name in owner.product_fan_ins}
            fresh = {
                name: roles[id(p)].fan_in
                for name, p in factors.items()
                if id(p) not in drawn and roles[id(p)].kind == "factor"
            }
            if fresh:
                owner.reset_parameters(fresh)
                drawn |= {id(factors[name]) for name in fresh}
    for parameter in model.parameters():
        if id(parameter) not in drawn:
            roles[id(parameter)].draw_(parameter)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float = 0.0, base_fan_in: int = BASE_FAN_IN
) -> list[dict[str, Any]]:
    """Groups for AdamW, one for each learning rate, without frozen parameters.

    Weight decay is divided by the group's learning-rate scale: AdamW multiplies the two, so that every matrix
    then shrinks by ``learning_rate * weight_decay`` per step at any width.

    Args:
        model: any module whose parameters all have roles.
        learning_rate: the base rate, that of matrices with ``base_fan_in`` inputs and of every parameter that
            is not a matrix.
        weight_decay: of matrices. Default 0.
        base_fan_in: the width for which the base rate was chosen. Default 768.

    Returns:
        Groups with ``params``, ``lr``, ``weight_decay`` and ``lr_scale``, by which a schedule multiplies its
        rate.

    Raises:
        ConfigError: see ``roles_of``; or a number is out of its range.
    """
    check_number("learning_rate", learning_rate, above=0)
    check_number("weight_decay", weight_decay, minimum=0)
    check_number("base_fan_in", base_fan_in, minimum=1)
    roles = roles_of(model)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            role = roles[name]
            role.learning_rate(learning_rate, base_fan_in)  # checks that it is finite
            groups.setdefault((role.learning_rate_scale(base_fan_in), role.decays), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": learning_rate * scale,
            "weight_decay": weight_decay / scale if decays else 0.0,
            "lr_scale": scale,
        }
        for (scale, decays), parameters in groups.items()
    ]


def fastest_adamw(groups: list[dict[str, Any]]) -> dict[str, bool]:
    """``{"fused": True}`` where torch has a fused AdamW for these parameters, else ``{"foreach": True}``."""
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, dict) and "params" in group for group in groups
    ):
        raise ConfigError(f"groups must be those of parameter_groups, got {describe(groups)}")
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(p.device.type in ("cpu", "cuda") and torch.is_floating_point(p) for p in parameters)
    return {"fused" if fused else "foreach": True}


def adamw(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-20,
    base_fan_in: int = BASE_FAN_IN,
) -> torch.optim.AdamW:
    """AdamW with the learning rates of muP, in torch's fused implementation where there is one.

    Args:
        model, learning_rate, weight_decay, base_fan_in: see ``parameter_groups``.
        betas: decay rates of the moments.
        eps: default 1e-20: gradients shrink with the width, and a larger one would become part of the step.

    Raises:
        ConfigError: see ``parameter_groups``.
    """
    check_number("eps", eps, minimum=0)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas must be two numbers, got {describe(betas)}")
    for beta in betas:
        check_number("each of betas", beta, minimum=0, below=1)
    groups = parameter_groups(model, learning_rate=learning_rate, weight_decay=weight_decay, base_fan_in=base_fan_in)
    if not groups:
        raise ConfigError("the model has no parameters to train")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(betas[0], betas[1]), eps=eps, **fastest_adamw(groups))
