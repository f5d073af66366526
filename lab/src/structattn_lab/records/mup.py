"""The record of a muP check: ``results.json`` of ``structattn mup check``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from structattn_lab.records.common import Json, ResultRecord


@dataclass(frozen=True, kw_only=True)
class LargestSlope:
    """The slope furthest from 0: of which quantity, and after which step."""

    slope: float
    quantity: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Sizes inside the models of a structure under a parametrisation, by quantity and training step.

    Attributes:
        structure, parametrization: of the models.
        widths, specs: of the models.
        slope_widths: the largest widths, to which slopes are fitted.
        sizes: geometric mean over seeds, one per width; ``None`` where training diverged.
        by_seed: likewise with a list per width.
        slopes: of log size against log width; ``None`` before anything has moved.
        largest: ``None`` if training diverged everywhere.
    """

    structure: str
    parametrization: Literal["mup", "standard"]
    widths: tuple[int, ...]
    specs: tuple[str, ...]
    slope_widths: tuple[int, ...]
    sizes: dict[str, dict[str, tuple[float | None, ...]]]
    by_seed: dict[str, dict[str, tuple[tuple[float | None, ...], ...]]]
    slopes: dict[str, dict[str, float | None]]
    largest: LargestSlope | None


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Loss against learning rate for a structure under a parametrisation.

    Attributes:
        structure, parametrization: of the models.
        widths, rates: what was tried.
        losses: per width and rate, mean of the last fifth of the steps; ``None`` where training diverged.
        best_rates: one per width; ``None`` where all diverged.
        spread: log2 of the largest best rate over the smallest.
    """

    structure: str
    parametrization: Literal["mup", "standard"]
    widths: tuple[int, ...]
    rates: tuple[float, ...]
    losses: tuple[tuple[float | None, ...], ...]
    best_rates: tuple[float | None, ...]
    spread: float | None


@dataclass(frozen=True, kw_only=True)
class MupRecord(ResultRecord):
    """A muP check: ``results.json``, from which figures and report are drawn.

    Attributes:
        config: the settings, see ``CheckConfig``.
        quantities: what is measured, in words by name.
        seconds: of both checks.
        coordinates: one for each structure and parametrisation.
        transfers: for those whose best learning rates were looked for.
    """

    config: Json
    quantities: dict[str, str]
    seconds: float
    coordinates: tuple[Coordinates, ...]
    transfers: tuple[Transfer, ...]
