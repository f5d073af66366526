"""Conformal intervals: how far from a forecast the truth was on validation windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structattn.checks import check_int
from structattn.errors import ConfigError

PERCENTS = range(1, 100)


def conformal_widths(errors: Tensor, percents: Sequence[int]) -> Tensor:
    """Half the width of the intervals that hold these percentages of errors like the given ones.

    Of n errors the one of rank ceil(p / 100 (n + 1)), counted from the smallest. If the next error is
    exchangeable with them, it is at most that large with a probability of at least p / 100.

    Args:
        errors: absolute ones, ``(n, ...)``: the other axes, such as lead times, are independent of each
            other.
        percents: of ``PERCENTS``.

    Returns:
        ``(len(percents), ...)``; infinite where the rank is larger than n.

    Source: split conformal prediction, Vovk et al. 2005, Lei et al. 2018.
    """
    count = errors.shape[0]
    ranked = errors.sort(dim=0).values
    ranks = [-(-percent * (count + 1) // 100) for percent in percents]
    never = torch.full_like(errors[0], torch.inf)
    return torch.stack([ranked[rank - 1] if rank <= count else never for rank in ranks])


def check_percents(percents: Sequence[int], windows: int) -> tuple[int, ...]:
    """The percentages in order.

    Raises:
        ConfigError: one is not in ``PERCENTS``, is given twice, or needs more validation windows than there
            are.
    """
    for percent in percents:
        check_int("a level in percent", percent, minimum=PERCENTS[0], maximum=PERCENTS[-1])
    ordered = tuple(sorted(percents))
    if len(set(ordered)) != len(ordered):
        raise ConfigError(f"levels must be unique, got {', '.join(map(str, percents))}")
    most = 100 * windows // (windows + 1)
    if ordered and ordered[-1] > most:
        raise ConfigError(
            f"an interval of {ordered[-1]} % needs at least {-(-ordered[-1] // (100 - ordered[-1]))} validation "
            f"windows, and the training had {windows:,}: give levels of at most {most}"
        )
    return ordered
