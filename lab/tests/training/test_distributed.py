"""One model on several processes, sharded or not, and in several passes: the losses of one process and one
pass.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn

from structattn.cli import main
from structattn.errors import ConfigError, TrainingFailedError
from structattn.testing.tolerances import ANOTHER_ORDER, SAME_MODEL
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.text.task import TextConfig, TextTask
from structattn_lab.training import processes, sharding
from structattn_lab.training.checkpoint import latest_checkpoint, load_checkpoint
from structattn_lab.training.loop import train

SPEC = "mlr:4|2|2"
TASK = {"context_length": 32, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "eval_windows": 8}
# muP, whose groups have different learning rates; decay, clipping and a schedule.
TRAINING = {
    "steps": 12,
    "batch_size": 6,
    "learning_rate": 3e-3,
    "schedule": "cosine",
    "eval_every": 3,
    "checkpoint_every": 4,
    "parametrization": "mup",
    "base_fan_in": 16,
    "weight_decay": 0.1,
    "gradient_clip": 0.5,
}
STOPPED_AT = 7
# Trains lists of jobs, one list after the other, each in new processes; some die in the middle of a step,
# some are only stopped. With RANK, as a launcher sets it, this is one of the processes; without it, it starts
# two, which are forks that need no import.
_WORKER = """
import json, os, socket, sys
from pathlib import Path
from accelerate import PartialState
from structattn_lab.tasks.text.task import TextConfig, TextTask
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.training.loop import train
from structattn_lab.training.sharding import local_shard

class Stopping(TextTask):
    stops_at = None
    def batch(self, seed, step, batch_size):
        if step == self.stops_at:
            raise KeyboardInterrupt
        return super().batch(seed, step, batch_size)

def run(jobs):
    task = Stopping(TextConfig(**task_settings))
    for job in jobs:
        os.environ["ACCELERATE_USE_FSDP"] = str(job["fsdp"]).lower()
        task.stops_at = job["stops_at"]
        try:
            result = train(task, spec, TrainingConfig(**job["training"]), seed=0, run_dir=Path(job["folder"]),
                           resume=True, show_progress=False)
            held = sum(local_shard(p).numel() for p in result.model.parameters())
        except KeyboardInterrupt:
            held = None
            if job["dies"]:
                os._exit(9)
        if PartialState().process_index == 0:
            print(json.dumps([PartialState().num_processes, held]), flush=True)

def start(rank, port, jobs):
    if (process := os.fork()) == 0:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "forks"}
        run(jobs)
        sys.exit()
    return process

spec, task_settings, lists = json.loads(sys.argv[1])
if "RANK" in os.environ:
    Path(f"{__file__}.{os.environ['RANK']}").write_text(str(os.getpid()))
    run(sum(lists, []))
else:
    for jobs in lists:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        started = [start(rank, port, jobs) for rank in range(2)]
        for process in started:
            _, status = os.waitpid(process, 0)
            assert os.waitstatus_to_exitcode(status) == (9 if any(job["dies"] for job in jobs) else 0)
