"""A kill at any file operation of a run, of a comparison or of a corpus: it continues automatically to the
same result.
"""

import dataclasses
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from structattn.errors import CheckpointError, DataError
from structattn.files import write_atomic
from structattn.seeds import generator
from structattn_lab.compare import pages
from structattn_lab.compare.comparison import compare
from structattn_lab.data.corpus import PrepareConfig, Source, prepare
from structattn_lab.settings.recipe import Recipe
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.base import Task
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborConfig
from structattn_lab.tasks.text.task import TextConfig, TextTask
from structattn_lab.training.checkpoint import latest_checkpoint, load_latest, save_checkpoint
from structattn_lab.training.loop import train

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"}


class Killed(BaseException):
    """The process ends here; whatever it still tries to write is not written."""


class _Disk:
    """Counts what changes files below a folder, and kills at one of these operations: before it, or when a
    file has a part of its bytes.
    """

    def __init__(self) -> None:
        self.root, self.at, self.count = "", None, 0
        sys.addaudithook(self._hook)  # it cannot be removed: without a root it does nothing

    def _hook(self, event: str, args: tuple) -> None:
        if not self.root or threading.current_thread() is not threading.main_thread():
            return
        writes = event == "open" and args[2] & _WRITES
        if not (writes or event in _CHANGES):
            return
        path = os.fspath(args[0]) if isinstance(args[0], str | os.PathLike) else ""
        is_relative = event in ("os.remove", "os.rmdir") and not path.startswith("/")  # of rmtree
        if path.startswith(self.root) or is_relative:
            if writes:
                self.writes.append(self.count + 0.5)
            self._operation(path if writes else "")

    def fsync(self, handle: int) -> None:
        self._operation("")

    def _operation(self, path: str) -> None:
        self.count += 1
        if self.at is None or self.count <= int(self.at):
            return
        if path and self.at % 1:  # half an operation
            root, self.root = self.root, ""
            Path(path).write_bytes(b'{"a')
            self.root = root
            self.at -= 0.5
        raise Killed

    def run(self, root: Path, work: Callable[[], object], at: float | None = None) -> list[float]:
        """Does it, up to an operation if one is given; where it can be killed: before each operation, or in
        the middle of a write.
        """
        self.root, self.at, self.count, self.writes = str(root), at, 0, []
        try:
            work()
        except Killed:
            pass
        finally:
            self.root = ""
        return sorted([*range(self.count), *self.writes])


@pytest.fixture(scope="module")
def disk():
    found = _Disk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: found.fsync(handle) if found.root else None)
        yield found


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    width: int = 2


class Tiny(Task):
    """Linear regression."""

    name, metric, metric_label, question = "tiny", "mse", "mse", "?"

    def __init__(self, config: TinyConfig = TinyConfig()) -> None:
        self.config = config

    def build_model(self, spec):
        return nn.Sequential(nn.Linear(2, self.config.width), nn.Linear(self.config.width, 1))

    def batch(self, seed, step, batch_size):
        x = torch.randn(batch_size, 2, generator=generator("tiny", seed, step))
        return {"x": x, "y": x.sum(-1, keepdim=True)}

    def loss(self, model, batch, step):
        return F.mse_loss(model(batch["x"]), batch["y"])

    def evaluate(self, model, split):
        return {"mse": self.loss(model, self.batch(10**6, 0, 8), 0).item()}

    def baselines(self):
        return []

    def flops(self, model, step=None):
        return 1


CONFIG = TrainingConfig(steps=2, batch_size=2, learning_rate=0.1, eval_every=1, checkpoint_every=1, patience=2)


def trained(folder: Path, resume: bool = True):
    return train(Tiny(), "spec", CONFIG, seed=0, run_dir=folder, resume=resume, show_progress=False)


