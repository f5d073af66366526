"""The loop and its checkpoints: killed runs resume to the same bits, damaged files are refused."""

import dataclasses
import errno
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from structattn import files
from structattn.errors import CheckpointError, ConfigError, TrainingDivergedError
from structattn.files import write_atomic
from structattn.models.transformer import Transformer
from structattn.seeds import generator
from structattn.testing.tolerances import SIX_DIGITS
from structattn_lab.settings.schedule import learning_rate_at
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.base import Task
from structattn_lab.training import checkpoint as checkpoint_module
from structattn_lab.training.build import compiled, parameter_groups
from structattn_lab.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from structattn_lab.training.loop import train


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    width: int = 8


class Tiny(Task):
    """Linear regression with dropout."""

    name, metric, metric_label, question = "tiny", "mse", "mse", "?"

    def __init__(self, config: TinyConfig = TinyConfig()) -> None:
        self.config = config

    def build_model(self, spec):
        return nn.Sequential(
            nn.Linear(4, self.config.width),
            nn.LayerNorm(self.config.width),
            nn.Dropout(0.3),
            nn.Linear(self.config.width, 1),
        )

    def batch(self, seed, step, batch_size):
        x = torch.randn(batch_size, 4, generator=generator("tiny", seed, step))
        y = x.sum(-1, keepdim=True)
        return {"x": x, "y": y}

    def loss(self, model, batch, step):
        return F.mse_loss(model(batch["x"]), batch["y"])

    def evaluate(self, model, split):
        assert not model.training
        return {"mse": self.loss(model, self.batch(10**6, 0, 64), 0).item()}

    def baselines(self):
        return []

    def flops(self, model, step=None):
        return 1 if step is None or step >= 10 else step


CONFIG = TrainingConfig(
    steps=30, batch_size=16, learning_rate=1e-2, schedule="cosine", eval_every=5, checkpoint_every=7, weight_decay=0.1
)


def run(folder: Path, config=CONFIG, resume=False, task=None, seed=0):
    return train(task or Tiny(), "spec", config, seed=seed, run_dir=folder, resume=resume, show_progress=False)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The weights of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return weights(folder)


def weights(folder: Path):
    return load_file(folder / "model.safetensors")


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("patience", [None, 3])
def test_a_run_stopped_in_the_middle_resumes_bit_for_bit(tmp_path: Path, patience) -> None:
    config = dataclasses.replace(CONFIG, patience=patience)
    whole = run(tmp_path / "whole", config)

    class Stopped(Tiny):
        def batch(self, seed, step, batch_size):
            if step == 17:
                raise KeyboardInterrupt
            return super().batch(seed, step, batch_size)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", config, task=Stopped())
    assert latest_checkpoint(tmp_path / "cut" / "checkpoints").name == "step-00000014"
    resumed = run(tmp_path / "cut", config, resume=True)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert whole.progress.history == resumed.progress.history
    assert whole.progress.best_step == resumed.progress.best_step
    again = run(tmp_path / "cut", config, resume=True)
    assert again.progress.step == whole.progress.step
    assert_same(dict(whole.model.state_dict()), dict(again.model.state_dict()))


def test_early_stopping_keeps_the_best_weights(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=400, patience=2, learning_rate=0.3, schedule="constant")
    result = run(tmp_path, config)
    assert result.progress.step < 400
    best = min(entry["validation_mse"] for entry in result.progress.history)
    assert Tiny().evaluate(result.model.eval(), "validation")["mse"] == pytest.approx(best, rel=SIX_DIGITS)


KILLED = """
import sys
from pathlib import Path
from structattn_lab.tasks.registry import recipe_for
from structattn_lab.settings.overrides import apply_overrides
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborTask
from structattn_lab.training.loop import train
recipe = apply_overrides(recipe_for("nearest-neighbor", "demo"), (
    "training.steps=150", "training.batch_size=8", "training.eval_every=20", "training.checkpoint_every=5",
    "task.dim=8", "task.num_points=4", "task.num_heads=2", "task.eval_examples=16"))
train(NearestNeighborTask(recipe.task), "bilinear-btt:1", recipe.training, seed=3, run_dir=Path(sys.argv[1]),
      resume=True, show_progress=False)
"""


