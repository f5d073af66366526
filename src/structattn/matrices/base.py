"""The contract of a structured matrix.

A structure supplies the products of ONE vector family with its matrix and its transpose, on inputs in a
canonical shape; everything else (batches, heads, dense form, bilinear form, choice of contraction) is here.

Axes: P matrices (all heads), R vectors, M x N the shape of one matrix, F inner dimension of the factors. The
canonical shape is feature-major, (P, size, R); ``feature_major.py`` says why.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from structattn.checks import (
    check_choice,
    check_int,
    check_like,
    check_number,
    check_size,
    check_sizes,
    check_tensor,
    check_type,
    holds,
    quoted,
)
from structattn.errors import ConfigError, ShapeError
from structattn.matrices.block_term import TermFactors
from structattn.matrices.feature_major import to_feature_major, to_token_major
from structattn.matrices.solver import Solver
from structattn.memory import check_memory
from structattn.optim.roles import Role

Order = Literal["factored", "formed_left", "formed_right"]

# On a CPU a matrix of at most this many rows and columns is written out before it multiplies many vectors.
# One core (AMD EPYC, MKL, float32), forward and backward of 4,096 vectors, times faster than the factors:
# btt:1 2.0 at 64, 1.4 at 128, 0.8 at 256; 8 of them 1.9, 1.4 and 1.1; the features of 8 mlr:4|2|2 1.7 at 64.
MOST_ROWS_WRITTEN_OUT = 128
# Writing it out costs as much as multiplying that many columns; with fewer vectors than this many times the
# rows or columns, 8 matrices of 128 x 128 lose.
VECTORS_PER_COLUMN = 4


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """How a bilinear form over T x S pairs is computed, and what each way costs (FLOPs, all matrices of the
    batch).

    Attributes:
        order: ``"factored"`` <w(x), u(y)> of the inner dimension; ``"formed_left"`` (M^T x) against y;
            ``"formed_right"`` x against (M y).
        flops: cost of the chosen order.
        alternatives: cost of every order that the structure has.
    """

    order: Order
    flops: int
    alternatives: Mapping[Order, int]


# A structure is there to have fewer numbers than a dense matrix. Tests and small examples have more; a rank
# of 100,000 is a mistake.
_MOST_NUMBERS = 16
_FEW = 64 * 64  # numbers of a matrix that is so small that any rank is cheap


@contextmanager
def without_autocast() -> Iterator[None]:
    """Products are computed in the dtype of their factors."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def check_matrix_size(name: str, num_rows: int, num_cols: int) -> None:
    """Raises ``ConfigError`` unless both are sizes."""
    check_size(f"{name}: num_rows", num_rows)
    check_size(f"{name}: num_cols", num_cols)


