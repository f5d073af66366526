"""One model on several processes, and in several passes: the losses of one process and one pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from structattn.cli import main
from structattn.tasks.text import TextConfig, TextTask
from structattn.training.config import TrainingConfig
from structattn.training.loop import train

TASK = {"context_length": 32, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "eval_windows": 8}
TRAINING = {"steps": 12, "batch_size": 6, "learning_rate": 3e-3, "eval_every": 3, "checkpoint_every": 4}
_WORKER = """
import json, os, sys
from pathlib import Path
from accelerate import PartialState
from structattn.tasks.text import TextConfig, TextTask
from structattn.training.config import TrainingConfig
from structattn.training.loop import train

class Dying(TextTask):
    def batch(self, seed, step, batch_size):
        if step == int(sys.argv[2]):
            os._exit(9)
        return super().batch(seed, step, batch_size)

task, training = json.loads(sys.argv[3])
train(Dying(TextConfig(**task)), "mlr:4|2|2", TrainingConfig(**training), seed=0, run_dir=Path(sys.argv[1]), resume=True,
      show_progress=False)
print(PartialState().num_processes, "together")
"""


def launched(tmp_path: Path, folder: Path, dies_at: int, **training) -> str:
    """What two processes print, nothing if they die."""
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    words = [str(folder), str(dies_at), json.dumps([TASK, TRAINING | training])]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(script), *words], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode == 0) == (dies_at < 0), done.stderr
    return done.stdout


def history_of(folder: Path) -> list[dict[str, float]]:
    (state,) = folder.glob("checkpoints/step-00000012/state.json")
    return json.loads(state.read_text())["progress"]["history"]


def trained(folder: Path, **training) -> list[dict[str, float]]:
    config = TrainingConfig(**TRAINING | training)
    return train(
        TextTask(TextConfig(**TASK)), "mlr:4|2|2", config, seed=0, run_dir=folder, resume=True, show_progress=False
    ).history


def same(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    assert len(a) == len(b) == 4
    for one, other in zip(a, b, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert a[-1]["train_loss"] < a[0]["train_loss"] - 0.1


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_processes_train_as_one_does_and_one_goes_on_where_two_were_killed(tmp_path) -> None:
    expected = trained(tmp_path / "one")
    assert launched(tmp_path, tmp_path / "two", -1) == "2 together\n2 together\n"
    same(history_of(tmp_path / "two"), expected)
    launched(tmp_path, tmp_path / "killed", 7, micro_batch_size=2)
    same(trained(tmp_path / "killed", micro_batch_size=2), expected)
    assert json.loads((tmp_path / "two" / "run.json").read_text())["seed"] == 0


@pytest.mark.parametrize("size", [1, 4, 6, 99])
def test_a_batch_in_several_passes_gives_the_same_losses(tmp_path, size) -> None:
    same(trained(tmp_path / "parts", micro_batch_size=size), trained(tmp_path / "whole"))


def test_launched_commands_that_cannot_be_shared_are_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "text"]) == 2
    assert "give --out" in capsys.readouterr().err
    assert main(["compare", "text", "--out", str(tmp_path / "x")]) == 2
    assert "--jobs" in capsys.readouterr().err
