"""Benchmark "call": what one call costs where there is little to compute: sequences of some dozen positions,
causal, as ``auto`` runs it.
"""

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
# Batches of narrow heads, as models of in-context learning and of short forecasts have them; blocks are
# halved from the length.
BATCHES, BATCH_LENGTHS = (16, 32), (21, 42, 64, 128, 256)
BATCH_HEADS, BATCH_RANKS = 8, ((8, 4, 2, 2), (4, 4, 4, 4))


def _attend(layout: LevelLayout | None) -> Attend:
    """``structured_attention`` with a layout, or the baseline where there is none."""
    if layout is None:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return structured_attention(q, k, v, layout)

    return attend


def _case(
    label: str,
    layout: LevelLayout,
    sizes: tuple[int, int, int],
    backward: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Case:
    """A variant at B, H and T."""
    batch, heads, length = sizes
    dim = layout.head_dim

    def build() -> AttentionWork:
        shape = (batch, heads, length, dim)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3))
        cotangent = torch.randn(shape, device=device, dtype=dtype) if backward else None
        code = "" if label == BASELINE else explain(q, k, v, layout).partition(":")[0]
        return AttentionWork(_attend(None if label == BASELINE else layout), layout, q, k, v, cotangent, code)

    scores, values = layout.score_flops(length), layout.value_flops(length, dim)
    return Case(
        benchmark="call",
        label=label,
        sizes={"T": length, "B": batch, "H": heads, "D": dim},
        build=build,
        flops=batch * heads * (4 * scores + 3 * values if backward else scores + values),
        bytes=(2 if backward else 1) * 4 * batch * heads * length * dim * dtype.itemsize,
        is_baseline=label == BASELINE,
    )


def _batch_layouts(length: int) -> dict[str, LevelLayout]:
    plain = LevelLayout((sum(BATCH_RANKS[0]),), (length,))
    levels = {f"mlr {'|'.join(map(str, ranks))}": LevelLayout.halving(ranks, length) for ranks in BATCH_RANKS}
    return {BASELINE: plain, "one level": plain, **levels}


@benchmark(
    "call",
    "One call on few positions: the time is that of Python and of small operations, not of arithmetic.",
    baseline=BASELINE,
    axis="T",
    quick={"cpu": (64,), "cuda": (64,)},
    quick_others={"B": 1},
)
def call(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """B = 1, H = 4, D = 64, T 16 to 128; B = 16 and 32, H = 8, D = 16, T 21 to 256."""
    groups = [((1, HEADS, length), LAYOUTS) for length in LENGTHS]
    groups += [((b, BATCH_HEADS, length), _batch_layouts(length)) for b in BATCHES for length in BATCH_LENGTHS]
    for sizes, layouts in groups:
        for mode in ("forward", "forward+backward"):
            backward = mode == "forward+backward"
            cases = (_case(label, layout, sizes, backward, device, dtype) for label, layout in layouts.items())
            yield Group(mode=mode, cases=tuple(cases))
