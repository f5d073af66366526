"""From tensors (B, heads, length, d) to the rows of a geometry and back: grouped heads together, stretches gathered.

Rows of one position stand together: with R query heads per key head, row t * R + r is head r at position t, so that the keys
are never repeated and a stretch of positions is a stretch of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Regroup(Protocol):
    """A change of shape that can be undone."""

    def get(self, x: Tensor, repeats: int, missing: float | None = None) -> Tensor:
        """(B, G * repeats, length, d) to rows, (..., d).

        Args:
            x: the tensor.
            repeats: query heads per key head; 1 for keys and values.
            missing: what a place without a position holds. Default: what the first of its stretch holds.
        """
        ...

    def put(self, x: Tensor, rows: Tensor, repeats: int) -> Tensor:
        """Rows into x (B, G * repeats, length, d), which may be written to; returns the result, contiguous or not."""
        ...


@dataclass(frozen=True)
class Whole:
    """All sequences as they are: (B * G, length * repeats, d), a view where the strides allow."""

    def get(self, x: Tensor, repeats: int, missing: float | None = None) -> Tensor:
        """See ``Regroup``."""
        batch, heads, length, dim = x.shape
        if repeats > 1:
            x = x.unflatten(1, (heads // repeats, repeats)).transpose(2, 3)
        return x.reshape(batch * heads // repeats, length * repeats, dim)

    def put(self, x: Tensor, rows: Tensor, repeats: int) -> Tensor:
        """See ``Regroup``."""
        batch, heads, length, dim = x.shape
        rows = rows.view(batch, heads // repeats, length, repeats, dim)
        return rows.transpose(2, 3).reshape(batch, heads, length, dim)


@dataclass(frozen=True)
class Gathered:
    """Stretches of positions, padded to one length C: (stretches * G, C * repeats, d).

    Attributes:
        index: (stretches, C) int64 into the B * length positions; where ``there`` is false, any.
        there: bool (stretches, C), which places hold a position.
    """

    index: Tensor
    there: Tensor

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor) -> Gathered:
        """Stretches from their starts in the B * length positions and their lengths, (stretches,) int64 each."""
        steps = torch.arange(int(lengths.max()), device=starts.device)
        there = steps[None, :] < lengths[:, None]
        return cls(starts[:, None] + torch.where(there, steps[None, :], 0), there)

    def get(self, x: Tensor, repeats: int, missing: float | None = None) -> Tensor:
        """See ``Regroup``."""
        batch, heads, length, dim = x.shape
        flat = x.transpose(1, 2).reshape(batch * length, heads, dim)
        rows = flat[self.index]
        if missing is not None:
            rows = rows.masked_fill(~self.there[..., None, None], missing)
        rows = rows.unflatten(2, (heads // repeats, repeats)).transpose(1, 2)  # stretches, G, C, R, d
        return rows.reshape(rows.shape[0] * rows.shape[1], -1, dim)

    def put(self, x: Tensor, rows: Tensor, repeats: int) -> Tensor:
        """See ``Regroup``; positions of no stretch keep what x has."""
        batch, heads, length, dim = x.shape
        count, size = self.index.shape
        rows = rows.view(count, heads // repeats, size, repeats, dim).transpose(1, 2).reshape(count, size, heads, dim)
        flat = x.transpose(1, 2).contiguous().view(batch * length, heads, dim)
        flat[self.index[self.there]] = rows[self.there]
        return flat.view(batch, length, heads, dim).transpose(1, 2)