class StructuredMatrix(nn.Module, ABC):
    """A differentiable matrix M of shape (num_rows, num_cols), or a batch of them, that is never stored
    densely.

    A structure implements ``_matmul``, ``_rmatmul``, ``flops``, ``rank_bound``, ``options``,
    ``factor_groups`` and ``product_fan_ins``; ``solver`` and ``block_terms`` where it has them. Every
    parameter has the batch dimensions in front.

    Args:
        num_rows: rows of one matrix.
        num_cols: columns of one matrix.
        batch_shape: leading dimensions of a batch of matrices, such as ``(num_heads,)``. Default ``()``: one
            matrix.

    Raises:
        ConfigError: a size is not a positive int.
    """

    def __init__(self, num_rows: int, num_cols: int, *, batch_shape: Sequence[int] = ()) -> None:
        super().__init__()
        check_matrix_size(type(self).__name__, num_rows, num_cols)
        self.num_rows = num_rows
        self.num_cols = num_cols
        self.batch_shape = check_sizes(f"{type(self).__name__} batch_shape", batch_shape)

    def _empty(self, *shape: int) -> nn.Parameter:
        """A new factor without numbers.

        Raises:
            ConfigError: it has far more numbers than the dense matrix, so that a rank is a mistake; or memory
                cannot hold it.
        """
        count = math.prod(shape) // math.prod(self.batch_shape)
        if count > (most := _MOST_NUMBERS * max(self.num_rows * self.num_cols, _FEW)):
            raise ConfigError(
                f"a factor of a {self.num_rows} x {self.num_cols} {type(self).__name__} would have {count:,} numbers: "
                f"expected at most {most:,}, {_MOST_NUMBERS} times a dense matrix; choose a smaller rank"
            )
        check_memory(f"the factors of a {self.num_rows} x {self.num_cols} {type(self).__name__}", math.prod(shape))
        return nn.Parameter(torch.empty(*shape))

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The arguments of the structure besides sizes and batch:
        ``type(m)(num_rows, num_cols, **m.options)`` has the same structure.
        """

    def rebatched(self, batch_shape: Sequence[int]) -> Self:
        """A new matrix of the same structure and size, with fresh parameters of the same dtype and device.

        Args:
            batch_shape: its batch dimensions.
        """
        new = type(self)(self.num_rows, self.num_cols, batch_shape=batch_shape, **self.options)
        return new.to(next(self.parameters()))

    def solver(self) -> Solver:
        """How ``fit`` finds the nearest matrix of this structure: by default from the weights that it has,
        which are then refined.
        """
        return Solver(lambda target, tick: None, "its own start")

    def block_terms(self) -> list[TermFactors]:
        """The matrix as a sum of block terms, exactly; the factors are those in use (after ``rms_cap``),
        without gradient.

        Raises:
            ConfigError: the structure is no such sum, or one that is not smaller than a dense matrix.
        """
        raise ConfigError(
            f"{type(self).__name__} has no block terms that are known: fit an MLBTC to to_dense(), or give the class "
            "a method block_terms"
        )

    @property
    @abstractmethod
    def product_fan_ins(self) -> dict[str, int]:
        """For every factor, by its parameter name: the numbers that one entry of its output sums over in M x.

        This is the fan-in of one block, which sets the initial scale and, under muP, the learning rate.
        Parameters that are not matrices (the weights of a sum of terms) are left out.
        """

    @property
    def initial_fan_ins(self) -> dict[str, int]:
        """The fan-ins that a new matrix is drawn with: ``product_fan_ins`` unless the structure says
        otherwise.
        """
        return self.product_fan_ins

    @property
    def factor_uses(self) -> dict[str, int]:
        """The number of slices of one vector that the same factor multiplies, for the factors where it is
        more than one; see ``mup.Role``.
        """
        return {}

    def factor_roles(self, fan_ins: Mapping[str, int]) -> dict[str, Role]:
        """The muP roles of the factors, with fan-ins by parameter name."""
        uses = self.factor_uses
        return {name: Role(kind="factor", fan_in=fan_in, uses=uses.get(name, 1)) for name, fan_in in fan_ins.items()}

    def parameter_roles(self) -> dict[str, Role]:
        """The muP role of every parameter: a factor with its fan-in in M x, or a gain for a parameter that is
        not a matrix.
        """
        factors = self.factor_roles(self.product_fan_ins)
        return {name: factors[name] if name in factors else Role(kind="gain") for name, _ in self.named_parameters()}

    @torch.no_grad()
    def reset_parameters(self, fan_ins: Mapping[str, int] | None = None) -> None:
        """Draws every factor from a normal of standard deviation 1/sqrt(fan-in of one block).

        Args:
            fan_ins: by parameter name. Default: ``initial_fan_ins``.

        Raises:
            ConfigError: a name is not that of a factor, or a fan-in is not a positive int.
        """
        for name, fan_in in self._checked(fan_ins).items():
            nn.init.normal_(self.get_parameter(name), std=1 / math.sqrt(fan_in))

    def _checked(self, fan_ins: Mapping[str, int] | None) -> Mapping[str, int]:
        if fan_ins is None:
            return self.initial_fan_ins
        check_type("fan_ins", fan_ins, Mapping, "a dict of fan-ins by parameter name, or None")
        for name, fan_in in fan_ins.items():
            if name not in self.product_fan_ins:
                raise ConfigError(
                    f"{type(self).__name__} has no factor {quoted(name)}; it has {', '.join(self.product_fan_ins)}"
                )
            check_size(f"fan-in of {name}", fan_in)
        return fan_ins

    @property
    @abstractmethod
    def factor_groups(self) -> list[list[nn.Parameter]]:
        """The factors in groups: M is linear in each group, so that scaling every group by t scales M by
        t^(number of groups).
        """

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiplies M by a number in place, spread evenly over the groups of factors; the sign goes to the
        first.

        Raises:
            ConfigError: the factors are capped (``rms_cap``), so that M does not follow their scale.
        """
        check_number("factor", factor)
        share = abs(factor) ** (1 / len(self.factor_groups))
        for index, group in enumerate(self.factor_groups):
            for parameter in group:
                parameter.mul_(math.copysign(share, factor) if index == 0 else share)

    @abstractmethod
    def _matmul(self, x: Tensor) -> Tensor:
        """M x for feature-major x (1 or P, N, R): (P, M, R). With a leading 1 every matrix gets the same
        vectors.
        """

    @abstractmethod
    def _rmatmul(self, x: Tensor) -> Tensor:
        """M^T x for feature-major x (1 or P, M, R): (P, N, R)."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """FLOPs of M x for one vector and one matrix, 2 per multiply-add; M^T x costs the same."""

    @property
    @abstractmethod
    def rank_bound(self) -> int:
        """The largest rank that one matrix of this structure can have; random factors reach it."""

    @property
    def num_matrices(self) -> int:
        """The number of matrices in the batch, 1 without batch dimensions."""
        return math.prod(self.batch_shape)

    @property
    def num_params(self) -> int:
        """The number of parameters of all the matrices of the batch."""
        return sum(p.numel() for p in self.parameters())

    def _check_vectors(self, x: Tensor, size: int) -> None:
        """Raises ``ShapeError`` for what this matrix cannot multiply."""
        what = f"{type(self).__name__} {self.num_rows} x {self.num_cols}"
        check_tensor(f"{what}: the vectors", x)
        if x.dim() < 1 or x.shape[-1] != size:
            raise ShapeError(
                f"{what}: expected vectors of {size} numbers in the last dimension, got shape {tuple(x.shape)}"
            )
        parameter = next(self.parameters())
        if hasattr(parameter, "full_tensor") and not hasattr(
            x, "full_tensor"
        ):  # a DTensor, whose class is slow to import
            raise ConfigError(
                f"{what}: the factors are divided among processes; call the module that was divided, which computes "
                "with its own parts"
            )
        check_like(f"{what}: the tensor of vectors", x, parameter)

    def _on_rows(self, apply: Callable[[Tensor], Tensor], x: Tensor, size: int, batch_shape: tuple[int, ...]) -> Tensor:
        """Brings x (..., T, size) to the canonical shape, applies the product, and brings the result back.

        Dimensions of x before T broadcast against ``batch_shape``; vectors that all matrices share are not
        repeated.
        """
        self._check_vectors(x, size)
        depth = len(batch_shape)
        vector = x.dim() == 1
        tokens = x[None] if vector else x
        lead = (1,) * max(0, depth - (tokens.dim() - 2)) + tuple(tokens.shape[:-2])
        outer, inner = lead[: len(lead) - depth], lead[len(lead) - depth :]
        if any(a not in (1, b) for a, b in zip(inner, batch_shape, strict=True)):
            raise ShapeError(
                f"{type(self).__name__} with batch_shape {batch_shape}: the dimensions of x before the last two must "
                f"broadcast to it, got shape {tuple(x.shape)}"
            )
        num_tokens, num_outer, num = tokens.shape[-2], len(outer), math.prod(batch_shape)
        is_shared = all(a == 1 for a in inner)
        if is_shared and self._is_written_out(x, size):
            identity = torch.eye(size, dtype=x.dtype, device=x.device)
            matrix = apply(identity[None])
            rows = tokens.reshape(-1, size) @ matrix.flatten(0, 1).t()
            rows = rows.reshape(*outer, num_tokens, *batch_shape, matrix.shape[1])
            rows = rows.movedim(num_outer, -2)
            return rows.squeeze(-2) if vector else rows
        if is_shared:
            vectors = to_feature_major(tokens.reshape(-1, size))[None]
        else:
            full = tokens.reshape(*lead, num_tokens, size).expand(*outer, *batch_shape, num_tokens, size)
            # The dimension of the matrices is between tokens and features, so one 2-D transposition serves
            # all of them.
            order = [*range(num_outer), num_outer + depth, *range(num_outer, num_outer + depth), num_outer + depth + 1]
            vectors = to_feature_major(full.permute(order).flatten(0, num_outer).flatten(1)).unflatten(0, (num, size))
        out = apply(vectors)
        height = out.shape[1]
        rows = to_token_major(out.reshape(num * height, out.shape[2])).reshape(*outer, num_tokens, *batch_shape, height)
        order = [*range(num_outer), *range(num_outer + 1, num_outer + 1 + depth), num_outer, num_outer + 1 + depth]
        rows = rows.permute(order)
        return rows.squeeze(-2) if vector else rows

    def _is_written_out(self, x: Tensor, size: int) -> bool:
        """Whether to multiply vectors (..., size) by a matrix written out: see ``MOST_ROWS_WRITTEN_OUT``."""
        if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        is_small = max(self.num_rows, self.num_cols, size) <= MOST_ROWS_WRITTEN_OUT
        return is_small and holds(x.numel() >= VECTORS_PER_COLUMN * size * max(self.num_rows, self.num_cols, size))

    def matmul(self, x: Tensor) -> Tensor:
        """M x. On a CPU many vectors are multiplied by a small matrix written out, which is faster; it
        differs by rounding.

        Args:
            x: (..., T, num_cols), or one vector (num_cols,); dimensions before T broadcast against
                ``batch_shape``.

        Returns:
            (..., *batch_shape, T, num_rows).

        Raises:
            ShapeError: the last dimension or the batch dimensions do not fit.

        Cost: ``flops`` for each vector and matrix, counted as those of the structure in either case.
        """
        return self._on_rows(self._matmul, x, self.num_cols, self.batch_shape)

    def rmatmul(self, x: Tensor) -> Tensor:
        """M^T x, for x (..., T, num_rows); see ``matmul``."""
        return self._on_rows(self._rmatmul, x, self.num_rows, self.batch_shape)

    def forward(self, x: Tensor) -> Tensor:
        """M x; see ``matmul``."""
        return self.matmul(x)

    def to_dense(self) -> Tensor:
        """M as a dense tensor (*batch_shape, num_rows, num_cols), differentiable, in its own dtype also under
        autocast.

        Cost: ``num_cols`` products.
        """
        parameter = next(self.parameters())
        eye = torch.eye(self.num_cols, dtype=parameter.dtype, device=parameter.device)
        with without_autocast():
            return self.matmul(eye).transpose(-2, -1)

    def projection_flops(self, order: Order, num_left: int, num_right: int) -> int:
        """FLOPs of the two sides of the bilinear form before they meet, for T left and S right vectors, all
        matrices.
        """
        check_choice("order", order, self.orders)
        check_int("num_left", num_left, minimum=0)
        check_int("num_right", num_right, minimum=0)
        num = num_left if order == "formed_left" else num_right
        return self.num_matrices * num * self.flops

    def pair_dim(self, order: Order) -> int:
        """The dimension in which the two sides meet."""
        check_choice("order", order, self.orders)
        return self.num_cols if order == "formed_left" else self.num_rows

    @property
    def orders(self) -> tuple[Order, ...]:
        """The orders of contraction that the structure has, the preferred one first."""
        return ("formed_left", "formed_right")

    def contraction(self, num_left: int, num_right: int) -> Contraction:
        """The cheapest way to compute the bilinear form of ``num_left`` x ``num_right`` pairs, by counting
        FLOPs.

        On a tie formed_left wins, in which all matrices of a batch share y, then factored.

        Raises:
            ConfigError: a number is not a positive int.
        """
        check_size("num_left", num_left)
        check_size("num_right", num_right)
        costs = {
            order: self.projection_flops(order, num_left, num_right)
            + 2 * self.num_matrices * num_left * num_right * self.pair_dim(order)
            for order in self.orders
        }
        shared_first = sorted(self.orders, key=lambda order: order != "formed_left")
        cheapest = (a for a in shared_first if all(holds(costs[a] <= costs[b]) for b in self.orders))
        order = next(cheapest, self.orders[0])  # an exported program whose lengths decide has the preferred one
        return Contraction(order=order, flops=costs[order], alternatives=costs)

    def bilinear(self, x: Tensor, y: Tensor) -> Tensor:
        """x^T M y for every pair of vectors.

        Args:
            x: (..., T, num_rows); dimensions before T broadcast against ``batch_shape``.
            y: (..., S, num_cols), likewise.

        Returns:
            (..., *batch_shape, T, S).

        Raises:
            ShapeError: a shape does not fit.

        Cost: that of ``contraction(T, S)``.
        """
        self._check_pairs(x, y)
        if self.contraction(max(1, x.shape[-2]), max(1, y.shape[-2])).order == "formed_left":
            return self.rmatmul(x) @ y.transpose(-2, -1)
        return x @ self.matmul(y).transpose(-2, -1)

    def _check_pairs(self, x: Tensor, y: Tensor) -> None:
        for name, vectors, size in (("x", x, self.num_rows), ("y", y, self.num_cols)):
            self._check_vectors(vectors, size)
            if vectors.dim() < 2:
                raise ShapeError(f"bilinear: {name} must have shape (..., tokens, {size}), got {tuple(vectors.shape)}")
        try:
            torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], self.batch_shape)
        except RuntimeError:
            raise ShapeError(
                f"bilinear: the dimensions before the last two must broadcast with each other and with batch_shape "
                f"{self.batch_shape}, got {tuple(x.shape)} and {tuple(y.shape)}"
            ) from None

    def extra_repr(self) -> str:
        """The arguments, for ``repr``."""
        options = {**self.options, **({"batch_shape": self.batch_shape} if self.batch_shape else {})}
        return ", ".join([f"{self.num_rows}, {self.num_cols}", *(f"{name}={value}" for name, value in options.items())])
