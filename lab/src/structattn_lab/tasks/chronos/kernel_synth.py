"""Synthetic series: draws of Gaussian processes whose kernels are random sums and products of simple ones.

Source: the idea and the bank of kernels are of Ansari et al. 2024, "Chronos: Learning the Language of Time
Series", section 4.2 (KernelSynth), after the automatic statistician of Duvenaud et al. 2013. Ours divides
time by the length of the series, draws periods from a list of usual ones, and is written in PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from structattn.errors import ConfigError
from structattn.seeds import generator

# A kernel maps times (T,) and their differences (T, T), both in series lengths, to a covariance (T, T).
Kernel = Callable[[Tensor, Tensor], Tensor]

# Steps of hours in a half day, day and week; of weeks, months and quarters in a year; and a few between.
PERIODS = (4, 6, 7, 12, 24, 30, 48, 52, 96, 168)
_MOST_KERNELS = 5
_JITTER = 1e-6  # of the largest variance: a Cholesky factor exists, and no bin of a tokenizer notices


def linear(offset: float) -> Kernel:
    """k(s, t) = offset^2 + s t: trends."""
    return lambda t, _: offset**2 + t[:, None] * t[None, :]


def rbf(length_scale: float) -> Kernel:
    """k(s, t) = exp(-(s - t)^2 / (2 l^2)): smooth changes."""
    return lambda _, lag: torch.exp(-0.5 * (lag / length_scale).square())


def rational_quadratic(alpha: float) -> Kernel:
    """k(s, t) = (1 + (s - t)^2 / (2 alpha))^-alpha: smooth changes at many scales."""
    return lambda _, lag: (1 + lag.square() / (2 * alpha)).pow(-alpha)


def periodic(period: float) -> Kernel:
    """k(s, t) = exp(-2 sin^2(pi (s - t) / p)): seasons."""
    return lambda _, lag: torch.exp(-2 * torch.sin(torch.pi * lag / period).square())


def white_noise(variance: float) -> Kernel:
    """k(s, t) = variance at s = t, else 0."""
    return lambda t, _: variance * torch.eye(len(t), dtype=t.dtype)


def constant(value: float) -> Kernel:
    """k(s, t) = value: a level."""
    return lambda _, lag: torch.full_like(lag, value)


def kernel_bank(length: int) -> tuple[Kernel, ...]:
    """The kernels to draw from, for series of ``length`` steps."""
    return (
        constant(1.0),
        white_noise(0.1),
        white_noise(1.0),
        *(linear(offset) for offset in (0.0, 1.0, 10.0)),
        *(rbf(scale) for scale in (0.1, 1.0, 10.0)),
        *(rational_quadratic(alpha) for alpha in (0.1, 1.0, 10.0)),
        *(periodic(period / length) for period in PERIODS if 2 * period <= length),
    )


def covariance(length: int, rng: torch.Generator) -> Tensor:
    """A random kernel at T steps: one to five of the bank, joined by + or x at random, (T, T) float64,
    positive semidefinite.
    """
    bank = kernel_bank(length)
    times = torch.arange(length, dtype=torch.float64) / length
    lag = times[:, None] - times[None, :]
    count = int(torch.randint(1, _MOST_KERNELS + 1, (), generator=rng))
    chosen = torch.randint(len(bank), (count,), generator=rng).tolist()
    joins = torch.randint(2, (count,), generator=rng).tolist()
    total = bank[chosen[0]](times, lag)
    for index, is_product in zip(chosen[1:], joins[1:], strict=True):
        part = bank[index](times, lag)
        total = total * part if is_product else total + part
    return total


@functools.lru_cache(maxsize=8)
def kernel_synth(count: int, length: int, *names: str | int) -> Tensor:
    """Random series, each of a random kernel.

    Args:
        count: how many.
        length: T, steps of each.
        *names: what the random numbers are a function of, beside the first two.

    Returns:
        (count, T) float32. It is shared by all callers: do not write into it.

    Raises:
        ConfigError: a number below 1.

    Cost: a Cholesky factor for each series, T^3 / 3 multiply-adds.
    """
    if count < 1 or length < 1:
        raise ConfigError(f"expected at least one series of at least one step, got {count} of {length}")
    rng = generator("kernel-synth", count, length, *names)
    series = torch.empty(count, length, dtype=torch.float64)
    for row in series:
        matrix = covariance(length, rng)
        jitter = _JITTER * float(matrix.diagonal().max())
        factor = torch.linalg.cholesky(matrix + jitter * torch.eye(length, dtype=torch.float64))
        row.copy_(factor @ torch.randn(length, dtype=torch.float64, generator=rng))
    return series.float()
