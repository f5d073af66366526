"""The rows of all parts, most valuable first."""

from __future__ import annotations

import re

from benchmarks.gpu import check, speed, tile, train
from benchmarks.gpu.rows import Row, Settings
from structattn.errors import ConfigError

PARTS = (check, tile, speed, train)


def all_rows(settings: Settings) -> list[Row]:
    """Every row, by its rank; rows of one rank by their parts."""
    return sorted((row for part in PARTS for row in part.rows(settings)), key=lambda row: row.rank)


def chosen_rows(settings: Settings, only: str) -> list[Row]:
    """The rows whose names match a regular expression.

    Raises:
        ConfigError: none does, or it is no regular expression.
    """
    try:
        found = [row for row in all_rows(settings) if re.search(only, row.name)]
    except re.error as error:
        raise ConfigError(f"--only {only!r} is no regular expression: {error}") from error
    if not found:
        raise ConfigError(f"--only {only!r} matches no row: names are such as {all_rows(settings)[0].name!r}")
    return found
