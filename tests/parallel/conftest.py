"""Processes that all tests of this folder share: to start them takes seconds."""

from collections.abc import Iterator

import pytest
from cluster import Cluster


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
