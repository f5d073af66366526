"""The role of each parameter of a model: modules declare it, and initial scale and learning rate follow from
it.

A module says what its parameters are by a method ``parameter_roles``. The factors of structured matrices
count with the fan-in of one block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, Literal, Protocol, TypeGuard, get_args

import torch
from torch import nn

from structattn.checks import MAX_SCALE, check_choice, check_number, check_size, check_type, describe, quoted
from structattn.errors import ConfigError, ShapeError

RoleKind = Literal["embedding", "hidden", "factor", "output", "norm", "gain", "bias"]
BASE_FAN_IN = 768
EMBEDDING_STD = 0.02
_WITH_FAN_IN = ("hidden", "factor", "output")


@dataclass(frozen=True, kw_only=True)
class Role:
    """The role of one parameter in muP.

    ==========  =================================================  ============  ============================
    kind        what                                               initial std   learning rate (AdamW)
    ==========  =================================================  ============  ============================
    embedding   token and position embeddings, input projections   0.02, or std  rate
    hidden      a matrix that reads the width: q, k, v, MLP in     1/sqrt(f)     rate base_fan_in sqrt(u) / f
    factor      one factor of a structured matrix, of its block f  1/sqrt(f)     likewise
    output      attention output, MLP output, head                 0             likewise
    norm        the weights of a norm                              1, constant   rate
    gain        other factors near one, as the weights of a sum    1, constant   rate
    bias        anything added                                     0             rate
    ==========  =================================================  ============  ============================

    Args:
        kind: see above.
        fan_in: f, the numbers that one entry of the output sums over; of a structured factor those of one
            block. Must be 1, the default, for kinds whose row does not mention it.
        uses: u, of a matrix: how many times one vector meets it, in a number that grows with the width.
            Default 1. The gradients of these uses add up with random signs, not in step as the inputs of one
            sum do, so that a step at the rate of the fan-in only would vanish like 1/sqrt(u): a Kronecker
            product's factors meet sqrt(E) slices of a vector of E numbers.
        std: initial standard deviation of an embedding, the same at every width. Default ``None``: 0.02.

    Raises:
        ConfigError: the kind is unknown, the fan-in is not a positive int, or the kind has no fan-in or std
            to choose.

    Source: Yang et al. 2022; Kuang et al. 2025, appendix, for the fan-in of structured factors.
    """

    kind: RoleKind
    fan_in: int = 1
    uses: int = 1
    std: float | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(RoleKind))
        check_size("fan_in", self.fan_in)
        check_size("uses", self.uses)
        if self.fan_in != 1 and self.kind not in _WITH_FAN_IN:
            raise ConfigError(f"a role of kind {self.kind!r} has no fan-in: leave it at 1, got {self.fan_in}")
        if self.uses != 1 and self.kind not in _WITH_FAN_IN:
            raise ConfigError(f"a role of kind {self.kind!r} has no uses: leave it at 1, got {self.uses}")
        if self.std is not None:
            check_number("std", self.std, above=0, maximum=MAX_SCALE)
            if self.kind != "embedding":
                raise ConfigError(f"only an embedding takes a std: got {self.std!r} for {self.kind!r}")

    @property
    def init_std(self) -> float:
        """Standard deviation of the initial values; 0 where they are constant."""
        match self.kind:
            case "hidden" | "factor":
                return 1 / math.sqrt(self.fan_in)
            case "embedding":
                return EMBEDDING_STD if self.std is None else self.std
            case _:
                return 0.0

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices only."""
        return self.kind in _WITH_FAN_IN

    def learning_rate_scale(self, base_fan_in: int = BASE_FAN_IN) -> float:
        """The learning rate under AdamW over the base rate: see the table; 1 for every parameter that is not
        a matrix.
        """
        check_number("base_fan_in", base_fan_in, minimum=1)
        return base_fan_in * math.sqrt(self.uses) / self.fan_in if self.kind in _WITH_FAN_IN else 1.0

    def learning_rate(self, base: float, base_fan_in: int = BASE_FAN_IN) -> float:
        """The learning rate under AdamW."""
        check_number("base", base, minimum=0)
        rate = base * self.learning_rate_scale(base_fan_in)
        check_number(f"the learning rate, {base} scaled for a fan-in of {self.fan_in},", rate)
        return rate

    @torch.no_grad()
    def draw_(self, parameter: torch.Tensor) -> None:
        """Draws the initial values in place, from torch's global generator."""
        if not isinstance(parameter, torch.Tensor):  # a DTensor is one too: sharded models draw their own part
            raise ShapeError(f"parameter must be a torch.Tensor, got {describe(parameter)}")
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ShapeError(f"parameter must be floating point, got {parameter.dtype}")
        try:
            if self.kind in ("norm", "gain"):
                parameter.fill_(1.0)
            elif self.init_std:
                parameter.normal_(std=self.init_std)
            else:
                parameter.zero_()
        except (RuntimeError, ValueError) as error:  # sparse, nested, expanded, of 8 bits, or without a shape yet
            raise ShapeError(f"parameter cannot be drawn in place: {str(error).partition(chr(10))[0]}") from error


