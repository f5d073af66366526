"""``python -m benchmarks.gpu --minutes 10 --out DIR``: checks, tiles, speed and training on a GPU, most
valuable first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.driver import run_rows
from benchmarks.gpu.parts import all_rows, chosen_rows
from benchmarks.gpu.results import Results, markdown, reproduction, summary
from benchmarks.gpu.rows import Row, Settings
from structattn.checks import check_number
from structattn.errors import ConfigError
from structattn.files import write_atomic
from structattn_lab.runs.folders import Owner, opened

MINUTES = 10.0
MOST_JOBS = 8  # processes that compile at the same time, each with a context on the GPU


def run(*, minutes: float, out: Path | None, only: str, rehearse: bool, jobs: int, text: Path | None = None) -> str:
    """Does the rows that are not done yet, and writes the files.

    Args:
        minutes: no row starts after them.
        out: folder of the results, which a later call continues; ``None``: nothing is kept, and all rows are
            done.
        only: a regular expression that names of rows must match.
        rehearse: tiny sizes on the CPU.
        jobs: rows at the same time.
        text: to train on; ``None``: that of the package.

    Returns:
        The summary.

    Raises:
        ConfigError: a setting that cannot work.
    """
    check_number("--minutes", minutes, above=0)
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}")
    if text is not None and not text.exists():
        raise ConfigError(f"--text: there is no {text}")
    if rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before a worker imports Triton
    elif not torch.cuda.is_available():
        raise ConfigError("PyTorch finds no CUDA device here; --rehearse runs tiny sizes on the CPU")
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            owner = Owner(
                command="gpu",
                task="",
                settings={"rehearse": rehearse, "text": None if text is None else str(text.absolute())},
            )
            folder = stack.enter_context(opened(out, owner, resume=True))
        settings = Settings(rehearse=rehearse, folder=folder, text=None if text is None else text.absolute())
        chosen, results = chosen_rows(settings, only), Results.opened(settings)
        left = [row for row in chosen if not results.is_done(row.name)]
        left.sort(key=lambda row: row.name in results.rows)  # what failed comes last

        def on_result(row: Row, result: dict[str, Any]) -> None:
            results.add(row.name, result)
            if row.part == "tile" and result["status"] == "ok":
                from benchmarks.gpu.tile import table

                write_atomic(settings.tiles, table(results.searched).to_json())
            print(f"{result['status']:<11} {result['seconds']:>6.1f} s  {row.name}", flush=True)  # noqa: T201
            if "message" in result:
                print(f"    {result['message']}\n    {reproduction(row.name, settings)}", flush=True)  # noqa: T201

        run_rows(left, settings, jobs=jobs, seconds=60 * minutes, on_result=on_result)
        named = {row.name for row in chosen} | set(results.rows)
        total = Counter(row.part for row in all_rows(settings) if row.name in named)
        write_atomic(results.path.with_suffix(".md"), markdown(results, settings, total))
        return summary(results, settings, total)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, and prints each row and the summary."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Checks and measures on a GPU.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"no row starts after them ({MINUTES:g})")
    parser.add_argument("--out", type=Path, help="folder of the results, continued by the next call (none are kept)")
    parser.add_argument("--only", default="", help="regex on names of rows, such as 'check/backward/.*/float16'")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--jobs", type=int, help=f"rows at the same time (half of the cores, {MOST_JOBS} at most)")
    parser.add_argument("--text", type=Path, help="a text file or prepared corpus to train on (the packaged text)")
    options = parser.parse_args(arguments)
    jobs = options.jobs if options.jobs is not None else max(1, min(MOST_JOBS, cores // 2))
    try:
        summary_text = run(
            minutes=options.minutes,
            out=options.out,
            only=options.only,
            rehearse=options.rehearse,
            jobs=jobs,
            text=options.text,
        )
    except ConfigError as error:
        parser.error(str(error))
    print(summary_text)  # noqa: T201


if __name__ == "__main__":
    main()
