"""Corpora: what is written, what is read back, kills in between, and damaged files."""

from __future__ import annotations

import cProfile
import gc
import gzip
import json
import os
import sys
import time
import tracemalloc
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from structattn.cli import main
from structattn.errors import CheckpointError, ConfigError, DataError, MissingDependencyError
from structattn.files import signed
from structattn_lab.data.corpus import (
    BytePairs,
    Bytes,
    Characters,
    Corpus,
    PrepareConfig,
    Source,
    SplitTokens,
    prepare,
    tokenizer_from,
)
from structattn_lab.data.corpus.preparation import split_of
from structattn_lab.data.corpus.tokenizers import CHARACTERS
from structattn_lab.data.plain_text import open_text, read_text
from structattn_lab.tasks.text.task import TextConfig, TextTask

WORDS = ["attention", "is", "a", "matrix", "of", "scores,", "and", "its", "rank", "matters.", "\n"]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=int(rng.integers(5, 60)))) + f" {i}" for i in range(count)]


def folder_of(tmp_path: Path, documents: list[str]) -> Path:
    folder = tmp_path / "source"
    folder.mkdir(parents=True)
    for i, text in enumerate(documents):
        (folder / f"{i:04d}.txt").write_text(text)
    return folder


def config_of(folder: Path, **options) -> PrepareConfig:
    known = {"validation": 0.2, "test": 0.2, "shard_tokens": 700}
    source = {k: options.pop(k) for k in ("document_start", "text_column", "max_documents") if k in options}
    return PrepareConfig(source=Source(path=str(folder), **source), **known | options)


def documents_of(corpus: Corpus, split: str) -> list[str]:
    tokens = corpus.splits[split]
    ids = tokens.read(0, len(tokens))
    numbers = tokens.windows(torch.tensor([0]), len(tokens)).documents[0].numpy()
    cuts = np.flatnonzero(np.diff(numbers)) + 1
    return [corpus.tokenizer.decode(piece.tolist()) for piece in np.split(ids, cuts)]


@pytest.mark.parametrize("tokens", ["chars", "bytes", "bpe"])
def test_every_document_comes_back_in_its_split(tmp_path, tokens) -> None:
    documents = texts(60)
    config = config_of(folder_of(tmp_path, documents), tokens=tokens, vocab_size=300)
    manifest = prepare(config, tmp_path / "corpus", show_progress=False)
    corpus = Corpus(tmp_path / "corpus")
    corpus.verify()
    for split in ("train", "validation", "test"):
        expected = [text for text in documents if split_of(text, 0.2, 0.2) == split]
        assert documents_of(corpus, split) == expected
        assert corpus.splits[split].num_documents == len(expected)
        assert len(manifest["splits"][split]["shards"]) > 1
    assert manifest["documents"] == 60
    assert manifest["characters"] == sum(map(len, documents))
    sizes = [shard["tokens"] for shard in manifest["splits"]["train"]["shards"][:-1]]
    assert max(sizes) < 700 + max(map(len, documents))