def linear_roles(module: nn.Module, kinds: Mapping[str, RoleKind]) -> dict[str, Role]:
    """The roles of a module's linear layers, by parameter name: each weight has the given kind, and biases
    are biases.
    """
    roles: dict[str, Role] = {}
    for name, kind in kinds.items():
        linear: Any = getattr(module, name)
        roles[f"{name}.weight"] = Role(kind=kind, fan_in=linear.in_features if kind in _WITH_FAN_IN else 1)
        if linear.bias is not None:
            roles[f"{name}.bias"] = Role(kind="bias")
    return roles


class DeclaresRoles(Protocol):
    """A module that declares the roles of its parameters."""

    def parameter_roles(self) -> Mapping[str, Role]:
        """Roles by parameter name, relative to the module; those of submodules may be among them."""


class DrawsFactors(Protocol):
    """A module whose parameters are not drawn one by one: given the fan-ins of its factors, it draws them
    together.
    """

    def reset_parameters(self, fan_ins: Mapping[str, int]) -> None:
        """Draws the factors, with fan-ins by parameter name relative to the module."""

    @property
    def product_fan_ins(self) -> Mapping[str, int]:
        """Names the factors."""


class ComputesWeight(Protocol):
    """A layer whose ``weight`` is made of several parameters, so that it can replace a linear layer."""

    def weight_roles(self, role: Role) -> Mapping[str, Role]:
        """The roles of these parameters, by name relative to the layer, where the weight as a whole has that
        role.
        """


# Modules of torch whose type determines the roles of their parameters. That of a linear layer does not: it
# may be hidden or an output.
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def _has(module: object, *names: str) -> bool:
    """Whether a module itself has these attributes, not something that it wraps; properties are not computed
    for the answer.
    """
    return all(getattr_static(module, name, None) is not None for name in names)


def _declares_roles(module: nn.Module) -> TypeGuard[DeclaresRoles]:
    return _has(module, "parameter_roles")


def draws_factors(module: object) -> TypeGuard[DrawsFactors]:
    return _has(module, "reset_parameters", "product_fan_ins")


def _computes_weight(module: object) -> TypeGuard[ComputesWeight]:
    return _has(module, "weight_roles")


def _declared(module: nn.Module) -> Mapping[str, Role]:
    """The roles that a module declares for parameters in itself or below."""
    if _declares_roles(module):
        return module.parameter_roles()
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if isinstance(module, _NORMS):
        return {name: Role(kind="bias" if name == "bias" else "norm") for name in names}
    if isinstance(module, nn.Embedding):
        return {name: Role(kind="embedding") for name in names}
    return {}