def listing(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file and folder below one, with its contents and the time of its last change."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        found[str(path.relative_to(folder))] = (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
    return found


def assert_same(a, b) -> None:
    assert a.progress.history == b.progress.history
    assert a.progress.step == b.progress.step
    assert a.progress.best_step == b.progress.best_step
    weights, others = a.model.state_dict(), b.model.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_reading_a_finished_run_changes_no_file(tmp_path: Path, disk) -> None:
    expected = trained(tmp_path, resume=False)
    before, found = listing(tmp_path), []
    assert disk.run(tmp_path, lambda: found.append(trained(tmp_path))) == []
    assert_same(found[0], expected)
    assert listing(tmp_path) == before


def test_a_run_that_is_killed_at_any_file_operation_goes_on(tmp_path: Path, disk) -> None:
    whole = []
    points = disk.run(tmp_path / "whole", lambda: whole.append(trained(tmp_path / "whole")))
    assert len(points) > 40
    for at in points:
        folder = tmp_path / str(at)
        disk.run(folder, lambda folder=folder: trained(folder), at)
        assert_same(trained(folder), whole[0])
        assert not list(folder.rglob(".tmp-*"))


def saved(root: Path, step: int, value: float) -> Path:
    tensors = {"model": {"w": torch.full((3,), value)}}
    return save_checkpoint(root, step, tensors=tensors, state={"value": value}, keep=2)


@pytest.mark.parametrize("step", [3, 2])  # a new one beyond those that are kept; one that is there already
def test_a_kill_while_a_checkpoint_is_saved_leaves_the_old_one_or_the_new_one(tmp_path: Path, disk, step) -> None:
    def folder(name: object) -> Path:
        for old in (1, 2):
            saved(tmp_path / str(name), old, old)
        return tmp_path / str(name)

    root = folder("whole")
    points = disk.run(root, lambda: saved(root, step, 9))
    assert len(points) > 15
    values = []
    for at in points:
        root = folder(at)
        disk.run(root, lambda root=root: saved(root, step, 9), at)
        found = load_latest(root)
        assert (found.step, found.state["value"]) in ((2, 2), (step, 9))
        assert latest_checkpoint(root) is not None
        values.append(found.state["value"])
        saved(root, 4, 4)
        assert {path.name[:5] for path in root.iterdir()} == {"step-"}
    assert values == sorted(values)  # once there, it stays
    assert values[-1] == 9


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path, caplog) -> None:
    first, last = saved(tmp_path, 1, 1), saved(tmp_path, 2, 2)
    content = bytearray((last / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (last / "model.safetensors").write_bytes(content)
    assert load_latest(tmp_path).step == 1
    assert "step-00000002/model.safetensors was changed" in caplog.text
    (first / "state.json").unlink()  # as a kill of version 0.1.0 leaves it while it removes a folder
    with pytest.raises(CheckpointError, match=rf"step-00000002.* was changed.* delete {tmp_path} to begin again"):
        load_latest(tmp_path)
    saved(tmp_path, 2, 3)  # in the place of the damaged one
    assert load_latest(tmp_path).state == {"value": 3}


def test_a_corpus_whose_preparation_is_killed_at_any_file_operation_is_the_same(tmp_path: Path, disk) -> None:
    (tmp_path / "source").mkdir()
    for number in range(24):
        (tmp_path / "source" / f"{number}.txt").write_text(f"{number} " * 9)
    config = PrepareConfig(source=Source(path=str(tmp_path / "source")), validation=0.3, test=0.3, shard_tokens=150)

    def prepared(folder: Path) -> dict[str, bytes]:
        prepare(config, folder, resume=True, show_progress=False)
        # A process that was killed leaves its lock in a folder that is finished and only read.
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}

    whole: list[dict[str, bytes]] = []
    points = disk.run(tmp_path / "whole", lambda: whole.append(prepared(tmp_path / "whole")))
    assert len(points) > 50
    for at in points:
        folder = tmp_path / str(at)
        disk.run(folder, lambda folder=folder: prepared(folder), at)
        assert prepared(folder) == whole[0]
    settings = TextConfig(data=str(tmp_path / "whole"), context_length=8)
    assert TextTask(settings).data_sha256
    shard = tmp_path / "whole" / "train-00000.tokens"
    content = bytearray(shard.read_bytes())
    content[5] ^= 2
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000\.tokens: the contents have changed"):
        TextTask(settings)


def test_a_comparison_that_is_killed_gives_the_same_results_and_never_loses_a_finished_run(
    tmp_path: Path, disk, monkeypatch
) -> None:
    def write(record, out: Path, task) -> Path:  # the real ones take a second, and are written in the same way
        write_atomic(out / "report.html", str(record.rows))
        return out / "report.html"

    monkeypatch.setattr(pages, "write_pages", write)
    task = NearestNeighborConfig(dim=4, num_points=4, num_heads=2, eval_examples=4)
    recipe = Recipe(task=task, training=CONFIG, attention=("standard", "bilinear-btt:1"), seeds=1)

    def compared(folder: Path) -> list[tuple]:
        found = compare("nearest-neighbor", recipe, folder, resume=True, show_progress=False)
        return [(row.spec, row.metrics, row.histories, row.details) for row in found.record.rows]

    whole, expected = tmp_path / "whole", []
    points = disk.run(whole, lambda: expected.append(compared(whole)))
    assert len(points) > 100
    for at in points[::30]:
        folder = tmp_path / str(at)
        disk.run(folder, lambda folder=folder: compared(folder), at)
        assert compared(folder) == expected[0]
    before = listing(whole / "runs")
    for at in disk.run(whole, lambda: compared(whole))[::4]:
        disk.run(whole, lambda at=at: compared(whole), at)
        assert compared(whole) == expected[0]
    assert listing(whole / "runs") == before
