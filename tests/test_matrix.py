"""`make test-matrix` fails for what is ours, and says what it could not run."""

import datetime
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """packaging/matrix.py, with a wheel in dist and a Python 3.12 only."""
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "packaging" / "matrix.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "matrix", module)
    spec.loader.exec_module(module)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "structattn-0.2.0-py3-none-any.whl").touch()
    (tmp_path / "constraints.txt").write_text("# limits\ntorch==2.13.0\nnumpy<=2.4.6\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "interpreter", lambda version: "python3.12" if version == "3.12" else None)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    return module


def answers(monkeypatch: pytest.MonkeyPatch, **said: tuple[int, str, str]) -> list[str]:
    """What pip, the first call and pytest say: status, stdout, stderr. Returns the commands, as they come."""
    commands: list[str] = []
    frozen = (0, "torch==2.13.0\ntransformers==5.24.0\nnumpy==2.4.6\n", "")
    answer = {"pip install": (0, "", ""), "pip freeze": frozen, "import time": (0, "import 0.01 s", ""), **said}

    def run(command: tuple[str, ...], timeout: float | None = None, **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(" ".join(command))
        if timeout == 0:
            raise subprocess.TimeoutExpired(command, timeout)
        status, out, errors = next((answer[name] for name in answer if name in commands[-1]), (0, "", ""))
        return subprocess.CompletedProcess(command, status, out, errors)

    monkeypatch.setattr("subprocess.run", run)
    return commands


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ({}, 0, "3 passed"),
        ({"pytest": (1, "FAILED tests/x.py::test_y\n1 failed, 2 passed in 3 s", "")}, 1, "1 failed"),
        ({"pytest": (5, "", "no tests ran")}, 1, "no tests ran"),
        ({"import time": (1, "", "ImportError: no")}, 1, "ImportError"),
        ({"pip install": (1, "", "ERROR: No matching distribution found for torch==2.11.0")}, 0, "not run"),
        ({"pip install": (1, "", "HTTPSConnectionPool: Max retries exceeded")}, 0, "not run"),
        ({"pip install": (1, "", "No matching distribution found for structattn-native==1")}, 1, "not installed"),
        ({"pip install": (1, "", "ERROR: ResolutionImpossible")}, 1, "not installed"),
    ],
    ids=["well", "test", "none", "import", "version", "network", "wheel", "conflict"],
)
def test_what_a_cell_ends_with(matrix, monkeypatch, capsys, said, status, words) -> None:
    answers(monkeypatch, **{"pytest": (0, "3 passed in 3 s", ""), **said})
    assert matrix.main(["oldest-avx2"]) == status
    assert words in capsys.readouterr().out


def test_the_cell_of_the_day_is_one_that_can_run(matrix, monkeypatch, capsys) -> None:
    commands = answers(monkeypatch, pytest=(0, "3 passed in 3 s", ""))
    chosen = set()
    for day in range(1, 9):
        today = SimpleNamespace(today=lambda day=day: datetime.date.fromordinal(day))
        monkeypatch.setattr(matrix, "datetime", SimpleNamespace(date=today))
        assert matrix.main(["date"]) == 0
        out = capsys.readouterr().out
        assert "oldest: this machine has no Python 3.11" in out
        chosen |= {line.split()[1] for line in out.splitlines() if "3 passed" in line}
    assert chosen == {"oldest-avx2", "3.12"}
    tests = {command.partition("cacheprovider ")[2] for command in commands if "cacheprovider" in command}
    assert tests == {" ".join(matrix.QUICK)}
    monkeypatch.setattr(matrix, "DAILY_S", 0)
    assert matrix.main(["date"]) == 0
    assert "not run: not installed within 0 s" in capsys.readouterr().out
    monkeypatch.setattr(matrix, "interpreter", lambda version: None)
    assert matrix.main(["date"]) == 0
    with pytest.raises(SystemExit, match=r"there is no cell 3\.9; there are oldest"):
        matrix.main(["3.9"])
    assert all((ROOT / name).exists() for name in matrix.TESTS)
