"""Attention from queries, keys and values: the definition and its backends."""

from structattn.ops.attention import explain, structured_attention
from structattn.ops.backends import Backend

__all__ = ["Backend", "explain", "structured_attention"]