"""


def job(folder: Path, fsdp: bool = False, stops_at: int | None = None, dies: bool = False, **training) -> dict:
    return {
        "folder": str(folder),
        "fsdp": fsdp,
        "stops_at": stops_at,
        "dies": dies,
        "training": TRAINING | training,
    }


def on_two_processes(root: Path, *lists: list[dict]) -> list[list]:
    """Trains; for each job that ends how many processes there were, and the numbers that one of them held of
    the model.
    """
    process = started(root, [], lists)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines()]


def launched(root: Path, jobs: list[dict]) -> subprocess.Popen:
    return started(root, ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"], [jobs])


def started(root: Path, launcher: list[str], lists: Sequence[list[dict]]) -> subprocess.Popen:
    script = root / "worker.py"
    script.write_text(_WORKER)
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), json.dumps([SPEC, TASK, lists])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


class Stopping(TextTask):
    def batch(self, seed, step, batch_size):
        if step == STOPPED_AT:
            raise KeyboardInterrupt
        return super().batch(seed, step, batch_size)


def trained(folder: Path, task_type: type[TextTask] = TextTask, **training) -> list[dict[str, float]]:
    config = TrainingConfig(**TRAINING | training)
    return train(
        task_type(TextConfig(**TASK)), SPEC, config, seed=0, run_dir=folder, resume=True, show_progress=False
    ).progress.history


def same(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    assert len(a) == len(b) == 4
    for one, other in zip(a, b, strict=True):
        assert one == pytest.approx(other, abs=SAME_MODEL)
    assert a[-1]["train_loss"] < a[0]["train_loss"] - 0.1


def step_of(folder: Path) -> int:
    return load_checkpoint(latest_checkpoint(folder / "checkpoints")).step


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs of one process and of two, whole and interrupted, by the names of their folders."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    root = tmp_path_factory.mktemp("runs")
    trained(root / "one")
    with pytest.raises(KeyboardInterrupt):
        trained(root / "one then two", Stopping)
    shutil.copytree(root / "one then two", root / "one then sharded")
    killed = [
        job(root / "two then one", micro_batch_size=2, stops_at=STOPPED_AT),
        job(root / "two then two", micro_batch_size=2, stops_at=STOPPED_AT, dies=True),
    ]
    jobs = {
        "two": {"activation_checkpointing": True},
        "two in parts": {"micro_batch_size": 2},
        "two then two": {"micro_batch_size": 2},
        "one then two": {},
        "sharded": {"fsdp": True},
        "sharded in parts": {"fsdp": True, "micro_batch_size": 2, "activation_checkpointing": True},
        "sharded then one": {"fsdp": True, "stops_at": STOPPED_AT},
        "one then sharded": {"fsdp": True},
        "sharded, best": {"fsdp": True, "patience": 2, "learning_rate": 0.1, "schedule": "constant", "eval_every": 1},
    }
    stopped, *found = on_two_processes(root, killed, [job(root / name, **options) for name, options in jobs.items()])
    assert stopped == [2, None]
    (root / "held.json").write_text(json.dumps(dict(zip(jobs, found, strict=True))))
    return root


def history_of(folder: Path) -> list[dict[str, float]]:
    return load_checkpoint(latest_checkpoint(folder / "checkpoints")).state["progress"]["history"]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["two", "two in parts", "one then two", "sharded", "sharded in parts", "one then sharded"]
)
def test_two_processes_train_as_one_does(runs, name) -> None:
    same(history_of(runs / name), history_of(runs / "one"))
    processes, held = json.loads((runs / "held.json").read_text())[name]
    whole = sum(tensor.numel() for tensor in load_file(runs / "one" / "model.safetensors").values())
    assert processes == 2
    assert held == whole / 2 if "sharded" in name else held == whole


@pytest.mark.full
@pytest.mark.parametrize("name", ["two then one", "sharded then one"])
def test_one_process_goes_on_where_two_were_stopped(runs, name) -> None:
    assert step_of(runs / name) == 4
    same(trained(runs / name, **({"micro_batch_size": 2} if name == "two then one" else {})), history_of(runs / "one"))


@pytest.mark.full
def test_two_processes_that_were_killed_resume_to_the_same_bits(runs) -> None:
    for part in ("model", "optimizer"):
        killed, whole = (
            load_checkpoint(latest_checkpoint(runs / name / "checkpoints")).tensors[part]
            for name in ("two then two", "two in parts")
        )
        assert killed.keys() == whole.keys()
        assert all(torch.equal(killed[key], whole[key]) for key in whole)


@pytest.mark.full
def test_a_sharded_run_saves_what_one_process_saves(runs) -> None:
    sharded, one = (load_checkpoint(latest_checkpoint(runs / name / "checkpoints")) for name in ("sharded", "one"))
    for part in ("model", "optimizer"):
        assert {k: v.shape for k, v in sharded.tensors[part].items()} == {
            k: v.shape for k, v in one.tensors[part].items()
        }
    weights, expected = (load_file(runs / name / "model.safetensors") for name in ("sharded", "one"))
    assert all(torch.allclose(weights[key], expected[key], atol=ANOTHER_ORDER) for key in expected)


@pytest.mark.full
def test_a_sharded_run_stops_early_with_its_best_weights(runs) -> None:
    folder = runs / "sharded, best"
    history = history_of(folder)
    best = min(range(len(history)), key=lambda i: history[i]["validation_nats_per_char"])
    assert best < len(history) - 1  # else the last weights would do
    task = TextTask(TextConfig(**TASK))
    model = task.build_model(f"{SPEC},scaling=mup")
    model.load_state_dict(load_file(folder / "model.safetensors"))
    score = task.evaluate(model.eval(), "validation")["nats_per_char"]
    assert score == pytest.approx(history[best]["validation_nats_per_char"], abs=SAME_MODEL)


def running(process: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ended(processes: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while any(map(running, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(running, processes))


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes as Linux lists them")
def test_a_stopped_process_is_named_and_all_end_with_the_launcher(tmp_path) -> None:
    run = tmp_path / "run"
    launcher = launched(tmp_path, [job(run, steps=10**6, warmup_steps=0, checkpoint_every=1, process_timeout=3)])
    while latest_checkpoint(run / "checkpoints") is None and launcher.poll() is None:
        time.sleep(0.05)
    ranks = [int((tmp_path / f"worker.py.{rank}").read_text()) for rank in (0, 1)]
    try:
        os.kill(ranks[1], signal.SIGSTOP)
        assert ended([ranks[0]], 20)
        assert running(launcher.pid)  # it waits for the stopped one
        launcher.kill()
        assert ended([ranks[1]], 5)
    finally:
        for process in (launcher.pid, *ranks):
            if running(process):
                os.kill(process, signal.SIGKILL)
    assert "process 1 of 2 (counted from 0) has not answered for 3 s" in launcher.communicate()[1]


def test_a_launcher_that_has_ended_is_named(monkeypatch) -> None:
    monkeypatch.setattr(processes, "end_with_parent", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.create_server(("127.0.0.1", 0)) as store:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(store.getsockname()[1]))
        processes.follow_launcher()
    with pytest.raises(TrainingFailedError, match="the launcher does not answer at 127"):
        processes.follow_launcher()


def test_what_fsdp_cannot_do_here_is_named(monkeypatch) -> None:
    assert not sharding.is_requested()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert sharding.is_requested()
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ConfigError, match="leave out --fsdp_offload_params"):
        sharding.is_requested()
    model = nn.Linear(2, 2)
    model.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="single numbers: gain"):
        sharding.shard(model, torch.device("cpu"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [(None, True), ("true", True), ("FULL_SHARD", True), ("false", False), ("SHARD_GRAD_OP", False)],
)
def test_the_launcher_says_whether_weights_are_given_up(monkeypatch, word, expected) -> None:
    if word is not None:
        monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", word)
    assert sharding.reshards_after_forward() is expected


@pytest.mark.full
def test_a_run_that_the_launcher_compiles_is_saved_as_any_other(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    AcceleratorState._reset_state()  # it keeps what the first run of a process asked for
    try:
        found = trained(tmp_path / "compiled")
    finally:
        AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    same(found, trained(tmp_path / "plain"))
    for part in ("model", "optimizer"):
        compiled, plain = (
            load_checkpoint(latest_checkpoint(tmp_path / name / "checkpoints")).tensors[part]
            for name in ("compiled", "plain")
        )
        assert compiled.keys() == plain.keys()


@pytest.mark.parametrize("size", [1, 4, 6, 99])
def test_a_batch_in_several_passes_gives_the_same_losses(tmp_path, size) -> None:
    same(trained(tmp_path / "parts", micro_batch_size=size), trained(tmp_path / "whole"))


def test_launched_commands_that_cannot_be_shared_are_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "text"]) == 2
    assert "give --out" in capsys.readouterr().err
    assert main(["compare", "text", "--out", str(tmp_path / "x")]) == 2
    assert "--jobs" in capsys.readouterr().err
