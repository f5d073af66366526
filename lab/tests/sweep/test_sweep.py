"""Sweeps: the grammar of parameters, the numbers of a single run, what goes wrong, and going on after a
kill.
"""

import dataclasses
import importlib
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structattn.cli import main
from structattn.errors import ConfigError
from structattn.extras import install_command
from structattn.grammar import split_specs
from structattn.testing.tolerances import SAME_MODEL
from structattn_lab.records.common import read_file, to_json
from structattn_lab.records.run import Progress
from structattn_lab.records.sweep import Parameter, SweepRecord
from structattn_lab.runs.folders import Owner
from structattn_lab.settings.overrides import apply_overrides, fields_of
from structattn_lab.sweep.halving import SuccessiveHalving
from structattn_lab.sweep.plan import Journal, SweepPlan
from structattn_lab.sweep.space import RunSettings, parse_parameters
from structattn_lab.tasks.registry import TASKS, recipe_for
from structattn_lab.training.checkpoint import latest_checkpoint, load_checkpoint

SMALL = (
    "task.dim=8",
    "task.num_points=4",
    "task.num_heads=2",
    "task.eval_examples=16",
    "training.batch_size=4",
    "training.steps=8",
    "training.eval_every=2",
    "training.checkpoint_every=2",
    "training.schedule=constant",
)
ISSUE = ("training.lr=log:1e-5:5e-3", "attention=choice:standard,mlr:16|8|4|4")


def settings(task: str = "nearest-neighbor", *changes: str) -> RunSettings:
    recipe = apply_overrides(recipe_for(task, "default"), changes)
    return RunSettings(task=recipe.task, training=recipe.training)


def parsed(text: str, task: str = "nearest-neighbor") -> Parameter:
    (parameter,) = parse_parameters([text], settings(task))
    return parameter


def plan(*params: str, **more) -> SweepPlan:
    return SweepPlan(
        task_name="nearest-neighbor",
        settings=settings("nearest-neighbor", *SMALL),
        changes=SMALL,
        params=params or ISSUE,
        **{"trials": 3} | more,
    )


def test_parameters_and_the_short_name_of_the_rate() -> None:
    rate, attention = parse_parameters(ISSUE, settings())
    assert rate == Parameter(name="training.learning_rate", low=1e-5, high=5e-3, log=True)
    assert attention == Parameter(name="attention", choices=("standard", "mlr:16|8|4|4"))
    assert parsed("task.dropout=uniform:0:0.5", "forecast") == Parameter(name="task.dropout", low=0.0, high=0.5)
    layers = parsed("task.num_layers=int:1:4", "forecast")
    assert (layers.low, layers.high, type(layers.low)) == (1, 4, int)
    batch = parsed("training.batch_size=log:8:64")
    assert (batch.low, batch.log, type(batch.high)) == (8, True, int)
    assert parsed("training.patience=int:2:8").high == 8


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_can_be_swept(task: str) -> None:
    names = [name for name, _, _ in fields_of(settings(task))]
    assert {"training.learning_rate", "training.schedule"} <= set(names)
    assert any(name.startswith("task.") for name in names)
    assert len(parse_parameters(ISSUE, settings(task))) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("standard,mlr:8|8,values=8|8", ["standard", "mlr:8|8,values=8|8"]),
        ("mlr:8|8,scaling=paper,values=8|8,window:4", ["mlr:8|8,scaling=paper,values=8|8", "window:4"]),
        ("[standard,window:4],mlr:8|8", ["[standard,window:4]", "mlr:8|8"]),
        (
            "mlr:8|8,[mlr:8|8,scaling=paper,window:4],standard",
            ["mlr:8|8", "[mlr:8|8,scaling=paper,window:4]", "standard"],
        ),
        ("bilinear-btt:1+mlr:8|8 , standard:1", ["bilinear-btt:1+mlr:8|8", "standard:1"]),
    ],
)  # fmt: skip
def test_commas_of_specs_are_no_borders(text: str, expected: list[str]) -> None:
    assert split_specs(text) == expected
    assert list(parsed(f"attention=choice:{text}").choices) == expected


PIECES = ("standard", "standard:1", "mlr:8|8", "mlr:8|8,values=8|8", "mlr:8|8,scaling=paper,values=8|8", "window:4")


