"""Names of modules that are old now give the modules of today, executed once."""

import importlib

import pytest

from structattn_lab.old_imports import add_old_names


@pytest.mark.parametrize(
    "name", ["compare", "recipe", "tasks.base", "tasks.registry", "training.config", "data.corpus"]
)
def test_an_old_name_is_the_module_of_today(name: str) -> None:
    add_old_names()
    today = importlib.import_module(f"structattn_lab.{name}")
    spec = today.__spec__
    assert importlib.import_module(f"structattn.studies.{name}") is today
    assert today.__spec__ is spec


def test_a_module_that_never_was_is_not_found() -> None:
    add_old_names()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("structattn.studies.nothing")
