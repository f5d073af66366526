"""Prompts of in-context regression: where x comes from, which function makes y of it, and the noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from structattn.checks import check_choice, check_int, check_number

FunctionName = Literal["linear", "sparse-linear", "relu-network", "decision-tree"]
Covariates = Literal["isotropic", "skewed"]


class PromptFunction(ABC):
    """A distribution of functions R^d -> R, one for each prompt. New ones are listed in ``FUNCTIONS``.

    ``draw`` is ``values`` with fresh ``parameters``; they are two methods so that a definition can be tested
    with given parameters.
    """

    @abstractmethod
    def parameters(self, rng: Generator, count: int, dim: int) -> tuple[Tensor, ...]:
        """The parameters of ``count`` functions of ``dim`` inputs, each with the prompts as its first
        axis.
        """

    @abstractmethod
    def values(self, xs: Tensor, *parameters: Tensor) -> Tensor:
        """xs (B, N, d) and the parameters of B functions to f(x), (B, N)."""

    @abstractmethod
    def variance(self, dim: int) -> float:
        """E f(x)^2, the expected squared error of predicting zero: the same for every covariance of trace
        d.
        """

    def draw(self, rng: Generator, xs: Tensor) -> Tensor:
        """Values of fresh functions, one for each prompt: xs (B, N, d), live coordinates only, to f(x), (B,
        N), in the dtype of xs.

        The numbers are drawn in float32 for every dtype, so that both precisions see the same functions.
        """
        drawn = self.parameters(rng, xs.shape[0], xs.shape[2])
        return self.values(xs, *(p.to(xs.dtype) if p.is_floating_point() else p for p in drawn))


@dataclass(frozen=True, kw_only=True)
class Linear(PromptFunction):
    """f(x) = w.x with w ~ N(0, I_d)."""

    def parameters(self, rng: Generator, count: int, dim: int) -> tuple[Tensor, ...]:
        """w (B, d)."""
        return (torch.randn(count, dim, generator=rng),)

    def values(self, xs: Tensor, *parameters: Tensor) -> Tensor:
        (w,) = parameters
        return (xs @ w[..., None])[..., 0]

    def variance(self, dim: int) -> float:
        return dim


@dataclass(frozen=True, kw_only=True)
class SparseLinear(Linear):
    """f(x) = w.x with w ~ N(0, I_d), then all but ``sparsity`` random coordinates (at most d) set to zero."""

    sparsity: int

    def parameters(self, rng: Generator, count: int, dim: int) -> tuple[Tensor, ...]:
        """w (B, d)."""
        (w,) = super().parameters(rng, count, dim)
        support = torch.rand(count, dim, generator=rng).topk(min(self.sparsity, dim), dim=1).indices
        return (w * torch.zeros_like(w).scatter_(1, support, 1.0),)

    def variance(self, dim: int) -> float:
        """The number of nonzero weights."""
        return min(self.sparsity, dim)


@dataclass(frozen=True, kw_only=True)
class ReluNetwork(PromptFunction):
    """f(x) = sum_i a_i relu(w_i.x) over ``hidden_units``, w_i ~ N(0, I_d), a_i ~ N(0, 2 / hidden_units)."""

    hidden_units: int

    def parameters(self, rng: Generator, count: int, dim: int) -> tuple[Tensor, ...]:
        """w (B, hidden, d) and a (B, hidden)."""
        w = torch.randn(count, self.hidden_units, dim, generator=rng)
        return w, torch.randn(count, self.hidden_units, generator=rng) * math.sqrt(2 / self.hidden_units)

    def values(self, xs: Tensor, *parameters: Tensor) -> Tensor:
        w, a = parameters
        return ((xs @ w.mT).relu_() @ a[..., None])[..., 0]

    def variance(self, dim: int) -> float:
        """d: E relu(w.x)^2 = E (w.x)^2 / 2 = d / 2, and the a_i^2 sum to 2."""
        return dim


@dataclass(frozen=True, kw_only=True)
class DecisionTree(PromptFunction):
    """A full binary tree: ``depth`` times the sign of one coordinate chooses the branch, and the leaf is the
    value.

    Each inner node tests one coordinate, drawn uniformly, and goes right where it is positive; leaves ~ N(0,
    1).
    """

    depth: int

    def parameters(self, rng: Generator, count: int, dim: int) -> tuple[Tensor, ...]:
        """Coordinates (B, 2^depth - 1) of the inner nodes, level after level, and leaves (B, 2^depth) from
        left to right.
        """
        coordinates = torch.randint(dim, (count, 2**self.depth - 1), generator=rng)
        return coordinates, torch.randn(count, 2**self.depth, generator=rng)

    def values(self, xs: Tensor, *parameters: Tensor) -> Tensor:
        """The leaf that each x falls in."""
        coordinates, leaves = parameters
        signs = xs > 0
        node = torch.zeros(xs.shape[:2], dtype=torch.long)
        for _ in range(self.depth):
            right = signs.gather(2, coordinates.gather(1, node)[..., None])[..., 0]
            node = 2 * node + 1 + right
        return leaves.gather(1, node - (2**self.depth - 1))

    def variance(self, dim: int) -> float:
        return 1.0


def isotropic(rng: Generator, count: int, num_points: int, dim: int, dtype: torch.dtype) -> Tensor:
    """x ~ N(0, I_d), (B, N, d)."""
    return torch.randn(count, num_points, dim, generator=rng).to(dtype)


def skewed(rng: Generator, count: int, num_points: int, dim: int, dtype: torch.dtype) -> Tensor:
    """x ~ N(0, Sigma), (B, N, d): eigenvalues d i^-2 / sum_j j^-2 in an orthogonal basis drawn for each
    prompt.

    Source: Garg et al. 2022, section 4 (skewed covariance; inputs scaled to the length of those in training).
    """
    variances = torch.arange(1, dim + 1, dtype=dtype) ** -2
    variances *= dim / variances.sum()
    independent = isotropic(rng, count, num_points, dim, dtype) * variances.sqrt()
    # Up to the signs of its columns Q is uniform over the orthogonal matrices, and Q diag(variances) Q^T has
    # no signs.
    basis = torch.linalg.qr(torch.randn(count, dim, dim, generator=rng).to(dtype)).Q
    return independent @ basis.mT


FUNCTIONS: dict[FunctionName, Callable[[PromptConfig], PromptFunction]] = {
    "linear": lambda prompts: Linear(),
    "sparse-linear": lambda prompts: SparseLinear(sparsity=prompts.sparsity),
    "relu-network": lambda prompts: ReluNetwork(hidden_units=prompts.hidden_units),
    "decision-tree": lambda prompts: DecisionTree(depth=prompts.depth),
}
COVARIATES: dict[Covariates, Callable[[Generator, int, int, int, torch.dtype], Tensor]] = {
    "isotropic": isotropic,
    "skewed": skewed,
}


class DrawnPrompts(NamedTuple):
    """Prompts: ``xs`` (B, N, d), ``ys`` (B, N) as a model sees them, and ``values`` (B, N), f(x) without
    noise.
    """

    xs: Tensor
    ys: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """A distribution of prompts x_1, y_1, ..., x_N, y_N with y_i = f(x_i) + noise and one f per prompt.

    Args:
        function: distribution of f: ``linear`` (f(x) = w.x), ``sparse-linear``, ``relu-network`` or
            ``decision-tree``.
        sparsity: nonzero coordinates of w, for ``sparse-linear``. Default 3.
        hidden_units: width, for ``relu-network``. Default 100.
        depth: of the ``decision-tree``. Default 4.
        noise_std: standard deviation of the normal noise added to every y. Default 0.
        covariates: distribution of x: ``isotropic``, x ~ N(0, I_d), or ``skewed``, x ~ N(0, Sigma) with
            eigenvalues proportional to 1 / i^2, trace d and a random basis per prompt.

    Raises:
        ConfigError: an unknown name, a count below 1, or noise that is negative or not finite.

    Source: Garg et al. 2022, "What can transformers learn in-context?", sections 3 to 5 and appendix A.
    """

    function: FunctionName = "linear"
    sparsity: int = 3
    hidden_units: int = 100
    depth: int = 4
    noise_std: float = 0.0
    covariates: Covariates = "isotropic"

    def __post_init__(self) -> None:
        check_choice("task.prompts.function", self.function, FUNCTIONS)
        for name in ("sparsity", "hidden_units", "depth"):
            check_int(f"task.prompts.{name}", getattr(self, name), minimum=1)
        check_number("task.prompts.noise_std", self.noise_std, minimum=0)
        check_choice("task.prompts.covariates", self.covariates, COVARIATES)

    @property
    def distribution(self) -> PromptFunction:
        """The distribution of f."""
        return FUNCTIONS[self.function](self)

    def draw(
        self,
        rng: Generator,
        count: int,
        num_points: int,
        dim: int,
        *,
        live: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> DrawnPrompts:
        """Independent prompts on the CPU.

        Args:
            rng: the prompts are a pure function of its state and the sizes. It draws float32 numbers for
                every dtype, so float64 gives the same prompts with more exact values.
            count: B.
            num_points: N.
            dim: d.
            live: coordinates that are not zero; f has only those as its inputs, and the trace of the
                covariance is this number. Default ``None``: all.
            dtype: of the result. Default float32.

        Returns:
            ``DrawnPrompts``. The noise is drawn last: prompts that differ only in ``noise_std`` have the same
            x and f.

        Cost: B N d normal numbers, and for ``skewed`` a QR of d x d per prompt.
        """
        live = dim if live is None else live
        xs = COVARIATES[self.covariates](rng, count, num_points, live, dtype)
        values = self.distribution.draw(rng, xs)
        ys = values
        if self.noise_std:
            ys = values + self.noise_std * torch.randn(count, num_points, generator=rng).to(dtype)
        return DrawnPrompts(F.pad(xs, (0, dim - live)) if live < dim else xs, ys, values)
