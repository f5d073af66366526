"""The maximal update parametrization, under its public name ``structattn.mup``."""

from structattn.optim.mup import (
    ComputesWeight,
    DeclaresRoles,
    DrawsFactors,
    Role,
    RoleKind,
    adamw,
    fastest_adamw,
    initialize,
    parameter_groups,
    roles_of,
)

__all__ = [
    "ComputesWeight",
    "DeclaresRoles",
    "DrawsFactors",
    "Role",
    "RoleKind",
    "adamw",
    "fastest_adamw",
    "initialize",
    "parameter_groups",
    "roles_of",
]