def test_splits_are_of_documents_and_equal_documents_share_one() -> None:
    counts = Counter(split_of(text, 0.1, 0.2) for text in texts(4000))
    assert counts["validation"] == pytest.approx(400, abs=80)
    assert counts["test"] == pytest.approx(800, abs=110)
    assert split_of("the same", 0.1, 0.2) == split_of("the same", 0.1, 0.2)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_finished_corpus_is_returned_at_once(tmp_path, monkeypatch) -> None:
    config = config_of(folder_of(tmp_path, texts(60)))
    prepare(config, tmp_path / "corpus", show_progress=False)
    before = files_of(tmp_path / "corpus")
    monkeypatch.setattr("structattn_lab.data.corpus.preparation.opened", None)  # it may be on a read-only disk
    again = prepare(config, tmp_path / "corpus", resume=True, show_progress=False)
    assert again == Corpus(tmp_path / "corpus").manifest
    assert files_of(tmp_path / "corpus") == before


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch) -> None:
    import structattn.files

    folder = folder_of(tmp_path, texts(60))
    prepare(config_of(folder), tmp_path / "whole", show_progress=False)
    write, left = structattn.files.write_synced, 5

    def full(path: Path, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(path, data)

    out = tmp_path / "full"
    with monkeypatch.context() as patch:
        patch.setattr(structattn.files, "write_synced", full)
        with pytest.raises(CheckpointError, match="No space left"):
            prepare(config_of(folder), out, show_progress=False)
    prepare(config_of(folder), out, resume=True, show_progress=False)
    assert files_of(out) == files_of(tmp_path / "whole")


def test_begun_with_other_settings(tmp_path) -> None:
    folder = folder_of(tmp_path, texts(30))
    prepare(config_of(folder), tmp_path / "corpus", show_progress=False)
    with pytest.raises(ConfigError, match="give --resume"):
        prepare(config_of(folder), tmp_path / "corpus", show_progress=False)
    with pytest.raises(ConfigError, match="begun with tokens = 'chars', now 'bytes'"):
        prepare(config_of(folder, tokens="bytes"), tmp_path / "corpus", resume=True, show_progress=False)
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "thesis.doc").write_text("mine")
    with pytest.raises(ConfigError, match="holds 'thesis.doc', which structattn data prepare text did not write"):
        prepare(config_of(folder), tmp_path / "else", resume=True, show_progress=False)
    for damaged in ("{", "[]"):
        (tmp_path / "corpus" / "progress.json").write_text(damaged)
        with pytest.raises(DataError, match="expected the record of a begun corpus"):
            prepare(config_of(folder), tmp_path / "corpus", resume=True, show_progress=False)


@pytest.mark.parametrize("damage", ["cut", "gone", "changed", "manifest", "list", "field", "format"])
def test_damage_is_named(tmp_path, damage) -> None:
    out = tmp_path / "corpus"
    prepare(config_of(folder_of(tmp_path, texts(40))), out, show_progress=False)
    shard = out / "train-00000.tokens"
    data = shard.read_bytes()
    if damage == "cut":
        shard.write_bytes(data[:-1])
    elif damage == "gone":
        shard.unlink()
    elif damage == "changed":
        shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        Corpus(out)  # opening does not read it all
    elif damage == "manifest":
        (out / "manifest.json").write_text("{")
    elif damage == "list":
        (out / "manifest.json").write_text("[]")
    elif damage == "field":
        (out / "manifest.json").write_text('{"format": 1}')
    else:
        manifest = json.loads((out / "manifest.json").read_text())
        del manifest["signature"]
        (out / "manifest.json").write_bytes(signed(manifest | {"format": 99}))
    words = {
        "cut": f"expected {len(data):,} bytes, got {len(data) - 1:,} bytes",
        "gone": "no such file",
        "changed": "the contents have changed",
        "manifest": "expected the manifest of a corpus",
        "list": "expected the manifest of a corpus",
        "field": "expected the manifest of a corpus, got one without 'tokenizer'",
        "format": "expected a corpus of format 1, got 99",
    }
    with pytest.raises(DataError, match=words[damage]):
        Corpus(out).verify()


