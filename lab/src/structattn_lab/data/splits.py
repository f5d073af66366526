"""The splits of data: what trains, what chooses settings, and what gives the scores."""

from __future__ import annotations

from typing import Literal, get_args

DataSplit = Literal["train", "validation", "test"]
SPLITS: tuple[DataSplit, ...] = get_args(DataSplit)
