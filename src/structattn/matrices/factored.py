"""Structured matrices of two factors, M = L R^T: bilinear forms by features, and right factors that grouped
heads share.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from structattn.checks import check_bool, check_choice, check_int, check_sizes
from structattn.errors import ConfigError
from structattn.matrices.base import Order, StructuredMatrix


class FactoredMatrix(StructuredMatrix):
    """A structured matrix M = L R^T of two structured factors: its bilinear form is <L^T x, R^T y>.

    The right factors may be shared between matrices of the batch, as grouped key/value heads are:
    ``right_batch_shape`` broadcasts to ``batch_shape``, for example ``batch_shape=(G, H // G)`` and
    ``right_batch_shape=(G, 1)``.

    A structure implements the four half products on canonical shapes, ``left_flops``/``right_flops`` and
    ``inner_dim``.

    Args:
        num_rows, num_cols, batch_shape: see ``StructuredMatrix``.
        right_batch_shape: batch dimensions of the right factors. Default: ``batch_shape``.
        rms_cap: divide each factor W by max(1, rms(W) / sigma) before use, one rms per matrix of the batch,
            with sigma^2 = min(f_in, f_out) / f_in^2 and f_in, f_out the sizes of one block. Default
            ``False``.

    Raises:
        ConfigError: a size is wrong, or ``right_batch_shape`` does not broadcast to ``batch_shape``.

    Source: Kuang et al. 2025, section 3; the cap is the weight normalisation of their structured factors.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        *,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(num_rows, num_cols, batch_shape=batch_shape)
        name = f"{type(self).__name__} right_batch_shape"
        right = self.batch_shape if right_batch_shape is None else check_sizes(name, right_batch_shape)
        check_bool(f"{type(self).__name__}: rms_cap", rms_cap)
        if len(right) != len(self.batch_shape) or any(
            a not in (1, b) for a, b in zip(right, self.batch_shape, strict=True)
        ):
            raise ConfigError(f"right_batch_shape {right} does not broadcast to batch_shape {self.batch_shape}")
        self.right_batch_shape = right
        self.rms_cap = rms_cap

    @property
    @abstractmethod
    def inner_dim(self) -> int:
        """F, the number of features of each side."""

    @property
    @abstractmethod
    def left_flops(self) -> int:
        """FLOPs of L^T x (or L u) for one vector and one matrix."""

    @property
    @abstractmethod
    def right_flops(self) -> int:
        """FLOPs of R^T y (or R w) for one vector and one matrix."""

    @abstractmethod
    def _left_features(self, x: Tensor) -> Tensor:
        """L^T x for feature-major x (1 or P, M, R): (P, F, R)."""

    @abstractmethod
    def _left_expand(self, u: Tensor) -> Tensor:
        """L u for u (P, F, R): (P, M, R)."""

    @abstractmethod
    def _right_features(self, y: Tensor) -> Tensor:
        """R^T y for feature-major y (1 or P', N, R): (P', F, R), with P' the number of right factors."""

    @abstractmethod
    def _right_expand(self, w: Tensor) -> Tensor:
        """R w for w (P, F, R): (P, N, R)."""

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """As ``StructuredMatrix.options``; a structure adds its own to this one, ``rms_cap``."""
        return {"rms_cap": self.rms_cap} if self.rms_cap else {}

    def rebatched(self, batch_shape: Sequence[int], right_batch_shape: Sequence[int] | None = None) -> Self:
        """As ``StructuredMatrix.rebatched``, with ``right_batch_shape`` for shared right factors."""
        new = type(self)(
            self.num_rows, self.num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, **self.options
        )
        return new.to(next(self.parameters()))

    @property
    def feature_fan_ins(self) -> dict[str, int]:
        """``product_fan_ins`` for the use in a bilinear form, where BOTH factors are applied to inputs.

        Default: the same. A structure whose left factor reads inputs rather than features says so here.
        """
        return self.product_fan_ins

    @property
    def flops(self) -> int:
        """FLOPs of M x for one vector and one matrix: both factors."""
        return self.left_flops + self.right_flops

    @property
    def orders(self) -> tuple[Order, ...]:
        """All three."""
        return ("factored", "formed_left", "formed_right")

    def projection_flops(self, order: Order, num_left: int, num_right: int) -> int:
        """FLOPs of the two sides before they meet; shared right factors are applied once per group where they
        come first.
        """
        check_choice("order", order, self.orders)
        check_int("num_left", num_left, minimum=0)
        check_int("num_right", num_right, minimum=0)
        right = math.prod(self.right_batch_shape) * num_right * self.right_flops
        match order:
            case "factored":
                return self.num_matrices * num_left * self.left_flops + right
            case "formed_left":
                return self.num_matrices * num_left * self.flops
            case "formed_right":
                return right + self.num_matrices * num_right * self.left_flops
        raise AssertionError(order)  # checked above

    def pair_dim(self, order: Order) -> int:
        """The inner dimension of the factors, or that of the side that is not formed."""
        check_choice("order", order, self.orders)
        return self.inner_dim if order == "factored" else super().pair_dim(order)

    def scale_(self, factor: float) -> None:
        if self.rms_cap:
            raise ConfigError(f"{type(self).__name__} with rms_cap does not follow the scale of its factors")
        super().scale_(factor)

    def _spread_right(self, x: Tensor) -> Tensor:
        """Repeats (P', ...) over the matrices that share a right factor: (P, ...)."""
        if self.right_batch_shape == self.batch_shape:
            return x
        tail = x.shape[1:]
        wide = x.reshape(*self.right_batch_shape, *tail).expand(*self.batch_shape, *tail)
        return wide.reshape(self.num_matrices, *tail)

    def left_features(self, x: Tensor) -> Tensor:
        """w = L^T x, for x (..., T, num_rows): (..., *batch_shape, T, inner_dim)."""
        return self._on_rows(self._left_features, x, self.num_rows, self.batch_shape)

    def right_features(self, y: Tensor) -> Tensor:
        """u = R^T y, for y (..., S, num_cols): (..., *right_batch_shape, S, inner_dim)."""
        return self._on_rows(self._right_features, y, self.num_cols, self.right_batch_shape)

    def right_expand(self, w: Tensor) -> Tensor:
        """R w, the adjoint of ``right_features``, for w (..., *batch_shape, T, inner_dim): (...,
        *batch_shape, T, num_cols).
        """
        return self._on_rows(self._right_expand, w, self.inner_dim, self.batch_shape)

    def _matmul(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1 or self.right_batch_shape == self.batch_shape:
            return self._left_expand(self._spread_right(self._right_features(x)))
        return self._left_expand(self._per_group(x, self._right_features))

    def _per_group(self, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        """The right product of vectors that differ between matrices with one right factor: those dimensions
        join R.
        """
        depth = len(self.batch_shape)
        shared = [d for d in range(depth) if self.right_batch_shape[d] != self.batch_shape[d]]
        kept = [d for d in range(depth) if d not in shared]
        size, tokens = x.shape[-2:]
        group = x.reshape(*self.batch_shape, size, tokens)
        folded = group.permute(*kept, depth, *shared, depth + 1).reshape(math.prod(self.right_batch_shape), size, -1)
        out = apply(folded)
        order = (*kept, depth, *shared)
        dims = [out.shape[1] if d == depth else self.batch_shape[d] for d in order]
        out = out.reshape(*dims, tokens)
        back = [order.index(d) for d in range(depth)]
        return out.permute(*back, order.index(depth), depth + 1).reshape(self.num_matrices, dims[len(kept)], tokens)

    def _rmatmul(self, x: Tensor) -> Tensor:
        return self._right_expand(self._left_features(x))

    def bilinear(self, x: Tensor, y: Tensor) -> Tensor:
        """x^T M y for every pair of vectors, in the cheapest order; see ``StructuredMatrix.bilinear``."""
        self._check_pairs(x, y)
        # Vectors that differ between matrices with one right factor have no features of that factor's batch.
        fits = all(a in (1, b) for a, b in zip(y.shape[-3::-1], self.right_batch_shape[::-1], strict=False))
        if fits and self.contraction(max(1, x.shape[-2]), max(1, y.shape[-2])).order == "factored":
            return self.left_features(x) @ self.right_features(y).transpose(-2, -1)
        return super().bilinear(x, y)

    def _used(self, factor: Tensor, fan_in_dim: int) -> Tensor:
        """A factor as it is used, (P or P', ...): with ``rms_cap`` divided by max(1, rms / sigma), per
        matrix.

        Args:
            fan_in_dim: -1 or -2, the dimension of a block whose size is f_in; the other one is f_out.
        """
        weight = factor.reshape(-1, *factor.shape[len(self.batch_shape) :])
        if not self.rms_cap:
            return weight
        sigma = math.sqrt(min(weight.shape[-2:])) / weight.shape[fan_in_dim]
        # Squares overflow half precision, and the root has no gradient at zero, where the cap does not bind
        # anyway.
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        shrink = (wide.flatten(1) / sigma).square().mean(dim=-1).clamp(min=1.0).sqrt()
        return (wide / shrink.reshape(-1, *(1,) * (weight.dim() - 1))).to(weight.dtype)
