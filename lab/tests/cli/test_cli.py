"""The command line as a user meets it: results, resume, and one clear line for every mistake."""

import dataclasses
import html
import io
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from structattn import progress
from structattn.cli import main
from structattn.errors import ConfigError
from structattn.testing.tolerances import ANOTHER_ORDER
from structattn.typed_records import read_as
from structattn_lab.cli import commands
from structattn_lab.cli.parsing import parse
from structattn_lab.settings.overrides import apply_overrides, fields_of, meanings
from structattn_lab.tasks.forecast.task import ForecastConfig, ForecastTask
from structattn_lab.tasks.registry import TASKS, presets_of, recipe_for
from structattn_lab.training.checkpoint import latest_checkpoint, load_checkpoint

SMALL = {
    "nearest-neighbor": ["task.dim=8", "task.num_points=4", "task.num_heads=2", "task.eval_examples=64"],
    "forecast": ["task.look_back=48", "task.horizon=12", "task.embed_dim=8", "task.num_heads=1", "task.num_layers=1"],
    "icl-regression": ["task.dim=4", "task.embed_dim=8", "task.num_heads=2", "task.num_layers=1"],
}

PLAN = ["plan", "text", "--model", "125m"]
CORPUS = ["data", "prepare", "text", "--source", "owned/file", "--out", "c"]


def small(task: str, *more: str) -> list[str]:
    changes = [
        *SMALL[task],
        "training.steps=6",
        "training.batch_size=8",
        "training.warmup_steps=0",
        "training.eval_every=3",
    ]
    return [part for change in [*changes, *more] for part in ("--set", change)]


@pytest.mark.parametrize(
    ("task", "specs"),
    [
        ("nearest-neighbor", ["standard", "bilinear-mlr:2|1|1"]),
        ("forecast", ["standard", "mlr:4|2|2"]),
        ("icl-regression", ["standard:1", "bilinear-btt:1"]),
    ],
)
@pytest.mark.quick(task=["nearest-neighbor"])
def test_compare_writes_everything(task: str, specs: list[str], tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["compare", task, "--attention", *specs, "--seeds", "2", "--out", str(out), *small(task)]) == 0
    printed = capsys.readouterr().out
    assert str(out / "report.html") in printed
    results = json.loads((out / "results.json").read_text())
    assert {"task", "metric", "config", "versions", "rows"} <= set(results)
    assert [row["spec"] for row in results["rows"]] == specs
    for row in results["rows"]:
        assert len(row["scores"]) == 2
        assert row["scores"][0] != row["scores"][1]
        assert row["score"] == pytest.approx(sum(row["scores"]) / 2)
        assert row["score_std"] > 0
        assert row["num_params"] > 0
        assert row["flops_per_example"] > 0
        assert row["seconds"] > 0
        assert row["peak_memory_bytes"] > 2**20
    assert (out / "report.html").read_text().startswith("<!")
    page = html.unescape((out / "report.html").read_text())
    for words in (*results["data"].values(), *results["meanings"].values(), "6 steps of 8 examples"):
        assert words in page
    assert len(list((out / "figures").glob("*.png"))) == len(list((out / "figures").glob("*.svg"))) >= 2
    assert main(["compare", task, "--attention", *specs, "--seeds", "2", "--out", str(out), *small(task)]) == 2
    assert "--resume" in capsys.readouterr().err
    again = ["compare", task, "--attention", *specs, "--seeds", "2", "--resume", "--out", str(out), *small(task)]
    assert main(again) == 0
    repeated = json.loads((out / "results.json").read_text())
    assert [row["scores"] for row in repeated["rows"]] == [row["scores"] for row in results["rows"]]


def test_learning_rates_are_chosen_on_validation(tmp_path: Path) -> None:
    rates = ["--set", "learning_rates=0.000001,0.01"]
    main(
        [
            "compare",
            "nearest-neighbor",
            "--attention",
            "standard",
            "--out",
            str(tmp_path),
            *small("nearest-neighbor"),
            *rates,
        ]
    )
    row = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    found = {}
    for path in tmp_path.glob("runs/*/seed-0-*/run.json"):
        run = json.loads(path.read_text())
        found[run["config"]["learning_rate"]] = run["progress"]["history"][-1]["validation_nmse"]
    assert set(found) == {0.000001, 0.01}
    assert found[0.01] < found[0.000001]
    assert row["learning_rate"] == 0.01


