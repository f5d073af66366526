"""Numbers for caches that compiled programs made. Only these programs import it, since it imports
``torch.compile``.
"""

from __future__ import annotations

from typing import Any

import torch

from structattn.cache.numbers import new_number


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason=(
        "a cache that a compiled program made is numbered once, in Python: make it outside of the program, or leave "
        "fullgraph away"
    )
)
def give_numbers(things: list[Any]) -> None:
    """Numbers for caches or layers that have none and hold tokens: a compiled program made them, and another
    one goes on with them.
    """
    for thing in things:
        thing.number = new_number(thing)