def test_a_manifest_without_a_signature_is_not_believed(tmp_path) -> None:
    """Version 0.1.0 did not sign its manifests: whatever is in them is refused with a sentence, and nothing
    else is read.
    """
    out = tmp_path / "corpus"
    prepare(config_of(folder_of(tmp_path, texts(40))), out, show_progress=False)
    (tmp_path / "train-00000.tokens").write_bytes((out / "train-00000.tokens").read_bytes())
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["signature"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    Corpus(out).verify()
    shard = ("splits", "train", "shards", 0)
    changes = [
        (("dtype",), value, words)
        for value, words in (
            ("O", "tokens of type 'O'"),
            ("<f4", "tokens of type"),
            ("zz", "wrong type"),
            (5, "wrong type"),
        )
    ]
    changes += [
        (("tokenizer",), value, "expected ")
        for value in ("chars", {}, {"kind": "x"}, {"kind": "bpe", "definition": {}})
    ]
    changes += [(("splits",), value, "expected ") for value in ([], {}, None, {"train": 3})]
    changes += [(shard[:3], value, "wrong type") for value in ("x", 3, None, [3])]
    changes += [((*shard, "tokens"), value, "a shard of train has") for value in ("5", -5, 0, 1.5, True, None)]
    changes += [((*shard, "documents"), value, "a shard of train has") for value in ("5", -1, None)]
    changes += [
        ((*shard, "file"), value, "outside of the folder") for value in ("../train-00000.tokens", "/etc/passwd")
    ]
    changes += [((*shard, "file"), 3, "wrong type"), ((*shard, "documents"), 3, "expected 12 bytes")]
    for path, value, words in changes:
        changed = json.loads(json.dumps(manifest))
        inner = changed
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        (out / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(DataError, match=words) as told:
            Corpus(out)
        assert "Error(" not in str(told.value)
    (out / "manifest.json").write_text(json.dumps(manifest))
    lengths = bytearray((out / "train-00000.lengths").read_bytes())
    lengths[0] ^= 1
    (out / "train-00000.lengths").write_bytes(lengths)
    with pytest.raises(DataError, match="expected lengths of .* tokens in all"):
        Corpus(out)


def test_a_source_that_has_changed_is_not_continued(tmp_path) -> None:
    folder = folder_of(tmp_path, texts(60))
    out = tmp_path / "corpus"
    prepare(config_of(folder), out, show_progress=False)
    before = files_of(out)
    (folder / "0000a.txt").write_text("a document in between")
    for left in ("finished", "unfinished"):
        with pytest.raises(ConfigError, match="had other files, or files of other sizes"):
            prepare(config_of(folder), out, resume=True, show_progress=False)
        if left == "finished":
            (out / "manifest.json").unlink()
    (folder / "0000a.txt").unlink()
    prepare(config_of(folder), out, resume=True, show_progress=False)
    assert files_of(out) == before
    folder.rename(tmp_path / "elsewhere")
    prepare(config_of(folder), out, resume=True, show_progress=False)  # a finished corpus does not need its source
    assert files_of(out) == before


@pytest.mark.parametrize("left", ["finished", "unfinished"])
def test_an_edit_that_keeps_the_size_of_a_file_is_noticed(tmp_path, left) -> None:
    folder, out = folder_of(tmp_path, texts(60)), tmp_path / "corpus"
    prepare(config_of(folder), out, show_progress=False)
    if left == "unfinished":
        (out / "manifest.json").unlink()
    path = sorted(folder.iterdir())[0]
    text = path.read_text()
    path.write_text(text)  # a copy of the same text, made later
    prepare(config_of(folder), out, resume=True, show_progress=False)
    if left == "unfinished":
        (out / "manifest.json").unlink()
    path.write_text("X" + text[1:])
    with pytest.raises(ConfigError, match="when its source had other text: begin anew in another folder"):
        prepare(config_of(folder), out, resume=True, show_progress=False)


def test_damaged_sources_are_named(tmp_path) -> None:
    packed = gzip.compress(np.random.default_rng(0).bytes(4000).hex().encode())
    for name, data in (("cut", packed[: len(packed) // 2]), ("wrong", packed[:200] + bytes(50) + packed[250:])):
        path = tmp_path / f"{name}.txt.gz"
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}.txt.gz: expected a whole gzip file"):
            list(Source(path=str(path)).documents())
    path = tmp_path / "deep.jsonl"
    for line in ("[" * 100_000, '{"id": ' + "1" * 5000 + "}"):
        path.write_text('{"text": "fine"}\n' + line + "\n")
        with pytest.raises(DataError, match=r"deep.jsonl, line 2: expected JSON"):
            list(Source(path=str(path)).documents())


@pytest.mark.parametrize("tokens", ["bytes", "bpe"])
def test_half_a_surrogate_pair_is_named_with_its_place(tmp_path, tokens) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "whole"}\n{"text": "\\ud83d"}\n')
    config = config_of(path, tokens=tokens, vocab_size=256, validation=1e-9, test=1e-9)
    with pytest.raises(DataError, match=r"half.jsonl, line 2: expected text that UTF-8 can encode"):
        prepare(config, tmp_path / "corpus", show_progress=False)


def test_no_corpus(tmp_path) -> None:
    with pytest.raises(DataError, match="structattn data prepare text"):
        Corpus(tmp_path)


def test_sources(tmp_path) -> None:
    folder = tmp_path / "many"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "b.md").write_text("PEP: 1\nfirst\n\nPEP: 2\nsecond\n")
    (folder / "a.txt").write_text("  \n")  # nothing in it
    (folder / "c.csv").write_text("no text file")
    (folder / ".hidden" / "d.txt").write_text("hidden")
    with gzip.open(folder / "deep" / "e.jsonl.gz", "wt") as file:
        file.write('{"text": "third", "id": 1}\n\n{"text": "fourth"}\n')
    source = Source(path=str(folder), document_start="PEP: ")
    found = list(source.documents())
    assert [doc.text for doc in found] == ["PEP: 1\nfirst\n\n", "PEP: 2\nsecond\n", "third", "fourth"]
    assert found[1].name.endswith("b.md, line 4")
    assert [doc.text for doc in source.documents(skip=2)] == ["third", "fourth"]
    assert len(list(Source(path=str(folder), max_documents=2).documents())) == 2
    cut = list(Source(path=str(folder), longest_document=8).documents())
    assert [doc.text for doc in cut] == ["PEP: 1\n", "first\n\n", "PEP: 2\n", "second\n", "third", "fourth"]
    assert cut[2].name.endswith("b.md, from character 14")
    cut = list(
        Source(path=str(folder), longest_document=6).documents()
    )  # a line that is longer, and one of its end alone
    assert [doc.text for doc in cut] == ["PEP: 1", "first\n", "PEP: 2", "second", "third", "fourth"]
    with pytest.raises(ConfigError, match="longest_document must be"):
        Source(path=str(folder), longest_document=0)
    with pytest.raises(DataError, match=r"line 1: expected a text in the field 'body', got text, id"):
        list(Source(path=str(folder), text_column="body").documents())
    wrong = {
        "null": "a record without fields",
        "[1]": "a record without fields",
        "{}": "no field",
        '{"text": 3}': "3 .int.",
    }
    for line, words in wrong.items():
        (tmp_path / "bad.jsonl").write_text(line)
        with pytest.raises(DataError, match=f"in the field 'text', got {words}"):
            list(Source(path=str(tmp_path / "bad.jsonl")).documents())
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"bad.jsonl, line 1: expected JSON"):
        list(Source(path=str(tmp_path / "bad.jsonl")).documents())
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match="expected text in UTF-8"):
        list(Source(path=str(tmp_path / "latin.txt")).documents())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"expected files with one of .txt"):
        Source(path=str(tmp_path / "empty")).files()
    with pytest.raises(ConfigError, match="got an empty text"):
        Source(path=" ")
    with pytest.raises(DataError, match="no such file"):
        Source(path="./nowhere").files()


