"""Attention from queries, keys and values: the definition and its backends."""

from structattn.ops.attention import Backend, explain, structured_attention

__all__ = ["Backend", "explain", "structured_attention"]
