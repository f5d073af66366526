"""Independent random streams that are pure functions of their names, so that nothing has to be stored to resume."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a few ints and words; different parts give unrelated seeds."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by ``derive_seed``."""
    return torch.Generator().manual_seed(derive_seed(*parts))
