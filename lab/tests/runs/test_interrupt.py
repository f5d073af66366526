"""Ctrl-C, SIGTERM and killed workers: everything ends soon, nothing new begins, and the line that is printed
continues the work.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from structattn.cli import main
from structattn.errors import TrainingFailedError
from structattn_lab.compare.budgets import flops_of
from structattn_lab.runner.base import Listener
from structattn_lab.runner.job import Job
from structattn_lab.runner.local import LocalRunner
from structattn_lab.runner.train_all import train_all
from structattn_lab.runs import interrupt
from structattn_lab.settings.training import TrainingConfig

LONG = [
    part
    for change in (
        *("task.dim=8", "task.num_points=4", "task.num_heads=2", "task.eval_examples=16"),
        *("training.steps=100000", "training.checkpoint_every=100000", "training.eval_every=100000"),
    )
    for part in ("--set", change)
]


def steps(folder: Path) -> list[int]:
    """Of all checkpoints below a folder."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.rglob("step-*"))


def until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def continuation(printed: str) -> list[str]:
    line = printed.splitlines()[-1]
    assert line.startswith("structattn: interrupted; continue with: structattn ")
    return shlex.split(line.partition("continue with: structattn ")[2])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_is_saved_at_the_next_step(number: int, tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)  # a library that another test has used may have set one

    def send(begun: int) -> None:
        until(lambda: len(list(Path().rglob("events.out*"))) > begun)
        time.sleep(0.1)
        os.kill(os.getpid(), number)

    command = ["train", "nearest-neighbor", "--attention", "standard:1", *LONG]
    for begun in range(2):
        sender = threading.Thread(target=send, args=(begun,))
        sender.start()
        assert main(command) == 128 + number
        sender.join()
        assert len(found := steps(tmp_path)) == begun + 1
        assert 0 < found[-1] < 100000
        command = continuation(capfd.readouterr().err)
        assert command[-3:-1] == ["--out", str(*Path("runs").iterdir())]
        assert command[-1] == "--resume"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals")
