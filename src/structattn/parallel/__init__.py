"""One model over many processes: attention over a sequence that is divided among them, and heads that are.

Names are imported at their first use: layers import the first kind, the second imports layers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structattn.parallel.context import ContextParallel, context_parallel
    from structattn.parallel.shard import SequenceShard
    from structattn.parallel.tensor import tensor_parallel_plan

__all__ = ["ContextParallel", "SequenceShard", "context_parallel", "tensor_parallel_plan"]

_HOMES = {
    "ContextParallel": "context",
    "SequenceShard": "shard",
    "context_parallel": "context",
    "tensor_parallel_plan": "tensor",
}

if not TYPE_CHECKING:  # type checkers read the imports above

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
