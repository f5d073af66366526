"""Attention over a sequence that is divided among processes: each holds neighboring tokens, and only the shared levels travel."""

from structattn.parallel.context import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
