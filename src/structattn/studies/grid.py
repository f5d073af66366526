"""The grid of a recipe: the points at which everything is compared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from structattn.studies.recipe import Recipe, Variant
from structattn.studies.settings import Change, apply_overrides, with_changes

_AS_IT_IS = Variant(name="", changes={})


@dataclass(frozen=True, kw_only=True)
class Point:
    """A recipe at one of its variants, widths and budgets.

    Attributes:
        variant: its name; empty where there is only one.
        width, budget: ``None`` where the recipe does not vary them.
        searched: which of the settings to choose from, by its name; empty without a search.
        changes: the differences from the settings of the recipe, as text.
        recipe: the settings there.
        sweep_changes: as ``changes``, without the settings of the runs that choose a learning rate: points with equal ``sweep_changes``
            share those runs.
        swept: the settings of those runs.
    """

    variant: str
    width: int | None
    budget: float | None
    searched: str
    changes: dict[str, Change]
    recipe: Recipe
    sweep_changes: dict[str, Change]
    swept: Recipe

    @property
    def settings(self) -> str:
        """``changes`` as one text, used in folder names."""
        return " ".join(self.changes)

    @property
    def sweep_settings(self) -> str:
        """``sweep_changes`` as one text, used in folder names."""
        return " ".join(self.sweep_changes)


def points_of(recipe: Recipe) -> list[Point]:
    """Everything under which the attention variants are compared: variants x widths x budgets x search, in that order; at least one point."""
    axes = itertools.product(
        [Variant.parse(text) for text in recipe.variants] or [_AS_IT_IS],
        recipe.widths or (None,),
        recipe.budgets or (None,),
        [Variant.parse(text) for text in recipe.search] or [_AS_IT_IS],
    )
    return [_point(recipe, *axis) for axis in axes]


def _point(recipe: Recipe, variant: Variant, width: int | None, budget: float | None, searched: Variant) -> Point:
    sizes = []
    if width is not None:
        sizes += [
            Change.of("task.embed_dim", width),
            Change.of("task.num_heads", width // recipe.head_dim()),
        ]
    if budget is not None:
        sizes.append(Change.of("budgets", (budget,)))
    changes = {**variant.changes, **searched.changes, **{str(change): change for change in sizes}}
    single = replace(recipe, variants=(), search=(), widths=(), budgets=())
    own = with_changes(single, changes.values())
    replaced = {Change.parse(text).name for text in recipe.sweep_settings}
    return Point(
        variant=variant.name,
        width=width,
        budget=budget,
        searched=searched.name,
        changes=changes,
        recipe=own,
        sweep_changes={text: change for text, change in changes.items() if change.name not in replaced},
        swept=apply_overrides(own, recipe.sweep_settings),
    )
