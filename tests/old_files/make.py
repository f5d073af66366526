"""Writes files with an older version of structattn into a zip archive; see README.md.

git archive COMMIT src | tar -x -C OLD && PYTHONPATH=OLD/src python make.py ARCHIVE.zip
"""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from structattn.studies.tasks.registry import task_class
from structattn.studies.training.finished import read_finished

import structattn as sa
from structattn.cli import main
from structattn.integrations.chronos import new_config
from structattn.integrations.chronos import structurize as structurize_chronos
from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    calibrate,
    level_cache,
    structurize,
)

SPECS = [
    "standard",
    "bilinear-btt:1",
    "bilinear-mlr:2|1|1",
    "bilinear-monarch",
    "bilinear-mlbtc:1x1x2|2x2x8s",
    "mlr:2|1|1",
    "mlr:2|1|1,values=2|1|1",
    "window:5",
    "global-window:2|2@4",
    "mlr-text:2|1|1",
    "[standard,bilinear-dense+mlr:4|4]",
]
MATRICES = [
    "dense",
    "lowrank:2",
    "mlr:2|1|1",
    "btt:1",
    "kronecker",
    "monarch",
    "butterfly",
    "kaleidoscope",
    "mlbtc:1x1x2|2x2x4s",
]
IDS = torch.arange(14).reshape(2, 7).mul(5).remainder(11)


