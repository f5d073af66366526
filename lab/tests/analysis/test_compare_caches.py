"""``structattn compare caches``: rows, the record, the report, and mistakes."""

import re

import pytest
import torch

from structattn import cli
from structattn.errors import ConfigError, DataError
from structattn_lab.compare.cache_rows import MeasuredCache, UnavailableError, cache_rows
from structattn_lab.compare.caches import CachesConfig, CacheTask, compare_caches
from structattn_lab.records.caches import CachesRecord
from structattn_lab.records.common import read_file
from structattn_lab.report.caches import report
from structattn_lab.report.writer import text

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
HEAD_DIM = 16
SMALL = {"context_length": 560, "num_steps": 3, "num_windows": 2, "num_prompts": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random Llama with a tokenizer of bytes."""
    out = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(out)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("Some text that is long enough for a few windows of it. " * 40)
    return path


def _only_plain(*sizes):
    return list(cache_rows(*sizes))[:1]


def test_heads_and_bits_that_allocate_chooses(folder, book, tmp_path) -> None:
    from structattn.integrations.transformers import calibrate

    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    calibrate(model, [torch.randint(256, (2, 300))]).save(tmp_path / "calibration.safetensors")
    options = settings(folder, book, calibration=str(tmp_path / "calibration.safetensors"))
    done = compare_caches(options, tmp_path / "out", rows=_only_plain, show_progress=False)
    first, quarter, eighth = done.record.rows
    assert (quarter.name, eighth.name) == ("chosen heads and bits, 1/4", "chosen heads and bits, 1/8")
    assert quarter.note == eighth.note == ""
    assert eighth.size < quarter.size <= first.size / 3  # of 4: exact numbers have 32 bits here, as all of the first
    with pytest.raises(ConfigError, match=r"task.calibration: there is no .*nothing; calibrate\(model, texts\).save"):
        compare_caches(settings(folder, book, calibration="nothing"), tmp_path / "no", rows=_only_plain)


def settings(folder, book, **options):
    return CachesConfig(task=CacheTask(model=str(folder), data=str(book), **SMALL | options))


def test_the_command_measures_all_caches_alike(folder, book, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    changes = [f"--set=task.{name}={value}" for name, value in {"model": folder, **SMALL}.items()]
    assert cli.main(["compare", "caches", *changes, "--data", str(book), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    record = read_file(CachesRecord, out / "results.json")
    assert text(report(record)) in shown
    rows = {row.name: row for row in record.rows}
    assert list(rows) == [cache.name for cache in cache_rows(560, 3, HEAD_DIM)]
    first = record.rows[0]
    assert (first.name, first.above, first.interval) == ("DynamicCache", 0, (0, 0))
    assert first.nbytes == 2 * 2 * HEAD_DIM * 563 * 4
    assert first.size == 2  # float32
    assert record.num_windows == len(first.losses) == 2
    for name, row in rows.items():
        if row.note:
            assert re.search("needs the package (optimum-quanto|hqq), which is not installed", row.note), row
            assert f"{name}: not measured, it needs" in shown
            continue
        assert row.above == pytest.approx(row.loss - first.loss)
        assert [(x.task, x.distance) for x in row.recall] == [(x.task, x.distance) for x in first.recall]
        assert row.size == pytest.approx(2 * row.nbytes / first.nbytes)
        assert name in (out / "report.html").read_text()
    assert rows["4 bits"].size < rows["8 bits"].size
    assert rows["window of 136"].size < rows["window of 276"].size
    assert abs(rows["8 bits"].above) < abs(rows["window of 136"].above)
    assert {path.name for path in (out / "figures").iterdir()} == {
        f"{name}-against-bytes.{kind}" for name in ("loss", "recall") for kind in ("png", "svg")
    }


def test_a_cache_that_cannot_be_had_is_a_note(folder, book, tmp_path) -> None:
    def fails(error):
        def prepare(model):
            raise error

        return prepare

    def few(context_length, num_steps, head_dim):
        assert (context_length, num_steps, head_dim) == (560, 3, HEAD_DIM)
        yield next(cache_rows(context_length, num_steps, head_dim))
        yield MeasuredCache(name="missing", about="", prepare=fails(UnavailableError("it needs a package")))
        yield MeasuredCache(name="broken", about="", prepare=fails(ValueError("no such shape")))

    options = {"rows": few, "show_progress": False}
    config = settings(folder, book, num_prompts=0, num_windows=1, dtype="bfloat16")
    record = compare_caches(config, tmp_path / "out", **options).record
    assert [row.note for row in record.rows] == ["", "it needs a package", "it fails: ValueError: no such shape"]
    assert record.rows[0].size == 1
    assert record.rows[0].interval is None
    assert record.rows[0].recall == ()
    assert "missing: not measured, it needs a package" in text(report(record))


def test_mistakes_are_one_line(folder, book, tmp_path, capsys) -> None:
    def refused(kind, match, config):
        with pytest.raises(kind, match=match):
            compare_caches(config, tmp_path / "out", show_progress=False)
        assert not (tmp_path / "out" / "results.json").exists()

    refused(ConfigError, "expected task.model, got none: give --set task.model=FOLDER", settings("", book))
    refused(ConfigError, "expected task.data, got none: give --data TEXT", settings(folder, ""))
    refused(ConfigError, "no such folder", settings(tmp_path / "none", book))
    refused(ConfigError, "at most 1,024, the positions", settings(folder, book, context_length=1200))
    refused(DataError, "no such file", settings(folder, tmp_path / "none.txt"))
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    refused(DataError, "the longest text has 12 tokens, and a window takes 564", settings(folder, short))
    for name, value in (("num_steps", 0), ("num_prompts", -1), ("seed", -1)):
        with pytest.raises(ConfigError, match=f"task.{name} must be"):
            settings(folder, book, **{name: value})
    assert cli.main(["compare", "caches", "--set", "task.modell=x"]) == 2
    assert "did you mean 'task.model'" in capsys.readouterr().err