def _walk(module: nn.Module, parts: Sequence[str]) -> Any:
    """The attribute at that path; by attributes, since the wrappers of compile and FSDP pass these on."""
    value: Any = module
    for part in parts:
        while isinstance(value, nn.parallel.DistributedDataParallel | nn.DataParallel):
            value = value.module
        value = getattr(value, part)
    return value


def reach(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter of that dotted name."""
    value = _walk(module, name.split("."))
    if not isinstance(value, nn.Parameter):
        raise AttributeError(f"{name} is no parameter")
    return value


def _meant(module: nn.Module, name: str, role: Role) -> dict[str, Role]:
    """The parameters that a declaration is about: the one of that name, or those that a weight of that name
    is made of.
    """
    *path, last = name.split(".")
    if path and last == "weight" and isinstance(role, Role):
        layer = _walk(module, path)
        if _computes_weight(layer):
            return {".".join((*path, key)): weight_role for key, weight_role in layer.weight_roles(role).items()}
    return {name: role}


@dataclass(frozen=True, eq=False)
class _Claim:
    """What one module says of one parameter."""

    role: Role
    module: nn.Module
    name: str

    def is_overruled_by(self, other: _Claim) -> bool:
        """Whether the other module contains this one: the module that uses a submodule knows its role."""
        return other.module is not self.module and any(part is self.module for part in other.module.modules())


def resolved_roles(model: nn.Module) -> dict[int, Role]:
    """Roles by the id of the parameter."""
    claims: dict[int, list[_Claim]] = {}
    for path, module in model.named_modules():
        for name, role in _declared(module).items():
            try:
                meant = [
                    (key, reach(module, key), meant_role) for key, meant_role in _meant(module, name, role).items()
                ]
            except Exception as error:  # a property on the way may raise anything
                raise ConfigError(
                    f"{type(module).__name__} declares a role for {name!r}, which it does not have; it has "
                    f"{', '.join(key for key, _ in module.named_parameters()) or 'no parameters'}"
                ) from error
            if not isinstance(role, Role):
                raise ConfigError(f"{type(module).__name__} must declare a Role for {name!r}, got {quoted(role)}")
            for key, parameter, meant_role in meant:
                full = f"{path}.{key}" if path else key
                claims.setdefault(id(parameter), []).append(_Claim(meant_role, module, full))
    return {identity: _agreed(claimed) for identity, claimed in claims.items()}


def _agreed(claims: list[_Claim]) -> Role:
    """The role of a parameter: a declaration of a containing module replaces those of its submodules."""
    standing = claims
    if any(claim.role != claims[0].role for claim in claims):
        standing = [claim for claim in claims if not any(claim.is_overruled_by(other) for other in claims)]
    first = standing[0]
    for other in standing:
        if other.role != first.role:
            raise ConfigError(
                f"{other.name} has two roles, {first.role} (as {first.name}) and {other.role}, since modules share it: "
                "declare it in a module that contains both"
            )
    return first.role


def roles_of(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter, by its name in ``model.named_parameters()``.

    Modules declare roles by a method ``parameter_roles``; what a module declares for a parameter of a
    submodule replaces what the submodule declares. Norms and embeddings of torch are known by their type.
    Wrapping by ``torch.compile``, DDP or FSDP (with ``use_orig_params``) changes nothing.

    Args:
        model: any module.

    Raises:
        ConfigError: a parameter without a role (named), a role for a parameter that does not exist, or two
            different roles.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    roles = resolved_roles(model)
    out = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in roles:
            raise ConfigError(
                f"muP does not know what {name} {_shape(parameter)} is: give the module that owns it, or one that "
                "contains it, "
                'a method parameter_roles() that returns {"name": structattn.mup.Role(kind=..., fan_in=...)}'
            )
        out[name] = roles[id(parameter)]
    return out


def _shape(parameter: nn.Parameter) -> str:
    """Its shape, for a message; a lazy module has none yet."""
    return "of unknown shape" if isinstance(parameter, nn.UninitializedParameter) else str(tuple(parameter.shape))
