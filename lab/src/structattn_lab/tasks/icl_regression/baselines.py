"""Predictors of y_i from the pairs before it that need no training: what a model in context is measured
against.

Each takes xs (B, N, d) and ys (B, N) and returns predictions (B, N) in the dtype of ys, of which the first is
0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from structattn_lab.tasks.icl_regression.prompts import PromptConfig

# A point counts as a combination of those before it when at most this part of its length lies outside their
# span.
_IN_SPAN = 1e-12


def zero(xs: Tensor, ys: Tensor) -> Tensor:
    """Predicts 0."""
    return torch.zeros_like(ys)


def averaging(xs: Tensor, ys: Tensor) -> Tensor:
    """w.x_i with w the mean of y_j x_j over j < i."""
    out = torch.zeros_like(ys)
    counts = torch.arange(1, xs.shape[1])[:, None]
    w = (xs * ys[..., None]).cumsum(1)[:, :-1] / counts
    out[:, 1:] = (w * xs[:, 1:]).sum(-1)
    return out


def least_squares(xs: Tensor, ys: Tensor) -> Tensor:
    """w.x_i with w the minimum-norm least-squares fit to the pairs before i, computed in float64.

    Each pair updates w, the projection P on what is orthogonal to the points so far, and C = (X^T X)^+. With
    r = P x:

        r != 0: k = r / |r|^2,                 C += (1 + x^T C x) k k^T - C x k^T - k x^T C,   P -= r k^T
        r == 0: k = C x / (1 + x^T C x),       C -= k x^T C
        both:   w += k (y - w.x)

    Cost: O(N d^2) per prompt, where a decomposition at every point would take O(N^2 d^2).
    Source: Greville 1960, "Some applications of the pseudoinverse of a matrix".
    """
    outside = _identities(xs)
    inverse = torch.zeros_like(outside)

    def gain(x: Tensor) -> Tensor:
        r = outside @ (outside @ x)  # twice: rounding in one projection would leave parts of the span
        is_new = r.norm(dim=1, keepdim=True) > _IN_SPAN * x.norm(dim=1, keepdim=True)
        cx = inverse @ x
        spread = 1 + x.mT @ cx
        k = torch.where(is_new, r / r.square().sum(1, keepdim=True), cx / spread)
        step = torch.where(is_new, spread * k - cx, 0.0)
        inverse.add_(step @ k.mT - k @ cx.mT)
        outside.sub_(torch.where(is_new, r, 0.0) @ k.mT)
        return k

    return _fitted_in_order(xs, ys, gain)


def ridge(xs: Tensor, ys: Tensor, *, noise_std: float) -> Tensor:
    """w.x_i with w = (X^T X + noise_std^2 I)^-1 X^T y of the pairs before i, computed in float64;
    ``noise_std`` is above 0.

    For linear f, w ~ N(0, I), that is the posterior mean: no predictor has a lower expected squared error.
    Computed pair by pair with the posterior covariance S, which starts at I: k = S x / (noise_std^2 + x^T S
    x), w += k (y - w.x), S -= k x^T S.

    Cost: O(N d^2) per prompt.
    """
    covariance = _identities(xs)

    def gain(x: Tensor) -> Tensor:
        sx = covariance @ x
        k = sx / (noise_std**2 + x.mT @ sx)
        covariance.sub_(k @ sx.mT)
        return k

    return _fitted_in_order(xs, ys, gain)


def _identities(xs: Tensor) -> Tensor:
    """An identity matrix for each prompt, (B, d, d) float64."""
    return torch.eye(xs.shape[2], dtype=torch.float64).repeat(xs.shape[0], 1, 1)


def _fitted_in_order(xs: Tensor, ys: Tensor, gain: Callable[[Tensor], Tensor]) -> Tensor:
    """Predictions w.x, where each pair updates w by k (y - w.x); ``gain`` gives k (B, d, 1) for x (B, d, 1),
    in float64.
    """
    x_all, y_all = xs.double(), ys.double()
    out, w = torch.zeros_like(y_all), torch.zeros_like(x_all[:, 0, :, None])
    for i in range(xs.shape[1]):
        x = x_all[:, i, :, None]
        predicted = x.mT @ w
        out[:, i] = predicted[:, 0, 0]
        w += gain(x) * (y_all[:, i, None, None] - predicted)
    return out.to(ys.dtype)


def nearest_neighbors(xs: Tensor, ys: Tensor, *, num_neighbors: int = 3) -> Tensor:
    """The mean y of the nearest x so far (all of them while there are fewer): 3, as Garg et al. 2022.

    Cost: O(N^2 d) per prompt, and N^2 numbers of memory.
    """
    num_points = xs.shape[1]
    distances = torch.cdist(xs, xs, compute_mode="donot_use_mm_for_euclid_dist")
    later = torch.ones(num_points, num_points, dtype=torch.bool).triu()
    nearest, index = distances.masked_fill_(later, torch.inf).topk(min(num_neighbors, num_points), dim=2, largest=False)
    is_there = nearest.isfinite()
    near_ys = ys[:, None].expand_as(distances).gather(2, index)
    return torch.where(is_there, near_ys, 0.0).sum(2) / is_there.sum(2).clamp_(min=1)


class Predictor(NamedTuple):
    """A baseline: its name, how it works, and the function."""

    name: str
    note: str
    predict: Callable[[Tensor, Tensor], Tensor]


def predictors(prompts: PromptConfig) -> list[Predictor]:
    """The baselines of a distribution of prompts; ridge regression only where there is noise, whose standard
    deviation it knows.
    """
    optimal = ", the optimal predictor" if prompts.function == "linear" else ""
    fit, noise = "the linear fit of smallest norm to the pairs seen", prompts.noise_std
    methods = [
        Predictor("zero", "predicts 0", zero),
        Predictor("averaging", "w is the mean of y x over the pairs seen", averaging),
        Predictor("least squares", fit if noise else fit + optimal, least_squares),
    ]
    if noise:
        note = f"the linear fit to the pairs seen with the variance of the noise as its penalty{optimal}"
        methods.append(Predictor("ridge (noise known)", note, partial(ridge, noise_std=noise)))
    return [*methods, Predictor("3 nearest neighbors", "the mean y of the 3 nearest x seen", nearest_neighbors)]