def test_gzip_and_utf_16_are_read_and_other_formats_are_named(tmp_path) -> None:
    """Whatever the names of the files are: `train text` reads the same way."""
    text = "one line\r\nand another\n"
    good = {
        "packed.txt": gzip.compress(text.encode()),
        "marked.txt": text.encode("utf-8-sig"),
        "wide.txt": text.encode("utf-16"),
        "wider.txt": gzip.compress(b"\xfe\xff" + text.encode("utf-16-be")),
        "records.json": json.dumps({"text": "one line\nand another\n"}).encode(),
    }
    for name, data in good.items():
        (tmp_path / name).write_bytes(data)
        assert [doc.text for doc in Source(path=str(tmp_path / name)).documents()] == ["one line\nand another\n"]
    bad = {
        "sheet.txt": (b"PK\x03\x04rest", "got a zip archive"),
        "table.txt": (b"PAR1rest", "got a Parquet file"),
        "binary.txt": (b"text\0\1\2", "a binary file, or UTF-16 without a byte order mark"),
        "latin.txt": ("é".encode("latin-1"), "got the byte 0xe9, as in Latin-1 or Windows-1252. Save it as UTF-8"),
        "array.json": (b'[\n {"text": "one"}\n]', "array.json, line 1: expected JSON, one record in each line"),
    }
    for name, (data, words) in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=words):
            list(Source(path=str(tmp_path / name)).documents())
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="got a pipe or a device"):
        list(Source(path=str(tmp_path / "pipe.txt")).documents())


