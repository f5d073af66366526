"""What forecasts of the future need besides a model: kept with a run or a comparison, since its training data
may be moved or grow.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from structattn.tensor_files import read_tensors, tensor_bytes
from structattn.typed_records import read_as
from structattn_lab.data.time_steps import TimeStep

FILE = "forecast.safetensors"
_KEY = "forecast"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of the training that are no tensors.

    Attributes:
        columns: that are forecast, in order.
        step: between two rows.
        look_back, horizon: of the windows.
        season: of the seasonal baseline; ``None`` without it.
        penalties: of ridge regression, one for each column; empty in the file of a run.
    """

    format_version: int = _VERSION
    columns: tuple[str, ...]
    step: TimeStep
    look_back: int
    horizon: int
    season: int | None = None
    penalties: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The content of ``forecast.safetensors``.

    Attributes:
        facts: see ``Facts``.
        tensors: ``mean`` and ``std``, (columns,), in float64: of the training rows. Of a run ``widths``, (99,
            columns, horizon): of the conformal intervals of 1 ... 99 %, of scaled values, and ``windows``,
            (), from how many validation windows. Of the baselines ``ridge``, (columns, look_back + 1,
            horizon), and ``validation``, (columns, look_back + rows): the scaled validation rows and the
            look-back before them, from which their widths are computed at any horizon.
    """

    facts: Facts
    tensors: dict[str, Tensor]

    def content(self) -> bytes:
        """Of the file."""
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        return tensor_bytes(_KEY, asdict(self.facts), tensors)


def read_kept(path: Path) -> Kept:
    """What a run or a comparison keeps.

    Raises:
        CheckpointError: the file is damaged.
    """
    record, tensors = read_tensors(
        path,
        _KEY,
        what="file for forecasts",
        remedy="remove it, so that it is computed from the training data",
        version=_VERSION,
    )
    return Kept(facts=read_as(Facts, record, str(path)), tensors=tensors)
