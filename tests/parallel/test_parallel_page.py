"""The example of docs/parallel.md runs as the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from structattn.testing.tolerances import SAME_MODEL

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


@pytest.mark.full
def test_the_example_runs_under_torchrun(tmp_path) -> None:
    code = re.search(r"test_parallel_page.py.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "example.py").write_text(code[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    # Lines of several processes may run into each other.
    found = re.findall(r"process (\d): (\([\d, ]+\)), error (\S+), ([\d,]+) bytes sent", done.stdout)
    expected = [(334, "235,264"), (333, "133,376"), (333, "0")]
    assert len(found) == 3
    for (process, shape, error, sent), (length, count) in zip(sorted(found), expected, strict=True):
        assert (shape, sent) == (f"(1, 4, {length}, 40)", count), process
        assert float(error) < SAME_MODEL
