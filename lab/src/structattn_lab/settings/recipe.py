"""Recipes: everything that is needed to repeat a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from structattn.checks import check_choice, check_field_types, check_int, check_number
from structattn.errors import ConfigError
from structattn_lab.old_formats import todays_spec
from structattn_lab.settings.overrides import Change
from structattn_lab.settings.training import TrainingConfig

MOST_RUNS = 100_000
# Settings of one run that something of the whole recipe replaces.
_LOST_UNDER = {"budgets": "training.steps", "learning_rates": "training.learning_rate"}
# The settings that a point of a grid and a choice of learning rates set.
_SET_BY = {
    "widths": ("task.embed_dim", "task.num_heads"),
    "budgets": ("budgets", _LOST_UNDER["budgets"]),
    "learning_rates": (_LOST_UNDER["learning_rates"],),
}
_OF_THE_WHOLE = ("variants", "search", "widths")  # a point of the grid has none of its own


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Settings that are varied together.

    Attributes:
        name: for tables.
        changes: of the settings, by how each is written.
    """

    name: str
    changes: dict[str, Change]

    @classmethod
    def parse(cls, text: str) -> Variation:
        """Reads ``"task.dim=4 task.num_heads=2"``, where the text is also the name, or
        ``"small: task.dim=4"``.
        """
        name, named, settings = text.partition(": ")
        written = (settings if named else text).split()
        return cls(name=name, changes={change: Change.parse(change) for change in written})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that is needed to repeat a comparison.

    Args:
        task: settings of data and model, a ``Task.config_class``.
        training: settings of one run, the same for every variant.
        attention: specs to compare.
        seeds: runs per variant, with seeds 0 ... seeds - 1.
        learning_rates: rates to choose from: when there is more than one, each variant is first trained at
            every rate with seed 0, and its best rate on the validation split is used for all seeds: equal
            tuning effort. Empty: ``training.learning_rate``.
        sweep_settings: settings of the runs that choose the learning rate: in which they differ from the
            others, such as ``("task.embed_dim=16",)``: under muP a rate found at a small width holds at a
            large one. Empty: no difference.
        equal: what all variants get alike: ``"steps"``: ``training.steps`` for every variant. ``"compute"``:
            as many steps as cost what ``training.steps`` steps of the first variant cost, in forward FLOPs,
            so that all are compared at equal compute. Budgets go before it.
        variants: settings that are varied: each is a text such as ``"task.dim=4 task.num_heads=2"``, or with
            a separate name for tables, ``"small: task.dim=4"``, each name once: everything is compared under
            each. Empty: the settings as they are.
        search: settings of which each attention gets its best: such as
            ``("task.look_back=96", "task.look_back=336")``: everything is trained with each, all seeds, and
            the one with the lowest mean validation score counts. Empty: no choice.
        widths: widths of the models: everything is compared at each ``task.embed_dim``, with heads of the
            dimension that the settings have. Empty: that of the settings.
        budgets: forward FLOPs of all training examples: everything is compared at each of them, instead of
            after ``training.steps``.

    Raises:
        ConfigError: no seeds, a learning rate or budget that is not positive, something twice, settings of a
            sweep without rates or without muP, several widths without muP or with heads that do not divide
            them, a variant or a search of what widths, budgets or learning rates set, a search together with
            budgets, or of what a variant sets.
    """

    task: Any
    training: TrainingConfig
    attention: tuple[str, ...]
    seeds: int = 1
    learning_rates: tuple[float, ...] = ()
    sweep_settings: tuple[str, ...] = ()
    equal: Literal["steps", "compute"] = "steps"
    variants: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    budgets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_field_types(self)
        object.__setattr__(self, "attention", tuple(map(todays_spec, self.attention)))
        check_int("seeds", self.seeds, minimum=1)
        check_choice("equal", self.equal, ("steps", "compute"))
        if self.num_runs > MOST_RUNS:
            raise ConfigError(
                f"{self.num_runs:,} runs of {self.training.steps:,} steps ({len(self.attention)} models, "
                f"{self.seeds:,} seeds and what is varied), and {MOST_RUNS:,} are the most: give fewer seeds, or do it "
                "in parts"
            )
        for name in ("learning_rates", "budgets"):
            for number in getattr(self, name):
                check_number(f"{name}: each", number, above=0)
        for name in ("learning_rates", "variants", "search", "widths", "budgets"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                words = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
                raise ConfigError(f"{name} must be unique, got {', '.join(words)}")
        if self.sweep_settings and not self.learning_rates:
            raise ConfigError(f"sweep_settings {self.sweep_settings} without learning_rates to sweep")
        if self.sweep_settings and self.training.parametrization != "mup":
            raise ConfigError(
                "a learning rate found with other settings (sweep_settings) holds under muP only: set "
                "training.parametrization=mup"
            )
        if self.widths:
            self._check_widths()
        self._check_variants()
        self._check_search()
        if self.training.patience is not None and (self.budgets or self.equal == "compute"):
            raise ConfigError(
                "with early stopping (training.patience) a run does not take the compute that it is compared at: set "
                "training.patience=none"
            )

    def _check_search(self) -> None:
        if self.search and self.budgets:
            raise ConfigError("a search and budgets exclude each other: a scaling law is of settings that are given")
        searched = {change.name for text in self.search for change in Variation.parse(text).changes.values()}
        self._check_kept(("variants",), searched, "the search sets it")

    def _check_variants(self) -> None:
        for axis in ("variants", "search"):
            for text in getattr(self, axis):
                try:
                    Variation.parse(text)
                except ConfigError as error:
                    raise ConfigError(f"{axis}: {error}") from None
        names = [Variation.parse(text).name for text in self.variants]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"variants: names must be unique, since results are identified by them, got {', '.join(names)}"
            )
        varied = ("variants", "search")
        self._check_kept(varied, set(_OF_THE_WHOLE), "it is of the whole comparison")
        for axis, names_set in _SET_BY.items():
            if getattr(self, axis):
                self._check_kept(varied, set(names_set), f"{axis} set it")
        self._check_kept(("sweep_settings",), {_LOST_UNDER["learning_rates"]}, "learning_rates set it")

    def _check_kept(self, axes: tuple[str, ...], names: set[str], why: str) -> None:
        """Raises ``ConfigError`` if a text of an axis, such as a variant, sets one of these settings, which
        something else sets as well.
        """
        for axis in axes:
            for text in getattr(self, axis):
                for written, change in Variation.parse(text).changes.items():
                    if change.name in names:
                        raise ConfigError(f"{axis}: {written} would be lost, since {why}: leave one of the two out")

    def lost(self, name: str) -> str:
        """The axis that sets a setting of this name in place of the recipe, such as ``"budgets"`` for
        ``"training.steps"``; empty where it counts.
        """
        return next((axis for axis, lost in _LOST_UNDER.items() if getattr(self, axis) and name == lost), "")

    def _check_widths(self) -> None:
        if self.training.parametrization != "mup" and len(self.widths) > 1:
            raise ConfigError(
                "a learning rate holds at several widths under muP only: set training.parametrization=mup"
            )
        head_dim = self.head_dim()
        if wrong := [width for width in self.widths if width < 1 or width % head_dim]:
            raise ConfigError(f"widths must be multiples of the head dimension, {head_dim} here, got {wrong[0]}")

    def head_dim(self) -> int:
        """That of the settings; raises ``ConfigError`` for models without a width."""
        task = self.task
        if not hasattr(task, "embed_dim") or not hasattr(task, "num_heads"):
            raise ConfigError(f"the models of {type(task).__name__} have no width to vary: leave widths empty")
        return int(task.embed_dim // task.num_heads)

    @property
    def num_runs(self) -> int:
        """Models that a comparison trains: those of its table, and those that choose learning rates."""
        points = math.prod(len(values) or 1 for values in (self.variants, self.widths, self.budgets, self.search))
        swept = len(self.learning_rates) - (not self.sweep_settings) if len(self.learning_rates) > 1 else 0
        return points * len(self.attention) * (self.seeds + swept)


@dataclass(frozen=True)
class Preset:
    """A recipe by name, with what it is for and its time on 2 CPU cores."""

    recipe: Recipe
    about: str