def test_several_processes_end_soon_after_ctrl_c_and_nothing_begins(tmp_path: Path) -> None:
    command = ["compare", "nearest-neighbor", "--attention", "standard:1", "--seeds", "4", "--jobs", "2"]
    words = [*command, *LONG, "--out", str(tmp_path / "a b")]
    process = subprocess.Popen(
        [sys.executable, "-m", "structattn", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: len(list(tmp_path.rglob("events.out*"))) == 2)
    sent = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    ended_soon(sent, process.returncode, 130, printed, tmp_path)


def test_several_processes_end_soon_after_sigterm_and_nothing_begins(tmp_path: Path, capfd, forked_workers) -> None:
    command = ["sweep", "nearest-neighbor", "--param", "training.lr=log:1e-3:1e-1", "--jobs", "2"]
    sent = []

    def send() -> None:
        until(lambda: len(list(tmp_path.rglob("events.out*"))) == 2)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    status = main([*command, *LONG, "--out", str(tmp_path / "a b")])
    sender.join()
    ended_soon(sent[0], status, 143, capfd.readouterr().err, tmp_path)


def ended_soon(sent: float, status: int, expected: int, printed: str, folder: Path) -> None:
    assert time.monotonic() - sent < 8
    assert status == expected
    assert "Warning" not in printed
    assert continuation(printed)[-3:] == ["--out", str(folder / "a b"), "--resume"]
    assert len(list((folder / "a b").rglob("checkpoints"))) == 2
    assert len(steps(folder)) == 2


@dataclass(frozen=True)
class Fake(Job):
    """A job that runs a line of Python."""

    code: str

    is_done = False

    def run(self, **_) -> None:
        exec(self.code)


def fake(code: str, folder: Path) -> Fake:
    settings = TrainingConfig(steps=1, batch_size=1, learning_rate=1e-3)
    return Fake(tasks=None, task=None, spec=folder.name, training=settings, seed=0, folder=folder, code=code)


class Told(Listener):
    """Keeps errors by the names of the jobs, and raises the third one."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def ended(self, job: Job, error: Exception | None) -> None:
        self.errors[job.spec] = str(error)
        if len(self.errors) == 3 and error is not None:
            raise error


def test_a_worker_that_dies_or_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch, forked_workers) -> None:
    monkeypatch.setitem(interrupt.GRACE_S, signal.SIGTERM, 1.2)
    codes = {
        "left": "import os; os._exit(3)",
        "failed": "int('x')",
        "killed": "import signal; signal.raise_signal(signal.SIGKILL)",
        "sleeps": "import time; time.sleep(60)",
    }
    jobs = [fake(code, tmp_path / name) for name, code in codes.items()]
    told, sent = Told(), time.monotonic()
    with pytest.raises(TrainingFailedError):
        LocalRunner(2).run(jobs, told)
    assert time.monotonic() - sent < 50  # the one that sleeps is not waited for
    assert told.errors == {
        "left": "its process was ended by status 3",
        "failed": "ValueError: invalid literal for int() with base 10: 'x'",
        "killed": "its process was ended by signal SIGKILL: the machine may be out of memory",
    }
    assert "Traceback" in jobs[1].log.read_text()
    assert not jobs[0].log.read_bytes()


def test_a_failed_run_is_one_line_that_names_its_log(tmp_path: Path) -> None:
    class Fails:
        def run(self, jobs, listener: Listener) -> None:
            listener.ended(jobs[0], TrainingFailedError("bad luck"))

    job = fake("", tmp_path / "mine")
    for log in ("", f"; its log is {job.log}"):
        if log:
            job.log.parent.mkdir()
            job.log.write_text("what it wrote")
        with pytest.raises(TrainingFailedError) as caught:
            train_all([job], runner=Fails(), resume=False, show_progress=False)
        assert str(caught.value) == (
            f"mine, seed 0, learning rate 0.001: bad luck{log}. The other runs are kept, and --resume continues them"
        )


def test_a_process_that_comes_to_no_step_ends_nevertheless() -> None:
    code = (
        "import signal, sys, threading, time; from structattn_lab.runs import interrupt; "
        "interrupt.GRACE_S[signal.SIGTERM] = 0.3\n"
        "with interrupt.handled(lambda number: print('continue', number, flush=True)), interrupt.at_steps():\n"
        "    print('ready', flush=True)\n"
        "    while True: time.sleep(1)"
    )
    for numbers, status in (((signal.SIGTERM,), 143), ((signal.SIGINT, signal.SIGINT), 130)):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        sent = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.2)
        assert process.communicate(timeout=30)[0] == f"continue {numbers[0]}\n"
        assert process.returncode == status
        assert time.monotonic() - sent < interrupt.GRACE_S[signal.SIGINT]


def test_what_it_takes_is_said_before_it_begins(tmp_path: Path, capsys) -> None:
    few = ["--set", "training.steps=2", "--set", "training.checkpoint_every=9", "--set", "task.eval_examples=16"]
    command = ["compare", "nearest-neighbor", "--attention", "standard:1", "--out", str(tmp_path / "o")]
    for more, words in (
        (["--seeds", "1000000"], "1,000,000 runs of 1,000 steps"),
        (["--seeds", "2", "--set", "training.steps=0"], "training.steps"),
    ):
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err
    assert main([*command, "--seeds", "2", *few]) == 0
    said = capsys.readouterr().err.splitlines()  # no terminal: no line is written over
    assert said[0] == f"structattn: writing to {tmp_path / 'o'} (2 runs of 2 steps)"
    assert said[1].startswith("model 1 of 1, run 1 of 2:   0% 0/4 ")
    assert said[-1].startswith("table: baselines: 100% 2/2 ")
    assert len(said) <= 8


def test_billions_of_steps_are_counted_at_once() -> None:
    class Growing:
        def flops(self, model, step=None):
            return 10 if step is None or step >= 3 else step

    assert [flops_of(Growing(), None, steps) for steps in (0, 2, 5)] == [0, 1, 23]
    assert flops_of(Growing(), None, 10**15) == 10 * 10**15 - 27