def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path, monkeypatch) -> None:
    folder = folder_of(tmp_path, texts(3))
    (folder / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: str):
        if str(path).rstrip("/").endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for source in (folder, folder / "closed"):
        with pytest.raises(DataError, match="closed cannot be read: Permission denied"):
            prepare(config_of(source), tmp_path / "corpus", show_progress=False)


def test_a_path_that_cannot_be_looked_at_is_named(tmp_path) -> None:
    path = str(tmp_path / ("x" * 300))
    for read in (Source(path=path).files, lambda: Corpus(Path(path)), lambda: TextTask(TextConfig(data=path))):
        with pytest.raises(DataError, match="cannot be read: File name too long"):
            read()


def lines_of(path: Path, count: int) -> Path:
    path.write_text("".join(f'{{"text": "line {i} of some text"}}\n' for i in range(count)))
    return path


@pytest.mark.full
def test_time_and_memory_of_a_document_do_not_depend_on_their_number(tmp_path) -> None:
    seconds = {}
    for count in (2000, 16000):
        config = PrepareConfig(source=Source(path=str(lines_of(tmp_path / f"{count}.jsonl", count))))
        taken = []
        for i in range(2):
            before = time.process_time()
            prepare(config, tmp_path / f"corpus-{count}-{i}", show_progress=False)
            taken.append(time.process_time() - before)
        seconds[count] = min(taken)
    assert seconds[16000] < 20 * seconds[2000]  # 8 times the documents; all pairs of them are 64 times as many
    config = PrepareConfig(source=Source(path=str(tmp_path / "2000.jsonl")))
    peaks = []
    for i in range(2):  # what other tests have left, and what is made once, is not of the documents
        gc.collect()
        tracemalloc.start()
        prepare(config, tmp_path / f"corpus-{i}", show_progress=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < 2000 * 19 * 8  # 19 characters a document; an array for each would be 200 bytes


def test_small_files_take_few_calls_each(tmp_path) -> None:
    """Reading many small files is bound by the operating system: what is around it takes a few calls."""
    count = 200
    config = config_of(folder_of(tmp_path, texts(count)), shard_tokens=10**6)
    profile = cProfile.Profile()
    profile.runcall(prepare, config, tmp_path / "corpus", show_progress=False)
    assert sum(entry.callcount for entry in profile.getstats()) < 130 * count  # 214 a file with a text stream for each


@pytest.mark.parametrize(
    "content", [b"", b"a\rb\r\nc\n\r", b"\xef\xbb\xbfx\r\n", "é\r\n".encode("utf-16"), b"ab\r" * 500_000]
)
def test_a_file_that_is_read_at_once_has_the_text_of_its_lines(tmp_path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    for data in (content, gzip.compress(content)):
        path.write_bytes(data)
        with open_text(str(path)) as file:
            assert read_text(str(path)) == file.read()


def test_a_corpus_of_many_shards_keeps_no_file_open(tmp_path) -> None:
    prepare(config_of(lines_of(tmp_path / "a.jsonl", 40), shard_tokens=20), tmp_path / "corpus", show_progress=False)
    before = len(list(Path("/proc/self/fd").iterdir()))
    corpus = Corpus(tmp_path / "corpus")
    assert len(corpus.manifest["splits"]["train"]["shards"]) > 15
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_failed_call_leaves_nothing_in_the_way(tmp_path, monkeypatch) -> None:
    """An error in a document removes all files; where reading stops, the written files stay, and `--resume`
    continues.
    """
    path, out = tmp_path / "a.jsonl", tmp_path / "corpus"
    documents = texts(60)
    good = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    for bad in ('{"text": "tab\\t"}\n', "{\n", '{"body": ""}\n'):
        path.write_text(good + bad)
        with pytest.raises(DataError):
            prepare(config_of(path), out, show_progress=False)
        assert not out.exists()
    path.write_text(json.dumps({"text": documents[0]}) + "\n")
    with pytest.raises(DataError, match="expected documents for each split"):
        prepare(config_of(path), out, show_progress=False)
    path.write_text(good)
    prepare(config_of(path), out, show_progress=False)

    def stopping():
        yield from ({"text": text} for text in documents[:50])
        raise ConnectionError("the line went dead")

    streams = [stopping(), iter([{"text": text} for text in documents])]
    fake = types.SimpleNamespace(load_dataset=lambda *_, **__: streams.pop(0))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    streamed = config_of(Path("remote"))
    with pytest.raises(DataError, match="stopped: ConnectionError: the line went dead. Continue with --resume"):
        prepare(streamed, tmp_path / "streamed", show_progress=False)
    with pytest.raises(ConfigError, match="give --resume to continue"):
        prepare(streamed, tmp_path / "streamed", show_progress=False)
    prepare(streamed, tmp_path / "streamed", resume=True, show_progress=False)
    for name, data in files_of(out).items():
        assert (
            name in ("manifest.json", "progress.json", "owner.json")
            or (tmp_path / "streamed" / name).read_bytes() == data
        )


def test_a_data_set_is_streamed(monkeypatch) -> None:
    asked = []

    def load_dataset(name: str, *, split: str, streaming: bool):
        asked.append((name, split, streaming))
        if name == "down":
            raise ConnectionError("no network\nand more")
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert [doc.text for doc in Source(path="openwebtext").documents(skip=1)] == ["two"]
    assert asked == [("Skylion007/openwebtext", "train", True)]
    with pytest.raises(DataError, match="data set named 'down', got: no network$"):
        list(Source(path="down").documents())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[data\]"):
        list(Source(path="openwebtext").documents())


def test_a_split_without_documents_is_an_error(tmp_path) -> None:
    folder = folder_of(tmp_path, ["only one document"])
    with pytest.raises(DataError, match="got 1 in all, and none for"):
        prepare(config_of(folder), tmp_path / "corpus", show_progress=False)
    assert not (tmp_path / "corpus" / "manifest.json").exists()


def test_equal_documents_are_named_as_such(tmp_path) -> None:
    folder = folder_of(tmp_path, ["one and the same"] * 30)
    with pytest.raises(DataError, match="got 30, but only 1 different, and equal ones are in one split, and none for"):
        prepare(config_of(folder), tmp_path / "corpus", show_progress=False)


def test_unknown_characters(tmp_path) -> None:
    documents = [*texts(30), "a caf\u00e9\tin Paris"]
    folder = folder_of(tmp_path, documents)
    with pytest.raises(
        DataError,
        match=(
            r"0030.txt: expected newlines and printable ASCII, got '\u00e9' \(U\+00E9\) in line 1, column 6.*--tokens "
            r"bytes.*--unknown drop"
        ),
    ):
        prepare(config_of(folder), tmp_path / "error", show_progress=False)
    prepare(config_of(folder, unknown="drop"), tmp_path / "drop", show_progress=False)
    found = [
        text for split in ("train", "validation", "test") for text in documents_of(Corpus(tmp_path / "drop"), split)
    ]
    assert "a cafin Paris" in found


def test_copies_that_differ_in_dropped_characters_are_in_one_split(tmp_path) -> None:
    lines = [json.dumps({"text": f"text {n // 2} of many" + "\u2026" * (n % 2)}) for n in range(400)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    config = PrepareConfig(source=Source(path=str(tmp_path / "texts.jsonl")), tokens="chars", unknown="drop", test=0.2)
    prepare(config, tmp_path / "corpus", show_progress=False)
    corpus = Corpus(tmp_path / "corpus")
    splits = [set(documents_of(corpus, split)) for split in ("train", "validation", "test")]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"tokens": "words"},
            "unknown tokens 'words': known: 'bpe', 'bytes', 'chars'",
        ),
        ({"validation": 0.0}, "validation must be a finite number above 0 and below 1"),
        ({"test": float("nan")}, "test must be a finite number above 0 and below 1"),
        ({"validation": 0.6, "test": 0.4}, "sum to less than 1"),
        ({"shard_tokens": 0}, "shard_tokens must be an int of at least 1"),
        ({"vocab_size": 10**12}, "vocab_size must be an int of at least 256"),
        ({"unknown": "keep"}, "unknown value of unknown 'keep'"),
        ({"tokens": "bytes", "unknown": "drop"}, "is only for chars"),
        ({"max_documents": 0}, "max_documents must be an int of at least 1"),
    ],
)
def test_wrong_settings(tmp_path, options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(tmp_path, **options)


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_tokenizers_lose_nothing(text) -> None:
    pairs = BytePairs.train(WORDS, 300)
    for tokenizer in (Bytes(), pairs, tokenizer_from(pairs.description())):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids.tolist())
    known = "".join(c for c in text if c in CHARACTERS)
    assert Characters().decode(Characters("drop").encode(text).tolist()) == known


