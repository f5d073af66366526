"""The presets ``cache-map``: their caches have the sizes that the groups of the list promise."""

from __future__ import annotations

import pytest
import torch

from structattn_lab.tasks.cache_sizes import cache_map
from structattn_lab.tasks.registry import recipe_for, task_class

# Of the standard cache: least and most of each group, and how many specs it has.
GROUPS = ((1.0, 1.0, 1), (0.45, 0.57, 5), (0.23, 0.32, 7), (0.11, 0.17, 4), (0.0, 0.09, 1))


@pytest.mark.quick(preset=["cache-map"])
@pytest.mark.parametrize("preset", ["cache-map", "cache-map-gpu"])
@pytest.mark.parametrize("name", ["text", "recall"])
def test_cache_sizes(name: str, preset: str) -> None:
    recipe = recipe_for(name, preset)
    task = task_class(name)(recipe.task)
    with torch.device("meta"):
        numbers = [task.build_model(spec).cache_numbers() for spec in recipe.attention]
    shares = iter([number / numbers[0] for number in numbers])
    for least, most, count in GROUPS:
        for _ in range(count):
            assert least <= next(shares) <= most
    assert next(shares, None) is None


def test_ranks_and_windows_grow_with_the_model() -> None:
    small, large = cache_map(256, head_dim=16), cache_map(1024, head_dim=32)
    assert len(small) == len(large)
    assert "sliding:6|10@-|51,values=6|10" in small
    assert "sliding:12|20@-|204,values=12|20" in large


def test_the_control_of_two_levels_has_their_cache() -> None:
    recipe = recipe_for("text", "levels")
    task = task_class("text")(recipe.task)
    with torch.device("meta"):
        standard, levels, control = (task.build_model(recipe.attention[index]).cache_numbers() for index in (0, -2, -1))
    assert abs(control - levels) < 0.003 * standard
    assert 0.43 < levels / standard < 0.44