def settings(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


STEPS = settings(
    "training.batch_size=2",
    "training.steps=4",
    "training.eval_every=2",
    "training.checkpoint_every=2",
    "training.warmup_steps=0",
)
NEAREST = settings("task.dim=4", "task.num_points=4", "task.num_heads=1", "task.eval_examples=16") + STEPS
TEXT = (
    settings(
        "task.context_length=16", "task.embed_dim=4", "task.num_heads=1", "task.num_layers=1", "task.eval_windows=3"
    )
    + STEPS
)
FORECAST = (
    settings(
        "task.look_back=24",
        "task.horizon=4",
        "task.embed_dim=4",
        "task.num_heads=1",
        "task.num_layers=1",
        "task.patch_length=8",
    )
    + STEPS
)
REGRESSION = (
    settings("task.dim=3", "task.embed_dim=4", "task.num_heads=1", "task.num_layers=1", "task.eval_prompts=8") + STEPS
)
CHRONOS = (
    settings(
        "task.context_length=30",
        "task.prediction_length=6",
        "task.season=12",
        "task.num_tokens=32",
        "task.embed_dim=4",
        "task.num_heads=1",
        "task.head_dim=4",
        "task.mlp_dim=8",
        "task.num_layers=1",
        "task.num_synthetic=4",
        "task.eval_windows=2",
        "task.forecasts=2",
        "task.num_samples=2",
    )
    + STEPS
)
RECALL = (
    settings(
        "task.context_length=24",
        "task.num_pairs=2",
        "task.num_keys=4",
        "task.num_values=4",
        "task.embed_dim=4",
        "task.num_heads=1",
        "task.num_layers=1",
        "task.eval_sequences=8",
    )
    + STEPS
)
UPTRAINING = (
    settings("task.model=random", "task.context_length=24", "task.eval_windows=2", "task.attention_steps=2") + STEPS
)
TRAIN = {
    "nearest-neighbor": [*NEAREST, "--attention", "bilinear-btt:1"],
    "text": [*TEXT, "--attention", "mlr:2|1|1"],
    "forecast": [*FORECAST, "--attention", "mlr:2|1|1"],
    "icl-regression": [*REGRESSION, "--attention", "bilinear-dense"],
    "chronos": [*CHRONOS, "--attention", "mlr:2|2"],
    "recall": [*RECALL, "--attention", "mlr:2|2"],
    "uptraining": [*UPTRAINING, "--attention", "cache:1.3"],
}
# Layouts of caches, with the options of ``LevelCache``.
LAYOUTS = {
    "plain": (None, {}),
    "values": (sa.LevelLayout((2, 1, 1), (16, 8, 4), value_ranks=(2, 1, 1)), {}),
    "sliding": (sa.LevelLayout.sliding((2, 2), (None, 3)), {}),
    "window": (sa.LevelLayout((2, 2), (16, 4)), {"window": 5}),
    "padding": (sa.LevelLayout((2, 2), (16, 4)), {"left_padding": [0, 2]}),
    "global-window": (sa.GlobalWindowLayout((2, 2), 5), {}),
}
PACKAGES = Path(__file__).parent / "packages"  # as users of that version wrote them
COMPARE = ["compare", "nearest-neighbor", *NEAREST, *settings("learning_rates=1e-3,1e-2"), "--seeds", "2"]
COMPARE += ["--attention", "standard", "bilinear-btt:1", "--out", "comparison"]
SWEEP = ["sweep", "nearest-neighbor", *NEAREST, "--param", "training.learning_rate=log:1e-4:1e-1", "--trials", "2"]
SWEEP += ["--scheduler", "none", "--jobs", "1", "--out", "sweep"]
RESULTS = {
    "scaling": [
        "compare",
        "text",
        *TEXT,
        *settings("training.parametrization=mup", "training.eval_every=20"),
        "--attention",
        "standard",
        "mlr:2|2",
        "--widths",
        "4",
        "--budgets",
        "1e6",
        "2e6",
        "4e6",
    ],
    "forecast": ["compare", "forecast", *FORECAST, "--attention", "standard", "peer:DLinear", "--seeds", "2"],
    "fit": ["fit", "hadamard", "--size", "8", "--structures", "lowrank:2", "btt:1", "--refine", "2"],
    "mup": [
        "mup",
        "check",
        "--structures",
        "standard",
        "--widths",
        "8",
        "16",
        "--steps",
        "1",
        "2",
        "--seeds",
        "1",
        "--transfer-widths",
        "8",
        "16",
        "--transfer-steps",
        "2",
    ],
}


def run(*words: str) -> str:
    """The output of a command that succeeds."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*words]) == 0, words
    return out.getvalue()


def trim(folder: Path) -> None:
    """Leaves what is read again, with the last checkpoint alone."""
    for name in ("tensorboard", "figures"):
        for path in sorted(folder.rglob(name)):
            shutil.rmtree(path)
    for path in folder.rglob("checkpoints"):
        for old in sorted(path.glob("step-*"))[:-1]:
            shutil.rmtree(old)
    for name in ("report.html", ".lock"):
        for path in folder.rglob(name):
            path.unlink()


def uptrained() -> str:
    """What ``evaluate`` should print of the run of uptraining: that version took its tied weights for
    damaged.
    """
    finished = read_finished(Path("runs/uptraining"))
    record = finished.record
    task = task_class(record.task)(task_class(record.task).config_class(**record.task_config))
    model = task.build_model(record.spec)
    model.load_state_dict(finished.weights)
    return "\n".join(f"test {name} {value:.6g}" for name, value in task.evaluate(model.eval(), "test").items())


def write_runs() -> None:
    expected: dict[str, object] = {}
    for task, words in TRAIN.items():
        run("train", task, *words, "--out", f"runs/{task}")
        printed = uptrained() if task == "uptraining" else run("evaluate", f"runs/{task}")
        expected[task] = [line for line in printed.splitlines() if line.startswith("test")]
    expected["generate"] = run("generate", "runs/text", "--prompt", "The ", "--max-new-tokens", "8", "--seed", "4")
    # As an interruption leaves it: the first checkpoint only.
    shutil.copytree("runs/nearest-neighbor", "interrupted")
    for name in ("run.json", "model.safetensors", "scores.json"):
        Path("interrupted", name).unlink(missing_ok=True)
    shutil.rmtree("interrupted/checkpoints/step-00000004")
    run(*COMPARE)
    run(*SWEEP)
    for name in ("runs", "interrupted", "comparison", "sweep"):
        trim(Path(name))
    for task in set(TRAIN) - {"nearest-neighbor"}:
        for path in Path("runs", task, "checkpoints").glob("step-*/optimizer.safetensors"):
            path.unlink()  # the largest file, which a finished run does not read
    Path("results").mkdir()
    for name, words in RESULTS.items():
        run(*words, "--out", f"work/{name}")
        shutil.copy(f"work/{name}/results.json", f"results/{name}.json")
    shutil.rmtree("work")
    Path("expected.json").write_text(json.dumps(expected, indent=1))


def write_corpora() -> None:
    Path("books").mkdir()
    for number in range(6):
        Path(f"books/{number}.txt").write_text(
            f"Book {number}.\n" + "".join(f"{i} is {i * number}\n" for i in range(8))
        )
    for kind, more in (("chars", []), ("bytes", []), ("bpe", ["--vocab-size", "300"])):
        out = f"corpora/{kind}"
        words = ["--tokens", kind, *more, "--validation", "0.3", "--test", "0.3", "--out", out]
        run("data", "prepare", "text", "--source", "books", *words)
    shutil.rmtree("books")
    trim(Path("corpora"))


def write_models() -> None:
    """Weights of every kind, with the inputs and outputs of their modules, and the caches of half of the
    inputs.
    """
    tensors: dict[str, torch.Tensor] = {"ids": IDS}
    Path("caches").mkdir()
    for index, spec in enumerate(SPECS):
        torch.manual_seed(0)
        sizes = {"num_layers": 2 if "[" in spec else 1, "embed_dim": 8, "num_heads": 2, "context_length": 16}
        rotary = None if index % 2 or "text" in spec else sa.Rotary()
        units = {"text_units": sa.TextUnits.of([*"ab \ncdef. g"])} if "text" in spec else {}
        model = sa.LanguageModel(11, spec, rotary=rotary, **sizes, **units).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) / 4)
            cache = model.new_cache(max_length=16)
            model(IDS[:, :4], caches=cache)
            cache.save(f"caches/{index}.safetensors")
            tensors[f"{spec} logits"] = model(IDS)
        tensors |= {f"{spec} weight {name}": value for name, value in model.state_dict().items()}
    for text in MATRICES:
        torch.manual_seed(0)
        layer = sa.StructuredLinear(8, 8, text)
        tensors[f"matrix {text} outputs"] = layer(torch.eye(8)).detach()
        tensors |= {f"matrix {text} weight {name}": value for name, value in layer.state_dict().items()}
    save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, "models.safetensors")


def write_caches() -> None:
    """A cache of each layout after five tokens, and the outputs of two more."""
    tensors = {}
    rng = torch.Generator().manual_seed(0)
    for name, (layout, options) in LAYOUTS.items():
        q, k, v = (torch.randn(2, heads, 7, 4, generator=rng) for heads in (4, 2, 2))
        cache = sa.LevelCache(layout, **options)
        cache.attend(q[:, :, :5], k[:, :, :5], v[:, :, :5])
        cache.save(f"caches/{name}.safetensors")
        states = {"q": q, "k": k, "v": v, "outputs": cache.attend(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:])}
        tensors |= {f"{name} {part}": x.contiguous() for part, x in states.items()}
    save_file(tensors, "caches.safetensors")


def write_calibrated() -> None:
    """A calibration, the model that it gives, and its logits after a cache."""
    sizes = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    folder = Path("transformers")
    plain.save_pretrained(folder / "plain")
    tokens = torch.randint(11, (3, 32), generator=torch.Generator().manual_seed(1))
    calibration = calibrate(plain, [tokens], block_sizes=(4, 8), num_queries=None)
    calibration.save(folder / "calibration.safetensors")
    model = structurize(
        plain, "mlr:4|4@32|8,values=4|4,scaling=standard", rotary_split="calibrated", calibration=calibration
    )
    model.save_pretrained(folder / "calibrated")
    with torch.no_grad():
        cache = level_cache(model)
        first = model(IDS[:, :5], past_key_values=cache).logits
        logits = torch.cat([first, model(IDS[:, 5:], past_key_values=cache).logits], 1)
    save_file({"logits": logits}, folder / "calibrated.safetensors")
    for path in [*(folder / "plain").iterdir(), *(folder / "calibrated").iterdir()]:
        if path.suffix not in (".json", ".safetensors"):
            path.unlink()


def write_packages() -> None:
    """What a package with a task and one with an attention variant gave."""
    shutil.copytree(PACKAGES, "packages")
    sys.path.insert(0, str(Path("packages").absolute()))
    run("compare", "old-mean", "--preset", "smoke", "--out", "work/mean")
    run("compare", "text", *TEXT, "--attention", "old-decay:0.1", "--out", "work/decay")
    scores = {
        name: [[row["spec"], row["score"]] for row in json.loads(Path(f"work/{name}/results.json").read_text())["rows"]]
        for name in ("mean", "decay")
    }
    Path("packages.json").write_text(json.dumps(scores, indent=1))
    shutil.rmtree("work")


def write_transformers() -> None:
    sizes = {
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
    }
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    own_sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    own = StructAttnForCausalLM(StructAttnConfig(**own_sizes, attention="bilinear-btt:1", max_position_embeddings=16))
    t5_sizes = {
        "context_length": 16,
        "prediction_length": 4,
        "num_tokens": 16,
        "embed_dim": 8,
        "num_heads": 2,
        "head_dim": 4,
        "mlp_dim": 8,
        "num_layers": 1,
    }
    t5 = transformers.T5ForConditionalGeneration(new_config(**t5_sizes))
    models = {
        "structurized": structurize(plain, "mlr:2|2", context_length=16),
        "own": own.eval(),
        "chronos": structurize_chronos(t5.eval(), "mlr:2|2"),
    }
    expected = {}
    for name, model in models.items():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) / 4)
            more = {"decoder_input_ids": IDS[:, :3]} if name == "chronos" else {}
            expected[name] = model(IDS, **more).logits
        model.save_pretrained(f"transformers/{name}")
        for path in Path("transformers", name).iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
    save_file(expected, "transformers/expected.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    archive = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        write_packages()
        write_models()
        write_caches()
        write_transformers()
        write_calibrated()
        write_corpora()
        write_runs()
        shutil.make_archive(str(archive.with_suffix("")), "zip")
        os.chdir(archive.parent)
