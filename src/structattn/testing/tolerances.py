"""All numerical tolerances: relative Frobenius errors by dtype, for outputs and for gradients."""

from __future__ import annotations

import torch
from torch import Tensor

FORWARD = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GRADIENT = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# Outputs of a whole model, each layer of which rounds to its dtype.
WHOLE_MODEL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Relative errors in float64, or absolute ones of numbers near 1, where a test computes no tensor to compare
# with.
ROUNDING = 1e-14  # the same few operations in another order
ROUNDINGS = 1e-13  # many of them
COMPUTED = 1e-12  # sums of many products, and what is solved in closed form
SOLVED = 1e-9  # what an iteration ends with
SIX_DIGITS = 1e-6  # sizes of errors, which are themselves differences; float32
SMALL_FIT = 1e-3  # the error of an iteration that has not ended, where the right structure is found
TWO_DECIMALS = 0.005  # figures that are printed with two decimals
SAME_MODEL = 1e-5  # float32: the same model, computed in another order; its scores
ANOTHER_ORDER = 1e-4  # the same of many layers or many steps
GOLDEN = 1e-4  # numbers of float32 that were written down once
VISIBLE = {torch.float64: 1e-9, torch.float32: 1e-6}  # a lower bound: a change that is no rounding


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; the absolute error where ``expected`` is zero; inf for
    a NaN.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    size = float(expected.norm())
    error = float((actual - expected).norm())
    return error / size if size > 0 else error


def assert_close(actual: Tensor, expected: Tensor, *, gradient: bool = False) -> None:
    """Asserts that ``actual`` is ``expected`` to the tolerance of its dtype."""
    limit = (GRADIENT if gradient else FORWARD)[actual.dtype]
    error = relative_error(actual, expected)
    assert error <= limit, f"relative error {error:.2e} is above {limit:.0e} for {actual.dtype}"
