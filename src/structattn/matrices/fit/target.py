"""The dense matrix that a fit approximates: read, checked, scaled, and what it is compared by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from structattn.errors import DataError, ShapeError
from structattn.matrices.base import StructuredMatrix, without_autocast
from structattn.seeds import derive_seed, seeded

# Exponents between which a scale and its inverse are normal numbers.
_TINY = -900
_HUGE = 900


@contextmanager
def workspace(seed: int) -> Iterator[None]:
    """Gradients are recorded, nothing is autocast, and random numbers come from the seed only, wherever this
    is entered.

    Matrices are made on the CPU, whose generator is put back afterwards; no other generator is used or
    seeded. The seed names a private stream: that of ``torch.manual_seed(seed)`` may have drawn the target.
    """
    stream = seeded(derive_seed("fit", seed))
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(), torch.device("cpu"), stream:
        yield


def as_matrix(dense: object) -> Tensor:
    """A tensor with values from a tensor, an array or nested lists; raises ``DataError`` for anything
    else.
    """
    if not isinstance(dense, Tensor):
        try:
            dense = torch.as_tensor(np.array(dense))  # a copy: arrays may be read-only or run backwards
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"fit: expected a tensor or an array of numbers, got {type(dense).__name__}: {error}"
            ) from None
    if is_lazy(dense) or dense.is_nested or dense.is_quantized:
        raise DataError(
            "fit: expected one matrix of numbers, got a tensor that is not initialised, nested or quantised"
        )
    if dense.is_meta:
        raise DataError("fit: the matrix is on the meta device and has no values")
    if dense.is_floating_point() and dense.element_size() == 1:
        dense = dense.float()  # of 8 bits nothing can be computed
    return dense if dense.layout is torch.strided else dense.to_dense()


def check_dense(dense: Tensor) -> Tensor:
    """The matrix in float64, apart from the graph; raises ``ShapeError`` or ``DataError`` for what cannot be
    fitted.
    """
    if dense.dim() < 2 or 0 in dense.shape:
        raise ShapeError(f"fit: expected a matrix (..., num_rows, num_cols), got shape {tuple(dense.shape)}")
    if dense.is_complex():
        raise DataError("fit: the matrix is complex; fit its real and imaginary part")
    target = dense.detach().double().clone()  # a clone of an inference tensor may take part in gradients
    bad = (~target.isfinite()).nonzero()
    if len(bad):
        where = tuple(bad[0].tolist())
        raise DataError(
            f"fit: the matrix holds {len(bad)} values that are not finite, the first at {where}: {float(dense[where])}"
        )
    return target


def scale_of(target: Tensor) -> float:
    """The power of two next to the largest magnitude, 1 for zeros: divided by it, squares neither overflow
    nor vanish.
    """
    largest = float(target.abs().max())
    return 2.0 ** min(_HUGE, max(_TINY, math.frexp(largest)[1])) if largest else 1.0


@torch.no_grad()
def matrix_errors(m: StructuredMatrix, target: Tensor) -> Tensor:
    """||M - target|| of every matrix of a batch, over ``scale_of(target)``: (*batch_shape,).

    Args:
        m: of any dtype; its dense form in that dtype is compared.
        target: (*batch_shape, num_rows, num_cols), float64.
    """
    scale = scale_of(target)
    return torch.linalg.matrix_norm(m.to_dense().double() / scale - target / scale)


def relative_error(m: StructuredMatrix, target: Tensor) -> float:
    """||M - target|| / ||target|| over a whole batch (of zeros: the absolute error); arguments as
    ``matrix_errors``.
    """
    size = float((target / scale_of(target)).norm()) or 1.0
    return float(matrix_errors(m, target).norm()) / size
