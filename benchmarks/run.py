"""The driver: ``python -m benchmarks.run NAME [--quick] [--device cpu] [--dtype float32] [...]``."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, memory, report
from benchmarks.registered import BENCHMARKS
from benchmarks.registry import Benchmark, Group
from benchmarks.timing import SEED, Ceilings, Clock, CpuClock, CudaClock, measure_ceilings, measure_group
from structattn.checks import check_number
from structattn.errors import ConfigError, nearest_name
from structattn.progress import progress_bar
from structattn_lab.runs.folders import OF_EVERY_FOLDER, Owner, opened

REPEATS = 21
PATIENCE_S = 60.0
QUICK_REPEATS = 3
QUICK_PATIENCE_S = 2.0
RESULTS = machine.ROOT / "benchmarks" / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def selected(group: Group, only: str) -> Group | None:
    """The group with the cases whose name matches and its baseline; ``None`` if no case matches."""
    cases = tuple(case for case in group.cases if re.search(only, group.name_of(case)))
    if not cases:
        return None
    return dataclasses.replace(group, cases=tuple(c for c in group.cases if c in cases or c.is_baseline))


def chosen_groups(
    bench: Benchmark, device: torch.device, dtype: torch.dtype, *, only: str = "", quick: bool = False
) -> list[Group]:
    """The groups of a run; arguments as for ``run``.

    Raises:
        ConfigError: nothing is left, or ``only`` is no regular expression.
    """
    groups = bench.groups(device, dtype)
    if quick:
        groups = [
            group
            for group in groups
            if group.sizes[bench.axis] in bench.quick[device.type]
            and all(group.sizes.get(name, size) == size for name, size in bench.quick_others.items())
        ]
    try:
        found = [chosen for group in groups if (chosen := selected(group, only))]
    except re.error as error:
        raise ConfigError(f"--only {only!r} is no regular expression: {error}") from error
    if not found:
        raise ConfigError(f"--only {only!r} matches no case of {bench.name}" + (" with --quick" if quick else ""))
    return found


def run(
    bench: Benchmark,
    *,
    device: str,
    dtype: str,
    repeats: int,
    only: str = "",
    patience_s: float = PATIENCE_S,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures a benchmark.

    Args:
        bench: the benchmark.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: a name in ``DTYPES``.
        repeats: how often every variant is timed.
        only: a regular expression that names of cases must match (``Group.name_of``). Default: all.
        patience_s: what may be lost per group to repeats that other programs disturb, in seconds.
        quick: only the sizes that the benchmark calls quick, and no peak memory.

    Returns:
        Everything that is written to the JSON file.

    Raises:
        WrongResultError: a variant does not compute what it should.
        ConfigError: ``only`` matches nothing.
    """
    where, kind = torch.device(device), DTYPES[dtype]
    clock: Clock = CudaClock(where) if where.type == "cuda" else CpuClock()
    groups = chosen_groups(bench, where, kind, only=only, quick=quick)
    commit = machine.commit()  # of the code that is already loaded, whatever happens to the files meanwhile
    seen: list[Ceilings] = []
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    with progress_bar(total=repeats * len(groups), unit="repeat", show=True) as bar:
        for group in groups:
            bar.set_description(group.name_of(group.baseline).rpartition("/")[0])
            measured = measure_group(
                group,
                dtype=kind,
                clock=clock,
                repeats=repeats,
                patience_s=patience_s,
                on_repeat=bar.update,
                left_out=left_out,
            )
            if not quick:  # most of its time would be that of starting processes
                left_out += _add_memory(measured, bench, group, where, kind)
            rows += measured
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
    command += ["--quick"] if quick else []
    return {
        "benchmark": bench.name,
        "about": bench.about,
        "baseline": bench.baseline,
        "axis": bench.axis,
        "device": device,
        "dtype": dtype,
        "repeats": repeats,
        "quick": quick,
        "seed": SEED,
        "command": shlex.join(command),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "hardware": machine.hardware(where),
        "versions": machine.versions(where),
        "ceilings": dataclasses.asdict(ceilings),
        "rows": rows,
        "left_out": left_out,
        "crossover": report.crossovers(rows, bench.axis),
        "fit": bench.fit,
        "exponents": [] if bench.fit is None else report.exponents(rows, bench.axis, bench.fit),
    }


