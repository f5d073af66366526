"""The modules of scoring: queries and keys of all heads from hidden states, one class per way to scale and
normalise them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from structattn.checks import check_bool, check_size
from structattn.errors import ConfigError
from structattn.matrices import FactoredMatrix, LowRank, MultiLevelLowRank, StructuredMatrix
from structattn.matrices.base import Order
from structattn.optim.roles import Role

ScoreScaling = Literal["variance", "mup"]


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What a scoring needs to know of its attention layer.

    Args:
        embed_dim: E, the width of the hidden states.
        num_heads: H, query heads.
        num_kv_heads: G, key heads; divides H.
        norm: layer norm of queries and keys.
        bias: whether those norms have a bias.
        fixed_features: the layout gives a meaning to single features, so the contraction order is not free.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    norm: bool = True
    bias: bool = False
    fixed_features: bool = False

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "num_kv_heads"):
            check_size(name, getattr(self, name))
        if self.embed_dim % self.num_heads:
            raise ConfigError(
                f"num_heads must divide embed_dim: got {self.num_heads} heads and embed_dim {self.embed_dim}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads must divide num_heads: got {self.num_kv_heads} and {self.num_heads}")
        for name in ("norm", "bias", "fixed_features"):
            check_bool(name, getattr(self, name))


class ScoringModule(nn.Module):
    """Queries and keys from hidden states, for all heads at once.

    Attributes:
        matrix: M for all heads, of batch shape (G, H // G); right factors of (G, 1) where key heads share
            them.
        shape: the layer it belongs to.
    """

    matrix: StructuredMatrix

    def __init__(self, matrix: StructuredMatrix, shape: HeadShape) -> None:
        super().__init__()
        self.matrix = matrix
        self.shape = shape

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """D of the norms and of a layout: see ``Scoring.feature_dim``."""

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Sizes of the slices of D that have separate norms and scales, which a rotation must not mix.
        Default: one slice.
        """
        return (self.feature_dim,)

    @property
    @abstractmethod
    def matrix_fan_ins(self) -> dict[str, int]:
        """The fan-in of every factor in the way this scoring uses it: in features of both sides, or in M
        x'.
        """

    def parameter_roles(self) -> dict[str, Role]:
        """The muP roles of the factors of the matrix; its norms are known by their type."""
        return {f"matrix.{name}": role for name, role in self.matrix.factor_roles(self.matrix_fan_ins).items()}

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Unscaled queries and keys.

        Args:
            x: hidden states of the queries, (B, T, E).
            context: hidden states of the keys, (B, S, E).

        Returns:
            q (B, H, T, D) and k (B, 1 or G or H, S, D); 1 head means that all heads share k.
        """
        order = self.order(x.shape[1], context.shape[1])
        return self.queries(x, order), self.normed_keys(self.keys(context, order), order)

    @abstractmethod
    def queries(self, x: Tensor, order: Order) -> Tensor:
        """Queries of hidden states (B, T, E) in a contraction order: (B, H, T, D), normed."""

    @abstractmethod
    def keys(self, context: Tensor, order: Order) -> Tensor:
        """Keys of hidden states (B, S, E), a linear map of them, before any norm: (B, 1 or G or H, S, D)."""

    @abstractmethod
    def key_norms(self, order: Order) -> list[tuple[slice, nn.LayerNorm]]:
        """The norms of the keys with the slices of the key dimension that they work on; empty without
        norms.
        """

    def normed_keys(self, keys: Tensor, order: Order) -> Tensor:
        """Keys after their norms."""
        parts = [norm(keys[..., dims]) for dims, norm in self.key_norms(order)]
        return keys if not parts else parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def adjoint_keys(self, w: Tensor, order: Order) -> Tensor:
        """The adjoint of ``keys``: u with <w, keys(x)> = <u, x> for each query head, (B, H, T, D) to (B, H,
        T, E).
        """
        per_group = w.unflatten(1, (self.shape.num_kv_heads, -1))
        match order:
            case "factored":
                return self._factored.right_expand(per_group).flatten(1, 2)
            case "formed_right":
                return self.matrix.rmatmul(per_group).flatten(1, 2)
            case "formed_left":
                return w

    @property
    @abstractmethod
    def cached_order(self) -> Order:
        """The order in which keys are kept as features: one for all lengths, the smallest where there is a
        choice.
        """

    @abstractmethod
    def order(self, num_queries: int, num_keys: int) -> Order:
        """The contraction order used for T queries and S keys: factored, formed_left or formed_right."""

    @abstractmethod
    def scaled(self, query: Tensor) -> tuple[Tensor, float]:
        """The query and the scale to give to the op when no layout scales the scores; the query may be scaled
        here.
        """

    @property
    def is_variance(self) -> bool:
        """Whether ``scaled`` is the scale 1 / sqrt(D) of scores without a layout."""
        return False

    def projection_flops(self, num_queries: int, num_keys: int) -> int:
        """FLOPs of ``forward`` for one example, 2 per multiply-add, norms not counted."""
        return self.matrix.projection_flops(self.order(num_queries, num_keys), num_queries, num_keys)

    def num_key_heads(self, order: Order) -> int:
        """How many different keys a token has: 1 if all heads share them, else one per right factor or per
        query head.
        """
        match order:
            case "formed_left":
                return 1
            case "factored":
                return math.prod(self._factored.right_batch_shape)
            case "formed_right":
                return self.shape.num_heads

    def score_dim(self, num_queries: int, num_keys: int) -> int:
        """The dimension of the queries and keys that ``forward`` returns for these lengths."""
        return self.matrix.pair_dim(self.order(num_queries, num_keys))

    @property
    def _factored(self) -> FactoredMatrix:
        assert isinstance(self.matrix, FactoredMatrix)  # only then there is a factored order
        return self.matrix

    def _left_heads(self, x: Tensor) -> Tensor:
        """w = L^T x for all query heads: (B, T, E) to (B, H, T, F)."""
        return self._factored.left_features(x[:, None, None]).flatten(1, 2)

    def _right_heads(self, y: Tensor) -> Tensor:
        """u = R^T y for all key heads: (B, S, E) to (B, G, S, F)."""
        return self._factored.right_features(y[:, None, None]).flatten(1, 2)

    def _formed_queries(self, x: Tensor, order: Order) -> Tensor:
        """Queries of dimension E: M^T x, or x itself for all heads."""
        if order == "formed_left":
            return self.matrix.rmatmul(x[:, None, None]).flatten(1, 2)
        return x[:, None].expand(-1, self.shape.num_heads, -1, -1)


class OneNormScoring(ScoringModule):
    """One norm over all dimensions of a query and of a key; with norms, or a layout, one order is the
    definition, else it is free.

    Args:
        matrix: M.
        shape: of the layer.
        score_scale: how scores are scaled, where no layout gives it.
    """

    fixed_order: ClassVar[Order]
    mup_scale: ClassVar[int]

    def __init__(self, matrix: StructuredMatrix, shape: HeadShape, score_scale: ScoreScaling) -> None:
        super().__init__(matrix, shape)
        self.score_scale = score_scale
        size = self.feature_dim
        self.q_norm = nn.LayerNorm(size, bias=shape.bias) if shape.norm else nn.Identity()
        self.k_norm = nn.LayerNorm(size, bias=shape.bias) if shape.norm else nn.Identity()

    @property
    def is_variance(self) -> bool:
        return self.score_scale == "variance"

    @property
    def _is_fixed(self) -> bool:
        return self.shape.norm or self.shape.fixed_features

    def order(self, num_queries: int, num_keys: int) -> Order:
        if self._is_fixed:
            return self.fixed_order
        return self.matrix.contraction(max(1, num_queries), max(1, num_keys)).order

    @property
    def cached_order(self) -> Order:
        if self._is_fixed:
            return self.fixed_order
        return min(self.matrix.orders, key=lambda order: self.num_key_heads(order) * self.matrix.pair_dim(order))

    def scaled(self, query: Tensor) -> tuple[Tensor, float]:
        return query, self.feature_dim**-0.5 if self.score_scale == "variance" else self.mup_scale / self.feature_dim

    def keys(self, context: Tensor, order: Order) -> Tensor:
        match order:
            case "factored":
                return self._right_heads(context)
            case "formed_left":
                return context[:, None]  # the hidden state, for all heads
            case "formed_right":
                return self.matrix.matmul(context[:, None, None]).flatten(1, 2)

    def key_norms(self, order: Order) -> list[tuple[slice, nn.LayerNorm]]:
        return [(slice(None), self.k_norm)] if isinstance(self.k_norm, nn.LayerNorm) else []


class LowRankScoring(OneNormScoring):
    """Standard attention: q = norm(W_Q x), k = norm(W_K x')."""

    matrix: LowRank
    fixed_order = "factored"
    mup_scale = 8

    @property
    def matrix_fan_ins(self) -> dict[str, int]:
        return self.matrix.feature_fan_ins

    @property
    def feature_dim(self) -> int:
        return self.matrix.inner_dim

    def queries(self, x: Tensor, order: Order) -> Tensor:
        return self.q_norm(self._left_heads(x)) if order == "factored" else self._formed_queries(x, order)


class BilinearScoring(OneNormScoring):
    """Any M: q = norm(x), k_h = norm(M_h x'), both of dimension E. Without norms and levels the order is
    free.
    """

    fixed_order = "formed_right"
    mup_scale = 1

    @property
    def matrix_fan_ins(self) -> dict[str, int]:
        return self.matrix.product_fan_ins

    @property
    def feature_dim(self) -> int:
        return self.shape.embed_dim

    def queries(self, x: Tensor, order: Order) -> Tensor:
        return self._left_heads(x) if order == "factored" else self._formed_queries(self.q_norm(x), order)


class MLRScoring(ScoringModule):
    """Bilinear MLR: the features of each level, each with its own norm and scale."""

    matrix: MultiLevelLowRank

    def __init__(
        self, matrix: MultiLevelLowRank, shape: HeadShape, score_scale: ScoreScaling, divide_by_levels: bool
    ) -> None:
        super().__init__(matrix, shape)
        sizes = matrix.feature_sizes if shape.norm else ()
        self.q_norms = nn.ModuleList(nn.LayerNorm(size, bias=shape.bias) for size in sizes)
        self.k_norms = nn.ModuleList(nn.LayerNorm(size, bias=shape.bias) for size in sizes)
        share = 1 / len(matrix.ranks) if divide_by_levels else 1.0
        self.level_scales = [
            share * (size**-0.5 if score_scale == "variance" else 8 / size) for size in matrix.feature_sizes
        ]

    @property
    def matrix_fan_ins(self) -> dict[str, int]:
        return self.matrix.feature_fan_ins

    @property
    def feature_dim(self) -> int:
        return self.matrix.inner_dim

    @property
    def level_sizes(self) -> tuple[int, ...]:
        return self.matrix.feature_sizes

    def order(self, num_queries: int, num_keys: int) -> Order:
        # Each level has its own scale, which the formed orders cannot apply: the features are the definition.
        return "factored"

    def scaled(self, query: Tensor) -> tuple[Tensor, float]:
        parts = query.split(self.matrix.feature_sizes, dim=-1)
        return torch.cat([part * c for part, c in zip(parts, self.level_scales, strict=True)], dim=-1), 1.0

    @property
    def cached_order(self) -> Order:
        return "factored"

    def queries(self, x: Tensor, order: Order) -> Tensor:
        features = self._left_heads(x)
        if not self.q_norms:
            return features
        parts = features.split(self.matrix.feature_sizes, dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.q_norms, parts, strict=True)], dim=-1)

    def keys(self, context: Tensor, order: Order) -> Tensor:
        return self._right_heads(context)

    def key_norms(self, order: Order) -> list[tuple[slice, nn.LayerNorm]]:
        ends = list(accumulate(self.matrix.feature_sizes))
        levels = zip(self.matrix.feature_sizes, ends, self.k_norms, strict=False)
        return [(slice(end - size, end), norm) for size, end, norm in levels if isinstance(norm, nn.LayerNorm)]