@pytest.mark.full
def test_a_learning_rate_is_judged_by_the_weights_that_it_ends_with(tmp_path: Path) -> None:
    """Without early stopping those of the last step, however good the run was before."""
    settings = [
        "learning_rates=1e-2,1",
        "sweep_settings=task.embed_dim=16",
        "training.parametrization=mup",
        "training.eval_every=1",
    ]
    arguments = ["compare", "icl-regression", "--attention", "standard:1", "--out", str(tmp_path)]
    assert main([*arguments, *small("icl-regression", *settings)]) == 0
    row = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    last, best = [], []
    for run in sorted((tmp_path / "sweep").rglob("checkpoints")):
        found = latest_checkpoint(run)
        assert found is not None
        scores = [entry["validation_last_point_error"] for entry in load_checkpoint(found).state["progress"]["history"]]
        last.append(scores[-1])
        best.append(min(scores))
    assert last != best
    assert sorted(run["score"] for run in row["sweep"]["runs"]) == sorted(last)


def test_train_then_evaluate(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    task = "nearest-neighbor"
    assert main(["train", task, "--attention", "bilinear-btt:1", "--out", str(run), *small(task)]) == 0
    trained = [line for line in capsys.readouterr().out.splitlines() if line.startswith("test")]
    assert main(["evaluate", str(run.parent)]) == 2
    assert "holds no finished run: expected run.json" in capsys.readouterr().err
    assert main(["evaluate", str(run)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("test")] == trained
    assert main(["train", "icl-regression", "--out", str(run), "--resume", *small("icl-regression")]) == 2
    assert "holds the results of structattn train nearest-neighbor" in capsys.readouterr().err
    weights = run / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    assert main(["evaluate", str(run)]) == 2
    assert "damaged" in capsys.readouterr().err


def test_what_takes_long_is_shown_while_it_is_done(tmp_path: Path, capsys, monkeypatch) -> None:
    """Reading the data, scoring, and the baselines of a comparison; a caller of the library sees nothing of
    it.
    """
    monkeypatch.setattr(progress, "_SOON_S", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    arguments = ["compare", "forecast", "--preset", "smoke", "--attention", "standard", "--out", str(tmp_path / "a")]
    assert main([*arguments, *small("forecast")]) == 0
    shown = terminal.getvalue()
    for text in (
        "reading ETTh1",
        "scoring the validation windows",
        "scoring the test windows",
        "ridge regression, fit",
        "last value, test",
    ):
        assert text in shown
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    ForecastTask(ForecastConfig(look_back=32, horizon=8)).baselines()
    assert terminal.getvalue() == ""


class Terminal(io.StringIO):
    """Of standard error."""

    def isatty(self) -> bool:
        return True


def test_a_csv_of_ones_own(tmp_path: Path, capsys) -> None:
    data = tmp_path / "my.csv"
    rows = [f"2024-01-{1 + i // 24:02d} {i % 24:02d}:00,{(i * 37) % 24}" for i in range(24 * 30)]
    data.write_text("when,y\n" + "\n".join(rows) + "\n")
    arguments = ["compare", "forecast", "--attention", "standard", "--data", str(data), "--time", "when"]
    assert main([*arguments, "--target", "y", "--out", str(tmp_path / "a"), *small("forecast")]) == 0
    assert main([*arguments, "--target", "z", "--out", str(tmp_path / "b"), *small("forecast")]) == 2
    assert "'y'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nearest-neighbour"], "did you mean 'nearest-neighbor'"),
        (["compare", "forecast", "--preset", "demmo"], "did you mean 'demo'"),
        (["compare", "forecast", "--attention", "mrl:4|4"], "did you mean 'mlr'"),
        (["compare", "forecast", "--attention", "mlr:4|4|4"], "ranks of the layout must sum"),
        (["compare", "forecast", "--attention", "standard", "standard"], "specs must be unique"),
        (["compare", "forecast", "--set", "training.stps=4"], "did you mean 'training.steps'"),
        (["compare", "forecast", "--set", "training.lrr=4"], "did you mean 'training.lr'"),
        (["compare", "forecast", "--set", "steps=4"], "did you mean 'training.steps'?"),
        (["data", "info", "nowhere"], "nowhere: expected a corpus, got no such folder"),
        (["compare", "forecast", "--set", "training.betas=0.9"], "training.betas: expected 2 values"),
        (["compare", "forecast", "--set", "training.betas="], "training.betas: expected 2 values"),
        (
            ["compare", "forecast", "--set", "training.betas=0.9,nan"],
            "training.betas: expected a finite number, got 'nan'",
        ),
        (["compare", "forecast", "--set", "training.betas=0.9,1"], "training.betas must be a finite number"),
        (
            ["compare", "forecast", "--set", "training.weight_decay=nan"],
            "training.weight_decay: expected a finite number, got 'nan'",
        ),
        (
            ["compare", "forecast", "--set", "training.learning_rate=inf"],
            "training.learning_rate: expected a finite number, got 'inf'",
        ),
        (["comapre", "forecast"], "did you mean 'compare'"),
        (["mup", "chek"], "did you mean 'mup check'"),
        (["compare", "forecast", "--jbos", "2"], "did you mean '--jobs'"),
        (["compare", "forecast", "--jobs", "two"], "--jobs"),
        (["compare", "forecast", "extra"], "extra"),
        (["compare"], "expected TASK, one of nearest-neighbor"),
        (["train", "forecast", "--seed", "9" * 41], "--seed: expected a whole number"),
        (["settings", "forcast"], "did you mean 'forecast'"),
        (["mup", "check", "--heads", "0"], "--heads: expected a whole number of at least 1"),
        (["mup", "roles", "--heads", "0"], "--heads"),
        (["fit", "gaussian", "--size", "10000000"], "--size: expected a whole number of at least 2 and at most 16384"),
        (["fit", ""], "empty name"),
        (
            ["compare", "forecast", "--attention", "mlr:8|9x"],
            "Written mlr:R|R|...[@B|B|...][,values=V|V|...][,sink_tokens=N], such as mlr:32|16|8|8\n",
        ),
        (["compare", "forecast", "--set", "training.steps=four"], "expected a whole number, got 'four'"),
        (["compare", "forecast", "--set", "training"], "section.field=value"),
        (["compare", "forecast", "--set", "task.embed_dim=33"], "num_heads must divide"),
        (
            ["compare", "nearest-neighbor", "--data", "x.csv"],
            "--data belongs to forecast, text, chronos, uptraining, not to nearest-neighbor",
        ),
        (["compare", "text", "--time", "date"], "--time belongs to forecast, not to text"),
        (["compare", "forecast", "--data", "missing.csv"], "missing.csv"),
        (["evaluate", "nowhere"], "no finished run"),
        (["compare", "forecast", "--seeds", "0"], "--seeds: expected a whole number of at least 1, got '0'"),
        (["mup"], "one of mup check, mup roles"),
        (["--jobs"], "expected a command before its options, got '--jobs'"),
        (["data"], "structattn data needs one of data prepare, data info"),
        (["--version", "x"], "unknown command 'x'"),
        (["compare", "forecast", "--seeds", "two"], "--seeds: expected a whole number of at least 1, got 'two'"),
        (["compare", "forecast", "--seeds", "1_0"], "--seeds: expected a whole number of at least 1, got '1_0'"),
        (["train", "forecast", "--set", "training.steps=1_0"], "training.steps: expected a whole number, got '1_0'"),
        (["compare", "text", "--widths", "64", "x"], "--widths: expected a whole number of at least 1, got 'x'"),
        (["compare", "text", "--attention", "--seeds", "2"], "--attention: expected a text, or several"),
        (
            ["compare", "forecast", "--attention", "standard", " standard"],
            "specs must be unique, got standard,  standard",
        ),
        (["train", "forecast", "--attention", "standard:"], "expected a value after the colon, got nothing"),
        (["train", "forecast", "--seed", "-1"], "--seed: expected a whole number of at least 0, got '-1'"),
        (["sweep", "forecast", "--param", "training.weight_decay=log:1e-4:1", "--seed", "-1"], "--seed: expected"),
        (
            ["data", "prepare", "text", "--source", "owned", "--out", "c", "--max-documents", "1" * 41],
            "--max-documents: expected",
        ),
        (["train", "forecast", "--set", "attention=mlr:8|8"], "belongs to structattn compare: give --attention"),
        (["sweep", "forecast", "--set", "seeds=2"], "--set seeds belongs to structattn compare: leave it out"),
        (["train", "forecast", "--set", "Training.steps=2"], "did you mean 'training'"),
        (["train", "forecast", "--out", "owned/file"], "owned/file is not a folder: give another --out"),
        (["train", "forecast", "--set", "training.process_timeout=1e308"], "training.process_timeout must be"),
        (
            ["train", "forecast", "--set", "training.batch_size=" + "1" * 41],
            "training.batch_size must be an int at most",
        ),
        (["compare", "text", "--attention", "standard", "--budgets", "1e40"], "give a smaller budget"),
        ([*PLAN, "--link", "-5"], "--link: expected a finite number above 0, got '-5'"),
        ([*PLAN, "--link", "5"], "--link gives a time only together with --gpus"),
        ([*PLAN, "--gpus", "0"], "--gpus: expected a whole number of at least 2, got '0'"),
        ([*PLAN, "--gpus", "4096"], "--gpus must be an int of at least 2 and at most 2048"),
        ([*PLAN, "--context", "1" * 20], f"--context: expected a whole number of at least 1 and at most {2**31 - 1}"),
        ([*PLAN, "--gpu-memory", "nan"], "--gpu-memory: expected a finite number above 0, got 'nan'"),
        ([*PLAN, "--gpu-flops", "1e9"], "--gpu-flops gives a time only together with --tokens"),
        ([*PLAN, "--tokens", "1e400"], "--tokens: expected a finite number above 0, got '1e400'"),
        ([*PLAN, "--batch-tokens", "7"], "--batch-tokens must hold at least one sequence"),
        (["plan", "text"], "--embed-dim, --num-layers and --num-heads"),
        (["mup", "check", "--widths", "64"], "--widths: a check compares at least two different ones"),
        (
            ["fit", "gaussian", "--size", "1"],
            "--size: expected a whole number of at least 2 and at most 16384, got '1'",
        ),
        (["generate", "run", "--top-p", "1.5"], "--top-p: expected a finite number above 0 and at most 1, got '1.5'"),
        (["generate", "run", "--temperature", "-1"], "--temperature: expected a finite number of at least 0, got '-1'"),
        (["bench", "call", "--repeats", "0"], "--repeats: expected a whole number of at least 1, got '0'"),
        (["bench", "call", "--patience", "inf"], "--patience: expected a finite number of at least 0, got 'inf'"),
        (["bench", "call", "--device", "tpu"], "--device"),
        (["info", "--deep"], "unknown option '--deep' of structattn info: it has none"),
        ([*CORPUS, "--validation", "2"], "--validation: expected a finite number above 0 and below 1, got '2'"),
        ([*CORPUS, "--validation", "0.5", "--test", "0.5"], "--validation and --test must sum to less than 1"),
        ([*CORPUS, "--model", "m"], "give both, got --tokens chars and --model m"),
        ([*CORPUS, "--tokens", "bytes", "--unknown", "drop"], "--unknown drop is only for --tokens chars"),
        (["data", "prepare", "text", "--source", "./no", "--out", "c"], "expected a text file or a folder at ./no"),
        (
            ["compare", "text", "--attention", "standard", "--seeds", "1", "--attention", "mlr:8|8|8|8"],
            "--attention is given twice, and the first would be lost",
        ),
        (["train", "text", "--attention", "standard", "--attention=linear"], "--attention is given twice"),
        (
            ["compare", "text", "--attention", "standard", "--set", "attention=linear"],
            "--attention and --set attention give the same setting",
        ),
        (
            ["train", "nearest-neighbor", "--set", "training.batch_size=1000000000"],
            "training.batch_size: 1,000,000,000 examples take",
        ),
        (["compare", "text", "--data", "x", "--set", "task.data=y"], "--data and --set task.data give the same"),
        (
            ["compare", "text", "--budgets", "1e12", "--set", "training.steps=9"],
            "--set training.steps would be lost, since budgets set it: leave it out, or give --set 'budgets=()' too",
        ),
        (
            ["compare", "icl-regression", "--preset", "bottleneck", "--set", "training.lr=0.1"],
            "--set training.learning_rate would be lost, since learning_rates set it",
        ),
        (["compare", "forecast", "--preset", ""], "--preset: unknown preset ''"),
        (["compare", "forecast", "--ray-address", "x"], "--ray-address: expected auto, local, HOST:PORT"),
    ],
)
def test_mistakes_are_named_in_one_line(arguments, message: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("owned").mkdir()
    Path("owned/file").write_text("mine")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["owned", "file"]  # nothing is left behind


def test_an_unwritable_folder_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for command in (["compare", "nearest-neighbor"], ["train", "nearest-neighbor"]):
        assert main([*command, "--out", str(tmp_path / "file" / "out")]) == 2
        assert "cannot write to the output folder" in capsys.readouterr().err


def test_options_are_frozen() -> None:
    """Whoever adds an option changes this list, on purpose: most belong into a dataclass that --set
    reaches.
    """
    task = {"task", "preset", "config", "set", "out", "resume", "data", "time", "target"}
    expected = {
        commands.CompareCommand: task | {"attention", "seeds", "jobs", "widths", "budgets", "ray_address"},
        commands.TrainCommand: task | {"attention", "seed"},
        commands.SweepCommand: task
        | {"param", "trials", "attention", "seed", "scheduler", "grace_period", "jobs", "ray_address"},
        commands.UptrainCommand: {
            *("model", "data", "tokens", "out", "compression", "context_length", "batch_size", "learning_rate"),
            *("lora_rank", "attention", "document_start", "set", "resume"),
        },
        commands.ShrinkCommand: {
            *("model", "out", "data", "compression", "context_length", "windows", "prompts", "document_start"),
            "resume",
        },
        commands.EvaluateCommand: {"run", "data", "cache", "bits", "group_size", "residual"},
        commands.ForecastCommand: {
            *("run", "out", "data", "horizon", "row", "variant", "levels", "time", "overwrite"),
        },
        commands.GenerateCommand: {
            *("run", "prompt", "max_new_tokens", "temperature", "top_k", "top_p", "stop", "seed", "cache"),
        },
        commands.FitCommand: {"matrices", "structures", "size", "refine", "seed", "out"},
        commands.BenchCommand: {"name", "quick", "device", "dtype", "repeats", "only", "patience", "out"},
        commands.MupCheckCommand: {
            *("structures", "widths", "steps", "seeds", "heads", "learning_rate", "base_width"),
            *("transfer", "transfer_widths", "transfer_steps", "quick", "out"),
        },
        commands.MupRolesCommand: {"attention", "embed_dim", "heads"},
        commands.DataPrepareCommand: {
            *(
                "kind",
                "source",
                "tokens",
                "model",
                "vocab_size",
                "unknown",
                "document_start",
                "text_column",
                "dataset_split",
            ),
            *("max_documents", "longest_document", "validation", "test", "out", "resume"),
        },
        commands.DataInfoCommand: {"folder", "verify"},
        commands.PlanCommand: {
            *(
                "task",
                "model",
                "attention",
                "context",
                "embed_dim",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "vocab_size",
            ),
            *("precision", "batch_tokens", "gpu_memory", "gpus", "link", "tokens", "gpu_flops"),
        },
        commands.CompareCachesCommand: {"set", "data", "out", "resume"},
        commands.MergeCommand: {"parts", "out"},
        commands.PresetsCommand: set(),
        commands.SettingsCommand: {"task", "preset"},
        commands.CompletionCommand: {"shell"},
        **{commands.COMMANDS[name]: set() for name in ("measure-costs", "build-native", "info", "specs", "structures")},
    }
    found = set(commands.COMMANDS.values())
    assert {command: {field.name for field in dataclasses.fields(command)} for command in found} == expected


def test_the_examples_of_help_are_commands() -> None:
    lines = [line.strip() for kind in commands.COMMANDS.values() for line in (kind.__doc__ or "").splitlines()]
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("structattn ")]
    assert len(examples) > 10
    for words in examples:
        assert type(parse(words)) in commands.COMMANDS.values()