@pytest.mark.full
def test_sigkill_and_resume_give_identical_weights(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    subprocess.run([sys.executable, str(script), str(tmp_path / "whole")], check=True)
    killed = 0
    for at in (10, 60, 110):
        process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "cut")])
        while process.poll() is None:
            found = latest_checkpoint(tmp_path / "cut" / "checkpoints")
            # One that is complete and not yet renamed is found as well, under its temporary name.
            if found is not None and found.name.startswith("step-") and int(found.name.removeprefix("step-")) >= at:
                process.send_signal(signal.SIGKILL)
                killed += process.wait() == -signal.SIGKILL
                break
            time.sleep(0.001)
    assert killed >= 1
    subprocess.run([sys.executable, str(script), str(tmp_path / "cut")], check=True)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "cut" / "model.safetensors"
    ).read_bytes()


def test_other_settings_and_a_used_folder_are_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        run(tmp_path)
    with pytest.raises(CheckpointError, match="learning_rate = 0.01, now 0.02"):
        run(tmp_path, dataclasses.replace(CONFIG, learning_rate=0.02), resume=True)
    with pytest.raises(CheckpointError, match="seed = 0, now 1"):
        run(tmp_path, resume=True, seed=1)
    with pytest.raises(CheckpointError, match="task_config.width = 8, now 9"):
        run(tmp_path, resume=True, task=Tiny(TinyConfig(width=9)))


def test_settings_that_are_newer_than_a_checkpoint_had_their_defaults(tmp_path: Path) -> None:
    run(tmp_path)
    found = latest_checkpoint(tmp_path / "checkpoints")
    loaded = load_checkpoint(found)
    del loaded.state["settings"]["config"]["activation_checkpointing"]
    save_checkpoint(found.parent, loaded.step, tensors=loaded.tensors, state=loaded.state)
    assert run(tmp_path, resume=True).progress.step == CONFIG.steps
    with pytest.raises(CheckpointError, match="activation_checkpointing = False, now True"):
        run(tmp_path, dataclasses.replace(CONFIG, activation_checkpointing=True), resume=True, task=Blocks())


class Blocks(Tiny):
    """As ``Tiny``, with a model that has transformer blocks."""

    def build_model(self, spec):
        return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (1, 8)), trunk(), nn.Flatten(), nn.Linear(8, 1))


def trunk() -> Transformer:
    return Transformer("standard", num_layers=1, embed_dim=8, num_heads=2, context_length=4)


class Failing(Tiny):
    """Goes wrong at a step: in the loss, or only in its gradient."""

    def __init__(self, step: int, kind: str) -> None:
        super().__init__()
        self.step, self.kind = step, kind

    def loss(self, model, batch, step):
        loss = super().loss(model, batch, step)
        if step != self.step or not model.training:
            return loss
        # The square root has an infinite slope at 0: a finite loss, and gradients that are not.
        return loss * math.inf if self.kind == "loss" else loss + (0 * loss).sqrt()


@pytest.mark.parametrize(
    ("step", "kind", "message", "left"),
    [
        (0, "loss", "the training loss is inf at step 0; no weight had changed yet", None),
        (5, "loss", "the training loss is inf at step 5; try a learning rate below 0.01. There is no checkpoint", None),
        (17, "loss", "the training loss is inf at step 17; .* The checkpoint .*step-00000014 is from before it", 14),
        # Step 20 is the last one before a checkpoint, which would hold the broken weights.
        (20, "gradient", "a weight is not finite at step 20; .* The checkpoint .*step-00000014 is from before it", 14),
        # No checkpoint comes before the next loss, which then is not a number.
        (
            15,
            "gradient",
            "the training loss is nan at step 16; .* The checkpoint .*step-00000014 is from before it",
            14,
        ),
        (29, "gradient", "a weight is not finite at step 29; .* The checkpoint .*step-00000028 is from before it", 28),
    ],
)
def test_a_run_that_diverges_stops_with_a_checkpoint_from_before(
    tmp_path: Path, expected, step, kind, message, left
) -> None:
    with pytest.raises(TrainingDivergedError, match=message):
        run(tmp_path, task=Failing(step, kind))
    assert not (tmp_path / "model.safetensors").exists()
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert (found and load_checkpoint(found).step) == left
    run(tmp_path, resume=True)
    assert_same(weights(tmp_path), expected)


