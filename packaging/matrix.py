"""Tests what `make dist` made, in an environment of its own for each combination of Python, PyTorch and
transformers: `make test-matrix`.

The package is the wheel, not the clone, and there is no compiler. A cell is not run, and its row says why,
where this machine lacks the Python, or the index a version or an answer. What pip cannot install together,
and a test that fails, is a failure. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes builds of
PyTorch without CUDA, which are a tenth as large.

    python packaging/matrix.py [NAME ...]      these cells
    python packaging/matrix.py date            one of those whose Python is here, another one each day, with
                                               fewer tests; not run if it is not installed within 5 minutes
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "scipy", "triton", "tokenizers")
# What an installation can break: operators, caches, layers and models; compiled code is that of the wheel.
QUICK = (
    *("tests/ops/test_native.py", "tests/cache/test_steps.py", "tests/layers/test_attention.py"),
    *("tests/integrations/test_hf_steps.py", "tests/test_public_api.py"),
)
TESTS = (
    *QUICK,
    *("tests/ops/test_structured_attention.py", "tests/ops/test_transforms.py"),
    *("tests/cache/test_quantized.py", "tests/models"),
)
# What pip says where an index does not answer, or has no such version for this Python.
NOT_THERE = (
    r"No matching distribution found for (?!structattn)|ConnectionPool|ReadTimeout|HTTP error|Connection(Reset|Refused)"
)
DAILY_S = 300  # how long the installation of the cell of the day may take
_CALL = """
import time

start = time.perf_counter()
import torch
from_torch = time.perf_counter()
import structattn as sa
imported = time.perf_counter()
q, layout = torch.randn(1, 2, 700, 6), sa.LevelLayout((3, 2, 1), (24, 12, 3))
library = sa.ops.backends.library
computed = time.process_time()
assert library.why_not_here() is None, library.why_not_here()
loaded, start_of_call = time.process_time() - computed, time.perf_counter()
found = sa.structured_attention(q, q, q, layout, backend="native")
called = time.perf_counter()
torch.testing.assert_close(found, sa.structured_attention(q, q, q, layout, backend="reference"))
assert "site-packages" in sa.__file__, sa.__file__
words = f"import {imported - from_torch:.2f} s after PyTorch, library loaded in {1e3 * loaded:.1f} ms of CPU time"
print(f"{words}, first call {1e3 * (called - start_of_call):.0f} ms", end="")
"""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A combination.

    Attributes:
        torch, transformers: what pip is asked for.
        is_limited: whether constraints.txt limits the other packages.
    """

    name: str
    python: str
    torch: str
    transformers: str
    is_limited: bool = True
    environment: tuple[tuple[str, str], ...] = ()


CELLS = (
    Cell("oldest", "3.11", "torch==2.11.0", "transformers==5.17.0"),
    Cell("oldest-avx2", "3.12", "torch==2.11.0", "transformers==5.17.0", environment=(("STRUCTATTN_CPU", "avx2"),)),
    Cell("3.11", "3.11", "torch==2.13.0", "transformers==5.24.0"),
    Cell("3.12", "3.12", "torch==2.13.0", "transformers==5.24.0"),
    Cell("3.13", "3.13", "torch==2.13.0", "transformers==5.24.0"),
    Cell("3.14", "3.14", "torch==2.13.0", "transformers==5.24.0"),
    Cell("newest", "3.13", "torch", "transformers", is_limited=False),
)


def interpreter(version: str) -> str | None:
    """A Python of a version: on the path, or one of pyenv's."""
    folders = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for command in (*map(str, folders), shutil.which(f"python{version}")):
        if command and subprocess.run([command, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return command
    return None


def limits(cell: Cell) -> Iterator[str]:
    """The lines of constraints.txt for the packages that a cell does not choose."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if cell.is_limited and not line.startswith(("#", "torch=", "transformers=")):
            yield line


def run_cell(
    cell: Cell, dist: Path, folder: Path, tests: tuple[str, ...] = TESTS, within: float | None = None
) -> tuple[str, bool]:
    """What came out, in words, and whether all was well.

    Args:
        within: how many seconds the installation may take.
    """
    python = interpreter(cell.python)
    if python is None:
        return "not run: this machine has no such Python", True
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "STRUCTATTN_CPU")}
    environment |= {"CXX": "false", "STRUCTATTN_CACHE": str(folder / "cache"), **dict(cell.environment)}
    (folder / "limits.txt").write_text("\n".join(limits(cell)))

    def run(*command: str, within: float | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=within
        )

    start = time.monotonic()
    mine = str(folder / "venv" / "bin" / "python")
    install = (mine, "-m", "pip", "install", "-q", "--no-compile", "--only-binary", ":all:")
    install += ("--find-links", str(dist), "-c", str(folder / "limits.txt"))
    version = re.search(r"structattn-(.+)-py3", next(dist.glob("structattn-*.whl")).name)
    assert version is not None
    for command in (
        (python, "-m", "venv", str(folder / "venv")),
        (
            *install,
            cell.torch,
            cell.transformers,
            f"structattn[hf]=={version[1]}",
            f"structattn-lab=={version[1]}",
            *TOOLS,
        ),
    ):
        try:
            done = run(*command, within=within)
        except subprocess.TimeoutExpired:
            return f"not run: not installed within {within:.0f} s", True
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1][:200]
            is_elsewhere = re.search(NOT_THERE, done.stderr) is not None
            return f"{'not run' if is_elsewhere else 'not installed'}: {said}", is_elsewhere
    installed = time.monotonic() - start
    listed = dict(line.split("==") for line in run(mine, "-m", "pip", "freeze").stdout.split() if "==" in line)
    versions = f"torch {listed['torch']}, transformers {listed['transformers']}, numpy {listed['numpy']}"
    call = run(mine, "-c", _CALL)
    if call.returncode:
        return f"{versions}: {call.stderr.strip().splitlines()[-1][:200]}", False
    done = run(mine, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *tests)
    last = [line for line in done.stdout.splitlines() if re.search(r"\d (passed|failed|error)", line)][-1:]
    if done.returncode:
        (dist / f"matrix-{cell.name}.log").write_text(done.stdout)
        print(done.stdout[-4000:])
    seconds = f"{installed:.0f} s to install"
    return f"{versions}: {''.join(last) or done.stderr[-200:]}; {seconds}; {call.stdout}", done.returncode == 0


def main(names: list[str]) -> int:
    dist = ROOT / "dist"
    if not list(dist.glob("structattn-*.whl")):
        sys.exit("there are no wheels in dist/: run `make dist` first")
    if unknown := {name for name in names if name not in ("date", *(cell.name for cell in CELLS))}:
        sys.exit(f"there is no cell {', '.join(sorted(unknown))}; there are {', '.join(cell.name for cell in CELLS)}")
    if names == ["date"]:
        here = [cell for cell in CELLS if interpreter(cell.python)]
        cells, tests, within = [here[datetime.date.today().toordinal() % len(here)]] if here else [], QUICK, DAILY_S
        for cell in CELLS:
            if cell not in here:
                print(f"{cell.name}: this machine has no Python {cell.python}")
    else:
        cells, tests, within = [cell for cell in CELLS if not names or cell.name in names], TESTS, None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before its time"))  # so that environments are removed
    are_well = []
    for cell in cells:
        with tempfile.TemporaryDirectory() as folder:
            words, is_well = run_cell(cell, dist, Path(folder), tests, within)
            print(f"| {cell.name} | {cell.python} | {words} |", flush=True)
        are_well.append(is_well)
    return 0 if all(are_well) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
