"""The trunk that every sequence model here shares: positions, blocks, a last norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from structattn.errors import ConfigError, ShapeError
from structattn.layers.attention import Attention
from structattn.layers.block import TransformerBlock


class Transformer(nn.Module):
    """Learned positions and pre-norm blocks: (B, T, E) to (B, T, E).

    Args:
        spec: attention of every block, or one text per block (see ``structattn.spec``).
        num_layers: blocks.
        embed_dim: E.
        num_heads: heads where the spec does not say otherwise.
        context_length: longest sequence, in tokens; MLR blocks are halved from it.
        is_causal: default ``True``.
        mlp_ratio, dropout, bias: see ``TransformerBlock``.

    Raises:
        ConfigError: a list of specs of the wrong length, or a spec that does not fit.

    Source: Kuang et al. 2025, appendix (GPT-style trunk, no biases).
    """

    def __init__(
        self,
        spec: str | tuple[str, ...],
        *,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        context_length: int,
        is_causal: bool = True,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        specs = (spec,) * num_layers if isinstance(spec, str) else tuple(spec)
        if num_layers < 1 or len(specs) != num_layers:
            raise ConfigError(f"expected one attention spec or {num_layers} of them, got {len(specs)}")
        self.context_length = context_length
        self.position = nn.Parameter(torch.empty(context_length, embed_dim))
        nn.init.normal_(self.position, std=0.02)
        self.dropout = nn.Dropout(dropout)
        blocks = []
        for text in specs:
            attention = Attention.from_spec(
                text,
                embed_dim=embed_dim,
                num_heads=num_heads,
                context_length=context_length,
                is_causal=is_causal,
                bias=bias,
                dropout=dropout,
            )
            blocks.append(TransformerBlock(attention, mlp_ratio=mlp_ratio, bias=bias, dropout=dropout))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) embeddings to (B, T, E) features; raises ``ShapeError`` when T passes the context length."""
        length = x.shape[1]
        if length > self.context_length:
            raise ShapeError(f"the sequence has {length} tokens, more than the {self.context_length} positions learned")
        x = self.dropout(x + self.position[:length])
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    def flops(self, num_tokens: int) -> int:
        """Forward FLOPs for one example of that many tokens, 2 per multiply-add."""
        return sum(block.flops(num_tokens) for block in self.blocks if isinstance(block, TransformerBlock))
