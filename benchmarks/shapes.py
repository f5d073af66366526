"""The sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        head_dim: embed_dim / num_heads.
    """

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads
