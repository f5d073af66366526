"""Benchmark "call": what one call costs where there is little to compute: a sequence of some dozen positions, causal, as ``auto`` runs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import BASELINE, Attend, AttentionWork
from benchmarks.registry import Case, Group, benchmark
from structattn.layout.levels import LevelLayout
from structattn.ops import explain, structured_attention

LENGTHS = (16, 64, 128)
HEADS, DIM = 4, 64
LAYOUTS = {
    BASELINE: LevelLayout((DIM,), (128,)),
    "one level": LevelLayout((DIM,), (128,)),
    "mlr 16|16|16|16": LevelLayout.halving((16,) * 4, 128),
    "mlr 8x8": LevelLayout.halving((8,) * 8, 128),
    "mlr 8x8 values": LevelLayout.halving((8,) * 8, 128, value_ranks=(8,) * 8),
}


def _attend(label: str) -> Attend:
    if label == BASELINE:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    layout = None if label == "one level" else LAYOUTS[label]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return structured_attention(q, k, v, layout)

    return attend


def _case(label: str, length: int, backward: bool, device: torch.device, dtype: torch.dtype) -> Case:
    layout = LAYOUTS[label]

    def build() -> AttentionWork:
        shape = (1, HEADS, length, DIM)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3))
        cotangent = torch.randn(shape, device=device, dtype=dtype) if backward else None
        code = "" if label == BASELINE else explain(q, k, v, layout).partition(":")[0]
        return AttentionWork(_attend(label), layout, q, k, v, cotangent, code)

    scores, values = layout.score_flops(length), layout.value_flops(length, DIM)
    return Case(
        benchmark="call",
        label=label,
        sizes={"T": length, "B": 1, "H": HEADS, "D": DIM},
        build=build,
        flops=HEADS * (4 * scores + 3 * values if backward else scores + values),
        bytes=(2 if backward else 1) * 4 * HEADS * length * DIM * dtype.itemsize,
        is_baseline=label == BASELINE,
    )


@benchmark(
    "call",
    "One call on few positions: the time is that of Python and of small operations, not of arithmetic.",
    baseline=BASELINE,
    axis="T",
    quick={"cpu": (64,), "cuda": (64,)},
)
def call(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """B = 1, H = 4, D = 64, T 16 to 128."""
    for length in LENGTHS:
        for mode in ("forward", "forward+backward"):
            backward = mode == "forward+backward"
            cases = (_case(label, length, backward, device, dtype) for label in LAYOUTS)
            yield Group(mode=mode, cases=tuple(cases))
