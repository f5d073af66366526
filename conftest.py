"""What ``make test`` runs, and what only ``make test-full`` does: ``pytest --full``."""

import gc
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

# Without a GPU the Triton kernels run in Triton's interpreter, which is chosen before anything imports
# triton: structattn does, through torch._dynamo.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import structattn
from structattn.ops.native import library
from structattn.testing.interpreter import quick_interpreter

# Most tests are of what needs no compiled code, also in the processes that they start; `built` is for others.
# What the user chose, which processes of a test run inherit.
INSTRUCTIONS = os.environ.setdefault("STRUCTATTN_TEST_CPU", os.environ.get("STRUCTATTN_CPU", ""))
os.environ["STRUCTATTN_CPU"] = "none"
os.environ["STRUCTATTN_CACHE"] = f"{os.devnull}/none"

# The same examples in every run: what fails here fails for everyone. `--full` draws many more, and new ones
# in each run except in CI.
settings.register_profile("few", max_examples=12, derandomize=True, deadline=None)
settings.register_profile("many", max_examples=200, derandomize="CI" in os.environ, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full, and many random examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(config.getoption("--hypothesis-profile") or ("many" if config.getoption("--full") else "few"))


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not _is_quick(item):
            item.add_marker("full")
    if not config.getoption("--full"):
        full = {item for item in items if item.get_closest_marker("full")}
        config.hook.pytest_deselected(items=list(full))
        items[:] = [item for item in items if item not in full]


def pytest_collection_finish() -> None:
    # What is imported by now stays: the garbage collector would look through it again and again.
    gc.collect()
    gc.freeze()


def _is_quick(item: pytest.Item) -> bool:
    """Whether the parameters of a test are among the values that its mark ``quick`` names."""
    named = {name: values for mark in item.iter_markers("quick") for name, values in mark.kwargs.items()}
    return all(item.callspec.params[name] in values for name, values in named.items())  # type: ignore[attr-defined]


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes of ``LocalRunner`` are forks of this one, which take no import; `test_interrupt.py`
    starts them as users do.
    """
    if torch.cuda.is_available() or sys.platform != "linux":
        return
    context = multiprocessing.get_context("fork")

    class Worker(context.Process):
        def run(self) -> None:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not what pytest keeps of this test
            super().run()

    monkeypatch.setattr(context, "Process", Worker)
    monkeypatch.setattr("structattn_lab.runner.local.cores", lambda: 1)  # no threads, which a fork may wait for
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for what tests cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRUCTATTN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The C++ library: the one that the installation compiled, or one that is compiled once for all processes
    of a test run. Without it again afterwards.
    """
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRUCTATTN_CPU", INSTRUCTIONS)
        patch.setenv("STRUCTATTN_CACHE", str(root / "native"))
        library.why_not_here.cache_clear()
        with FileLock(root / "native.lock"):  # one process compiles, the others find what it made
            path = structattn.ops.build_native()
        yield path
    library.why_not_here.cache_clear()
