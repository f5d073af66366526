"""The process that measures one case: ``python -m benchmarks.memory_process BENCHMARK DEVICE DTYPE CASE``."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.memory import Peak, growth, tensor_growth
from benchmarks.registered import BENCHMARKS


def _main(benchmark: str, device: str, dtype: str, name: str) -> None:
    bench = BENCHMARKS[benchmark]
    groups = list(bench.groups(torch.device(device), getattr(torch, dtype)))
    group, case = next((g, c) for g in groups for c in g.cases if g.name_of(c) == name)
    torch.manual_seed(0)
    # Libraries and threads take their memory at the first call: the same variant at the smallest size.
    alike = [c for g in groups if g.mode == group.mode for c in g.cases if c.label == case.label]
    min(alike, key=lambda c: c.sizes[bench.axis]).build()()
    resident = growth(case.build())
    peak_of_case = Peak(resident=resident, tensors=tensor_growth(case.build()))
    print(json.dumps(peak_of_case._asdict()))  # noqa: T201


if __name__ == "__main__":
    _main(*sys.argv[1:])
