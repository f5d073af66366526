"""Trains under a launcher: forks of one process that has imported everything, as many as asked for, each list
of jobs in new ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_WORKER = """
import gc, json, os, signal, socket, sys, time
from pathlib import Path
from structattn.errors import StructAttnError
from structattn_lab.tasks.registry import task_class
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.training.loop import train

def run(jobs):
    for job in jobs:
        os.environ["ACCELERATE_USE_FSDP"] = str(job["fsdp"]).lower()
        task_type = task_class(job["task"])
        class Stopping(task_type):
            def batch(self, seed, step, batch_size):
                if step == job["stops_at"]:
                    if job["killed"] is None:
                        raise KeyboardInterrupt
                    if job["killed"] == int(os.environ["RANK"]):
                        Path(job["folder"] + ".killed").write_text(str(time.time()))
                        os.kill(os.getpid(), job["signal"])
                return super().batch(seed, step, batch_size)
        result = {}
        try:
            task = Stopping(task_type.config_class(**job["settings"]))
            own = job["training_of"].get(os.environ["RANK"], {})
            config = TrainingConfig(**job["training"] | own)
            folder = Path(job["folder"])
            done = train(task, job["spec"], config, seed=0, run_dir=folder, resume=True, show_progress=False)
            result = {"history": done.progress.history, "test": done.evaluate("test")}
        except KeyboardInterrupt:
            pass
        except StructAttnError as error:
            result = {"error": f"{type(error).__name__}: {error}", "time": time.time()}
        Path(job["folder"] + f".{os.environ['RANK']}.json").write_text(json.dumps(result))

def start(rank, world, port, jobs):
    if (process := os.fork()) == 0:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "forks"}
        run(jobs)
        sys.stderr.flush()
        os._exit(0)  # to take Python down takes longer than to train
    return process

gc.freeze()
for world, jobs in json.loads(sys.argv[1]):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = {start(rank, world, port, jobs) for rank in range(world)}
    ends = any(job["killed"] is not None for job in jobs)
    while started:
        if ends and len(started) == 1 and jobs[-1]["signal"] == signal.SIGSTOP:
            os.kill(*started, signal.SIGKILL)
        process, status = os.wait()
        started.remove(process)
        assert status == 0 or ends
"""


def job(
    folder: Path, task: str, spec: str, settings: dict[str, Any], training: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """A training. ``stops_at`` is a step at which it is interrupted, or at which the process ``killed`` gets
    a signal; ``fsdp`` shards the weights; ``training_of`` are other settings of single processes."""
    found = {"folder": str(folder), "task": task, "spec": spec, "settings": settings, "training": training}
    return (
        found | {"fsdp": False, "stops_at": None, "killed": None, "signal": signal.SIGKILL, "training_of": {}} | options
    )


def launch(folder: Path, *lists: tuple[int, list[dict[str, Any]]], seconds: float = 240) -> str:
    """Runs lists of jobs, each with its number of processes, one after the other; what they write to standard
    error.
    """
    script = folder / "worker.py"
    script.write_text(_WORKER)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(lists)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def result_file(of: dict[str, Any], rank: int) -> Path:
    """Of a process; it is missing where the process was killed."""
    return Path(f"{of['folder']}.{rank}.json")


def result(of: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """What a process has of a job: its history and test scores, or its error; empty where it was
    interrupted.
    """
    found: dict[str, Any] = json.loads(result_file(of, rank).read_text())
    return found
