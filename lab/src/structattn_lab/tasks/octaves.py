"""Numbers by octave of positions or distances: ranges that double in length."""

from __future__ import annotations

import torch
from torch import Tensor


def octaves(length: int) -> list[tuple[int, int]]:
    """Ranges of 1 ... length that double: (1, 1), (2, 3), (4, 7), ...; the last range also takes the rest
    where the rest is less than half of the next range."""
    last = (length + length // 3).bit_length() - 1 if length > 1 else 1
    starts = [2**i for i in range(last)]
    return [(a, 2 * a - 1) for a in starts[:-1]] + [(starts[-1], length)]


def by_octave(values: Tensor, positions: Tensor, length: int, weights: Tensor | None = None) -> list[float | None]:
    """Sums of values over the ``octaves`` of their positions, divided by the sums of weights where given.

    Args:
        values, positions, weights: of one shape; positions in 1 ... length.
        length: the largest position.

    Returns:
        One number per octave; ``None`` where nothing fell into it.
    """
    last = torch.tensor([end for _, end in octaves(length)], device=positions.device)
    octave = torch.searchsorted(last, positions.flatten())
    zeros = torch.zeros(len(last), dtype=torch.float64, device=positions.device)

    def sums(of: Tensor) -> Tensor:
        return zeros.index_add(0, octave, of.flatten().double())

    counts = sums(torch.ones_like(values))
    means = sums(values) / (1 if weights is None else sums(weights))
    return [float(v) if n else None for v, n in zip(means, counts, strict=True)]
