"""What is imported when, and what is said where an optional library is missing: one new process, in which
nothing is imported yet.
"""

import subprocess
import sys

import pytest

from structattn.extras import install_command

PROGRAM = """
import sys
import importlib.metadata

import structattn as sa
import structattn.integrations

heavy = {"accelerate", "matplotlib", "neuralforecast", "pandas", "ray", "tensorboard", "transformers", "tyro"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
# The lower floors read text without importing its parsers before they are needed.
from structattn.matrices.structure import Structure
assert "structattn.spec" not in sys.modules
assert str(Structure.parse("btt:2")) == "btt:2"

installed = importlib.metadata.version

def version(name):
    if name == "chronos-forecasting":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

importlib.metadata.version = version
for name in ("chronos", "matplotlib", "neuralforecast", "triton"):  # every import of them fails
    sys.modules[name] = None

import torch
from structattn.errors import BackendUnavailableError, MissingDependencyError

q = torch.randn(1, 2, 600, 8)
layout = sa.LevelLayout((4, 4), (512, 64))
expected = sa.structured_attention(q, q, q, layout, backend="blocked")
assert torch.equal(sa.structured_attention(q, q, q, layout), expected)

from structattn_lab.tasks.registry import presets_of, recipe_for, task_class, usable_tasks

assert all(presets_of(task) for task in usable_tasks())
assert "chronos" in usable_tasks()
assert "transformers" not in sys.modules

def without_triton():
    sa.structured_attention(q, q, q, layout, backend="triton")

def without_neuralforecast():
    import structattn.integrations.neuralforecast

def without_chronos():
    task_class("chronos")(recipe_for("chronos", "small").task)

def without_matplotlib():
    import structattn_lab.compare.pages

for call in (without_triton, without_neuralforecast, without_chronos, without_matplotlib):
    try:
        call()
    except (BackendUnavailableError, MissingDependencyError) as error:
        print(error)
"""


@pytest.mark.full
def test_a_missing_library_is_named_where_it_is_needed_and_nowhere_else() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = ("'triton' cannot run", *(install_command(extra) for extra in ("forecast", "chronos", "train")))
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stdout
    for line, words in zip(lines, expected, strict=True):
        assert words in line
