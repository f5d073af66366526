"""What a run is made of: rows, each a check or a measurement that a worker process does by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every row needs to know.

    Attributes:
        rehearse: tiny sizes on the CPU, kernels in Triton's interpreter.
        folder: of the results, where a search writes its table of tiles and training its runs.
        text: a text file or a prepared corpus to train on; ``None``: the text of the package.
    """

    rehearse: bool
    folder: Path
    text: Path | None = None

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return torch.device("cpu" if self.rehearse else "cuda")

    @property
    def tiles(self) -> Path:
        """The table that the search writes."""
        return self.folder / "tiles.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check or measurement.

    Attributes:
        name: ``part/...``, unique; ``--only`` is matched with it.
        rank: rows of rank 0 come first.
        limit_s: seconds after which its process is ended.
        run: does it, in a worker process; returns numbers and texts for JSON.
        alone: whether no other row may run at the same time.
    """

    name: str
    rank: int
    limit_s: float
    run: Callable[[], dict[str, Any]]
    alone: bool = False

    @property
    def part(self) -> str:
        """The first word of the name."""
        return self.name.partition("/")[0]
