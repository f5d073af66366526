"""The record of fits: ``results.json`` of ``structattn fit``."""

from __future__ import annotations

from dataclasses import dataclass

from structattn_lab.records.common import ResultRecord


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """A structure fitted to a matrix.

    Attributes:
        family, structure: its kind, and the text that names it.
        num_params, flops: of the fitted matrix; FLOPs of a product with one vector.
        relative_error: in the Frobenius norm.
        is_optimal: whether no matrix of the structure is nearer.
        method, detail: how it was found, and the ranks that were chosen.
        seconds: wall-clock.
    """

    family: str
    structure: str
    num_params: int
    flops: int
    relative_error: float
    is_optimal: bool
    method: str
    detail: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FittedMatrix:
    """A matrix, what it is in words, and all that was fitted to it."""

    name: str
    about: str
    num_rows: int
    num_cols: int
    rows: tuple[FitRow, ...]


@dataclass(frozen=True, kw_only=True)
class FitsRecord(ResultRecord):
    """Structures fitted to matrices: ``results.json``, from which figure and report are drawn.

    Attributes:
        seed, refine: of the fits; ``refine`` is ``None`` for the default.
        matrices: in the order given.
    """

    seed: int
    refine: int | None
    matrices: tuple[FittedMatrix, ...]