def _add_memory(
    rows: list[dict[str, Any]], bench: Benchmark, group: Group, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Adds the peak memory to the rows of the cases that measure it, and its ratio to the baseline's if that
    is no noise.

    Returns:
        A line for every case whose memory could not be measured: hours of times are not lost for it.
    """
    by_label, failed = {row["label"]: row for row in rows}, []
    for case in group.cases:
        if case.measures_memory and case.label in by_label:
            try:
                found = memory.peak(bench, group, case, device, dtype)
            except memory.MemoryMeasurementError as error:
                failed.append(f"peak memory of {group.name_of(case)}: {error}")
                continue
            by_label[case.label]["peak_bytes"] = found.resident
            if found.tensors is not None:
                by_label[case.label]["tensor_bytes"] = found.tensors
    for name, ratio in (("peak_bytes", "peak_ratio"), ("tensor_bytes", "tensor_ratio")):
        base = by_label[group.baseline.label].get(name, 0)
        for row in rows:
            if base >= memory.RESOLUTION and name in row:
                row[ratio] = row[name] / base
    return failed


def run_and_write(
    name: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    repeats: int | None = None,
    only: str = "",
    patience_s: float | None = None,
    quick: bool = False,
    out: Path | None = None,
    on_open: Callable[[Path], None] | None = None,
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Measures a benchmark by its name and writes its files.

    Args:
        name: in ``BENCHMARKS``.
        repeats, patience_s: default (``None``): 21 and 60; 3 and 2 when quick.
        out: folder of the results. Default: a new one below ``runs/``.
        on_open: called with the folder before anything is measured.
        device, dtype, only, quick: as for ``run``.

    Returns:
        The result, and the files.

    Raises:
        ConfigError: a setting that cannot work, or a folder that holds other files than results.
        WrongResultError: a variant does not compute what it should.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}: {nearest_name(name, BENCHMARKS)}")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}: {nearest_name(dtype, DTYPES)}")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here")
    if repeats is not None and repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")
    if patience_s is not None:
        check_number("--patience", patience_s, minimum=0)
    chosen_groups(
        BENCHMARKS[name], torch.device(device), DTYPES[dtype], only=only, quick=quick
    )  # named before a folder
    owner = Owner(command="bench", task="", settings={}, recorded=_record, label=f"bench-{name}")
    # The repository's own results have other files beside them, and no owner.
    is_own = out is not None and out.resolve() == RESULTS
    with nullcontext(RESULTS) if is_own else opened(out, owner, resume=out is not None, on_open=on_open) as folder:
        result = run(
            BENCHMARKS[name],
            device=device,
            dtype=dtype,
            repeats=repeats or (QUICK_REPEATS if quick else REPEATS),
            only=only,
            patience_s=patience_s if patience_s is not None else QUICK_PATIENCE_S if quick else PATIENCE_S,
            quick=quick,
        )
        return result, report.write(result, folder)


def _record(folder: Path) -> dict[str, Any] | None:
    """No settings of a folder of results; ``None`` if it holds anything else. Results of several benchmarks
    share one.
    """
    names = [path.name for path in folder.iterdir() if path.name not in OF_EVERY_FOLDER]
    return {} if all(re.fullmatch(r"\d{4}-\d\d-\d\d-.*\.(json|md|png)", name) for name in names) else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one benchmark, writes its files and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Runs one benchmark.")
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--quick", action="store_true", help="a few sizes and repeats, no peak memory: a minute or two")
    parser.add_argument(
        "--repeats", type=int, help=f"times that every variant is timed ({REPEATS}; quick: {QUICK_REPEATS})"
    )
    parser.add_argument("--only", default="", help="regex on benchmark/mode/E=256,tokens=1024/variant")
    parser.add_argument(
        "--patience",
        type=float,
        help="seconds per size that may be lost to repeats that other programs disturb "
        f"({PATIENCE_S:g}; quick: {QUICK_PATIENCE_S:g})",
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/bench-NAME-DATE-TIME)")
    options = parser.parse_args(arguments)
    try:
        result, paths = run_and_write(
            options.name,
            device=options.device,
            dtype=options.dtype,
            repeats=options.repeats,
            only=options.only,
            patience_s=options.patience,
            quick=options.quick,
            out=options.out,
        )
    except ConfigError as error:
        parser.error(str(error))
    print(report.markdown(result))  # noqa: T201
    print("\n".join(str(path) for path in paths))  # noqa: T201


if __name__ == "__main__":
    main()
