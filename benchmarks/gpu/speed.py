"""Part "speed": the benchmarks "attention", "decode", "model" and "llama" one variant at a time, each beside
its baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.attention import attention_groups
from benchmarks.decode import decode_groups
from benchmarks.gpu.rows import Row, Settings
from benchmarks.gpu.tile import tiles_of
from benchmarks.llama import llama_groups
from benchmarks.model import model_groups
from benchmarks.registry import CaseUnavailableError, Group
from benchmarks.shapes import ModelShape
from benchmarks.timing import QUEUED, Clock, CpuClock, CudaClock, measure_ceilings, measure_group

LIMIT_S = 240.0
REPEATS = 11
LENGTHS = (8192, 65536)
CORE = (
    "mlr 8x8",
    "mlr 8x8 values",
    "sliding 8x8",
    "mlr 64|32|16|16",
    "mlr 8 levels, values",
    "8 bits",
    "4 bits",
)  # before the other variants
SMOLLM2 = ModelShape(num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3)  # that of SmolLM2-135M
SMOLLM2_LENGTHS = (4096, 16384)
SIX_LAYERS = replace(SMOLLM2, num_layers=6)  # that a step can be compiled within the limit
TINY = ModelShape(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1)


def groups(settings: Settings) -> Iterator[Group]:
    """The groups of the benchmarks at the lengths of this part, 16-bit on a GPU."""
    device, dtype = settings.device, _dtype(settings)
    if settings.rehearse:
        yield from attention_groups(device, dtype, lengths=(128,), heads=1)
        yield from decode_groups(device, dtype, lengths=(128,), batches=(1,), heads=1)
        yield from model_groups(device, dtype, shape=TINY, lengths=(32,), batches=(1,))
        yield from llama_groups(device, dtype, shape=TINY, lengths=(128,))
        return
    yield from attention_groups(device, dtype, lengths=LENGTHS)
    yield from decode_groups(device, dtype, lengths=LENGTHS)
    yield from model_groups(device, dtype)
    yield from llama_groups(device, dtype, shape=SMOLLM2, lengths=SMOLLM2_LENGTHS)
    yield from llama_groups(device, dtype, shape=SIX_LAYERS, lengths=SMOLLM2_LENGTHS[:1])


def _dtype(settings: Settings) -> torch.dtype:
    return torch.float32 if settings.rehearse else torch.bfloat16


def rows(settings: Settings) -> Iterator[Row]:
    """Rank 3: the main variants; 5: the others."""
    for group in groups(settings):
        for case in group.cases:
            if not case.is_baseline:
                pair = tuple(one for one in group.cases if one is case or one.is_baseline)
                yield Row(
                    name=f"speed/{group.name_of(case)}",
                    rank=3 if case.label in CORE else 5,
                    limit_s=LIMIT_S,
                    run=_row(replace(group, cases=pair), settings),
                    alone=True,
                )


def _row(group: Group, settings: Settings) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        return _measured(group, settings)

    return run


def _measured(group: Group, settings: Settings) -> dict[str, Any]:
    """The times of a variant and of its baseline with the tiles that were found, if some were."""
    if not settings.tiles.exists():
        return _compared(group, settings) | {"used_found_tiles": False}
    from structattn.ops.triton.tile_table import read_tiles  # only a worker imports Triton

    with tiles_of(read_tiles(settings.tiles)):
        return _compared(group, settings) | {"used_found_tiles": True}


def _compared(group: Group, settings: Settings) -> dict[str, Any]:
    """The times of a variant and of its baseline, and how near they are to the rates that the device showed
    right after.
    """
    device, dtype = settings.device, _dtype(settings)
    clock: Clock = CpuClock() if settings.rehearse else CudaClock(device)
    left_out: list[str] = []
    repeats = 1 if settings.rehearse else REPEATS
    measured = measure_group(group, dtype=dtype, clock=clock, repeats=repeats, patience_s=0.0, left_out=left_out)
    if left_out:
        raise CaseUnavailableError(left_out[0].partition(": ")[2])
    ceilings = measure_ceilings(device, dtype, clock, repeats=1 if settings.rehearse else 4)
    kept = {}
    for row in measured:
        seconds = row["median_ms"] / 1e3
        of_rates = {
            "of_matmul_rate": row["flops"] / seconds / ceilings.flops_per_s,
            "of_copy_rate": row["bytes"] / seconds / ceilings.bytes_per_s,
        }
        kept["baseline" if row["is_baseline"] else "variant"] = row | of_rates
    if group.mode == "decode" and not settings.rehearse:  # a step is short: without the launches it is another number
        queued = measure_group(group, dtype=dtype, clock=CudaClock(device, QUEUED), repeats=repeats, patience_s=0.0)
        kept["queued"] = next(row for row in queued if not row["is_baseline"])
    return {**kept, "ceilings": asdict(ceilings)}
