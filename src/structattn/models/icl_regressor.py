"""The model of in-context regression: a causal transformer over the prompt x_1, y_1, ..., x_N, y_N."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.checks import MAX_SCALE, check_like, check_number, check_size, check_tensor
from structattn.errors import ShapeError
from structattn.memory import check_memory
from structattn.models.transformer import Transformer
from structattn.optim.roles import Role


class ICLRegressor(nn.Module):
    """Predicts y_i at the position of x_i from the pairs before it.

    Args:
        spec: attention of the layers, as ``Transformer`` takes it.
        dim: d, dimension of the inputs; y is padded to it with zeros.
        num_points: N, most pairs in a prompt; the sequence has 2 N tokens.
        embed_dim, num_layers, num_heads, qk_norm: of the trunk.
        read_in_std: of the initial input projection. Default ``None``: 1/sqrt(d), so that the tokens of x and
            the learned positions do not start at the same size; 0.02 is the reference's.

    Source: Garg et al. 2022; Kuang et al. 2025, section 4.
    """

    def __init__(
        self,
        spec: str | Sequence[str],
        *,
        dim: int,
        num_points: int,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        qk_norm: bool = True,
        read_in_std: float | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("num_points", num_points), ("embed_dim", embed_dim)):
            check_size(name, size)
        if read_in_std is not None:
            check_number("read_in_std", read_in_std, above=0, maximum=MAX_SCALE)
        self.dim = dim
        self.num_points = num_points
        self._flops: dict[int, int] = {}
        check_memory(f"the input projections from {dim} to embed_dim {embed_dim}", dim * embed_dim)
        self.read_in = nn.Linear(dim, embed_dim, bias=False)
        self.read_in_std = 1 / math.sqrt(dim) if read_in_std is None else read_in_std
        nn.init.normal_(self.read_in.weight, std=self.read_in_std)
        self.trunk = Transformer(
            spec,
            num_layers=num_layers,
            embed_dim=embed_dim,
            num_heads=num_heads,
            qk_norm=qk_norm,
            context_length=2 * num_points,
        )
        self.read_out = nn.Linear(embed_dim, 1, bias=False)
        nn.init.zeros_(self.read_out.weight)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP roles of the input projection, whose inputs do not grow with the width, and of the output
        head.
        """
        return {
            "read_in.weight": Role(kind="embedding", std=self.read_in_std),
            "read_out.weight": Role(kind="output", fan_in=self.read_out.in_features),
        }

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        """Predictions, (B, n), each made before its y is read.

        Args:
            xs: (B, n, d), n at most N.
            ys: (B, n).

        Raises:
            ShapeError: more than N pairs.
        """
        check_tensor("xs", xs)
        check_tensor("ys", ys)
        if xs.dim() != 3 or xs.shape[2] != self.dim or ys.shape != xs.shape[:2]:
            raise ShapeError(
                f"xs must have shape (batch, n, {self.dim}) and ys (batch, n), got "
                f"{tuple(xs.shape)} and {tuple(ys.shape)}"
            )
        check_like("xs", xs, self.read_in.weight)
        check_like("ys", ys, self.read_in.weight)
        padded = F.pad(ys[..., None], (0, self.dim - 1))
        tokens = torch.stack([xs, padded], dim=2).flatten(1, 2)
        features = self.trunk(self.read_in(tokens))[:, ::2]  # only at the x: no prediction is made at the y
        out: Tensor = self.read_out(features)[..., 0]
        return out

    def flops(self, num_points: int) -> int:
        """Forward FLOPs of a prompt of that many pairs, 2 per multiply-add, without the input projection:
        compute is counted without embeddings (Kuang et al. 2025, section 4)."""
        check_size("num_points", num_points)
        if num_points not in self._flops:  # asked for at every step
            self._flops[num_points] = self.trunk.flops(2 * num_points) + 2 * num_points * self.read_out.in_features
        return self._flops[num_points]

    def score_rank(self) -> int:
        """The rank of the bilinear form of one head of the first layer: the low-rank bottleneck is a limit on
        it.
        """
        return self.trunk.layers[0].scored_attention.scoring.matrix.rank_bound

    def flops_per_example(self) -> int:
        """``flops`` of a full prompt, N pairs: without the input projection."""
        return self.flops(self.num_points)
