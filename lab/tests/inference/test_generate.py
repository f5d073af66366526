"""``train text``, ``generate`` and ``evaluate --cache`` as a user meets them."""

import json
import re
from pathlib import Path

import pytest
import torch

from structattn.cli import main
from structattn.errors import CheckpointError, ConfigError
from structattn.files import signed
from structattn.models.sampling import Sampling
from structattn.testing.tolerances import ANOTHER_ORDER
from structattn_lab.data.corpus import Characters
from structattn_lab.inference.generate import TextGeneration
from structattn_lab.training.evaluate import load_language_model

SMALL = [
    *("--set", "task.context_length=32", "--set", "task.embed_dim=16", "--set", "task.num_layers=2"),
    *("--set", "task.num_heads=2", "--set", "task.eval_windows=6", "--set", "training.batch_size=4"),
    *("--set", "training.steps=5", "--set", "training.warmup_steps=0", "--set", "training.eval_every=5"),
]
TEXT = "".join(f"Line {i}: the {i * i}th of many.\n" + "\n" * (i % 3 == 0) for i in range(400))


def trained(folder: Path, *more: str) -> Path:
    (folder / "my.txt").write_text(TEXT)
    assert main(["train", "text", "--data", str(folder / "my.txt"), *SMALL, *more, "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """One run with learned positions, one with rotary ones, one whose layers differ, one that reads lines."""
    return {
        "learned": trained(tmp_path_factory.mktemp("learned"), "--attention", "mlr:4|2|2,values=2|2|4"),
        "rotary": trained(
            tmp_path_factory.mktemp("rotary"), "--attention", "mlr:4|2|2", "--set", "task.rotary=low_far"
        ),
        "paragraphs": trained(tmp_path_factory.mktemp("paragraphs"), "--attention", "mlr-text:4|2|2,values=2|2|4"),
        "mixed": trained(
            tmp_path_factory.mktemp("mixed"),
            *("--attention", "[mlr:4|2|2,scaling=paper,window:8]", "--set", "training.parametrization=mup"),
        ),
    }


@pytest.mark.parametrize("name", ["learned", "rotary", "mixed", "paragraphs"])
def test_text_comes_out_and_the_cache_does_not_change_it(name: str, runs, capsys) -> None:
    command = ["generate", str(runs[name]), "--prompt", "Line 4: ", "--max-new-tokens", "20", "--seed", "3"]
    assert main(command) == 0
    text, summary = capsys.readouterr()
    assert text.startswith("Line 4: ")
    assert len(text) == len("Line 4: ") + 20 + 1
    pattern = r"20 tokens in [\d.]+ s, [\d,]+ tokens/s; cache of 27 tokens: ([\d,]+) bytes, plain attention ([\d,]+)"
    cache, plain = (int(number.replace(",", "")) for number in re.match(pattern, summary).groups())
    assert plain == 2 * 27 * 2 * 16 * 4  # layers, tokens, keys and values, width, float32
    # Of lines, whose length nobody knows, a page of up to 256 tokens is kept: here as much as everything.
    assert cache == plain if name == "paragraphs" else cache < plain
    assert main([*command, "--no-cache"]) == 0
    again, summary = capsys.readouterr()
    assert again == text
    assert summary.endswith("no cache\n")
    assert main([*command[:-1], "4"]) == 0
    assert capsys.readouterr().out != text


def test_several_prompts_each_with_its_text(runs, capsys) -> None:
    single = []
    for prompt in ("Line", "The end: "):
        assert main(["generate", str(runs["learned"]), "--prompt", prompt, "--max-new-tokens", "9"]) == 0
        single.append(capsys.readouterr().out.removesuffix("\n"))
    both = ["generate", str(runs["learned"]), "--prompt", "Line", "--prompt", "The end: ", "--max-new-tokens", "9"]
    assert main(both) == 0
    assert capsys.readouterr().out == f"---\n{single[0]}\n\n---\n{single[1]}\n"


def test_a_stop_text_ends_a_prompt(runs) -> None:
    model = load_language_model(runs["learned"])
    prompts = ("Line 1", "the ")

    def texts(stop: str) -> tuple[list[str], int]:
        generation = TextGeneration(model, prompts, sampling=Sampling(), seed=0, stop=stop)
        columns = zip(*generation, strict=True)
        return ["".join(c for c in column if c is not None) for column in columns], generation.num_tokens

    free, count = texts("")
    assert [len(text) for text in free] == [32 - 6] * 2  # what fits the learned positions
    assert count == 2 * 26
    stop = free[0][7:9]
    stopped, count = texts(stop)
    assert stopped == [text[: text.index(stop) + 2] if stop in text else text for text in free]
    assert count == sum(map(len, stopped))


def test_rotary_runs_have_no_limit_and_learned_ones_say_theirs(runs, capsys) -> None:
    assert main(["generate", str(runs["rotary"]), "--max-new-tokens", "70", "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out) == 1 + 70 + 1  # the prompt, a line break, first
    assert main(["generate", str(runs["learned"]), "--max-new-tokens", "70"]) == 2
    assert "make 71, more than the 32 positions learned" in capsys.readouterr().err


def test_generating_needs_no_training_text(runs, tmp_path: Path, capsys) -> None:
    data = runs["learned"].parent / "my.txt"
    data.rename(tmp_path / "gone.txt")
    try:
        assert main(["generate", str(runs["learned"]), "--prompt", "a", "--max-new-tokens", "3"]) == 0
        assert main(["evaluate", str(runs["learned"])]) == 2
        assert "my.txt, which is not there" in capsys.readouterr().err
    finally:
        (tmp_path / "gone.txt").rename(data)


@pytest.mark.parametrize("name", ["learned", "rotary", "mixed", "paragraphs"])
def test_scores_through_the_cache(name: str, runs, capsys) -> None:
    assert main(["evaluate", str(runs[name])]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert main(["evaluate", str(runs[name]), "--cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(plain)] == plain
    assert lines[-2] == "through the cache"
    score, (name, cached, _, difference) = float(plain[-1].split()[-1]), lines[-1].split()
    assert name == plain[-1].split()[1]
    assert float(cached) == pytest.approx(score, rel=ANOTHER_ORDER)
    assert abs(float(difference)) < 1e-4


def test_scores_with_bits(runs, capsys) -> None:
    sizes = ["--group-size", "8", "--residual", "1"]
    assert main(["evaluate", str(runs["rotary"]), "--bits", "8", "4", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    shares = [
        re.fullmatch(rf"with {bits} bits: (0\.\d\d) of the bytes of the cache", line)[1]
        for bits, line in zip((8, 4), lines[-4::2], strict=True)
    ]
    assert 1 > float(shares[0]) > float(shares[1])
    eight, four = (abs(float(line.split()[-1])) for line in lines[-3::2])
    assert 0 < eight < four < 0.1
    assert main(["evaluate", str(runs["rotary"]), "--bits", "4"]) == 0  # all 32 tokens are exact
    out = capsys.readouterr().out
    assert "with 4 bits: 1.00 of the bytes" in out
    assert abs(float(out.split()[-1])) < 1e-4
    for command, message in {
        ("--bits", "5"): "--bits: unknown value '5'",
        ("--bits", "4", "--group-size", "3"): "--group-size must be even",
        ("--residual", "4"): "give --bits too",
    }.items():
        assert main(["evaluate", str(runs["rotary"]), *command]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_comparison_has_everything(tmp_path: Path, capsys) -> None:
    (tmp_path / "my.txt").write_text(TEXT)
    specs = ["standard", "[mlr:4|2|2,scaling=paper,standard]", "window:8"]
    command = ["compare", "text", "--data", str(tmp_path / "my.txt"), *SMALL, "--attention", *specs]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "nats_per_char" in printed
    assert "bigram" in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["spec"] for row in results["rows"]] == specs
    assert {row["name"] for row in results["baselines"]} == {"unigram", "bigram"}
    assert "cross entropy" in (tmp_path / "out" / "report.html").read_text()
    run = next((tmp_path / "out" / "runs").glob("*/seed-0-*"))
    assert main(["generate", str(run), "--max-new-tokens", "2"]) == 0


def test_mistakes_are_named_in_one_line(runs, tmp_path: Path, capsys) -> None:
    run = str(runs["learned"])
    other = tmp_path / "other"
    small = ["task.dim=8", "task.num_points=4", "task.num_heads=2", "task.eval_examples=8", "training.steps=2"]
    settings = [part for change in [*small, "training.batch_size=4"] for part in ("--set", change)]
    assert main(["train", "nearest-neighbor", *settings, "--out", str(other)]) == 0
    capsys.readouterr()
    for arguments, message in (
        (["generate", str(other)], "is a run of nearest-neighbor, which is not a language model"),
        (["generate", str(tmp_path / "nowhere")], "no finished run"),
        (["generate", run, "--prompt", ""], "--prompt: expected a text to continue, got ''"),
        (
            ["generate", run, "--prompt", "na\u00efve"],
            "the prompt: expected newlines and printable ASCII, got '\u00ef'",
        ),
        (["generate", run, "--temperature", "-1"], "--temperature: expected a finite number of at least 0"),
        (["generate", run, "--prompt", "x" * 33], "33 tokens in the longest prompt"),
        (["generate", run, "--max-new-tokens", "0"], "--max-new-tokens: expected"),
        (["evaluate", str(other), "--cache"], "nearest-neighbor has none"),
        (["evaluate", str(other), "--bits", "8"], "nearest-neighbor has none"),
        (["train", "text", "--target", "y"], "--target belongs to forecast, not to text"),
        (["train", "text", "--set", "task.rotary=round"], "unknown rotary split 'round'"),
        (["compare", "text", "--data", "missing.txt"], "missing.txt, got no such file"),
        (["train", "text", "--set", "task.num_layers=1000000000"], "task.num_layers must be at most 10,000"),
        (["train", "text", "--set", "task.embed_dim=1048576"], "the parameters of the model take"),
        (["compare", "nearest-neighbor", "--set", "task.dim=1000000"], "the parameters of the model take"),
    ):
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_damaged_run_is_refused(runs, tmp_path: Path) -> None:
    for name in ("run.json", "model.safetensors"):
        (tmp_path / name).write_bytes((runs["learned"] / name).read_bytes())
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"seed": 5}))
    with pytest.raises(CheckpointError, match=r"run\.json was changed"):
        load_language_model(tmp_path)
    del record["signature"]
    for name, size, message in (
        ("num_layers", 3, "is of a model of .* numbers, its weights are"),
        ("embed_dim", 2**40, "embed_dim = 1,099,511,627,776 in its run.json is too large"),
        ("num_layers", 10**9, "num_layers = 1,000,000,000 in its run.json is too large"),
        ("context_length", 2**40, "is of a model of"),
    ):
        settings = record["task_config"] | {name: size}
        path.write_bytes(signed(record | {"task_config": settings}))
        with pytest.raises(CheckpointError, match=f"is damaged.*{message}"):
            load_language_model(tmp_path)


def test_prompts_are_checked_before_the_first_character(runs) -> None:
    model = load_language_model(runs["rotary"])
    with pytest.raises(ConfigError, match="max_new_tokens"):
        TextGeneration(model, ("a",), sampling=Sampling(), max_new_tokens=0)
    generation = TextGeneration(model, ("ab",), sampling=Sampling.greedy(), max_new_tokens=3)
    encode = Characters().encode
    expected = model.generate([encode("ab").tolist()], max_new_tokens=3)[0]
    assert [encode(step[0])[0] for step in generation] == expected
    assert generation.caches.length == 2 + 3 - 1
    assert torch.is_grad_enabled()