@pytest.mark.parametrize(
    ("command", "word"),
    [("info", "backends"), ("specs", "global-window"), ("--version", "structattn 0.")],
)
def test_listings(command: str, word: str, capsys) -> None:
    assert main([command]) == 0
    assert word in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_settings_lists_what_set_takes(task: str, capsys) -> None:
    assert main(["settings", task]) == 0
    header, _, *lines, _, _ = capsys.readouterr().out.splitlines()
    columns = slice(header.index("value in"), header.index("type"))
    rows = [(line.split()[0], line[columns].strip()) for line in lines]
    recipe = recipe_for(task, "default")
    listed = {row[0] for row in rows}
    assert {"training.betas", "seeds"} <= listed
    written = [row for row in rows if row[0] not in ("attention", "variants", "search") and row[1] != "()"]
    assert apply_overrides(recipe, tuple(f"{name}={value}" for name, value in written)) == recipe


def test_fewer_steps_shrink_the_warmup_of_a_preset() -> None:
    recipe = recipe_for("forecast", "default")
    assert recipe.training.warmup_steps == 32
    assert apply_overrides(recipe, ("training.steps=20",)).training.warmup_steps == 1
    assert apply_overrides(recipe, ("training.steps=6400",)).training.warmup_steps == 32
    assert apply_overrides(recipe, ("training.steps=20", "training.warmup_steps=7")).training.warmup_steps == 7


