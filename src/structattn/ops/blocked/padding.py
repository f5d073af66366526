"""From tensors (B, heads, length, d) to the rows of a geometry and back: heads that share a key together, sequences padded.

Rows of one position are neighbours: with R query heads per key head, row t * R + r is head r at position t, so that the keys
are never repeated and a span of positions is a span of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Grouping(Protocol):
    """Rows for a geometry, from a tensor and back."""

    def pad(self, x: Tensor, repeats: int, missing: float | None = None) -> Tensor:
        """(B, G * repeats, length, d) to rows, (..., d).

        Args:
            x: the tensor.
            repeats: query heads per key head; 1 for keys and values.
            missing: what padding holds. Default: what the first position of its sequence holds.
        """

    def unpad(self, x: Tensor, rows: Tensor, repeats: int) -> Tensor:
        """Rows into x (B, G * repeats, length, d), which may be written to; returns the result, contiguous or not."""


@dataclass(frozen=True)
class NoPadding:
    """All sequences as they are: (B * G, length * repeats, d), a view where the strides allow."""

    def pad(self, x: Tensor, repeats: int, missing: float | None = None) -> Tensor:
        batch, heads, length, dim = x.shape
        if repeats > 1:
            x = x.unflatten(1, (heads // repeats, repeats)).transpose(2, 3)
        return x.reshape(batch * heads // repeats, length * repeats, dim)

    def unpad(self, x: Tensor, rows: Tensor, repeats: int) -> Tensor:
        batch, heads, length, dim = x.shape
        rows = rows.view(batch, heads // repeats, length, repeats, dim)
        return rows.transpose(2, 3).reshape(batch, heads, length, dim)


@dataclass(frozen=True)
class Padded:
    """Spans of positions, padded to one length C: (N * G, C * repeats, d).

    Attributes:
        index: (N, C) int64 into the B * length positions; where ``is_real`` is false, any.
        is_real: bool (N, C), false for padding.
    """

    index: Tensor
    is_real: Tensor

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor) -> Padded:
        """Spans from their starts in the B * length positions and their lengths, (N,) int64 each."""
        steps = torch.arange(int(lengths.max()), device=starts.device)
        is_real = steps[None, :] < lengths[:, None]
        return cls(starts[:, None] + torch.where(is_real, steps[None, :], 0), is_real)

    def pad(self, x: Tensor, repeats: int, missing: float | None = None) -> Tensor:
        batch, heads, length, dim = x.shape
        flat = x.transpose(1, 2).reshape(batch * length, heads, dim)
        rows = flat[self.index]
        if missing is not None:
            rows = rows.masked_fill(~self.is_real[..., None, None], missing)
        rows = rows.unflatten(2, (heads // repeats, repeats)).transpose(1, 2)  # N, G, C, R, d
        return rows.reshape(rows.shape[0] * rows.shape[1], -1, dim)

    def unpad(self, x: Tensor, rows: Tensor, repeats: int) -> Tensor:
        """See ``Grouping``; positions of no span keep what x has."""
        batch, heads, length, dim = x.shape
        count, size = self.index.shape
        rows = rows.view(count, heads // repeats, size, repeats, dim).transpose(1, 2).reshape(count, size, heads, dim)
        flat = x.transpose(1, 2).contiguous().view(batch * length, heads, dim)
        flat[self.index[self.is_real]] = rows[self.is_real]
        return flat.view(batch, length, heads, dim).transpose(1, 2)
