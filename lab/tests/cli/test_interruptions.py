"""Ctrl-C and SIGTERM at any moment: the right status, no traceback, and a last line with the command that
continues; a full disk likewise.
"""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from structattn.cli import main
from structattn.cli.session import Session
from structattn_lab.cli.call import RESUMABLE
from structattn_lab.cli.commands import COMMANDS

SMALL = [
    part
    for change in (
        *("task.dim=8", "task.num_points=4", "task.num_heads=2", "task.eval_examples=16"),
        *("training.steps=8", "training.eval_every=4", "training.checkpoint_every=3"),
    )
    for part in ("--set", change)
]
TRAIN = ["train", "nearest-neighbor", "--attention", "bilinear-btt:1", *SMALL]
COMPARE = ["compare", "nearest-neighbor", "--attention", "standard:1", "bilinear-btt:1", *SMALL]
DATA = ["data", "prepare", "text", "--source", "text.txt", "--document-start", "#"]
FIT = ["fit", "gaussian", "--size", "8", "--structures", "btt:1", "lowrank:2"]

# Runs the command line in a process of its own, which sends itself a signal: when a module is about to be
# imported, or a file written.
AT = """
import os, signal, sys
from pathlib import Path
kind, moment, number, *arguments = sys.argv[1:]
def send():
    os.kill(os.getpid(), int(number))
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            send()
replace = Path.replace
def at_file(self, target):
    if Path(target).name == moment:
        send()
    return replace(self, target)
if kind == "import":
    sys.meta_path.insert(0, AtImport())
else:
    Path.replace = at_file
sys.argv = ["structattn", *arguments]
from structattn.cli.__main__ import run
run()
"""


def interrupted(kind: str, moment: str, number: int, arguments: list[str], folder: Path) -> list[str]:
    """The words of the command in the last line."""
    done = subprocess.run(
        [sys.executable, "-c", AT, kind, moment, str(number), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("structattn: interrupted; "), done.stderr
    return shlex.split(line.partition(" with: structattn ")[2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "module", ["structattn.cli.session", "shlex", "structattn_lab.cli.call", "tyro", "torch", "numpy", "accelerate"]
)
@pytest.mark.quick(module=["structattn.cli.session", "numpy"])
def test_an_interruption_of_an_import_ends_the_command(module: str, number: int, tmp_path: Path) -> None:
    assert interrupted("import", module, number, TRAIN, tmp_path) == TRAIN
    assert list(tmp_path.rglob("*")) == []


def scores(folder: Path) -> object:
    """What a command computed."""
    if (folder / "model.safetensors").exists():
        return (folder / "model.safetensors").read_bytes()
    if (folder / "manifest.json").exists():
        return [path.read_bytes() for path in sorted(folder.glob("*.tokens"))]
    record = json.loads((folder / "results.json").read_text())
    if "rows" in record:
        return [row["scores"] for row in record["rows"]]
    return [row["relative_error"] for matrix in record["matrices"] for row in matrix["rows"]]


@pytest.mark.parametrize(
    ("command", "moment"),
    [
        (TRAIN, "owner.json"),
        (TRAIN, "model.safetensors"),
        (TRAIN, "run.json"),
        (COMPARE, "scores.json"),
        (COMPARE, "results.json"),
        (COMPARE, "report.html"),
        (FIT, "results.json"),
        (FIT, "report.html"),
        (DATA, "progress.json"),
        (DATA, "manifest.json"),
    ],
)
@pytest.mark.quick(moment=["manifest.json"])
def test_the_last_line_completes_the_work(command: list[str], moment: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(f"# {number}\n{'ab ' * number}\n" for number in range(100))
    Path("text.txt").write_text(text)
    assert main([*command, "--out", "base"]) == 0
    again = interrupted("file", moment, signal.SIGTERM, [*command, "--out", "a b's"], tmp_path)
    assert main(again) == 0
    assert scores(Path("a b's")) == scores(Path("base"))
    assert not list(Path("a b's").rglob(".tmp-*"))


def test_the_line_has_the_options_of_the_call(tmp_path: Path) -> None:
    words = ["compare", "text", "--data", "a b.txt", "--traceback", "--set", "x='$y'"]
    session = Session(words)
    session.resumable = RESUMABLE
    assert session.interrupted() == f"structattn: interrupted; continue with: {shlex.join(['structattn', *words])}"
    session.opened(Path("runs/it's"))
    assert shlex.split(session.interrupted())[-3:] == ["--out", "runs/it's", "--resume"]
    session = Session(["fit", "gaussian"])
    session.opened(Path("x"))
    assert session.interrupted() == "structattn: interrupted; run it again with: structattn fit gaussian"
    assert set(RESUMABLE) == {name for name, kind in COMMANDS.items() if "resume" in kind.__dataclass_fields__}


class FullDisk:
    """A disk on which nothing can be synced from one call on, until it is freed."""

    def __init__(self, monkeypatch) -> None:
        self.left: int | None = None
        self.calls = 0
        before = os.fsync

        def fsync(handle: int) -> None:
            self.calls += 1
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            before(handle)

        monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.full
@pytest.mark.parametrize("name", ["train", "compare"])
def test_a_command_completes_after_a_full_disk(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    command = {"train": TRAIN, "compare": COMPARE}[name]
    monkeypatch.chdir(tmp_path)
    disk = FullDisk(monkeypatch)
    assert main([*command, "--out", "base"]) == 0
    calls = disk.calls
    for moment in range(0, calls, max(1, calls // 5)):
        words = [*command, "--out", f"out-{moment}"]
        disk.left = moment
        capsys.readouterr()
        assert main(words) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("structattn: ")
        assert "No space left on device" in said
        disk.left = None
        assert main(shlex.split(said.partition("Free some space, and continue with: structattn ")[2])) == 0
        assert scores(Path(words[-1])) == scores(Path("base"))
        assert not list(Path(words[-1]).rglob(".tmp-*"))
