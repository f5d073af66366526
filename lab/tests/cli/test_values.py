"""What help and errors call the arguments of a command."""

import os
import subprocess
import sys

import pytest

from structattn.cli import main
from structattn_lab.cli import commands


def test_positions_are_named(capsys) -> None:
    names = {"compare": "TASK", "uptrain": "MODEL", "evaluate": "RUN", "data info": "CORPUS", "fit": "MATRIX"}
    for command, name in names.items():
        with pytest.raises(SystemExit) as end:
            main([*command.split(), "--help"])
        assert end.value.code == 0
        assert name in capsys.readouterr().out.splitlines()[0]
    for command in commands.COMMANDS:
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        shown = capsys.readouterr().out
        assert "STR" not in shown.split()
        assert not any(f"(default: {nothing})" in shown for nothing in ("", "None"))


def test_without_words_there_is_help(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "compare" in capsys.readouterr().out


def test_a_terminal_without_utf8_gets_the_same_line() -> None:
    said = set()
    for encoding in ("ascii", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-m", "structattn", "evaluate"],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            text=True,
            check=False,
        )
        said.add(done.stderr)
    assert len(said) == 1
    assert "--" not in said.pop().partition(";")[0]
