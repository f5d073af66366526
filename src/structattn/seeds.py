"""Independent random streams that are pure functions of their names, so that nothing has to be stored to
resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a few ints and words; different parts give unrelated seeds."""
    words = (str(part).replace("\\", "\\\\").replace("/", "\\/") for part in parts)
    digest = hashlib.sha256("/".join(words).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by ``derive_seed``."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Inside, torch's own generators of the CPU and of ``device`` start from the seed; afterwards they are as
    they were before.

    ``torch.manual_seed`` would also seed every other device, for good.
    """
    cuda = device if device is not None and device.type == "cuda" else None
    with torch.random.fork_rng(devices=[] if cuda is None else [cuda]):
        torch.default_generator.manual_seed(seed)
        if cuda is not None:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield
