"""The text task: its characters, splits, windows and baselines, from their definitions by loops."""

import gzip
import hashlib
import json
import math
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from structattn.cache import Storage
from structattn.errors import ConfigError, DataError
from structattn_lab.data.corpus import Characters, SplitTokens
from structattn_lab.data.corpus.tokenizers import CHARACTERS
from structattn_lab.tasks.text.task import TextConfig, TextTask

TOKENIZER = Characters()
decode = TOKENIZER.decode
TINY = {"context_length": 10, "embed_dim": 8, "num_layers": 1, "num_heads": 2, "eval_windows": 7}


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text).tolist()


def whole(tokens: SplitTokens) -> str:
    return decode(tokens.read(0, len(tokens)).tolist())


def text_of(length: int) -> str:
    """Text in which every substring of a few characters is unique, so that a window can be found again."""
    return "".join(f"{i:x} {chr(97 + i % 26)}.\n" for i in range(length))[:length]


@pytest.fixture
def task(tmp_path: Path) -> TextTask:
    path = tmp_path / "my.txt"
    path.write_text(text_of(3000))
    return TextTask(TextConfig(data=str(path), **TINY))


def test_characters() -> None:
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 96
    assert encode(CHARACTERS) == list(range(96))
    assert decode(encode("Hello,\n~world!")) == "Hello,\n~world!"
    assert (encode("\n"), encode(" "), encode("~"), encode("")) == ([0], [1], [95], [])


def test_splits_are_the_text_in_order(task: TextTask) -> None:
    parts = [whole(task.splits[name]) for name in ("train", "validation", "test")]
    assert "".join(parts) == text_of(3000)
    assert [len(part) for part in parts] == [2700, 150, 150]


def test_batches_are_pure_and_of_the_training_text(task: TextTask) -> None:
    train = whole(task.splits["train"])
    batch = task.batch(1, 2, 50)["tokens"]
    assert batch.shape == (50, 11)
    assert torch.equal(batch, task.batch(1, 2, 50)["tokens"])
    for other in (task.batch(1, 3, 50), task.batch(2, 2, 50)):
        assert not torch.equal(batch, other["tokens"])
    starts = {train.index(decode(row)) for step in range(100) for row in task.batch(1, step, 50)["tokens"].tolist()}
    assert min(starts) < 20
    assert 2700 - 11 - 20 < max(starts) <= 2700 - 11


@pytest.mark.parametrize("split", ["validation", "test"])
def test_windows_are_fixed_and_do_not_overlap(task: TextTask, split: str) -> None:
    text = whole(task.splits[split])
    windows = task.eval_windows(split).tokens
    starts = [text.index(decode(row)) for row in windows.tolist()]
    assert len(starts) == 7
    assert starts[0] == 0
    assert starts[-1] == len(text) - 11
    assert all(b - a >= 11 for a, b in zip(starts, starts[1:], strict=False))
    many = TextTask(TextConfig(**{**TINY, "eval_windows": 10**6, "data": task.config.data}))
    assert len(many.eval_windows(split).tokens) == len(text) // 11


def test_scores_are_the_mean_over_characters(task: TextTask) -> None:
    torch.manual_seed(0)
    model = task.build_model("standard").double().eval()
    assert task.evaluate(model, "test")["nats_per_char"] == pytest.approx(math.log(96))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    logs = []
    for window in task.eval_windows("test").tokens.tolist():
        with torch.no_grad():
            p = model(torch.tensor([window[:-1]]))[0].softmax(-1)
        logs += [-math.log(float(p[i, token])) for i, token in enumerate(window[1:])]
    assert task.evaluate(model, "test")["nats_per_char"] == pytest.approx(sum(logs) / len(logs), rel=1e-12)
    assert task.evaluate(model, "validation") != task.evaluate(model, "test")


@pytest.mark.parametrize("spec", ["standard", "mlr:2|1|1", "window:3"])
@pytest.mark.parametrize("rotary", ["", "low_far"])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_scores_through_the_cache_are_the_same(task: TextTask, spec: str, rotary: str, chunk: int) -> None:
    task.config = TextConfig(**TINY, rotary=rotary)
    torch.manual_seed(0)
    model = task.build_model(spec).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    expected = task.evaluate(model, "test")["nats_per_char"]
    assert task.evaluate_cached(model, "test", chunk)["nats_per_char"] == pytest.approx(expected, rel=1e-12)


def test_bits_change_scores_alike_in_any_chunks(task: TextTask) -> None:
    torch.manual_seed(0)
    model = task.build_model("mlr:2|1|1").double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    storage = Storage(4, 4, group_size=4, residual=1)
    one, four = (task.evaluate_cached(model, "test", chunk, storage=storage)["nats_per_char"] for chunk in (1, 4))
    assert one == pytest.approx(four, rel=1e-12)
    assert one != pytest.approx(task.evaluate(model, "test")["nats_per_char"], rel=1e-6)


def test_baselines_by_loops(task: TextTask) -> None:
    train = whole(task.splits["train"])
    single, pairs = Counter(train), Counter(zip(train, train[1:], strict=False))
    firsts = Counter(train[:-1])
    unigram, bigram = [], []
    for window in task.eval_windows("test").tokens.tolist():
        text = decode(window)
        for a, b in zip(text, text[1:], strict=False):
            unigram.append(-math.log((single[b] + 1) / (len(train) + 96)))
            bigram.append(-math.log((pairs[a, b] + 1) / (firsts[a] + 96)))
    found = {row.name: row.metrics["nats_per_char"] for row in task.baselines()}
    assert found == {
        "unigram": pytest.approx(sum(unigram) / len(unigram), rel=1e-12),
        "bigram": pytest.approx(sum(bigram) / len(bigram), rel=1e-12),
    }


def test_the_packaged_text_is_cut_between_documents() -> None:
    task = TextTask(TextConfig())
    texts = {name: whole(part) for name, part in task.splits.items()}
    counts = {}
    for name, text in texts.items():
        assert text.startswith("PEP: ")
        documents = re.split(r"\n\n(?=PEP: )", text)
        assert all(re.search(r"public\s+domain|CC0", document) for document in documents)
        counts[name] = len(documents)
    assert counts == {"train": 59, "validation": 7, "test": 7}
    note = files("structattn_lab.data").joinpath("files", "README.md").read_text()
    assert f"{sum(map(len, texts.values())):,} characters" in note
    found = {row.name: row.metrics["nats_per_char"] for row in task.baselines()}
    assert 2.4 < found["bigram"] < 2.8 < found["unigram"] < 3.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"ok\nna\xc3\xafve and \xe2\x80\x9cquotes\xe2\x80\x9d" + b"x" * 400,
            r"got 'ï' \(U\+00EF\) in line 2, column 3 \(and 2 other",
        ),
        (b"a\n\n\tb" + b"x" * 400, r"got '\\t' \(U\+0009\) in line 3, column 1\. Replace"),
        (b"", "got an empty file"),
        (b"\xff\xfe", "got an empty file"),
        (b"\xff", "expected text in UTF-8"),
        (b"x" * 200, r"more than 10 characters in each split .* got 10 of 200 for validation.* at least 220"),
    ],
)  # fmt: skip
def test_bad_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        TextTask(TextConfig(data=str(path), **TINY))
    assert "my.txt" in str(error.value)


def test_json_lines_and_gzip_are_read_as_prepare_reads_them(tmp_path: Path) -> None:
    texts = [text_of(700), text_of(800), " \n", text_of(500)]
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    tasks = [TextTask(TextConfig(data=str(tmp_path / name), **TINY)) for name in ("a.jsonl", "packed.jsonl.gz")]
    for task in tasks:
        assert "".join(map(whole, task.splits.values())) == texts[0] + texts[1] + texts[3]
        assert [part.num_documents for part in task.splits.values()] == [3, 1, 1]
        assert task.splits["train"].windows(torch.tensor([698]), 4).documents.tolist() == [[0, 0, 1, 1]]
    assert tasks[0].data_sha256 == tasks[1].data_sha256
    (tmp_path / "a.txt").write_text(text_of(900))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text_of(900).encode()))
    plain, packed = (TextTask(TextConfig(data=str(tmp_path / name), **TINY)) for name in ("a.txt", "b.txt.gz"))
    assert plain.data_sha256 == packed.data_sha256 == hashlib.sha256(text_of(900).encode()).hexdigest()
    (tmp_path / "c.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(
        DataError, match=r"c.jsonl, line 1: expected a text in the field 'text', got body.*data prepare text"
    ):
        TextTask(TextConfig(data=str(tmp_path / "c.jsonl"), **TINY))


def test_files_of_other_systems_and_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "my.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"ab\r\n" * 100)
    assert whole(TextTask(TextConfig(data=str(path), **TINY)).splits["train"])[:4] == "ab\na"
    with pytest.raises(DataError, match=r"no\.txt, got no such file"):
        TextTask(TextConfig(data=str(tmp_path / "no.txt")))
    with pytest.raises(DataError, match="expected a corpus, got a folder without manifest.json"):
        TextTask(TextConfig(data=str(tmp_path)))
    path.write_bytes(b"x" * 220)
    TextTask(TextConfig(data=str(path), **TINY))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 0}, r"task\.context_length must be an int of at least 1"),
        ({"num_heads": 3}, "num_heads must divide"),
        ({"rotary": "low_fat"}, "did you mean 'low_far'"),
    ],
)
def test_bad_settings_are_named(options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextConfig(**options)
