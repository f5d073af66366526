"""A univariate forecaster: patches of the look-back as tokens, a non-causal encoder, a linear head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from structattn.errors import ConfigError
from structattn.models.transformer import Transformer
from structattn.mup import Role


class Forecaster(nn.Module):
    """Reversible instance norm, patches, transformer encoder, linear head from all tokens to the horizon.

    Each window is centred on its last value and divided by its standard deviation; the forecast is put back.

    Args:
        spec: attention of the layers, as ``Transformer`` takes it.
        look_back: input steps; patches are cut from its end, so the newest steps are always whole patches.
        horizon: output steps.
        patch_length: steps per token.
        stride: steps between the starts of tokens.
        embed_dim, num_layers, num_heads, mlp_ratio, dropout: of the trunk.

    Raises:
        ConfigError: the patches do not fit in the look-back.

    Source: Nie et al. 2023 (patches), Kim et al. 2022 (reversible instance norm).
    """

    def __init__(
        self,
        spec: str,
        *,
        look_back: int,
        horizon: int,
        patch_length: int,
        stride: int,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        mlp_ratio: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= patch_length <= look_back or stride < 1:
            raise ConfigError(
                f"patches must fit in the look-back: got patch_length {patch_length}, stride {stride}, look_back {look_back}"
            )
        self.patch_length = patch_length
        self.stride = stride
        self.num_tokens = (look_back - patch_length) // stride + 1
        self.used_steps = (self.num_tokens - 1) * stride + patch_length
        self.embed = nn.Linear(patch_length, embed_dim)
        self.trunk = Transformer(
            spec,
            num_layers=num_layers,
            embed_dim=embed_dim,
            num_heads=num_heads,
            context_length=self.num_tokens,
            is_causal=False,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
        )
        self.head_dropout = nn.Dropout(dropout)
        self.head = nn.Linear(self.num_tokens * embed_dim, horizon)
        nn.init.normal_(self.embed.weight, std=1 / math.sqrt(patch_length))
        for linear in (self.embed, self.head):
            nn.init.zeros_(linear.bias)
        nn.init.zeros_(self.head.weight)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP roles of the read-in of patches, whose inputs do not grow with the width, and of the head."""
        return {
            "embed.weight": Role(kind="embedding"),
            "embed.bias": Role(kind="bias"),
            "head.weight": Role(kind="output", fan_in=self.head.in_features),
            "head.bias": Role(kind="bias"),
        }

    def forward(self, window: Tensor) -> Tensor:
        """(..., look_back) scaled values to (..., horizon): columns of a window stand in dimensions of their own, and are not mixed."""
        leading = window.shape[:-1]
        window = window.reshape(-1, window.shape[-1])
        last = window[:, -1:]
        spread = torch.sqrt(window.var(dim=1, keepdim=True, unbiased=False) + 1e-5)
        steps = ((window - last) / spread)[:, -self.used_steps :]
        tokens = self.embed(steps.unfold(1, self.patch_length, self.stride))
        out: Tensor = self.head(self.head_dropout(self.trunk(tokens).flatten(1)))
        return (out * spread + last).reshape(*leading, -1)

    def flops_per_example(self) -> int:
        """Forward FLOPs of one window."""
        head = 2 * self.head.in_features * self.head.out_features
        embed = 2 * self.num_tokens * self.embed.in_features * self.embed.out_features
        return self.trunk.flops(self.num_tokens) + head + embed