def test_bad_tokenizers(monkeypatch) -> None:
    with pytest.raises(ConfigError, match="at least the 256 bytes, got vocab_size 100"):
        BytePairs.train(WORDS, 100)
    with pytest.raises(DataError, match="one that does not load"):
        BytePairs("{}")
    with pytest.raises(DataError, match="got 'runes'"):
        tokenizer_from({"kind": "runes"})
    for tokenizer in (Bytes(), BytePairs.train(WORDS, 300)):
        with pytest.raises(DataError, match="UTF-8 can encode"):
            tokenizer.encode("a \ud800")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[data\]"):
        BytePairs.train(WORDS, 300)


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    data=st.data(),
)
def test_windows_cross_shards_and_know_their_documents(lengths, data) -> None:
    flat = [n for shard in lengths for n in shard]
    ids = np.arange(sum(flat), dtype=np.uint16)
    cuts = np.cumsum([sum(shard) for shard in lengths])[:-1]
    tokens = SplitTokens(np.split(ids, cuts), np.array(flat))
    assert len(tokens) == len(ids)
    length = data.draw(st.integers(1, len(ids)))
    starts = data.draw(st.lists(st.integers(0, len(ids) - length), min_size=1, max_size=3))
    found = tokens.windows(torch.tensor(starts), length)
    owner = np.repeat(np.arange(len(flat)), flat)
    for row, start in enumerate(starts):
        assert found.tokens[row].tolist() == list(range(start, start + length))
        assert found.documents[row].tolist() == owner[start : start + length].tolist()


def test_the_command(tmp_path, capsys) -> None:
    folder, out = folder_of(tmp_path, texts(40)), tmp_path / "corpus"
    words = [
        "data",
        "prepare",
        "text",
        "--source",
        str(folder),
        "--validation",
        "0.2",
        "--test",
        "0.2",
        "--out",
        str(out),
    ]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "96 different tokens (chars)" in printed.out
    assert "train" in printed.out
    assert "reading" in printed.err
    assert main(words) == 2
    assert "give --resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert main(["data", "info", str(out), "--verify"]) == 0
    capsys.readouterr()
    (out / "train-00000.tokens").write_bytes(b"")
    assert main(["data", "info", str(out)]) == 2
    assert "got 0 bytes" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "new"), "--tokens", "words"]) == 2
    assert "--tokens: unknown value 'words': known: 'bpe', 'bytes', 'chars', 'model'" in capsys.readouterr().err
