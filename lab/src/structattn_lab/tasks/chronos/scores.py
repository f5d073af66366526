"""Scores of probabilistic forecasts, and the seasonal naive forecast to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from structattn.errors import ShapeError

QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def forecast_scores(quantiles: Tensor, point: Tensor, truth: Tensor, context: Tensor, season: int) -> dict[str, float]:
    """Errors of forecasts, over all windows.

        MASE = mean over windows of (mean |y - point|) / (mean |x_t - x_(t - season)| of the look-back x)
        WQL = mean over quantiles a of 2 sum of max(a (y - q_a), (a - 1) (y - q_a)) / sum |y|

    Args:
        quantiles: (n, horizon, 9), for ``QUANTILES``.
        point: (n, horizon).
        truth: y, (n, horizon).
        context: x, (n, look-back), longer than a season. Where it does not change from season to season the
            window is left out of MASE.
        season: steps.

    Returns:
        ``mase`` and ``wql``; lower is better. A point forecast in place of all quantiles has a WQL of sum |y
        - point| / sum |y|.

    Raises:
        ShapeError: the shapes do not fit.

    Source: Hyndman and Koehler 2006 for MASE; the definition of both in Ansari et al. 2024, whose MASE
    divides by the errors of the whole history and not only of the look-back.
    """
    if quantiles.shape != (*truth.shape, len(QUANTILES)) or point.shape != truth.shape or context.shape[1] <= season:
        raise ShapeError(
            f"expected quantiles of shape (n, horizon, {len(QUANTILES)}), forecasts and truth of (n, horizon) and a "
            f"look-back longer than {season}, got {tuple(quantiles.shape)}, {tuple(point.shape)}, {tuple(truth.shape)} "
            f"and {tuple(context.shape)}"
        )
    truth, point, context = truth.double(), point.double(), context.double()
    scale = (context[:, season:] - context[:, :-season]).abs().mean(dim=1)
    error = (truth - point).abs().mean(dim=1)
    varies = scale > 0
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    over = truth[..., None] - quantiles.double()
    loss = 2 * torch.maximum(levels * over, (levels - 1) * over).sum(dim=(0, 1)) / truth.abs().sum()
    return {"mase": float((error[varies] / scale[varies]).mean()), "wql": float(loss.mean())}


def seasonal_forecast(context: Tensor, horizon: int, season: int) -> tuple[Tensor, Tensor]:
    """The last season repeated, with the quantiles of the look-back's changes from season to season around
    it.

    Args:
        context: (n, look-back), longer than a season.
        horizon: steps ahead. Quantiles are as wide at each: for more than one season they are too narrow.
        season: steps.

    Returns:
        Quantiles (n, horizon, 9) and point forecasts (n, horizon).
    """
    point = context[:, context.shape[1] - season + torch.arange(horizon) % season]
    changes = context[:, season:] - context[:, :-season]
    levels = torch.tensor(QUANTILES, dtype=context.dtype)
    around = torch.quantile(changes, levels, dim=1).T
    return point[..., None] + around[:, None, :], point
