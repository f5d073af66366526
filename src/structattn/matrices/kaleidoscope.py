"""Kaleidoscope: products of butterflies and transposed butterflies."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from structattn.checks import check_size
from structattn.errors import ConfigError
from structattn.grammar import positive
from structattn.matrices.block_term import TermFactors, one_block
from structattn.matrices.butterfly import Butterfly, default_radices
from structattn.matrices.elementary import Dense
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.family import Family, TextValue
from structattn.matrices.solver import Solver, Tick

_MOST_PAIRS = 1024  # of butterflies, which are modules themselves


class Kaleidoscope(FactoredMatrix):
    """M = A_1 B_1ᵀ ... A_w B_wᵀ with Butterfly matrices A_i, B_i of rank 1: the class (BB*)^w.

    Every sparse or fast linear transform has a member of this class near its own cost; the price is twice the
    stages.

    Args:
        num_rows, num_cols: shape of one matrix.
        width: w. Default 1.
        inner_size: size between the butterflies. Default: max(num_rows, num_cols).
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``. The right factor is B_w.

    Attributes:
        left: A_1, B_1, ..., A_w, as ``Butterfly``.
        right: B_w.

    Raises:
        ConfigError: a size, or the size inside, has a prime factor above 7.

    Cost: w times 4 E log2 E parameters for E a power of two, twice that in FLOPs per vector.

    Source: Dao et al. 2020, Kaleidoscope: an efficient, learnable representation for all structured linear
        maps.
    """

    right: Butterfly

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        width: int = 1,
        *,
        inner_size: int | None = None,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(
            num_rows, num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        check_size("Kaleidoscope width", width, _MOST_PAIRS)
        self.width = width
        self.inner_size = max(num_rows, num_cols) if inner_size is None else inner_size
        check_size("Kaleidoscope inner_size", self.inner_size)
        for size in (num_rows, num_cols, self.inner_size):
            default_radices(size, size, "Kaleidoscope")
        heights = [num_rows, *[self.inner_size] * (2 * width - 2)]
        self.left = nn.ModuleList(
            Butterfly(height, self.inner_size, batch_shape=self.batch_shape, rms_cap=rms_cap) for height in heights
        )
        self.right = Butterfly(num_cols, self.inner_size, batch_shape=self.right_batch_shape, rms_cap=rms_cap)
        self.reset_parameters()

    @property
    def _chain(self) -> list[Butterfly]:
        return list(self.left)  # type: ignore[arg-type]

    @property
    def butterflies(self) -> list[Butterfly]:
        """A_1, B_1, ..., A_w, B_w."""
        return [*self._chain, self.right]

    @torch.no_grad()
    def reset_parameters(self, fan_ins: Mapping[str, int] | None = None) -> None:
        """Draws every butterfly as ``Butterfly`` does, the transposed ones by the fan-in of their transposed
        stages.
        """
        drawn = {**(self.product_fan_ins if fan_ins is None else {}), **self._checked(fan_ins)}
        for prefix, butterfly in self._named_butterflies():
            names = [name for name in butterfly.product_fan_ins if f"{prefix}.{name}" in drawn]
            if names:
                butterfly.reset_parameters({name: drawn[f"{prefix}.{name}"] for name in names})

    def _named_butterflies(self) -> list[tuple[str, Butterfly]]:
        return [*((f"left.{i}", butterfly) for i, butterfly in enumerate(self._chain)), ("right", self.right)]

    @property
    def options(self) -> dict[str, Any]:
        return {"width": self.width, "inner_size": self.inner_size, **super().options}

    @property
    def factor_groups(self) -> list[list[nn.Parameter]]:
        return [group for butterfly in self.butterflies for group in butterfly.factor_groups]

    @property
    def product_fan_ins(self) -> dict[str, int]:
        """n_t of the stages of A, m_t of those of B, whose stages act transposed."""
        return self._fan_ins([index % 2 == 1 for index in range(2 * self.width)])

    @property
    def feature_fan_ins(self) -> dict[str, int]:
        """Left butterflies act in the other direction than in a product."""
        return self._fan_ins([index % 2 == 0 for index in range(2 * self.width - 1)] + [True])

    def _fan_ins(self, are_transposed: list[bool]) -> dict[str, int]:
        """The fan-ins of all stages, m_t where the butterfly acts transposed."""
        return {
            f"{prefix}.{name}": butterfly.get_parameter(name).shape[-2 if is_transposed else -1]
            for (prefix, butterfly), is_transposed in zip(self._named_butterflies(), are_transposed, strict=True)
            for name in butterfly.product_fan_ins
        }

    def _left_features(self, x: Tensor) -> Tensor:
        for index, butterfly in enumerate(self._chain):
            x = butterfly._rmatmul(x) if index % 2 == 0 else butterfly._matmul(x)
        return x

    def _left_expand(self, u: Tensor) -> Tensor:
        for index, butterfly in reversed(list(enumerate(self._chain))):
            u = butterfly._matmul(u) if index % 2 == 0 else butterfly._rmatmul(u)
        return u

    def _right_features(self, y: Tensor) -> Tensor:
        return self.right._rmatmul(y)

    def _right_expand(self, w: Tensor) -> Tensor:
        if self.right_batch_shape == self.batch_shape:
            return self.right._matmul(w)
        if w.shape[0] == 1:  # vectors that all matrices share: once per right factor
            return self._spread_right(self.right._matmul(w))
        return self._per_group(w, self.right._matmul)

    @property
    def inner_dim(self) -> int:
        """The size between the last two butterflies."""
        return self.inner_size

    @property
    def left_flops(self) -> int:
        """Those of all butterflies but the last."""
        return sum(butterfly.flops for butterfly in self._chain)

    @property
    def right_flops(self) -> int:
        """Those of the last butterfly."""
        return self.right.flops

    @property
    def rank_bound(self) -> int:
        """The smallest rank bound of its butterflies."""
        return min(butterfly.rank_bound for butterfly in self.butterflies)

    def solver(self) -> Solver:
        return Solver(self._start, "butterfly times identities")

    def _start(self, target: Tensor, tick: Tick) -> None:
        """One butterfly fitted to the target, every other one the identity, if an end of the chain has the
        target's shape.
        """
        butterflies = self.butterflies
        ends = []
        if self.num_cols == self.inner_size:
            ends.append((butterflies[0], target))
        if self.num_rows == self.inner_size:
            ends.append((butterflies[-1], target.t()))
        trials = []
        for end, goal in ends:
            for butterfly in butterflies:
                if butterfly is end:
                    butterfly.factorize(goal)
                else:
                    for stage in butterfly.stages:
                        stage.copy_(torch.eye(stage.shape[-2], stage.shape[-1]).to(stage).expand_as(stage))
            trials.append((float((self.to_dense() - target).square().sum()), copy.deepcopy(self.state_dict())))
        if trials:
            self.load_state_dict(min(trials, key=lambda trial: trial[0])[1])

    @torch.no_grad()
    def block_terms(self) -> list[TermFactors]:
        """One stage: a product of dense matrices. A narrow inside: low rank, everything but the last
        butterfly on the left.
        """
        mixing = max(
            sum(max(pair) > 1 for pair in zip(butterfly.row_radices, butterfly.col_radices, strict=True))
            for butterfly in self.butterflies
        )
        if self.inner_size * (self.num_rows + self.num_cols) < self.num_rows * self.num_cols:
            eye = torch.eye(self.inner_size, dtype=self.right.stages[0].dtype, device=self.right.stages[0].device)
            left = self._left_expand(eye.expand(self.num_matrices, -1, -1)).reshape(
                *self.batch_shape, self.num_rows, self.inner_size
            )
            right = self.right._matmul(eye[None]).reshape(*self.right_batch_shape, self.num_cols, self.inner_size)
            return one_block(left, right)
        if mixing > 1:
            raise ConfigError(
                f"a Kaleidoscope whose butterflies have {mixing} stages is not one MLBTC term: its stages mix the "
                f"indices 1, ..., {mixing}, ..., 1 in turn, and a term holds two runs of stages, each of which must "
                "leave some index unchanged, but wherever the cut is, one run mixes them all and becomes one dense "
                "block. It is a term smaller than a dense matrix only if its butterflies have one stage, or its "
                "inner_size makes it low rank. Use MLBTC.from_matrix on each butterfly, or fit an MLBTC to to_dense()"
            )
        dense = Dense(self.num_rows, self.num_cols, batch_shape=self.batch_shape)
        dense.weight = torch.nn.Parameter(self.to_dense())
        return dense.block_terms()


FAMILY = Family(
    Kaleidoscope,
    "kaleidoscope[:W]",
    "kaleidoscope",
    "a product of W pairs of a butterfly and a transposed butterfly (1 by default)",
    TextValue("width", positive, is_optional=True),
)
