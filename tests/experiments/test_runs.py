"""Worker processes: what a killed comparison leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from structattn.experiments.runs import Job, train_all
from structattn.tasks.nearest_neighbor import NearestNeighborConfig
from structattn.training.config import TrainingConfig

_PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from structattn.experiments.runs import begin_worker

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=begin_worker, initargs=(1, None))
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
"""


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    # Who has left but was not yet waited for by its new parent is gone as well.
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_a_worker_does_not_outlive_its_killed_parent(tmp_path):
    # A comparison that is begun again would otherwise write to the same folders as the workers of the first.
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    assert _runs(worker)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 30
    while _runs(worker) and time.monotonic() < until:
        time.sleep(0.1)
    left = _runs(worker)
    if left:
        os.kill(worker, signal.SIGKILL)
    assert not left


def test_the_bar_of_several_runs_counts_steps_also_of_those_that_were_done_before(tmp_path, capsys) -> None:
    jobs = [
        Job(
            task_name="nearest-neighbor",
            task=NearestNeighborConfig(dim=8, num_points=4, num_heads=2, eval_examples=16),
            spec="standard",
            training=TrainingConfig(steps=6, batch_size=2, learning_rate=1e-3, checkpoint_every=2),
            seed=seed,
            folder=tmp_path / str(seed),
        )
        for seed in range(3)
    ]
    told = []
    jobs[0].run(resume=False, show_progress=False, on_steps=told.append)
    assert sum(told) == 6
    train_all(jobs, workers=2, resume=True, show_progress=True)
    shown = capsys.readouterr().err
    assert "3 of 3 runs" in shown
    assert "18/18" in shown
