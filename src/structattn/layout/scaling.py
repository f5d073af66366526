"""Score scales: how the products of the levels that a pair shares make its score."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Literal

from structattn.checks import check_scale

Scaling = Literal["variance", "mup", "paper", "paper_sum", "standard"]
SCALINGS: tuple[Scaling, ...] = ("variance", "mup", "paper", "paper_sum", "standard")


def score_factors(
    ranks: tuple[int, ...], scaling: Scaling, scale: float | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(a_1 ... a_L) per level and (c_1 ... c_L) per number of shared levels; see
    ``LevelLayout.score_factors``.
    """
    per_rank = tuple(1 / rank for rank in ranks)
    ones = (1.0,) * len(ranks)
    if scale is not None:
        check_scale("scale", scale)
        # An int may be larger than any that a tensor takes.
        return ones, (float(scale) if isinstance(scale, int) else scale,) * len(ranks)
    match scaling:
        case "variance":
            return ones, tuple(1 / math.sqrt(total) for total in accumulate(ranks))
        case "mup":
            return ones, tuple(8 / total for total in accumulate(ranks))
        case "paper":
            return per_rank, tuple(1 / n for n in range(1, len(ranks) + 1))
        case "paper_sum":
            return per_rank, ones
        case "standard":
            return ones, (1 / math.sqrt(sum(ranks)),) * len(ranks)
