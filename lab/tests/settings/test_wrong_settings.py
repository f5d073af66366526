"""Settings given from Python: a value of another type is named, whatever it is."""

import dataclasses

import numpy as np
import pytest
import torch

from structattn.errors import ConfigError
from structattn_lab.tasks.registry import TASKS, recipe_for

WRONG = [b"x", 1j, {3: 4}, np.zeros((2, 3)), torch.ones(2, 3), torch.ones(2, 3).to_sparse(), torch.float32, object()]
RECIPES = {name: recipe_for(name, "smoke") for name in TASKS}


@pytest.mark.parametrize("task", TASKS)
def test_values_of_another_type_are_named(task: str) -> None:
    recipe = RECIPES[task]
    for settings in (recipe, recipe.task, recipe.training):
        for field in dataclasses.fields(settings):
            if settings is recipe and field.name == "task":
                continue  # of any type: the task checks its own settings
            for value in WRONG:
                with pytest.raises(ConfigError, match=field.name):
                    dataclasses.replace(settings, **{field.name: value})
