"""Parameter roles of maximal-update parametrisation (muP): what a parameter's initial scale and learning rate follow from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from structattn.errors import ConfigError

RoleKind = Literal["hidden", "output", "vector"]
BASE_FAN_IN = 768


@dataclass(frozen=True, kw_only=True)
class Role:
    """What one parameter is to muP.

    Args:
        kind: ``"hidden"``: a matrix, or one factor of a structured matrix; ``"output"``: a matrix that starts at zero (attention
            output, MLP output, read-out); ``"vector"``: everything whose fan-in does not grow with the width (biases, norms,
            embeddings, the weights of a sum of terms).
        fan_in: numbers that one output of the parameter sums over; of a structured factor: those of one block. 1 for vectors.

    Raises:
        ConfigError: the kind is unknown or the fan-in is not a positive int.

    Source: Yang et al. 2022; Kuang et al. 2025, appendix, for the fan-in of structured factors.
    """

    kind: RoleKind
    fan_in: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("hidden", "output", "vector"):
            raise ConfigError(f"the kind of a role is 'hidden', 'output' or 'vector', got {self.kind!r}")
        if isinstance(self.fan_in, bool) or not isinstance(self.fan_in, int) or self.fan_in < 1:
            raise ConfigError(f"the fan-in of a role must be a positive int, got {self.fan_in!r}")

    @property
    def init_std(self) -> float:
        """1/sqrt(fan_in) of a hidden matrix, 0 of an output or vector (norms, embeddings and sums set their own)."""
        return 1 / math.sqrt(self.fan_in) if self.kind == "hidden" else 0.0

    def learning_rate(self, base: float, base_fan_in: int = BASE_FAN_IN) -> float:
        """The learning rate under AdamW: ``base * base_fan_in / fan_in`` for matrices, ``base`` for vectors."""
        return base if self.kind == "vector" else base * base_fan_in / self.fan_in
