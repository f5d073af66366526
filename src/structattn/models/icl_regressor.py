"""The model of in-context regression: a causal transformer over the prompt x_1, y_1, ..., x_N, y_N."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from structattn.models.transformer import Transformer


class ICLRegressor(nn.Module):
    """Predicts y_i at the position of x_i from the pairs before it.

    Args:
        spec: attention variant of every layer.
        dim: d, dimension of the inputs; y is padded to it with zeros.
        num_points: N, most pairs in a prompt; the sequence has 2 N tokens.
        embed_dim, num_layers, num_heads: of the trunk.

    Source: Garg et al. 2022; Kuang et al. 2025, section 4.
    """

    def __init__(
        self, spec: str, *, dim: int, num_points: int, embed_dim: int, num_layers: int, num_heads: int
    ) -> None:
        super().__init__()
        self.dim = dim
        self.num_points = num_points
        self.read_in = nn.Linear(dim, embed_dim, bias=False)
        nn.init.normal_(self.read_in.weight, std=1 / math.sqrt(dim))
        self.trunk = Transformer(
            spec,
            num_layers=num_layers,
            embed_dim=embed_dim,
            num_heads=num_heads,
            context_length=2 * num_points,
        )
        self.read_out = nn.Linear(embed_dim, 1, bias=False)
        nn.init.zeros_(self.read_out.weight)

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        """xs (B, n, d), ys (B, n) to predictions (B, n), prediction i made before y_i is read."""
        padded = torch.zeros_like(xs)
        padded[..., 0] = ys
        tokens = torch.stack([xs, padded], dim=2).flatten(1, 2)
        out: Tensor = self.read_out(self.trunk(self.read_in(tokens)))[:, ::2, 0]
        return out

    def flops_per_example(self) -> int:
        """Forward FLOPs of a prompt of N pairs, read-in and read-out included."""
        tokens, width = 2 * self.num_points, self.read_in.out_features
        return self.trunk.flops(tokens) + 2 * tokens * width * (self.dim + 1)
