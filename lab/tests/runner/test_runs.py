"""Single runs of a comparison: worker processes, what a killed one leaves behind, and scores that are found
once.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from structattn_lab.runner.job import Job
from structattn_lab.runner.local import LocalRunner
from structattn_lab.runner.train_all import train_all
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.icl_regression.task import ICLRegressionConfig, ICLRegressionTask
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborConfig, NearestNeighborTask
from structattn_lab.training.evaluate import load_run

_PARENT = """
import sys
from pathlib import Path
from structattn_lab.runner.base import Listener
from structattn_lab.runner.local import LocalRunner
from jobs_of_this_test import Sleeper

if __name__ == "__main__":
    LocalRunner(2).run([Sleeper(Path(sys.argv[1]) / name) for name in "ab"], Listener())
"""
_JOBS = """
import os, time
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Sleeper:
    folder: Path
    tasks: object = None

    @property
    def log(self):
        return self.folder / "run.log"

    def run(self, **_):
        (self.folder / f"pid-{os.getpid()}").touch()
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


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_a_worker_does_not_outlive_its_killed_parent(tmp_path):
    # A comparison that is begun again would otherwise write to the same folders as the workers of the first.
    (tmp_path / "jobs_of_this_test.py").write_text(_JOBS)
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    until = time.monotonic() + 60
    while not (found := list(tmp_path.glob("*/pid-*"))):
        assert time.monotonic() < until
        time.sleep(0.1)
    worker = int(found[0].name.removeprefix("pid-"))
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


@pytest.mark.full
def test_the_bar_of_several_runs_counts_steps_also_of_those_that_were_done_before(
    tmp_path, capsys, forked_workers
) -> None:
    jobs = [
        Job(
            tasks=TaskFactory(NearestNeighborTask),
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
    train_all(jobs, runner=LocalRunner(2), resume=True, show_progress=True)
    shown = capsys.readouterr().err
    assert "model 1 of 1, run 3 of 3" in shown
    assert "18/18" in shown


def _scored(folder: Path, seed: int = 0) -> Job:
    return Job(
        tasks=TaskFactory(ICLRegressionTask),
        task=ICLRegressionConfig(dim=2, embed_dim=8, num_layers=1, num_heads=2, eval_prompts=16),
        spec="standard",
        training=TrainingConfig(steps=6, batch_size=2, learning_rate=1e-3),
        seed=seed,
        folder=folder,
        is_scored=True,
    )


def test_the_process_that_trains_scores_too_and_only_once(tmp_path, monkeypatch, forked_workers) -> None:
    jobs = [_scored(tmp_path / str(seed), seed) for seed in range(2)]
    assert jobs[0].record() is None
    train_all(jobs, runner=LocalRunner(2), resume=False, show_progress=False)
    found = [job.scores(job.record()) for job in jobs]
    task = ICLRegressionTask(jobs[0].task)
    models = [job.run(resume=True, show_progress=False).model.eval() for job in jobs]
    assert [scored.metrics for scored in found] == [task.evaluate(model, "test") for model in models]
    assert found[0].metrics != found[1].metrics
    assert found[0].details == json.loads(json.dumps(task.details(models[0])))
    assert found[0].details
    assert not found[1].details
    with monkeypatch.context() as patched:
        patched.setattr(ICLRegressionTask, "evaluate", lambda *_: pytest.fail("scored again"))
        jobs[0].run(resume=True, show_progress=False)
    assert jobs[0].scores(jobs[0].record()) == found[0]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_sha256": "0", "metrics": {}, "details": {}}'])
def test_scores_that_are_damaged_or_of_other_weights_are_found_again(tmp_path, content) -> None:
    job = _scored(tmp_path)
    job.run(resume=False, show_progress=False)
    record = job.record()
    found = job.scores(record)
    (tmp_path / "scores.json").write_text(content)
    assert job.scores(record) is None
    assert not job.is_done
    job.run(resume=True, show_progress=False)
    assert job.scores(record) == found
    assert job.is_done


def test_runs_of_one_process_may_differ_in_precision(tmp_path) -> None:
    job = _scored(tmp_path / "first")
    job.run(resume=False, show_progress=False)
    other = replace(job, folder=tmp_path / "second", training=replace(job.training, precision="bf16"))
    other.run(resume=False, show_progress=False)
    assert other.scores(other.record()).metrics != job.scores(job.record()).metrics
    # Scores are in float32, as those of baselines and of `structattn evaluate` are.
    assert other.scores(other.record()).metrics == other.made_task.evaluate(load_run(other.folder).model, "test")