@pytest.mark.parametrize("full_at", ["model.safetensors", "manifest.json"])
def test_a_disk_that_is_full_while_saving_loses_nothing(tmp_path: Path, monkeypatch, expected, full_at) -> None:
    root = tmp_path / "cut" / "checkpoints"

    def write(path: Path, data: bytes) -> None:
        if path.name == full_at and latest_checkpoint(root) is not None:  # the second checkpoint does not fit
            path.write_bytes(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        files.write_synced(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "write_synced", write)
        with pytest.raises(CheckpointError, match=r"No space left on device; the checkpoints before it are untouched"):
            run(tmp_path / "cut")
    assert load_checkpoint(latest_checkpoint(root)).step == 7
    run(tmp_path / "cut", resume=True)
    assert_same(weights(tmp_path / "cut"), expected)
    assert not [path for path in root.iterdir() if not path.name.startswith("step-")]


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    write_atomic(tmp_path / "run.json", "old")

    def write(path: Path, data: bytes) -> None:
        path.write_bytes(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_synced", write)
    with pytest.raises(CheckpointError, match="No space left"):
        write_atomic(tmp_path / "run.json", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def checkpoint(root: Path) -> Path:
    tensors = {"model": {"w": torch.arange(50.0)}, "best": {}}
    return save_checkpoint(root, 3, tensors=tensors, state={"a": [1, 2]})


def test_checkpoint_round_trip_and_pruning(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    loaded = load_checkpoint(path)
    assert loaded.step == 3
    assert loaded.state == {"a": [1, 2]}
    assert torch.equal(loaded.tensors["model"]["w"], torch.arange(50.0))
    (tmp_path / ".tmp-left-by-a-killed-run").mkdir()
    for step in (4, 5):
        save_checkpoint(tmp_path, step, tensors={}, state={})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    assert latest_checkpoint(tmp_path).name == "step-00000005"
    assert latest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-5]), "truncated"),
        (
            lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-1] + b"x"),
            "changed",
        ),
        (lambda p: (p / "state.json").unlink(), "expected files"),
        (lambda p: (p / "extra").write_text(""), "expected files"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest"),
        (
            lambda p: (p / "manifest.json").write_text('{"format_version": 9, "files": {}, "step": 1}'),
            "format version 1, got 9",
        ),
    ],
)
def test_damaged_checkpoints_are_refused(tmp_path: Path, damage, message: str) -> None:
    path = checkpoint(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot write"):
        write_atomic(tmp_path / "file" / "x.json", "{}")


def test_learning_rate_schedules() -> None:
    common = {"peak": 1e-2, "warmup_steps": 0}
    cosine = [learning_rate_at(step, "cosine", peak=1e-2, steps=30, warmup_steps=4) for step in range(30)]
    assert cosine[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert cosine[4:] == sorted(cosine[4:], reverse=True)
    one = [learning_rate_at(step, "one-cycle", steps=100, **common) for step in range(100)]
    assert one[0] == pytest.approx(4e-4)
    assert max(one) == one[30] == pytest.approx(1e-2)
    assert one[-1] < 2e-5
    assert learning_rate_at(20, "constant", steps=30, **common) == 1e-2
    decay = [learning_rate_at(step, "wsd", steps=8, **common) for step in range(8)]
    assert decay == pytest.approx([1e-2] * 7 + [5e-3])


def test_gains_and_biases_are_not_decayed() -> None:
    groups = parameter_groups(Tiny().build_model(""), 0.5)
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    assert all(p.dim() >= 2 for p in groups[0]["params"])
    assert sum(len(g["params"]) for g in groups) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"learning_rate": 0.0},
        {"warmup_steps": 30},
        {"gradient_clip": 0.0},
        {"patience": 0},
        {"schedule": "x"},
    ],
)
def test_bad_settings_are_named(change) -> None:
    with pytest.raises(ConfigError, match=f"training.{next(iter(change))}"):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.full
def test_more_shapes_are_compiled_than_dynamo_allows_at_first() -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=1):
        model = compiled(torch.nn.Linear(1, 1))
        before = counters["stats"]["unique_graphs"]
        for size in range(1, 4):
            assert model(torch.ones(size, 1)).shape == (size, 1)
    assert counters["stats"]["unique_graphs"] - before == 3
