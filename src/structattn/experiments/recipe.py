"""What a recipe is: everything that a comparison needs, so that it can be repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from structattn.errors import ConfigError
from structattn.tasks.forecast import ForecastConfig
from structattn.tasks.icl_regression import ICLRegressionConfig
from structattn.tasks.nearest_neighbor import NearestNeighborConfig
from structattn.tasks.text import TextConfig
from structattn.training.config import TrainingConfig

TaskConfig = NearestNeighborConfig | ForecastConfig | ICLRegressionConfig | TextConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a comparison needs, so that it can be repeated.

    Args:
        task: settings of data and model.
        training: settings of one run, the same for every variant.
        attention: specs to compare.
        seeds: runs per variant, with seeds 0 ... seeds - 1.
        learning_rates: when more than one, each variant is first trained at every rate with seed 0, and its best rate on
            the validation split is used for all seeds: equal tuning effort. Empty: ``training.learning_rate``.
        sweep_settings: settings in which the runs that choose the learning rate differ from the others, such as
            ``("task.embed_dim=16",)``: under muP a rate found at a small width holds at a large one. Empty: no difference.
        budget: ``"steps"``: ``training.steps`` for every variant. ``"compute"``: as many steps as cost what ``training.steps`` steps of
            the first variant cost, in forward FLOPs, so that all are compared at equal compute.
        variants: settings that are varied, each a text such as ``"task.dim=4 task.num_heads=2"``: everything is compared under each.
            Empty: the settings as they are.

    Raises:
        ConfigError: no seeds, a learning rate that is not positive, or settings of a sweep without rates or without muP.
    """

    task: TaskConfig
    training: TrainingConfig
    attention: tuple[str, ...]
    seeds: int = 1
    learning_rates: tuple[float, ...] = ()
    sweep_settings: tuple[str, ...] = ()
    budget: Literal["steps", "compute"] = "steps"
    variants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds must be at least 1, got {self.seeds}")
        if any(not rate > 0 for rate in self.learning_rates):
            raise ConfigError(f"learning_rates must be positive, got {self.learning_rates}")
        if len(set(self.learning_rates)) != len(self.learning_rates) or len(set(self.variants)) != len(self.variants):
            raise ConfigError("every learning rate and every variant once")
        if self.budget not in ("steps", "compute"):
            raise ConfigError(f"budget: {self.budget!r} is not steps or compute")
        if self.sweep_settings and not self.learning_rates:
            raise ConfigError(f"sweep_settings {self.sweep_settings} without learning_rates to sweep")
        if self.sweep_settings and self.training.parametrization != "mup":
            raise ConfigError(
                "a learning rate found with other settings (sweep_settings) holds under muP only: set training.parametrization=mup"
            )


@dataclass(frozen=True)
class Preset:
    """A recipe by name, with what it is for and its time on 2 CPU cores."""

    recipe: Recipe
    about: str
