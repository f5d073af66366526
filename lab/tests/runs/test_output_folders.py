"""Output folders: nothing of another command, of other settings, or of the user's is overwritten, also not by
two at once.
"""

import errno
import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from structattn.cli import main
from structattn.errors import ConfigError
from structattn_lab.runs.folders import OWNER, Owner, opened
from structattn_lab.tasks.registry import recipe_for
from structattn_lab.training import loop

SMALL = [
    part
    for change in (
        *("task.dim=8", "task.num_points=4", "task.num_heads=2", "task.eval_examples=16"),
        *("training.steps=2", "training.batch_size=2", "training.eval_every=2", "training.warmup_steps=0"),
    )
    for part in ("--set", change)
]
COMPARE = ["compare", "nearest-neighbor", "--attention", "standard:1", *SMALL]
TRAIN = ["train", "nearest-neighbor", "--attention", "standard:1", *SMALL]


def said(capsys) -> str:
    """The line that a command ended with."""
    return capsys.readouterr().err.splitlines()[-1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_comparison_is_continued_as_what_it_was_begun(tmp_path: Path, capsys) -> None:
    out = tmp_path / "o"
    assert main([*COMPARE, "--out", str(out)]) == 0
    assert f"writing to {out}" in capsys.readouterr().err
    assert not (out / ".lock").exists()
    before = contents(out)
    refused = {
        "give --resume": [*COMPARE],
        "this is structattn compare icl-regression": ["compare", "icl-regression", "--preset", "smoke", "--resume"],
        "training.learning_rate = 0.02, now 0.5": [*COMPARE, "--resume", "--set", "training.learning_rate=0.5"],
        "task.dim = 8, now 4": [*COMPARE, "--resume", "--set", "task.dim=4"],
        "results of structattn compare nearest-neighbor, this is structattn train nearest": [*TRAIN, "--resume"],
        "this is structattn mup check": ["mup", "check", "--quick"],
        "this is structattn fit": ["fit", "hadamard", "--size", "8", "--structures", "lowrank:1"],
    }  # fmt: skip
    for words, command in refused.items():
        assert main([*command, "--out", str(out)]) == 2
        assert words in said(capsys)
    assert contents(out) == before
    # Folders of version 0.1.0 have no owner file.
    (out / OWNER).unlink()
    assert main([*COMPARE, "--resume", "--set", "training.learning_rate=0.5", "--out", str(out)]) == 2
    assert "training.learning_rate = 0.02, now 0.5" in said(capsys)
    (out / "results.json").unlink()
    assert main(["compare", "icl-regression", "--preset", "smoke", "--resume", "--out", str(out)]) == 2
    assert "holds 'config.yaml', 'figures', 'report.html', 'runs' and 1 more, which" in said(capsys)
    # Settings with separate runs may change.
    assert main([*COMPARE, "--resume", "--seeds", "2", "--out", str(out)]) == 0
    assert len(json.loads((out / "results.json").read_text())["rows"][0]["scores"]) == 2
    recipe = asdict(recipe_for("nearest-neighbor", "default"))
    owner = Owner(command="compare", task="nearest-neighbor", settings=recipe, free=("seeds", "training.steps"))
    assert owner.differences(recipe | {"seeds": 9, "training": {"steps": 9, "stepsize": 9}}) == []
    assert owner.differences(recipe | {"seeds": 9}, free=False) == ["seeds = 9, now 1"]


def test_files_of_the_user_are_not_overwritten(tmp_path: Path, capsys) -> None:
    others = (TRAIN, ["mup", "check", "--quick"], ["fit", "hadamard", "--size", "8"])
    for name in ("report.html", "runs.csv", "figures/scores.png", "runs/notes.txt"):
        out = tmp_path / name.replace("/", "-")
        mine = out / name
        mine.parent.mkdir(parents=True)
        mine.write_text("mine")
        for command in (COMPARE, [*COMPARE, "--resume"], *(others if name == "report.html" else ())):
            assert main([*command, "--out", str(out)]) == 2
            assert repr(Path(name).parts[0]) in said(capsys)
        assert contents(out) == {name: b"mine"}


def test_a_run_is_continued_as_what_it_was_begun(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, "--resume"]) == 2
    assert "no folder below runs/ was begun by structattn train nearest-neighbor with these settings" in said(capsys)
    assert main(TRAIN) == 0
    (first,) = Path("runs").iterdir()
    assert main([*TRAIN, "--seed", "1"]) == 0
    assert len(list(Path("runs").iterdir())) == 2
    capsys.readouterr()
    assert main([*TRAIN, "--resume"]) == 0
    assert f"run      {first}" in capsys.readouterr().out
    for words, more in {"seed = 0, now 1": ["--seed", "1"], "give --resume": []}.items():
        assert main([*TRAIN, *more, *(["--resume"] if more else []), "--out", str(first)]) == 2
        assert words in said(capsys)
    (first / OWNER).unlink()  # as version 0.1.0 left it
    assert main([*TRAIN, "--resume", "--out", str(first)]) == 0
    # A mistake that is found late leaves no folder behind.
    assert main(["train", "nearest-neighbor", *SMALL, "--attention", "mlr:3|3"]) == 2
    assert len(list(Path("runs").iterdir())) == 2


