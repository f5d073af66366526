"""The shape of a block term P_L (⊕ L) P_R (⊕ Rᵀ), and a term with its factors.

A permutation is a name or indices: ``"identity"``; ``"stride"``, which exchanges the block index with the
index inside a block; or a tuple ``p`` with (P z)[i] = z[p[i]].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from structattn.checks import check_choice, check_size, describe, is_int
from structattn.errors import ConfigError

Permutation = Literal["identity", "stride"] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BlockTerm:
    """The shape of one term P_L (⊕_{k'=1..b} L_{k'}) P_R (⊕_{k=1..c} R_kᵀ) of a num_rows x num_cols matrix.

    L_{k'} is num_rows/b x F/b and R_k is num_cols/c x F/c, with F the inner dimension. Low rank: b = c = 1, F
    = r. A level of MLR: b = c = p, F = p r. BTT: F = b c s and both permutations ``"stride"``.

    Args:
        left_blocks: b, divides num_rows and F.
        right_blocks: c, divides num_cols and F.
        inner_dim: F.
        left_permutation: P_L, of num_rows. ``"stride"``: row (i_a, i_b) is (i_b, i_a) of the blocks.
        right_permutation: P_R, of F. ``"stride"``: feature (k', k, i_s) is (k, k', i_s) of the right blocks,
            so b c divides F.

    Raises:
        ConfigError: a number is not a positive int, the blocks do not divide F, or the indices are not a
            permutation.

    Source: Kuang et al. 2025, section 3 (multi-level block tensor contraction).
    """

    left_blocks: int
    right_blocks: int
    inner_dim: int
    left_permutation: Permutation = "identity"
    right_permutation: Permutation = "identity"

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            *,
            left_blocks: int,
            right_blocks: int,
            inner_dim: int,
            left_permutation: Permutation | Sequence[int] = "identity",
            right_permutation: Permutation | Sequence[int] = "identity",
        ) -> None: ...

    def __post_init__(self) -> None:
        b, c, inner = self.left_blocks, self.right_blocks, self.inner_dim
        for name in ("left_blocks", "right_blocks", "inner_dim"):
            check_size(f"BlockTerm: {name}", getattr(self, name))
        unit = b * c if self.right_permutation == "stride" else 1
        for name, divisor in (("left_blocks", b), ("right_blocks", c), ("left_blocks * right_blocks", unit)):
            if inner % divisor:
                raise ConfigError(
                    f"BlockTerm: inner_dim must be a multiple of {name} = {divisor}, got {inner}; use "
                    f"{_near_multiples(inner, divisor)}"
                )
        for name in ("left_permutation", "right_permutation"):
            value = getattr(self, name)
            if isinstance(value, str):
                check_choice(name, value, ("identity", "stride"))
                continue
            if not isinstance(value, tuple | list) or not all(is_int(i) for i in value):
                raise ConfigError(f"{name} is 'identity', 'stride' or a tuple of ints, got {describe(value)}")
            indices = tuple(value)
            if sorted(indices) != list(range(len(indices))):
                raise ConfigError(f"{name}: the indices must be a permutation of 0 ... n - 1, got {indices[:8]} ...")
            object.__setattr__(self, name, indices)
        if not isinstance(self.right_permutation, str) and len(self.right_permutation) != inner:
            raise ConfigError(f"right_permutation must have {inner} indices, got {len(self.right_permutation)}")

    def check_sizes(self, num_rows: int, num_cols: int, owner: str = "BlockTerm") -> None:
        """Raises ``ConfigError``, in the name of ``owner``, unless the blocks divide the sizes of the
        matrix.
        """
        check_size(f"{owner}: num_rows", num_rows)
        check_size(f"{owner}: num_cols", num_cols)
        for name, blocks, size in (("rows", self.left_blocks, num_rows), ("columns", self.right_blocks, num_cols)):
            if size % blocks:
                raise ConfigError(
                    f"{owner}: {blocks} blocks must divide the number of {name}, got {num_rows} x {num_cols}; the "
                    f"nearest sizes that work are {_near_multiples(size, blocks)}"
                )
        if not isinstance(self.left_permutation, str) and len(self.left_permutation) != num_rows:
            raise ConfigError(
                f"{owner}: left_permutation must have {num_rows} indices, got {len(self.left_permutation)}"
            )

    def row_index(self, num_rows: int) -> Tensor:
        """P_L as indices p with (P_L z)[i] = z[p[i]], (num_rows,)."""
        match self.left_permutation:
            case "identity":
                return torch.arange(num_rows)
            case "stride":
                return torch.arange(num_rows).reshape(self.left_blocks, -1).t().reshape(-1)
            case indices:
                return torch.tensor(indices)

    def inner_index(self) -> Tensor:
        """P_R as indices, (F,)."""
        match self.right_permutation:
            case "identity":
                return torch.arange(self.inner_dim)
            case "stride":
                grid = torch.arange(self.inner_dim).reshape(self.right_blocks, self.left_blocks, -1)
                return grid.transpose(0, 1).reshape(-1)
            case indices:
                return torch.tensor(indices)


def _near_multiples(size: int, divisor: int) -> str:
    low = size // divisor * divisor
    return f"{low} or {low + divisor}" if low else str(divisor)


@dataclass(frozen=True, kw_only=True)
class TermFactors:
    """One block term with its factors.

    Attributes:
        term: the shape.
        left: (*batch_shape, b, num_rows / b, F / b).
        right: (*right_batch_shape, c, num_cols / c, F / c).
    """

    term: BlockTerm
    left: Tensor
    right: Tensor


def one_block(left: Tensor, right: Tensor) -> list[TermFactors]:
    """L Rᵀ as one term of one block: left (*batch_shape, num_rows, F), right (*right_batch_shape, num_cols,
    F).
    """
    term = BlockTerm(left_blocks=1, right_blocks=1, inner_dim=left.shape[-1])
    return [TermFactors(term=term, left=left.unsqueeze(-3), right=right.unsqueeze(-3))]
