"""Uptraining: students are made from a teacher, learn from it, and come out as a checkpoint of
transformers.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
import transformers

from structattn.cli import main
from structattn.errors import ConfigError, DataError
from structattn.integrations.hub import check_source
from structattn.integrations.transformers import load_structurized
from structattn.testing.tolerances import ANOTHER_ORDER, SAME_MODEL, assert_close
from structattn_lab.compare.comparison import compare
from structattn_lab.compare.uptrain import uptrain
from structattn_lab.data.corpus import PrepareConfig, Source, prepare
from structattn_lab.data.corpus.tokenizers import BytePairs
from structattn_lab.report.numbers import DASH
from structattn_lab.report.plot import new_canvas
from structattn_lab.tasks.registry import recipe_for
from structattn_lab.tasks.uptraining.config import UptrainConfig
from structattn_lab.tasks.uptraining.figures import _mark_losses, costs, healed_rows, recall_healing, recovered
from structattn_lab.tasks.uptraining.recall import KnownPassages, RandomPassages, distances, recall
from structattn_lab.tasks.uptraining.students import Compressed, FewerTokens, SharedHeads, Window, student_form
from structattn_lab.tasks.uptraining.task import UptrainTask

SMOKE = recipe_for("uptraining", "smoke").task
PLAIN = dataclasses.replace(SMOKE, rotary_split="low_far")


@pytest.fixture(scope="module")
def task() -> UptrainTask:
    return UptrainTask(PLAIN)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict:
    """A Llama with a tokenizer of its own, and texts in three forms."""
    root = tmp_path_factory.mktemp("trained")
    texts = [f"PEP {n}: " + " ".join(f"word{(n * k) % 37} of {k}" for k in range(60)) + "\n" for n in range(120)]
    tokenizer = BytePairs.train(texts, 300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(root / "model")
    (root / "model" / "tokenizer.json").write_text(json.dumps(tokenizer.description()["definition"]))
    (root / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (root / "text.txt").write_text("\n".join(texts))
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": texts, "number": list(range(120))}), root / "text.parquet")
    return {"root": root, "model": root / "model", "lines": root / "text.jsonl", "parquet": root / "text.parquet"}


def test_forms() -> None:
    assert student_form("cache:4") == Compressed(4.0)
    assert student_form("cache:2.5,ranks=uniform") == Compressed(2.5, "uniform")
    assert student_form("tokens:8") == FewerTokens(8.0)
    assert student_form("heads:2") == SharedHeads(2)
    assert student_form("recent:20,sinks=3") == Window(20, 3)
    assert "20 tokens, and the first 3" in UptrainTask.describe_spec("recent:20,sinks=3")
    for text, words in (
        ("cache:much", "cache:TIMES"),
        ("heads:0", "heads:COUNT"),
        ("recent:5,sink=1", "unknown option 'sink'"),
        ("mlr:8|", "mlr"),
    ):
        with pytest.raises(ConfigError, match=words):
            UptrainTask.check_spec(text)


def test_one_level_is_the_teacher(task) -> None:
    windows = task._windows("test")[:2, :-1]
    expected = task.teacher(windows)
    for spec in ("mlr:16", "unchanged", "recent:64", "heads:2"):
        student = task.build_model(spec).eval()
        assert all(p.requires_grad for p in student.parameters())
        assert_close(student(windows)[0].detach(), expected)
    found = task.evaluate(task.build_model("mlr:16").eval(), "test")
    assert found["kl_to_teacher"] == pytest.approx(0, abs=1e-6)
    assert found["nats_per_token"] == pytest.approx(task.baselines()[0].metrics["nats_per_token"], rel=SAME_MODEL)


def test_a_window_hides_what_is_behind_it(task) -> None:
    student = task.build_model("recent:5,sinks=2").eval()
    tokens = task._windows("test")[:1, :20]
    changed = tokens.clone()
    changed[:, 2:6] = (changed[:, 2:6] + 1) % 96
    first, second = student(tokens)[0], student(changed)[0]
    layers = len(task.teacher.layers)
    seen_from = 5 + layers * 4 + 1  # a layer carries a token 4 places further
    assert_close(first[:, seen_from:], second[:, seen_from:])
    assert not torch.allclose(first[:, 2:6], second[:, 2:6])


def test_what_is_learned(task) -> None:
    """First the outputs of attention from the teacher's inputs, then the text and the teacher's
    predictions.
    """
    batch = task.batch(0, 0, 2)
    assert torch.equal(batch["tokens"], task.batch(0, 0, 2)["tokens"])
    same, other = task.build_model("unchanged"), task.build_model("mlr:8|8")
    assert task.loss(same, batch, 0).item() == pytest.approx(0, abs=1e-9)
    loss = task.loss(other, batch, 0)
    assert 1e-6 < float(loss.detach()) < 1
    loss.backward()
    learning = {name for name, p in other.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learning
    assert all("self_attn" in name for name in learning)
    assert all(p.grad is not None for p in other.parameters())  # as DDP expects
    logits, targets = task.teacher(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets)
    assert float(task.loss(same, batch, task.config.attention_steps)) == pytest.approx(
        (1 - task.config.distillation) * float(nats), rel=SAME_MODEL
    )


def test_recall_of_one_who_looks_it_up() -> None:
    def copies(tokens):
        """Continues as after the last place with the same four tokens."""
        logits = torch.zeros(*tokens.shape, 50)
        for row, text in enumerate(tokens.tolist()):
            for place in range(4, len(text)):
                for before in range(place - 1, 2, -1):
                    if text[before - 3 : before + 1] == text[place - 3 : place + 1]:
                        logits[row, place, text[before + 1]] = 1
                        break
        return logits

    windows = torch.randint(50, (6, 64), generator=torch.Generator().manual_seed(0))
    assert distances(64, 8) == [8, 16, 32]
    passages = RandomPassages(torch.arange(50), 8)
    assert recall(copies, windows, passages, [8, 16, 32]) == dict.fromkeys([8, 16, 32], 1.0)
    nothing = recall(lambda tokens: torch.zeros(*tokens.shape, 50), windows, passages, [8, 16, 32])
    assert max(nothing.values()) < 0.2
    known = KnownPassages.of("abcd{}e", ["x", "y", "z"], lambda text: [ord(letter) - ord("a") for letter in text])
    assert known.scored.tolist() == [False, False, False, False, True, False]
    assert recall(copies, windows % 7 + 30, known, [8, 32]) == {8: 1.0, 32: 1.0}
    with pytest.raises(ConfigError, match="that differ in their tokens"):
        KnownPassages.of("a{}", ["x", "y"], lambda text: [0] * len(text))
    others = dataclasses.replace(SMOKE, recall_text="key {}.", recall_values="a b c", context_length=32)
    assert set(UptrainTask(others).evaluate(UptrainTask(others).build_model("unchanged").eval(), "test")) == {
        "nats_per_token",
        "kl_to_teacher",
        "recall_8",
        "recall_16",
    }
    for options, message in (
        ({"recall_text": "key {}."}, "belong together"),
        ({"recall_text": "key", "recall_values": "a b"}, "expected a task.recall_text with {}"),
        ({"recall_text": "key {}", "recall_values": "a a"}, "at least two words"),
        ({"recall_text": "key {}", "recall_values": "a bc"}, "equally many tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            UptrainTask(dataclasses.replace(SMOKE, **options))


def test_what_decoding_needs(task) -> None:
    whole = task.baselines()[0].details
    assert (
        whole["cache_bytes"] == 2 * 2 * 2 * 16 * 64 * 4
    )  # keys and values, layers, heads, dimensions, tokens, float32
    smaller = task.details(task.build_model("mlr:4|12@64|16,values=4|12").eval())
    assert smaller["cache_bytes"] == whole["cache_bytes"] // 64 * (64 * 4 + 16 * 12) // 16
    assert task.details(task.build_model("recent:12,sinks=4").eval())["cache_bytes"] == whole["cache_bytes"] // 4
    assert len(smaller["loss_by_position"]) == len(smaller["octaves"])
    assert smaller["decode_ms"] > 0


def test_a_budget_is_kept() -> None:
    task = UptrainTask(SMOKE)
    whole = task.baselines()[0].details["cache_bytes"]
    for spec in ("cache:2", "cache:2,ranks=uniform"):
        assert whole / 4 < task.details(task.build_model(spec).eval())["cache_bytes"] <= whole / 2
    with pytest.raises(ConfigError, match="no ranks give a cache that is 60 times smaller"):
        task.build_model("cache:60")


@pytest.mark.full
def test_tokens_that_the_cache_drops_are_hidden() -> None:
    task = UptrainTask(dataclasses.replace(SMOKE, context_length=512, eval_windows=2))
    student = task.build_model("tokens:3")
    assert sum(not p.requires_grad for p in student.parameters()) == 2 * 2  # what scores tokens, in two layers
    whole = task.baselines()[0].details["cache_bytes"]
    assert whole / 6 < task.details(student.eval())["cache_bytes"] <= whole / 3
    tokens = task._windows("test")[:1, :-1]
    with torch.no_grad():
        scored, all_seen = student(tokens)[0], student.model(tokens, use_cache=False).logits
        wanted = task.teacher(tokens)
    assert_close(all_seen, wanted)
    near = 64  # so many recent tokens stay at least
    assert_close(scored[:, :near], wanted[:, :near])
    assert not torch.allclose(scored[:, -near:], wanted[:, -near:], atol=1e-4)
    loss = task.loss(student.train(), {"tokens": task._windows("test")[:1]}, step=0)
    loss.backward()
    assert all(p.grad is not None for p in student.parameters() if p.requires_grad)


@pytest.mark.full
def test_a_model_is_uptrained_and_saved(trained, tmp_path) -> None:
    options = {
        "tokens": 500,
        "context_length": 32,
        "batch_size": 2,
        "attention": "mlr:8|8@32|8,values=8|8",
        "show_progress": False,
    }
    changes = ("task.eval_windows=4", "task.recall_tokens=8", "task.rotary_split=low_far")
    text = tmp_path / "text.parquet"
    shutil.copy(trained["parquet"], text)
    done = uptrain(trained["model"], text, tmp_path / "out", changes=changes, **options)
    (row,) = done.results.record.rows
    assert row.steps == (8,)
    assert [entry["step"] for entry in row.histories[0]] == list(range(9))  # from the model as it was made
    page = done.results.report.read_text()
    assert "recovered" in page
    assert "Healing" in page
    assert "Recall and healing" in page
    assert all(0 <= entry["validation_recall_16"] <= 1 for entry in row.histories[0])
    assert done.results.record.baselines[0].details["validation"].keys() == {"nats_per_token", "recall_16"}
    loaded = load_structurized(done.model)
    assert type(loaded).__name__ == "StructAttnLlamaForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.model)
    ids = tokenizer("PEP 7: word3 of 4", return_tensors="pt")["input_ids"]
    task = UptrainTask(UptrainConfig(**done.results.record.config["task"]))
    weights = {name: p.detach().clone() for name, p in loaded.named_parameters()}
    before = task.build_model(row.spec).model
    assert weights.keys() == dict(before.named_parameters()).keys()
    assert not torch.equal(loaded(ids).logits, before(ids).logits)  # it was trained
    with pytest.raises(ConfigError, match="has results of structattn uptrain already"):
        uptrain(trained["model"], text, tmp_path / "out", changes=changes, **options)
    stamp = (done.model / "model.safetensors").stat().st_mtime_ns
    text.unlink()  # the corpus is made: the text is not needed any more
    again = uptrain(trained["model"], text, tmp_path / "out", changes=changes, resume=True, **options)
    assert again.results.record.rows[0].scores == row.scores
    assert (done.model / "model.safetensors").stat().st_mtime_ns == stamp
    other = {**options, "attention": "heads:1", "resume": True}
    with pytest.raises(ConfigError, match="attention"):
        uptrain(trained["model"], text, tmp_path / "out", changes=changes, **other)
    assert json.loads((tmp_path / "out" / "results" / "results.json").read_text())["rows"][0]["spec"] == row.spec


def test_what_does_not_fit_is_named(trained, tmp_path, task) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        UptrainTask(UptrainConfig(model=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"without config\.json"):
        UptrainTask(UptrainConfig(model=str(tmp_path / "empty")))
    with pytest.raises(DataError, match="those of another tokenizer"):
        UptrainTask(UptrainConfig(model=str(trained["model"]), context_length=64))
    prepare(
        PrepareConfig(source=Source(path=str(trained["lines"])), tokens="model", model=str(trained["model"])),
        tmp_path / "corpus",
        show_progress=False,
    )
    with pytest.raises(DataError, match="expected more than 16777216 tokens in each split"):
        UptrainTask(UptrainConfig(model="random", data=str(tmp_path / "corpus"), context_length=2**24))
    with pytest.raises(ConfigError, match="groups of equal size"):
        task.build_model("heads:3")
    with pytest.raises(ConfigError, match="belong together"):
        PrepareConfig(source=Source(path="x"), tokens="model")


@pytest.mark.full
def test_students_of_one_process_are_compiled(task) -> None:
    batch = task.batch(seed=0, step=0, batch_size=2)
    for _ in range(2):  # the second finds the programs of the first
        student = task.build_model("mlr:8|8,values=8|8")
        compiled = torch.compile(student, backend="eager")
        for step in (0, task.config.attention_steps):
            assert_close(task.loss(compiled, batch, step), task.loss(student, batch, step), gradient=False)


@pytest.mark.full
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_have_the_losses_of_one(tmp_path, fsdp) -> None:
    words = ["train", "uptraining", "--preset", "smoke", "--attention", "mlr:8|8,values=8|8"]
    words += ["--set", "task.rotary_split=low_far", "--out"]
    assert main([*words, str(tmp_path / "one")]) == 0
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "structattn",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_FSDP": str(fsdp).lower()}
    done = subprocess.run([*launcher, *words, str(tmp_path / "two")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    one, two = (
        json.loads((tmp_path / name / "run.json").read_text())["progress"]["history"] for name in ("one", "two")
    )
    for a, b in zip(one, two, strict=True):
        for name in ("train_loss", "validation_nats_per_token"):
            assert a[name] == pytest.approx(b[name], rel=ANOTHER_ORDER)


@pytest.mark.full
def test_adapters_alone_learn_from_one_text_and_are_merged(trained, tmp_path) -> None:
    pytest.importorskip("peft")
    options = {"tokens": 500, "context_length": 32, "batch_size": 2, "lora_rank": 2, "show_progress": False}
    changes = ("task.eval_windows=4", "task.recall_tokens=8", "task.rotary_split=low_far")
    done = uptrain(
        trained["model"], trained["root"] / "text.txt", tmp_path, attention="mlr:8|8", changes=changes, **options
    )
    loaded = dict(load_structurized(done.model).named_parameters())
    plain = dict(transformers.LlamaForCausalLM.from_pretrained(trained["model"]).named_parameters())
    assert loaded.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(plain[name], loaded[name])}
    assert changed
    assert all("self_attn" in name for name in changed)


@pytest.mark.full
def test_a_killed_run_ends_with_the_same_weights(trained, tmp_path) -> None:
    words = [
        "uptrain",
        str(trained["model"]),
        "--data",
        str(trained["lines"]),
        "--tokens",
        "6000",
        "--context-length",
        "32",
    ]
    words += [
        "--batch-size",
        "2",
        "--attention",
        "mlr:8|8",
        "--set",
        "task.rotary_split=low_far",
        "--set",
        "task.recall_tokens=8",
    ]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "structattn", *words, "--out", str(tmp_path / "killed")], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("killed/results/runs/**/checkpoints/step-*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed" / "model").exists()
    assert main([*words, "--out", str(tmp_path / "killed"), "--resume"]) == 0
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> dict:
    """A Llama with heads of 64 dimensions and 128 positions, its tokenizer, and a text of documents that
    begin with PEP.
    """
    root = tmp_path_factory.mktemp("wide")
    text = "".join(f"PEP: {n}\n" + " ".join(f"word{(n * k) % 37} of {k}" for k in range(60)) + "\n" for n in range(60))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=128,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(root / "model")
    tokenizer = BytePairs.train([text], 300)
    (root / "model" / "tokenizer.json").write_text(json.dumps(tokenizer.description()["definition"]))
    (root / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (root / "model" / "README.md").write_text("---\nbase_model: someone/first\nlicense: apache-2.0\n---\n")
    (root / "text.txt").write_text(text)
    return {"model": str(root / "model"), "text": str(root / "text.txt"), "root": root}


SMALL = ["--context-length", "32", "--batch-size", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "1"], "--tokens: expected at least 128, 2 steps of 2 windows of 32 tokens, got 1"),
        (["--tokens", "0"], "--tokens: expected a whole number of at least 1, got '0'"),
        (["--context-length", "0"], "--context-length: expected a whole number of at least 1, got '0'"),
        (["--batch-size", "0"], "--batch-size: expected a whole number of at least 1, got '0'"),
        (["--learning-rate", "0"], "--learning-rate: expected a finite number above 0, got '0'"),
        (["--lora-rank", "-1"], "--lora-rank: expected a whole number of at least 0, got '-1'"),
        (["--compression", "0.5"], "--compression: expected a finite number of at least 1, got '0.5'"),
        (["--context-length", "129"], "--context-length: expected at most 128, the positions of the model"),
        (["--attention", "unchanged", "--compression", "2"], "--compression 2 and --attention 'unchanged' both say"),
        (["--set", "task.model=x"], "--set task.model: MODEL gives this setting"),
        (["--set", "training.lr=1"], "--set training.lr: --learning-rate gives this setting"),
        (["--set", "attention=unchanged"], "--set attention: --attention or --compression gives this setting"),
        (["--set", "seeds=2"], "--set seeds belongs to structattn compare"),
        (["--set", "task.no=2"], "unknown setting 'task.no'"),
        (["--attention", "mlr:16|8|8,values=16|16"], "write mlr:32|16|16, and values=32|16|16"),
        (["--attention", "mlr:20|14|8"], "expected 64, got 20|14|8 = 42. Heads of this model have 64 dimensions"),
        (["--attention", "mlr:32|32,values=16|16"], "expected 64, got 16|16 = 32; in the same proportions: 32|32"),
        (["--attention", "bilinear-btt:1"], "asks for a bilinear scoring, which cannot keep trained"),
        (["--attention", "heads:3"], "heads:3 averages groups of equal size of the key and value heads"),
        (["--data", "nowhere.txt"], "got no such file"),
        (["--data", "/dev/null"], "expected a text file at /dev/null, got a pipe or a device"),
    ],
)
def test_wrong_options_are_named_before_anything_is_written(wide, tmp_path, capsys, options, message) -> None:
    words = ["uptrain", wide["model"], "--data", wide["text"], "--tokens", "5000", *SMALL]
    assert main([*words, "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "tokens must be an int of at least 1"),
        ({"batch_size": 0}, "batch_size must be an int"),
        ({"context_length": -1}, "context_length must be an int"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number above 0"),
        ({"lora_rank": -1}, "lora_rank must be an int"),
        ({"compression": 0}, "compression must be a finite number"),
    ],
)
def test_wrong_arguments_are_named(wide, tmp_path, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        uptrain(wide["model"], wide["text"], tmp_path / "out", **({"tokens": 50000} | options))


def test_a_window_is_not_longer_than_the_positions_of_the_model(wide) -> None:
    with pytest.raises(ConfigError, match=r"task\.context_length: expected at most 128"):
        UptrainTask(UptrainConfig(model=wide["model"], context_length=129))


def test_a_model_that_is_not_there_is_named_at_once(tmp_path, monkeypatch) -> None:
    import huggingface_hub

    asked = []

    def model_info(self, name, **options):
        asked.append((name, options["timeout"]))
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for source in ("/nowhere", "./nowhere", "~/nowhere", "a/b/c", "two words", "models/nowhere"):
        with pytest.raises(ConfigError, match="got no such folder"):
            UptrainTask(UptrainConfig(model=source))
        with pytest.raises(ConfigError, match="got no such folder"):
            load_structurized(source)
        with pytest.raises(ConfigError, match="got no such folder"):
            prepare_with(source, tmp_path)
    assert not asked
    for call in (lambda: UptrainTask(UptrainConfig(model="no/such")), lambda: load_structurized("no/such")):
        with pytest.raises(ConfigError, match="no folder 'no/such', and the hub cannot be reached"):
            call()
    assert [name for name, timeout in asked if timeout <= 5] == ["no/such"] * 2
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="since HF_HUB_OFFLINE is set"):
        UptrainTask(UptrainConfig(model="no/such"))
    assert len(asked) == 2


def test_a_model_in_the_cache_of_the_hub_needs_no_network(wide, tmp_path, monkeypatch) -> None:
    import huggingface_hub

    def model_info(self, name, **options):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    place = tmp_path / "models--some--tiny"
    shutil.copytree(wide["model"], place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    assert check_source("some/tiny", cache_dir=tmp_path) == place / "snapshots" / "abc"
    with pytest.raises(ConfigError, match="the hub cannot be reached"):
        check_source("some/tiny", cache_dir=tmp_path / "other")


def prepare_with(model: str, root) -> None:
    (root / "text.txt").write_text("some text\n" * 10)
    prepare(
        PrepareConfig(source=Source(path=str(root / "text.txt")), tokens="model", model=model),
        root / "corpus",
        show_progress=False,
    )


def test_a_model_must_be_given(tmp_path, capsys) -> None:
    for command in ("compare", "train"):
        assert main([command, "uptraining", "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert "--set task.model=FOLDER" in error
        assert "--set task.model=random" in error


def test_a_structurized_model_is_no_teacher(wide, tmp_path) -> None:
    from structattn.integrations.transformers import calibrate, structurize
    from structattn.integrations.transformers.calibration.discovery import find_attention

    model = structurize(transformers.LlamaForCausalLM.from_pretrained(wide["model"]), "mlr:32|32")
    model.save_pretrained(tmp_path / "model")
    for call in (
        lambda: find_attention(model),
        lambda: calibrate(model, [torch.zeros(1, 8, dtype=torch.int64)]),
        lambda: structurize(model, "mlr:32|32"),
        lambda: UptrainTask(UptrainConfig(model=str(tmp_path / "model"))),
        lambda: uptrain(tmp_path / "model", wide["text"], tmp_path / "out", tokens=50000),
    ):
        with pytest.raises(ConfigError, match="is structurized already: give the original model"):
            call()


def test_calibrated_levels_keep_the_scale_of_the_trained_scores() -> None:
    task = UptrainTask(SMOKE)
    plain, standard = (task.build_model(spec) for spec in ("mlr:8|8", "mlr:8|8,scaling=standard"))
    assert plain.model.config.structattn == standard.model.config.structattn
    with pytest.raises(ConfigError, match="has scaling=mup"):
        task.build_model("mlr:8|8,scaling=mup")


@pytest.mark.full
def test_the_example_of_the_help_runs_and_its_results_go_on(wide, tmp_path, capsys) -> None:
    from huggingface_hub import ModelCard

    words = ["uptrain", wide["model"], "--data", wide["text"], "--tokens", "200", *SMALL]
    words += [
        "--attention",
        "mlr:32|16|16,values=32|16|16",
        "--document-start",
        "PEP: ",
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--set", "task.recall_tokens=8", "--set", "task.eval_windows=4"]
    assert main([*words, "--resume"]) == 0  # nothing is there yet
    seen = capsys.readouterr()
    assert "(192 tokens, 3 steps)" in seen.err
    assert "Cost and quality, beside the original model" in seen.out
    assert "The original model: loss" in seen.out
    assert "the only attention with a score" not in seen.out
    manifest = json.loads((tmp_path / "out" / "corpus" / "manifest.json").read_text())
    assert str(manifest).count("PEP: ") >= 1
    page = (tmp_path / "out" / "results" / "report.html").read_text()
    assert "The original model" in page
    assert "aselines" not in page
    card = ModelCard.load(tmp_path / "out" / "model" / "README.md")
    assert (card.data.base_model, card.data.license, card.data.library_name) == (
        "someone/first",
        "apache-2.0",
        "transformers",
    )
    assert str(wide["root"]) not in card.content
    assert "192 tokens of text.txt" in card.content
    assert r"`mlr:32\|16\|16,scaling=standard,values=32\|16\|16`" in card.content
    loaded = load_structurized(tmp_path / "out" / "model")
    assert loaded.config.structattn["specs"][0] == "mlr:32|16|16,scaling=standard,values=32|16|16"
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "has results of structattn uptrain already: continue with structattn uptrain" in error
    assert "'mlr:32|16|16,values=32|16|16'" in error
    assert "--resume" in error
    assert main([*words, "--resume"]) == 0
    assert "The original model: loss" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    assert main([*words, "--out", str(tmp_path / "other"), "--resume"]) == 2
    assert "which structattn uptrain did not write" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "new"), "--data", str(tmp_path / "out" / "corpus")]) == 2
    assert "--document-start is for text" in capsys.readouterr().err


def test_what_was_lost_and_recovered() -> None:
    assert recovered((2.0, 2.4, 2.1)) == "75 %"
    assert recovered((2.0, 1.9, 1.8)) == DASH
    assert recovered((2.0, 2.0, 2.1)) == DASH
    assert recovered((2.0, 2.4, 1.9)) == "all"
    assert recovered((2.0, 2.4, 2.5)) == "-25 %"


@pytest.mark.parametrize("top", [1e-4, 0.003, 0.05, 0.3, 1.5, 9])
@pytest.mark.parametrize("bottom", [-0.2, -0.002, 0])
def test_the_axis_of_losses_has_three_marks(top, bottom) -> None:
    figure = new_canvas(3)
    ax = figure.subplots()
    ax.plot([0, 1, 2], [top, top / 2, bottom])
    _mark_losses([ax])
    low, high = ax.get_ylim()
    assert low < bottom <= top < high
    assert sum(low <= mark <= high for mark in ax.get_yticks()) >= 3


@pytest.mark.full
def test_variants_with_other_windows_are_drawn_with_their_own(tmp_path) -> None:
    """Recall is measured at other distances, and a step has other tokens."""
    recipe = dataclasses.replace(
        recipe_for("uptraining", "smoke"),
        attention=("cache:1.5",),
        variants=("short: task.context_length=32", "long: task.context_length=64"),
    )
    record = compare("uptraining", recipe, tmp_path / "out", show_progress=False).record
    assert [row.distance for row in healed_rows(record)] == [16, 32]
    figure, caption, _ = recall_healing(record)
    assert "16 or 32 tokens before" in caption
    assert [ax.lines[0].get_xdata()[-1] for ax in figure.axes] == [6 * 2 * 32, 6 * 2 * 64]
    assert "recall: the share of right guesses 16 or 32 tokens" in costs(record).notes[0]
