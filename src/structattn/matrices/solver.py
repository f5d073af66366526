"""How ``fit`` finds a matrix of a structure that is near to a dense one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Tick = Callable[[str, float], None]


@dataclass(frozen=True)
class Solver:
    """A closed form or a descent, which sets the parameters of one matrix.

    Attributes:
        solve: sets them, without gradient. It takes the dense matrix (num_rows, num_cols) in float64, as the
            parameters are, and a function to call after each step of a long descent, with a word for it and
            the relative error.
        method: what it is, in words.
        is_optimal: no matrix of the structure is nearer in the Frobenius norm. Others are refined.
    """

    solve: Callable[[Tensor, Tick], object]
    method: str
    is_optimal: bool = False
