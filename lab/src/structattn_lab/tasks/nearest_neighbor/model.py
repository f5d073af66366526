"""The model of the nearest-neighbor task: one attention layer over raw points, nothing else."""

from __future__ import annotations

from torch import Tensor, nn

from structattn.checks import check_tensor
from structattn.errors import ShapeError
from structattn.layers.attention import Attention


class NearestNeighborModel(nn.Module):
    """The query attends to the points; the output of that one layer is the answer.

    Args:
        spec: attention variant (see ``structattn.spec``).
        dim: d, dimension of the points and width of the layer.
        num_points: N.
        num_heads: heads where the spec does not say otherwise.
        qk_norm: see ``Attention``.
    """

    def __init__(self, spec: str, *, dim: int, num_points: int, num_heads: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.num_points = num_points
        self.attention = Attention.from_spec(
            spec, embed_dim=dim, num_heads=num_heads, context_length=num_points, is_causal=False, qk_norm=qk_norm
        )

    def forward(self, query: Tensor, points: Tensor) -> Tensor:
        """query (B, d), points (B, N, d) to (B, d)."""
        check_tensor("query", query)
        check_tensor("points", points)
        if query.dim() != 2 or points.dim() != 3:
            raise ShapeError(
                f"query must have shape (batch, dim) and points (batch, number, dim), got {tuple(query.shape)} and "
                f"{tuple(points.shape)}"
            )
        out: Tensor = self.attention(query[:, None], points)
        return out[:, 0]

    def flops_per_example(self) -> int:
        """Forward FLOPs of one query over its points."""
        return self.attention.cost(1, self.num_points).flops

    def score_rank(self) -> int:
        """The rank of the bilinear form of one head: the low-rank bottleneck is a limit on it."""
        return self.attention.scoring.matrix.rank_bound
