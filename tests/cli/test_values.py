"""Wrong values of options: the message names the option, and shows the value as it was typed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from structattn.cli import commands, main

PLAN = ["plan", "text", "--model", "125m"]
CORPUS = ["data", "prepare", "text", "--source", "owned/file", "--out", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--link", "-5"], "--link: expected a finite number above 0, got '-5'"),
        ([*PLAN, "--link", "5"], "--link gives a time only together with --gpus"),
        ([*PLAN, "--gpus", "0"], "--gpus: expected a whole number of at least 2, got '0'"),
        ([*PLAN, "--gpus", "4096"], "--gpus must be an int of at least 2 and at most 2048"),
        ([*PLAN, "--context", "1" * 20], f"--context: expected a whole number of at least 1 and at most {2**31 - 1}"),
        ([*PLAN, "--gpu-memory", "nan"], "--gpu-memory: expected a finite number above 0, got 'nan'"),
        ([*PLAN, "--gpu-flops", "1e9"], "--gpu-flops gives a time only together with --tokens"),
        ([*PLAN, "--tokens", "1e400"], "--tokens: expected a finite number above 0, got '1e400'"),
        ([*PLAN, "--batch-tokens", "7"], "--batch-tokens must hold at least one sequence"),
        (["plan", "text"], "--embed-dim, --num-layers and --num-heads"),
        (["mup", "check", "--widths", "64"], "--widths: a check compares at least two different ones"),
        (
            ["fit", "gaussian", "--size", "1"],
            "--size: expected a whole number of at least 2 and at most 16384, got '1'",
        ),
        (["generate", "run", "--top-p", "1.5"], "--top-p: expected a finite number above 0 and at most 1, got '1.5'"),
        (["generate", "run", "--temperature", "-1"], "--temperature: expected a finite number of at least 0, got '-1'"),
        (["bench", "call", "--repeats", "0"], "--repeats: expected a whole number of at least 1, got '0'"),
        (["bench", "call", "--patience", "inf"], "--patience: expected a finite number of at least 0, got 'inf'"),
        (["bench", "call", "--device", "tpu"], "--device"),
        ([*CORPUS, "--validation", "2"], "--validation: expected a finite number above 0 and below 1, got '2'"),
        ([*CORPUS, "--validation", "0.5", "--test", "0.5"], "--validation and --test must sum to less than 1"),
        ([*CORPUS, "--model", "m"], "give both, got --tokens chars and --model m"),
        ([*CORPUS, "--tokens", "bytes", "--unknown", "drop"], "--unknown drop is only for --tokens chars"),
        (["data", "prepare", "text", "--source", "./no", "--out", "c"], "expected a text file or a folder at ./no"),
        (["compare", "forecast", "--preset", ""], "--preset: unknown preset ''"),
        (["compare", "forecast", "--ray-address", "x"], "--ray-address: expected auto, local, HOST:PORT"),
    ],
)
def test_the_option_is_named_as_it_was_typed(arguments, message: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("owned").mkdir()
    Path("owned/file").write_text("mine")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["owned", "file"]  # nothing is left behind


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
        assert "STR" not in capsys.readouterr().out.split()


def test_without_words_there_is_help(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "compare" in capsys.readouterr().out


def test_a_terminal_without_utf8_gets_the_same_line() -> None:
    said = set()
    for encoding in ("ascii", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-m", "structattn.cli", "train"],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            text=True,
            check=False,
        )
        said.add(done.stderr)
    assert len(said) == 1
    assert "--" not in said.pop().partition(";")[0]
