"""The pre-norm transformer block around an attention module."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from structattn.cache.bounded import LayerCache
from structattn.cache.rows import OneLayerCache
from structattn.checks import check_bool, check_like, check_number, check_size, check_tensor, check_type
from structattn.errors import ConfigError, ShapeError
from structattn.layers.attention import Attention
from structattn.layers.checks import check_shard, check_states
from structattn.layers.layer import AttentionLayer
from structattn.layers.linear import linear_flops
from structattn.layout.levels import LevelLayout
from structattn.memory import check_memory
from structattn.optim.roles import Role, linear_roles

if TYPE_CHECKING:  # it imports torch.distributed and torch.compile, which takes a second
    from structattn.parallel.shard import SequenceShard


class MLP(nn.Module):
    """Two linear layers with a GELU: W_2 gelu(W_1 x).

    Args:
        embed_dim: E.
        ratio: width of the hidden layer over E. Default 4.
        bias: default ``False``.
        dropout: of the output. Default 0.

    Cost: 2 ratio E^2 parameters, twice that in FLOPs per token.
    """

    def __init__(self, embed_dim: int, *, ratio: int = 4, bias: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        check_size("embed_dim", embed_dim)
        check_size("ratio", ratio)
        check_bool("bias", bias)
        check_number("dropout", dropout, minimum=0, maximum=1)
        check_memory(f"the layers of an MLP of embed_dim {embed_dim} and ratio {ratio}", 2 * ratio * embed_dim**2)
        self.up = nn.Linear(embed_dim, ratio * embed_dim, bias=bias)
        self.down = nn.Linear(ratio * embed_dim, embed_dim, bias=bias)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        for linear in (self.up, self.down):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))
            if bias:
                nn.init.zeros_(linear.bias)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP roles: the first layer is hidden, the second an output."""
        return linear_roles(self, {"up": "hidden", "down": "output"})

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., E)."""
        check_tensor("x", x)
        if x.dim() < 1 or x.shape[-1] != self.up.in_features:
            raise ShapeError(f"x must have shape (..., {self.up.in_features}), got {tuple(x.shape)}")
        if type(self.up) is nn.Linear:
            check_like("x", x, self.up.weight)
        out: Tensor = self.dropout(self.down(self.activation(self.up(x))))
        return out

    def flops(self, num_tokens: int) -> int:
        """Forward FLOPs for one example of that many tokens."""
        check_size("num_tokens", num_tokens)
        width, hidden = self.up.in_features, self.up.out_features
        return num_tokens * (linear_flops(self.up, width, hidden) + linear_flops(self.down, hidden, width))


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        attention: the attention module (``Attention``, or another ``AttentionLayer``); its ``embed_dim`` is
            the width.
        mlp_ratio, bias, dropout: see ``MLP``; dropout is also applied to the attention's output.
    """

    def __init__(
        self, attention: AttentionLayer, *, mlp_ratio: int = 4, bias: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_type(
            "attention", attention, AttentionLayer, "an Attention module", "Attention.from_spec makes one from text"
        )
        check_bool("bias", bias)
        width = attention.embed_dim
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(width, ratio=mlp_ratio, bias=bias, dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    @property
    def scored_attention(self) -> Attention:
        """The attention, for what reads its scoring and its layout.

        Raises:
            ConfigError: it is a layer without them.
        """
        check_type("the attention", self.attention, Attention, "one of a scoring and a layout", "choose another spec")
        assert isinstance(self.attention, Attention)
        return self.attention

    def check_shard(self) -> None:
        """Raises ``ConfigError`` unless processes can divide its sequences: an ``Attention`` with a layout of
        levels or none, and no dropout of weights.
        """
        attention = self.attention
        if not isinstance(attention, Attention):
            raise ConfigError(
                f"{type(attention).__name__} computes whole sequences, which processes cannot divide: choose attention "
                "with a scoring and a layout, such as standard or mlr, or leave sequences whole"
            )
        check_shard(attention.layout, attention.backend, attention.dropout if attention.training else 0.0)

    def forward(
        self,
        x: Tensor,
        *,
        cache: LayerCache | OneLayerCache | None = None,
        left_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        layout: LevelLayout | None = None,
        shard: SequenceShard | None = None,
    ) -> Tensor:
        """(B, T, E) to (B, T, E).

        Args:
            x: (B, T, E).
            cache, left_padding, cu_seqlens, layout, shard: see ``Attention``.
        """
        norm = self.attention_norm  # before the attention, which a user may have replaced
        check_states("x", x, norm.normalized_shape[0], norm.weight)
        divided = {} if shard is None else {"shard": shard}  # not every layer takes it
        attended = self.attention(
            norm(x), cache=cache, left_padding=left_padding, cu_seqlens=cu_seqlens, layout=layout, **divided
        )
        x = x + self.dropout(attended)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def flops(self, num_tokens: int) -> int:
        """Forward FLOPs for one example of that many tokens."""
        return self.attention.cost(num_tokens).flops + self.mlp.flops(num_tokens)
