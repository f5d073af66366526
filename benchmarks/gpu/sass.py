"""Machine code of NVIDIA GPUs, as ``nvdisasm -c`` prints it: its innermost loops and their instructions by
kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Kinds of instructions, and how their names begin.
KINDS = {
    "tensor": ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "IMMA", "DMMA"),
    "multiply": (
        "FFMA",
        "FMUL",
        "FADD",
        "FMNMX",
        "FSEL",
        "FSETP",
        "HFMA2",
        "HADD2",
        "HMUL2",
        "FADD2",
        "FMUL2",
        "FFMA2",
    ),
    "exponential": ("MUFU.EX2",),
    "global": ("LDG", "LDGSTS", "STG", "UTMALDG", "UBLKCP"),
    "shared": ("LDS", "STS", "LDSM", "STSM", "LDTM", "STTM"),
    "spill": ("LDL", "STL"),
}
_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)$")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One innermost loop.

    Attributes:
        total: instructions, of one warp and one turn.
        kinds: those of each kind in ``KINDS``; the rest is addresses, conversions and control.
    """

    total: int
    kinds: dict[str, int]


def loops_of(code: str) -> tuple[Loop, ...]:
    """The innermost loops that multiply matrices, in the order of the code.

    A loop is what lies between a label and a later jump to it; it multiplies matrices if it has instructions
    of tensor cores, or, where a kernel has none at all, at least 32 of kind ``multiply``.
    """
    names, labels, jumps = [], dict[str, int](), list[tuple[int, int]]()
    for line in code.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif found := _LINE.match(line):
            target = _TARGET.search(found[3])
            if found[2].startswith("BRA") and target and target[1] in labels:
                jumps.append((labels[target[1]], len(names)))
            names.append(found[2])
    innermost = [
        (start, end)
        for start, end in sorted(set(jumps))
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in jumps)
    ]
    loops = [_loop(names[start : end + 1]) for start, end in innermost]
    has_tensor_cores = any(name.startswith(KINDS["tensor"]) for name in names)
    return tuple(loop for loop in loops if (loop.kinds["tensor"] if has_tensor_cores else loop.kinds["multiply"] >= 32))


def _loop(names: Sequence[str]) -> Loop:
    kinds = Counter(
        next((kind for kind, starts in KINDS.items() if _is(name, starts)), "other") for name in names if name != "NOP"
    )
    return Loop(total=sum(kinds.values()), kinds={kind: kinds[kind] for kind in KINDS})


def _is(name: str, starts: Sequence[str]) -> bool:
    """Whether an instruction is one of these, with or without modifiers."""
    return any(name == start or name.startswith(f"{start}.") for start in starts)
