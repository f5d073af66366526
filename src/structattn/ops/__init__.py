"""Attention from queries, keys and values: the definition and its backends."""

from structattn.ops.attention import explain, structured_attention
from structattn.ops.backends import Backend
from structattn.ops.costs import measure_costs
from structattn.ops.native.library import build_native

__all__ = ["Backend", "build_native", "explain", "measure_costs", "structured_attention"]