@given(
    st.lists(
        st.sampled_from([*PIECES, *(f"[{a},{b}]" for a in PIECES for b in PIECES)]), min_size=1, max_size=5, unique=True
    )
)
def test_any_list_of_specs_is_split_where_it_was_joined(specs: list[str]) -> None:
    assert split_specs(",".join(specs)) == specs


def test_choices_of_other_settings() -> None:
    assert parsed("training.betas=choice:(0.9,0.95),(0.9,0.999)").choices == ("(0.9,0.95)", "(0.9,0.999)")
    assert parsed("training.patience=choice:none,5").choices == ("none", "5")
    assert parsed("training.schedule=choice:cosine,wsd").choices == ("cosine", "wsd")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training.learning_rat=log:1:2", "did you mean 'training.learning_rate'"),
        ("learning_rate=log:1:2", "did you mean 'training.learning_rate'"),
        ("training.learning_rate", "section.field=value"),
        ("training.learning_rate=1e-3", "NAME=log"),
        ("training.learning_rate=grid:1:2", "unknown kind"),
        ("training.learning_rate=log:1e-3", "two ends"),
        ("training.learning_rate=log:1:2:3", "two ends"),
        ("training.learning_rate=log:1e-3:\u0661", "expected a number"),
        ("training.steps=int:1:1_0", "expected a whole number"),
        ("training.learning_rate=log:a:b", "expected a number"),
        ("training.learning_rate=log:1e-3:1e-3", "lower end"),
        ("training.learning_rate=uniform:2:1", "lower end"),
        ("training.learning_rate=uniform:nan:1", "expected a finite number"),
        ("training.learning_rate=uniform:0:inf", "expected a finite number"),
        ("training.learning_rate=log:0:1", "above 0"),
        ("training.learning_rate=int:1:2", "uniform:LOW:HIGH"),
        ("training.steps=uniform:1:2", "int:LOW:HIGH"),
        ("training.steps=int:1.5:2", "expected a whole number"),
        ("training.schedule=log:1:2", "not a number"),
        ("training.compile=int:0:1", "not a number"),
        ("training.schedule=choice:cosine,nope", "unknown value 'nope'"),
        ("training.schedule=choice:", "before and after every comma"),
        ("attention=choice:standard,,window:4", "before and after every comma"),
        ("attention=choice:standard,standard", "twice"),
        ("attention=choice:standard,mlp:4", "mlp"),
        ("attention=log:1:2", "not a number"),
    ],
)
def test_what_is_wrong_with_a_parameter_is_said(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(text)


def test_what_is_wrong_with_a_plan_is_said() -> None:
    with pytest.raises(ConfigError, match="nothing to sweep"):
        parse_parameters([], settings())
    with pytest.raises(ConfigError, match=r"learning_rate is swept twice"):
        plan("training.lr=log:1e-3:1", "training.learning_rate=log:1e-3:1")
    with pytest.raises(ConfigError, match="trials must be an int of at least 1 and at most 100000, got 0"):
        plan(trials=0)
    with pytest.raises(ConfigError, match="swept and set"):
        plan("task.dim=int:4:8")
    with pytest.raises(ConfigError, match="attention is swept and set"):
        plan(attention="standard:1")
    with pytest.raises(ConfigError, match="grace period"):
        plan(grace_period=9)


def test_the_command_of_a_trial_says_its_settings_exactly(tmp_path: Path) -> None:
    values = {"training.learning_rate": 0.1 + 0.2, "attention": "mlr:16|8|4|4"}
    words = shlex.split(plan(seed=3).command(values))
    assert words[:3] == ["structattn", "train", "nearest-neighbor"]
    assert f"training.learning_rate={0.1 + 0.2!r}" in words
    assert words[-4:] == ["--attention", "mlr:16|8|4|4", "--seed", "3"]
    job = plan(seed=3).job(tmp_path, values)
    assert (job.training.learning_rate, job.spec, job.seed) == (0.1 + 0.2, "mlr:16|8|4|4", 3)


def test_the_score_is_that_of_the_weights_that_are_kept() -> None:
    history = tuple({"step": step, "validation_mse": score} for step, score in ((1, 3.0), (2, 1.0), (3, 2.0)))
    progress = Progress(step=3, best_step=2, history=history, speeds=(), seconds=0, peak_memory_bytes=0, compute=0)
    assert progress.final_validation_score("mse", patience=None) == 2.0
    assert progress.final_validation_score("mse", patience=1) == 1.0
    history[-1]["validation_mse"] = float("nan")
    assert progress.final_validation_score("mse", patience=None) == float("inf")


def test_a_sweep_is_resumed_as_it_was() -> None:
    def differences(now: SweepPlan) -> list[str]:
        return Owner(command="sweep", task="", settings=now.identity()).differences(plan().identity())

    assert not differences(plan(trials=9))
    assert "parameters = " in differences(plan("training.lr=log:1e-5:1e-3"))[0]
    assert differences(plan(seed=1)) == ["seed = 0, now 1"]
    changed = dataclasses.replace(plan(), settings=settings("nearest-neighbor", *SMALL, "training.steps=9"))
    assert differences(changed)[0] == "settings.training.steps = 8, now 9"


def test_the_journal_counts_seconds_on_and_keeps_each_step_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin(2, {"attention": "standard"})
    for step in (2, 4, 4, 2):
        journal.update(2, entry=(step, 1.0), seconds=5.0)
    assert journal.trials()[0].history == ((2, 1.0), (4, 1.0))
    journal.begin(2, {"attention": "standard"})
    (record,) = journal.trials()
    assert (record.status, record.seconds, record.history) == ("running", 5.0, ((2, 1.0), (4, 1.0)))


def test_a_sweep_needs_optuna_and_no_ray(tmp_path: Path, monkeypatch, capsys) -> None:
    command = ["sweep", "nearest-neighbor", "--param", ISSUE[0], "--out", str(tmp_path / "out")]
    monkeypatch.delitem(sys.modules, "structattn_lab.sweep.trials", raising=False)
    for missing, more, extra in (("optuna", [], "sweep"), ("ray", ["--ray-address", "local"], "ray")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, missing, None)
            assert main([*command, *more]) == 2
        assert install_command(extra) in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(sweep_command(tmp_path / "out", "--scheduler", "none", trials=1)) == 0


def test_asha_compares_with_the_best_quarter_of_those_that_came_before() -> None:
    halving = SuccessiveHalving(grace=2, longest=32)
    assert not any(halving.stops(1, step, 5.0) for step in (1, 2, 3, 9, 31))
    assert not halving.stops(2, 1, 9.0)  # before the first rung
    assert halving.stops(2, 2, 5.1)
    assert not halving.stops(3, 3, 5.0)
    assert not halving.stops(3, 7, 99.0)  # between two rungs nothing is compared
    assert halving.stops(3, 8, 99.0)
    # A rung that is passed is one that is reached; a quarter of (5, 99, 1) lies between 1 and 5.
    assert not halving.stops(4, 10, 1.0)
    assert not halving.stops(5, 8, 3.0)
    assert halving.stops(6, 8, 3.1)
    assert halving.stops(7, 8, float("inf"))


PARAMS = ("training.lr=log:1e-3:1e-1", "attention=choice:standard,bilinear-mlr:2|1|1")


def sweep_command(out: Path, *more: str, params: tuple[str, ...] = PARAMS, trials: int = 4) -> list[str]:
    words = ["sweep", "nearest-neighbor", "--out", str(out), "--trials", str(trials), "--jobs", "1", *more]
    words += [word for change in SMALL for word in ("--set", change)]
    return words + [word for param in params for word in ("--param", param)]


def read(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def facts(trial: dict) -> dict:
    """What does not depend on the time of day."""
    return {name: value for name, value in trial.items() if name != "seconds"}


def last_score(run: Path) -> float:
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    return load_checkpoint(found).state["progress"]["history"][-1]["validation_nmse"]


def test_a_sweep_its_best_command_and_going_on(tmp_path: Path, capsys) -> None:
    out = tmp_path / "sweep"
    assert main(sweep_command(out)) == 0
    printed = capsys.readouterr().out
    results = read(out)
    assert json.loads(to_json(read_file(SweepRecord, out / "results.json"))) == results
    (tmp_path / "old.json").write_text(json.dumps({k: v for k, v in results.items() if k != "format_version"}))
    assert read_file(SweepRecord, tmp_path / "old.json") == read_file(SweepRecord, out / "results.json")
    best, trials = results["best"], results["trials"]
    assert [trial["number"] for trial in trials] == [1, 2, 3, 4]
    assert {trial["status"] for trial in trials} <= {"finished", "stopped"}
    finished = [trial for trial in trials if trial["status"] == "finished"]
    assert best["score"] == min(trial["score"] for trial in finished)
    assert all(trial["history"][0][0] == 2 for trial in trials)
    assert best["command"] in printed
    page = (out / "report.html").read_text()
    assert "Train the best again" in page
    assert page.count("<svg") == 3

    # The best command line gives the same numbers.
    words = shlex.split(best["command"])
    assert main([*words[1:], "--out", str(tmp_path / "again")]) == 0
    assert last_score(tmp_path / "again") == pytest.approx(best["score"], rel=SAME_MODEL)
    assert f"{best['test']['nmse']:.4g}"[:5] in capsys.readouterr().out

    # As after a kill in the middle of trial 1: what it wrote last is missing, and so are the results.
    first = out / "runs" / "trial-0001"
    record = json.loads((first / "trial.json").read_text())
    assert record["status"] == "finished"
    (first / "trial.json").write_text(json.dumps(record | {"status": "running", "score": None}))
    shutil.rmtree(first / "checkpoints" / "step-00000008")
    middle = (first / "checkpoints" / "step-00000006" / "manifest.json").stat().st_mtime_ns
    for path in (first / "model.safetensors", first / "run.json", out / "results.json"):
        path.unlink()
    others = {number: (out / "runs" / f"trial-000{number}" / "trial.json").stat().st_mtime_ns for number in (2, 3, 4)}
    assert main(sweep_command(out, trials=5)) == 2  # without --resume
    assert "--resume" in capsys.readouterr().err
    assert main(sweep_command(out, "--resume", trials=5)) == 0
    resumed = read(out)["trials"]
    assert [trial["number"] for trial in resumed] == [1, 2, 3, 4, 5]
    assert (resumed[0]["score"], resumed[0]["history"]) == (record["score"], record["history"])
    assert resumed[0]["seconds"] > record["seconds"]
    assert resumed[1:4] == trials[1:4]
    assert others == {n: (out / "runs" / f"trial-000{n}" / "trial.json").stat().st_mtime_ns for n in others}
    assert (first / "checkpoints" / "step-00000006" / "manifest.json").stat().st_mtime_ns == middle
    assert main(sweep_command(tmp_path / "at once", trials=5)) == 0
    assert [facts(trial) for trial in resumed] == [facts(trial) for trial in read(tmp_path / "at once")["trials"]]


@pytest.mark.full
def test_a_finished_sweep_or_run_is_only_read(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = sweep_command(Path(), trials=2)
    sweep = sweep[:2] + sweep[4:]  # without --out
    train = ["train", "nearest-neighbor", *(word for change in SMALL for word in ("--set", change))]
    for command in (sweep, train):
        assert main(command) == 0
        first = capsys.readouterr()
        assert "writing to" in first.err
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert main([*command, "--resume"]) == 0
        again = capsys.readouterr()
        assert "writing to" not in again.err
        assert again.out == first.out
        assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    other = next(Path("runs").glob("sweep-*"))
    assert main([*sweep, "--resume", "--out", str(other), "--seed", "1"]) == 2
    assert "seed = 0, now 1" in capsys.readouterr().err


def test_combinations_of_choices_are_run_once(tmp_path: Path) -> None:
    params = ("training.lr=choice:0.01,0.03", "attention=choice:standard,bilinear-mlr:2|1|1")
    out = tmp_path / "sweep"
    assert plan(*params, trials=3).num_trials == 3
    assert plan(params[0], "training.weight_decay=uniform:0:1", trials=9).combinations == []
    assert main(sweep_command(out, "--scheduler", "none", params=params, trials=20)) == 0
    found = [tuple(trial["params"].values()) for trial in read(out)["trials"]]
    assert found == [(rate, spec) for rate in ("0.01", "0.03") for spec in ("standard", "bilinear-mlr:2|1|1")]
    # As after a kill before the third one.
    for number in (3, 4):
        shutil.rmtree(out / "runs" / f"trial-000{number}")
    (out / "results.json").unlink()
    assert main(sweep_command(out, "--scheduler", "none", "--resume", params=params, trials=20)) == 0
    assert [tuple(trial["params"].values()) for trial in read(out)["trials"]] == found


def test_a_trial_that_asha_stops_is_recorded_as_such_at_once(tmp_path: Path, monkeypatch) -> None:
    """It may be interrupted before its process has ended."""

    def kill(self, trial, status, *rest, **more):
        if status == "stopped":
            raise KeyboardInterrupt
        return end(self, trial, status, *rest, **more)

    trials = importlib.import_module("structattn_lab.sweep.trials")
    end = trials._Trials._end
    wanted = main(sweep_command(tmp_path / "whole", trials=8)), read(tmp_path / "whole")["trials"]
    assert "stopped" in {trial["status"] for trial in wanted[1]}
    out = tmp_path / "broken"
    with monkeypatch.context() as patch:
        patch.setattr(trials._Trials, "_end", kill)
        assert main(sweep_command(out, trials=8)) == 130
    assert main(sweep_command(out, "--resume", trials=8)) == wanted[0] == 0
    assert [facts(trial) for trial in read(out)["trials"]] == [facts(trial) for trial in wanted[1]]


def test_what_goes_wrong_is_recorded(tmp_path: Path, capsys) -> None:
    params = ("training.lr=choice:0.01,1e30", "attention=choice:standard,mlr:3|3")
    out = tmp_path / "sweep"
    assert main(sweep_command(out, "--scheduler", "none", params=params, trials=8)) == 0
    trials = read(out)["trials"]
    expected = {
        ("0.01", "standard"): "finished",
        ("1e30", "standard"): "diverged",
        ("0.01", "mlr:3|3"): "failed",
        ("1e30", "mlr:3|3"): "failed",
    }
    found = {tuple(trial["params"].values()): trial["status"] for trial in trials}
    assert found.items() <= expected.items()
    assert set(found.values()) == {"finished", "diverged", "failed"}
    for trial in trials:
        assert (trial["score"] is not None) == (trial["status"] == "finished")
        assert bool(trial["message"]) == (trial["status"] != "finished")
    assert "mlr:3" in (out / "report.html").read_text()

    assert main(sweep_command(tmp_path / "none", params=("attention=choice:mlr:3|3,mlr:5|5",), trials=2)) == 2
    assert "none of 2 trials" in capsys.readouterr().err
    assert (tmp_path / "none" / "report.html").exists()


@pytest.mark.full
def test_processes_give_the_numbers_of_one_and_the_history_of_trials_is_replayed(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert main(sweep_command(here, "--scheduler", "none", trials=3)) == 0
    two = [word if word != "1" else "2" for word in sweep_command(there, "--scheduler", "none", trials=3)]
    assert main(two) == 0
    trials = [read(out)["trials"] for out in (here, there)]
    assert [trial["params"] for trial in trials[0]] == [trial["params"] for trial in trials[1]]
    assert [trial["score"] for trial in trials[1]] == [
        pytest.approx(trial["score"], rel=SAME_MODEL) for trial in trials[0]
    ]
    # Values that Optuna would not propose, such as of trials that ended in another order: they are kept, and
    # new ones are others.
    path = there / "runs" / "trial-0002" / "trial.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"params": record["params"] | {"training.learning_rate": 0.005}}))
    assert main(sweep_command(there, "--scheduler", "none", "--resume", trials=4)) == 0
    resumed = read(there)["trials"]
    assert resumed[1]["params"]["training.learning_rate"] == 0.005
    assert resumed[3]["params"] not in [trial["params"] for trial in resumed[:3]]


def test_a_model_that_no_trial_can_train_is_named_before_any_begins(tmp_path, capsys) -> None:
    words = ["sweep", "nearest-neighbor", "--preset", "demo", "--param", "training.learning_rate=log:1e-4:1e-2"]
    for more, message in (
        (["--attention", "nope"], "unknown form 'nope'"),
        (["--set", "task.num_heads=3"], "num_heads must divide embed_dim"),
        (["--ray-address", "127.0.0.1:1"], "expected a Ray cluster at '127.0.0.1:1'"),
    ):
        assert main([*words, *more, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
