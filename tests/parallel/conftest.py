"""Processes that all tests of this folder share: to start them takes seconds."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster

sys.path.append(
    str(Path(__file__).parents[1] / "integrations")
)  # the tiny models of transformers, also for the processes


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(4, tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(8, tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()
