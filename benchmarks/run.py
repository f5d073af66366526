"""The driver: ``python -m benchmarks.run NAME [--device cpu] [--dtype float32] [--repeats N] [--only REGEX] [--patience S] [--out DIR]``."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import benchmarks.linear  # noqa: F401  # registers itself; a new benchmark is imported here too
from benchmarks import machine, report
from benchmarks.registry import BENCHMARKS, Benchmark, Group
from benchmarks.timing import SEED, Ceilings, Clock, CpuClock, CudaClock, measure_ceilings, measure_group

REPEATS = 21
PATIENCE_S = 60.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def selected(group: Group, only: str) -> Group | None:
    """The group with the cases whose name matches and its baseline; ``None`` if no case matches."""
    cases = tuple(case for case in group.cases if re.search(only, group.name_of(case)))
    if not cases:
        return None
    return dataclasses.replace(group, cases=tuple(c for c in group.cases if c in cases or c.is_baseline))


def run(
    bench: Benchmark, *, device: str, dtype: str, repeats: int, only: str = "", patience_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Measures a benchmark.

    Args:
        bench: the benchmark.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: a name in ``DTYPES``.
        repeats: how often every variant is timed.
        only: a regular expression that names of cases must match (``Group.name_of``). Default: all.
        patience_s: what may be lost per group to repeats that other programs disturb, in seconds.

    Returns:
        Everything that is written to the JSON file.

    Raises:
        WrongResultError: a variant does not compute what it should.
        ValueError: ``only`` matches nothing.
    """
    where, kind = torch.device(device), DTYPES[dtype]
    clock: Clock = CudaClock(where) if where.type == "cuda" else CpuClock()
    groups = [found for group in bench.groups(where, kind) if (found := selected(group, only))]
    if not groups:
        raise ValueError(f"--only {only!r} matches no case of {bench.name}")
    commit = machine.commit()  # of the code that is already loaded, whatever happens to the files meanwhile
    seen: list[Ceilings] = []
    rows: list[dict[str, Any]] = []
    with tqdm(total=repeats * len(groups), unit="repeat") as bar:
        for group in groups:
            bar.set_description(group.name_of(group.baseline).rpartition("/")[0])
            rows += measure_group(
                group, dtype=kind, clock=clock, repeats=repeats, patience_s=patience_s, on_repeat=bar.update
            )
            seen.append(measure_ceilings(where, kind, clock))
    ceilings = Ceilings(
        flops_per_s=max(found.flops_per_s for found in seen), bytes_per_s=max(found.bytes_per_s for found in seen)
    )
    for row in rows:
        row["floor_ms"] = ceilings.floor_ms(row["flops"], row["bytes"])
        row["times_floor"] = row["median_ms"] / row["floor_ms"]
    # The folder of the results is left out: it is a path of this machine and changes no number.
    command = ["python", "-m", "benchmarks.run", bench.name, "--device", device, "--dtype", dtype]
    command += ["--repeats", str(repeats), *(["--only", only] if only else []), "--patience", f"{patience_s:g}"]
    return {
        "benchmark": bench.name,
        "about": bench.about,
        "baseline": bench.baseline,
        "axis": bench.axis,
        "device": device,
        "dtype": dtype,
        "repeats": repeats,
        "seed": SEED,
        "command": shlex.join(command),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "hardware": machine.hardware(where),
        "versions": machine.versions(where),
        "ceilings": dataclasses.asdict(ceilings),
        "rows": rows,
        "crossover": report.crossovers(rows, bench.axis),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one benchmark, writes its two files and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Runs one benchmark.")
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="times that every variant is timed (%(default)s)")
    parser.add_argument("--only", default="", help="regex on benchmark/mode/E=256,tokens=1024/variant")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="seconds per size that may be lost to repeats that other programs disturb (%(default)g)",
    )
    parser.add_argument(
        "--out", type=Path, default=machine.ROOT / "benchmarks" / "results", help="folder of the results"
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device here")
    result = run(
        BENCHMARKS[options.name],
        device=options.device,
        dtype=options.dtype,
        repeats=options.repeats,
        only=options.only,
        patience_s=options.patience,
    )
    paths = report.write(result, options.out)
    print(report.markdown(result))  # noqa: T201
    print("\n".join(str(path) for path in paths))  # noqa: T201


if __name__ == "__main__":
    main()
