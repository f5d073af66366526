"""The examples of docs/parallel.md and docs/parallel-heads.md run as the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from structattn.testing.tolerances import SAME_MODEL

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("parallel.md", "parallel-heads.md")]


def printed(folder: Path, marker: str, processes: int) -> str:
    """What the first example after a marker prints under torchrun."""
    code = re.search(marker + r".*?```python\n(.*?)```", "".join(page.read_text() for page in PAGES), re.DOTALL)
    assert code is not None
    (folder / "example.py").write_text(code[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, "example.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_the_example_of_a_sequence_runs_under_torchrun(tmp_path: Path) -> None:
    # Lines of several processes may run into each other.
    found = re.findall(
        r"process (\d): (\([\d, ]+\)), error (\S+), ([\d,]+) bytes sent",
        printed(tmp_path, "test_parallel_page.py starts it", 3),
    )
    expected = [(334, "235,264"), (333, "133,376"), (333, "0")]
    assert len(found) == 3
    for (process, shape, error, sent), (length, count) in zip(sorted(found), expected, strict=True):
        assert (shape, sent) == (f"(1, 4, {length}, 40)", count), process
        assert float(error) < SAME_MODEL


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_the_example_of_heads_runs_under_torchrun(tmp_path: Path, processes: int) -> None:
    found = re.fullmatch(r"loss (\S+), error (\S+)\n", printed(tmp_path, "starts heads.py", processes))
    assert found is not None
    assert float(found[1]) < 1
    assert float(found[2]) < SAME_MODEL
