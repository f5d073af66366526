"""What a pass of ``sweep`` is given: pieces of the score matrix, and the terms on which scores are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from structattn.layout import LevelLayout

LOG2_E = math.log2(math.e)
# A bound of |score| in units of log 2: 2^80 times any length and value is far from the end of float32, and so is 2^-80.
_SMALL = 80.0


class Piece(Protocol):
    """Some rows against some columns of the score matrix, in a batch, whose pairs all share ``level`` levels."""

    @property
    def level(self) -> int:
        """The number of shared levels of its pairs."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, rows and columns."""
        ...

    @property
    def number(self) -> int:
        """Tells it from the other pieces of a pass, for the random numbers of dropout."""
        ...

    def rows_of(self, x: Tensor) -> Tensor:
        """Its rows of a query-side tensor (..., d), shaped as the geometry has it: (batch, rows, d), at best a view."""
        ...

    def cols_of(self, x: Tensor) -> Tensor:
        """Its columns of a key-side tensor (..., d): (batch, columns, d), at best a view."""
        ...

    def open_rows(self, x: Tensor) -> Tensor:
        """(batch, rows, d) to add into what ``rows_of`` reads: a view, or a buffer that ``close_rows`` brings back."""
        ...

    def close_rows(self, x: Tensor, opened: Tensor) -> None:
        """Ends what ``open_rows`` began."""
        ...

    def open_cols(self, x: Tensor) -> Tensor:
        """As ``open_rows``, of what ``cols_of`` reads."""
        ...

    def close_cols(self, x: Tensor, opened: Tensor) -> None:
        """Ends what ``open_cols`` began."""
        ...

    def max_rows(self, x: Tensor, value: Tensor) -> None:
        """Takes the larger of (batch, rows, d) and what is there, where ``rows_of`` read."""
        ...

    def hides(self, batch: slice, rows: slice, cols: slice) -> Tensor | bool:
        """What is hidden of a part: all (``True``), nothing (``False``), or a bool mask that broadcasts to it."""
        ...

    def bias_of(self, bias: Tensor, batch: slice, rows: slice, cols: slice) -> Tensor:
        """The additive bias of a part, shaped as the part."""
        ...

    def add_bias(self, bias: Tensor, batch: slice, rows: slice, cols: slice, value: Tensor) -> None:
        """Adds a part where ``bias_of`` read."""
        ...


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a pass needs of a call besides the tensors.

    Attributes:
        layout: its ranks, scaling and value ranks are used here; its blocks by the geometry.
        scale: replaces the layout's scaling.
        dropout_p: probability of dropping a weight.
        seed: of the random numbers of dropout.
        budget: scores that are held at once.
    """

    layout: LevelLayout
    scale: float | None
    dropout_p: float
    seed: int
    budget: int

    def rank(self, level: int) -> int:
        """R, the dimensions of a score."""
        return sum(self.layout.ranks[:level])

    def value_rank(self, level: int, value_dim: int) -> int:
        """The dimensions of the value that a pair contributes to."""
        return value_dim if self.layout.value_ranks is None else sum(self.layout.value_ranks[:level])

    def factor(self, level: int, like: Tensor) -> Tensor:
        """(R,): times a query, it gives scores in natural units."""
        per_level, per_count = self.layout.score_factors(self.scale)
        values = [
            per_count[level - 1] * factor
            for factor, rank in zip(per_level[:level], self.layout.ranks[:level], strict=True)
            for _ in range(rank)
        ]
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    def are_small(self, q: Tensor, k: Tensor) -> bool:
        """Whether every score is surely so small that its exponential can be summed as it is, without a maximum.

        By Cauchy and Schwarz: first from the norms of whole rows, then, if that is not enough, from the norms of the
        prefixes that each number of levels uses. False if an input is not finite.

        Args:
            q, k: (..., D).

        Cost: one or two passes over q and k, and waiting for a GPU.
        """
        per_level, per_count = self.layout.score_factors(self.scale)
        norms = [torch.linalg.vector_norm(x, dim=-1).amax() for x in (q, k)]
        factor = max(map(abs, per_level)) * max(map(abs, per_count)) * LOG2_E
        if float(norms[0] * norms[1]) * factor <= _SMALL:
            return True
        largest = []
        for x, factors in ((q, per_level), (k, (1.0,) * len(per_level))):
            prefixes = x.new_zeros((len(factors), x.shape[-1]))  # of each number of levels, weighted
            for level, (part, weight) in enumerate(zip(self.layout.slices, factors, strict=True)):
                prefixes[level:, part] = weight**2
            # In parts, so that the squares never take as much memory as x.
            parts = x.flatten(0, -2).split(max(1, self.budget // x.shape[-1]))
            largest.append(torch.stack([(prefixes @ part.square().T).amax(1) for part in parts]).amax(0))
        counts = torch.tensor(per_count, dtype=q.dtype, device=q.device).abs()
        return float(((largest[0] * largest[1]).sqrt() * counts).max()) * LOG2_E <= _SMALL
