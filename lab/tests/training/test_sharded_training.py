"""``training.context_parallel``: the losses of one process, checkpoints for any number of them, and one line
where one is lost.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import job, launch, result, result_file
from torch import nn

from structattn.errors import ConfigError
from structattn.testing.tolerances import SAME_MODEL
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborConfig, NearestNeighborTask
from structattn_lab.tasks.registry import TASKS, task_class
from structattn_lab.tasks.text.task import TextConfig, TextTask
from structattn_lab.training.division import check_divisible, division_of
from structattn_lab.training.loop import train
from structattn_lab.training.processes import group_timeout

LEVELS = "mlr:4|2|2,values=2|2|4"
TEXT = {"context_length": 33, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "eval_windows": 2}
RECALL = {"context_length": 25, "num_pairs": 3, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "eval_sequences": 70}
TRAINING = {"steps": 20, "batch_size": 4, "learning_rate": 1e-2, "eval_every": 1, "checkpoint_every": 4}
STOPPED_AT = 10


def packed(folder: Path) -> dict[str, Any]:
    """Settings of windows that hold several documents each, with rotary positions."""
    draw = random.Random(0)
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "while",
        "it",
        "rained",
        "over",
        "all",
        "of",
        "the",
        "town",
        "again",
    ]
    texts = (" ".join(draw.choices(words, k=draw.randint(1, 12))) for _ in range(400))
    path = folder / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return TEXT | {"rotary": "low_far", "data": str(path)}


class Runs:
    """Trainings in one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of_task = {
            "learned": ("text", LEVELS, TEXT),
            "packed": ("text", LEVELS, packed(folder)),
            "recall": ("recall", "sliding:4|4@-|7", RECALL),
        }

    def job(
        self, kind: str, name: str, context: int, training: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        task, spec, settings = self.of_task[kind]
        wanted = TRAINING | {"context_parallel": context} | (training or {})
        return job(self.folder / f"{kind}, {name}", task, spec, settings, wanted, **options)

    def same(self, kind: str, name: str, count: int) -> None:
        """Every process has the losses and scores of one, at each of 20 steps; which of two equal logits is
        the answer is left to rounding.
        """

        def scores(entry: dict[str, float]) -> dict[str, float]:
            return {key: value for key, value in entry.items() if "accuracy" not in key}

        one = result(self.job(kind, "one", 1))
        assert len(one["history"]) == 20
        assert one["history"][-1]["train_loss"] < one["history"][0]["train_loss"] - 0.1
        for rank in range(count):
            found = result(self.job(kind, name, 1), rank)
            assert "error" not in found, found
            for a, b in zip([*found["history"], found["test"]], [*one["history"], one["test"]], strict=True):
                assert a.keys() == b.keys()
                assert scores(a) == pytest.approx(scores(b), abs=SAME_MODEL)


@pytest.mark.full
def test_two_copies_of_two_processes_train_as_one_does(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    odd = [
        runs.job("packed", f"another {name}", 2, training_of={"3": {name: 8}})
        for name in ("context_parallel", "batch_size")
    ]
    launch(tmp_path, (1, [runs.job("packed", "one", 1)]), (4, [*odd, runs.job("packed", "two by two", 2)]))
    runs.same("packed", "two by two", 4)
    for wrong, expected in zip(odd, ("2 in process 0, 1, 2; 8", "4 in process 0, 1, 2; 8"), strict=True):
        for rank in range(4):
            error = result(wrong, rank)["error"]
            assert "ConfigError: the processes of a launcher must have the same settings: training." in error
            assert f" is {expected} in process 3 (counted from 0)" in error


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trainings of one, 3, 4 and 8 processes, and such as are interrupted and continued by others."""
    found = Runs(tmp_path_factory.mktemp("runs"))
    less = {"activation_checkpointing": True, "micro_batch_size": 1}
    stopped = {"stops_at": STOPPED_AT}
    launch(
        found.folder,
        (
            1,
            [
                *(found.job(kind, "one", 1) for kind in found.of_task),
                found.job("packed", "one then four", 1, **stopped),
            ],
        ),
        (
            4,
            [
                *(found.job(kind, "sharded", 2, fsdp=True) for kind in found.of_task),
                found.job("learned", "sharded in parts", 4, less, fsdp=True),
                found.job("packed", "in parts", 2, less),
                found.job("learned", "four", 4),
                found.job("recall", "four", 4),
                found.job("learned", "four then one", 4, **stopped),
                found.job("packed", "four then three", 4, fsdp=True, **stopped),
                found.job("packed", "one then four", 4),
            ],
        ),
        (3, [found.job("learned", "three", 3, {"batch_size": 4}), found.job("packed", "four then three", 3)]),
        (8, [found.job("learned", "eight", 8), found.job("packed", "four by two", 2)]),
        (1, [found.job("learned", "four then one", 1)]),
    )
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        ("learned", "sharded", 4),
        ("packed", "sharded", 4),
        ("recall", "sharded", 4),
        ("learned", "four", 4),
        ("learned", "sharded in parts", 4),
        ("packed", "in parts", 4),
        ("recall", "four", 4),
        ("learned", "three", 3),
        ("learned", "eight", 8),
        ("packed", "four by two", 8),
        ("learned", "four then one", 1),
        ("packed", "four then three", 3),
        ("packed", "one then four", 4),
    ],
)
def test_any_division_trains_as_one_process_does(runs: Runs, kind: str, name: str, count: int) -> None:
    runs.same(kind, name, count)


@pytest.mark.full
def test_a_killed_process_ends_the_others_and_fewer_go_on(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    killed = runs.job("learned", "killed", 4, stops_at=STOPPED_AT, killed=2)
    errors = launch(tmp_path, (1, [runs.job("learned", "one", 1)]), (4, [killed]))
    before = float(Path(f"{killed['folder']}.killed").read_text())
    for rank in (0, 1, 3):
        found = result(killed, rank)
        assert found["time"] - before < 10
        assert found["error"].startswith(f"TrainingFailedError: process {rank} of 4 (counted from 0) lost the others")
        assert "--resume continues from the last checkpoint" in found["error"]
        assert "\n" not in found["error"]
    assert "Traceback" not in errors
    launch(tmp_path, (2, [runs.job("learned", "killed", 2)]))
    runs.same("learned", "killed", 2)


@pytest.mark.full
def test_a_stopped_process_ends_the_others_after_the_timeout(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    options = {"stops_at": STOPPED_AT, "killed": 1, "signal": signal.SIGSTOP}
    stopped = runs.job("learned", "stopped", 3, {"process_timeout": 3}, **options)
    errors = launch(tmp_path, (3, [stopped]))
    silent = errors.count("process 1 of 3 (counted from 0) has not answered for 3 s (training.process_timeout)")
    # The first of the two that ends may take the connection of the other with it, which then says so.
    ended = [result(stopped, rank).get("error", "") for rank in (0, 2) if result_file(stopped, rank).exists()]
    assert silent >= 1
    assert silent + sum("lost the others" in error for error in ended) == 2


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_compiled_training(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    options = {"compile": True, "activation_checkpointing": True}
    errors = launch(
        tmp_path, (1, [runs.job("learned", "one", 1)]), (2, [runs.job("learned", "compiled", 2, options)]), seconds=500
    )
    assert "not compiled" not in errors
    runs.same("learned", "compiled", 2)


def test_what_cannot_be_divided_is_named(tmp_path: Path) -> None:
    text = TextTask(TextConfig(**TEXT))
    config = TrainingConfig(**TRAINING | {"context_parallel": 4})
    with pytest.raises(
        ConfigError, match="among 4 processes, got 1 in all: .* torchrun --nproc-per-node 4 -m structattn train"
    ):
        train(text, "standard", config, seed=0, run_dir=tmp_path, show_progress=False)
    cpu, timeout = torch.device("cpu"), group_timeout(1)
    with pytest.raises(ConfigError, match="got 6 in all"):
        division_of(config, 0, 6, cpu, timeout)
    with pytest.raises(
        ConfigError,
        match="batch_size must divide by the number of processes / training.context_parallel = 12 / 4: got 4 and 3",
    ):
        division_of(config, 0, 12, cpu, timeout)
    for spec, match in (
        ("gated-delta:8,value=8", "computes whole sequences"),
        ("mlr-text:4|4@line", "the sequence of a LevelLayout"),
    ):
        with pytest.raises(ConfigError, match=match):
            check_divisible(text, text.build_model(spec))
    with pytest.raises(ConfigError, match="of the tasks text and recall; nearest-neighbor has none"):
        check_divisible(NearestNeighborTask(NearestNeighborConfig()), nn.Identity())
    assert [name for name in TASKS if task_class(name).divides_sequences] == ["text", "recall"]