def test_plan_compares_specs_and_names_what_is_wrong(capsys) -> None:
    sizes = ["--embed-dim", "64", "--num-layers", "2", "--num-heads", "2", "--vocab-size", "100", "--context", "256"]
    specs = ["--attention", "standard", "mlr:16|8|8"]
    assert main(["plan", "text", *sizes, *specs, "--tokens", "1e9", "--gpu-flops", "1e12"]) == 0
    printed = capsys.readouterr().out
    assert "mlr:16|8|8" in printed
    assert "DDP" in printed
    assert "GPU hours" in printed
    assert main(["plan", "text", *sizes, *specs, "--gpus", "2", "--link", "50"]) == 0
    assert "a sequence over 2 GPUs" in capsys.readouterr().out
    assert main(["plan", "text", *sizes, "--link", "50"]) == 2
    assert "together with --gpus" in capsys.readouterr().err
    assert main(["plan", "text", "--model", "14b"]) == 2
    assert "did you mean '13b'" in capsys.readouterr().err


def test_every_task_has_a_smoke_preset() -> None:
    assert all("smoke" in presets_of(task) for task in TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_settings_survive_plain_data(task: str) -> None:
    for name in presets_of(task):
        config = recipe_for(task, name).task
        assert read_as(type(config), json.loads(json.dumps(dataclasses.asdict(config))), "") == config


def test_settings_from_text() -> None:
    recipe = recipe_for("forecast", "demo")
    changed = apply_overrides(recipe, ("training.patience=none", "task.data.target=HUFL", "learning_rates=0.1,0.2"))
    assert changed.training.patience is None
    assert changed.task.data.target == "HUFL"
    assert changed.learning_rates == (0.1, 0.2)
    with pytest.raises(ConfigError, match="is a section"):
        apply_overrides(recipe, ("task.data=3",))


@pytest.mark.full
def test_a_reader_that_leaves_early_sees_no_traceback() -> None:
    """As in ``structattn structures | head -1``."""
    command = [sys.executable, "-m", "structattn", "structures"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr.read() == b""


def test_help_needs_no_torch_and_broken_streams_need_no_traceback() -> None:
    """Help answers before PyTorch is imported; closed, full and ASCII streams end in one line at most."""
    program = """
import sys
from structattn.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
assert "torch" not in sys.modules
sys.exit(status)
"""
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    wrong = run([sys.executable, "-c", program, "comapre"])
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    shown = run([sys.executable, "-c", program, "compare", "--help"])
    assert shown.returncode == 0
    assert "Examples:" in shown.stdout
    command = f"{sys.executable} -m structattn --version"
    for redirection, status in ((">&-", 0), ("2>&-", 0), (">/dev/full", 2)):
        done = run(f"{command} {redirection}", shell=True)
        assert done.returncode == status, (redirection, done.stderr)
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
    # Messages that cannot be written are lost, and nothing else is.
    assert run(f"{sys.executable} -m structattn comapre 2>/dev/full", shell=True).returncode == 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), "/x/y: Permission denied"),
        (MemoryError(), "out of memory: choose smaller settings"),
        (
            RuntimeError(
                "alloc_cpu.cpp: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes."
            ),
            "out of memory (it asked for 4 GiB)",
        ),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "not in the expected encoding"),
        (RuntimeError("shapes differ\nand more"), "RuntimeError: shapes differ; --traceback shows where"),
    ],
)
def test_errors_of_the_system_are_one_line(error: Exception, line: str, capsys, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("structattn.cli.listings.info", fail)
    assert main(["info"]) == 2
    printed = capsys.readouterr().err
    assert line in printed
    assert printed.count("\n") == 1
    with pytest.raises(type(error)):
        main(["info", "--traceback"])


def test_a_sweep_at_a_small_width_is_part_of_the_results(tmp_path: Path) -> None:
    """muP transfers the rate: the sweep trains narrower models, in separate folders, and one that diverges is
    recorded.
    """
    settings = [
        "learning_rates=1e-2,1e30",
        "sweep_settings=task.embed_dim=16",
        "training.parametrization=mup",
        "task.embed_dim=32",
    ]
    arguments = ["compare", "icl-regression", "--attention", "standard:1", "--out", str(tmp_path)]
    assert main([*arguments, *small("icl-regression", *settings)]) == 0
    row = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    assert row["learning_rate"] == 1e-2
    assert row["sweep"]["settings"] == ["task.embed_dim=16"]
    assert [run["learning_rate"] for run in row["sweep"]["runs"]] == [1e-2, 1e30]
    assert (
        row["sweep"]["runs"][1]["score"] is None or row["sweep"]["runs"][1]["score"] > row["sweep"]["runs"][0]["score"]
    )
    swept = [json.loads(path.read_text()) for path in (tmp_path / "sweep").rglob("run.json")]
    assert {run["task_config"]["embed_dim"] for run in swept} == {16}
    with pytest.raises(ConfigError, match="muP"):
        apply_overrides(
            recipe_for("icl-regression", "smoke"),
            ("learning_rates=1,2", "sweep_settings=task.embed_dim=16", "training.parametrization=standard"),
        )


@pytest.mark.full
def test_variants_and_processes_change_nothing_but_the_settings(tmp_path: Path, capsys, forked_workers) -> None:
    """Each variant gives the result of a separate comparison, also with several processes."""
    specs = ["--attention", "standard:1", "bilinear-btt:1"]
    both = "variants=task.dim=4,task.dim=3 task.num_heads=1"
    out = ["--out", str(tmp_path / "both"), "--jobs", "2"]
    assert main(["compare", "icl-regression", *specs, *out, *small("icl-regression", both)]) == 0
    printed = capsys.readouterr().out
    assert "task.dim=3 task.num_heads=1" in printed
    rows = json.loads((tmp_path / "both" / "results.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["task.dim=4"] * 2 + ["task.dim=3 task.num_heads=1"] * 2
    alone = small("icl-regression", "task.dim=3", "task.num_heads=1")
    assert main(["compare", "icl-regression", *specs, "--out", str(tmp_path / "one"), *alone]) == 0
    expected = json.loads((tmp_path / "one" / "results.json").read_text())["rows"]
    assert [row["score"] for row in rows[2:]] == pytest.approx([row["score"] for row in expected], rel=ANOTHER_ORDER)
    assert rows[0]["histories"][0][-1]["compute"] == rows[0]["compute"] > 0


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_says_what_it_is(task: str) -> None:
    found = meanings(recipe_for(task, "default"))
    assert set(found) == {name for name, _, _ in fields_of(recipe_for(task, "default"))}
    assert [name for name, words in found.items() if len(words) < 5] == []