@pytest.mark.full
def test_data_are_known_by_their_content_and_not_by_their_place(tmp_path: Path, capsys) -> None:
    rows = [f"2020-01-{day:02d} {hour:02d}:00,{day * 0.3 + hour % 5}" for day in range(1, 21) for hour in range(24)]
    (tmp_path / "a.csv").write_text("\n".join(["date,OT", *rows]))
    (tmp_path / "moved.csv").write_text("\n".join(["date,OT", *rows]))
    (tmp_path / "other.csv").write_text("\n".join(["date,OT", *rows[:-1], rows[-1] + "5"]))
    sizes = (
        "task.look_back=24",
        "task.horizon=4",
        "task.embed_dim=8",
        "task.num_heads=1",
        "task.num_layers=1",
        "task.patch_length=8",
    )
    steps = ("training.steps=2", "training.batch_size=2", "training.eval_every=2", "training.warmup_steps=0")
    changes = [part for change in (*sizes, *steps) for part in ("--set", change)]
    for command in ("train", "compare"):
        call = [command, "forecast", "--attention", "standard", *changes, "--out", str(tmp_path / command)]
        seeds = ["--seeds", "1"] if command == "compare" else []
        assert main([*call, *seeds, "--data", str(tmp_path / "a.csv")]) == 0
        capsys.readouterr()
        assert main([*call, *seeds, "--data", str(tmp_path / "moved.csv"), "--resume"]) == 0
        if command == "train":
            assert "writing to" not in capsys.readouterr().err  # it is finished, and only read
        assert main([*call, *seeds, "--data", str(tmp_path / "other.csv"), "--resume"]) == 2
        assert "was begun with content of the data = " in said(capsys)


def test_a_fault_inside_of_training_leaves_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    def wrong(*_: object) -> None:
        raise ConfigError("these do not fit together")

    monkeypatch.setattr(loop, "train_step", wrong)
    assert main([*TRAIN, "--out", str(tmp_path / "new")]) == 2
    assert "these do not fit together" in said(capsys)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "words", [["--out", "bad\udcff"], ["--attention=bad\udcff"], ["--set", "training.steps=\udcff"]]
)
def test_what_is_no_utf_8_is_named_before_anything_is_done(
    words: list[str], tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN, *words]) == 2
    assert f"{words[0].partition('=')[0]}: expected text in UTF-8" in said(capsys)
    assert not list(tmp_path.iterdir())


OWN = Owner(command="train", task="t", settings={"a": 1})


def test_one_process_at_a_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(None, OWN, resume=False) as first:
        # In the same second.
        with opened(None, OWN, resume=False) as second:
            assert second != first
            (second / "x").touch()
        with (
            pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "),
            opened(first, OWN, resume=True),
        ):
            pass
    assert not first.exists()
    # The lock of a process that is gone counts no more.
    if (child := os.fork()) == 0:
        with opened(Path("left"), OWN, resume=False) as left:
            (left / "y").touch()
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert Path("left/.lock").exists()
    with opened(Path("left"), OWN, resume=True):
        pass
    assert sorted(path.name for path in Path("left").iterdir()) == [OWNER, "y"]


def test_the_lock_of_a_process_that_is_gone_is_not_that_of_its_children(tmp_path: Path) -> None:
    wait_here, end = os.pipe()
    if (child := os.fork()) == 0:
        with opened(tmp_path / "o", OWN, resume=False) as folder:
            (folder / "x").touch()
            if os.fork() == 0:  # such as a worker that reads data
                os.close(end)
                os.read(wait_here, 1)
            os._exit(9)
    os.waitpid(child, 0)
    with opened(tmp_path / "o", OWN, resume=True):
        pass
    os.close(wait_here)
    os.close(end)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_allowed(number: int, tmp_path: Path, monkeypatch, caplog) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with opened(tmp_path / "o", OWN, resume=False) as folder:
        (folder / "x").touch()
    assert f"{folder} cannot be locked ([Errno {number}] {os.strerror(number)}): let one process" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == [OWNER, "x"]


def test_a_lock_file_of_somebody_else_is_no_file_system_without_locks(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(IsADirectoryError), opened(tmp_path, OWN, resume=False):
        pass


def test_a_lock_whose_file_was_removed_meanwhile_is_taken(tmp_path: Path, monkeypatch) -> None:
    acquire, left = FileLock.acquire, [2]

    def late(self: FileLock) -> None:
        if left[0]:
            left[0] -= 1
            raise Timeout(self.lock_file)
        acquire(self)

    monkeypatch.setattr(FileLock, "acquire", late)
    with opened(tmp_path / "o", OWN, resume=False) as folder:
        assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert left == [0]


def test_the_last_folder_of_the_same_settings_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = []
    for number, owner in enumerate((OWN, OWN, Owner(command="train", task="t", settings={"a": 2}))):
        with opened(None, owner, resume=False) as folder:
            (folder / "x").touch()
        os.utime(folder / OWNER, (number, number))
        folders.append(folder)
    with opened(None, OWN, resume=True) as found:
        assert found == folders[1]
    for folder in folders[:2]:
        os.utime(folder / OWNER, (5, 5))
    with pytest.raises(ConfigError, match="at the same time"), opened(None, OWN, resume=True):
        pass
    (folders[0] / OWNER).write_text('{"format_version": 1}')
    with opened(None, OWN, resume=True) as found:
        assert found == folders[1]
    with pytest.raises(ConfigError, match="is damaged"), opened(folders[0], OWN, resume=True):
        pass
