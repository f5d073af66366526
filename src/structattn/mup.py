"""The maximal update parametrization, under its public name ``structattn.mup``."""

from structattn.optim.mup import adamw, fastest_adamw, initialize, parameter_groups
from structattn.optim.roles import (
    BASE_FAN_IN,
    EMBEDDING_STD,
    ComputesWeight,
    DeclaresRoles,
    DrawsFactors,
    Role,
    RoleKind,
    roles_of,
)

__all__ = [
    "BASE_FAN_IN",
    "EMBEDDING_STD",
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
