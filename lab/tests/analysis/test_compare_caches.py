"""``structattn compare caches``: rows, the record, the report, and mistakes."""

import dataclasses
import re
import shutil
from itertools import combinations

import pytest
import torch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from structattn import cli
from structattn.errors import CheckpointError, ConfigError, DataError
from structattn.machine import hardware
from structattn_lab.compare.cache_rows import cache_rows
from structattn_lab.compare.caches import CachesConfig, CacheTask, compare_caches
from structattn_lab.compare.measured_cache import MeasuredCache, UnavailableError
from structattn_lab.records.caches import CacheRow, CachesRecord, RecallRow
from structattn_lab.records.common import read_file
from structattn_lab.report.caches import report
from structattn_lab.report.figures.caches import draw_loss, draw_recall
from structattn_lab.report.plot import in_style
from structattn_lab.report.writer import text

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
HEAD_DIM = 16
PRESSES = ("KVzip", "ExpectedAttention", "SnapKV", "TOVA", "KeyDiff", "StreamingLLM", "ThinK")
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


def _only_plain_and_window(*sizes):
    return [x for x in cache_rows(*sizes) if x.name in ("DynamicCache", "window of 276")]


@pytest.mark.full
def test_caches_that_allocate_chooses(folder, book, tmp_path) -> None:
    from structattn.integrations.transformers import calibrate

    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    read = calibrate(model, [torch.randint(256, (2, 300))], methods=("heads", "bits"))
    read.save(tmp_path / "calibration.safetensors")
    options = settings(folder, book, calibration=str(tmp_path / "calibration.safetensors"))
    done = compare_caches(options, tmp_path / "out", rows=_only_plain, show_progress=False)
    first, quarter, eighth = done.record.rows
    assert (quarter.name, eighth.name) == ("chosen, 1/4", "chosen, 1/8")
    assert quarter.note == eighth.note == ""
    assert eighth.size < quarter.size <= first.size / 3  # of 4: exact numbers have 32 bits here, as all of the first
    with pytest.raises(ConfigError, match=r"task.calibration: there is no .*nothing; calibrate\(model, texts\).save"):
        compare_caches(settings(folder, book, calibration="nothing"), tmp_path / "no", rows=_only_plain)


def test_bytes_are_counted_in_another_dtype_than_the_model_computes_in(folder, book, tmp_path) -> None:
    def rows(**options):
        done = compare_caches(
            settings(folder, book, num_prompts=0, **options),
            tmp_path / "-".join(options.values()),
            rows=lambda *sizes: [x for x in cache_rows(*sizes) if x.name in ("DynamicCache", "4 bits")],
            show_progress=False,
        )
        return done, done.record.rows

    (_, in_16), (_, in_32) = rows(dtype="bfloat16"), rows(dtype="float32")
    done, counted = rows(dtype="float32", bytes_dtype="bfloat16")
    for count, (half, whole, both) in enumerate(zip(in_16, in_32, counted, strict=True)):
        assert (both.nbytes, both.size) == (half.nbytes, half.size)
        assert both.losses == whole.losses != half.losses, count
        assert whole.nbytes > half.nbytes
    said = "computes in float32; bytes are those of the same cache of the model in bfloat16"
    assert said in (done.folder / "report.html").read_text()


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
        if name.startswith("KVzip") and "fake keys" in row.note:
            continue  # see below
        if row.note:
            package = re.search("^it needs the package (optimum-quanto|hqq|kvpress), which is not installed", row.note)
            assert package, row
            lines = [line for line in shown.splitlines() if f"not measured, {row.note}" in line]
            assert len(lines) == 1  # for all rows that need the package
            assert name in lines[0]
            continue
        assert row.above == pytest.approx(row.loss - first.loss)
        assert [(x.task, x.distance) for x in row.recall] == [(x.task, x.distance) for x in first.recall]
        assert row.size == pytest.approx(2 * row.nbytes / first.nbytes)
        assert (row.needed is None) != (row.name.partition(",")[0] in PRESSES)
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


def counting(measured):
    """Two caches besides the first; each call of ``prepare`` is noted."""

    def noted(cache):
        def prepare(model):
            measured.append(cache.name)
            if measured == ["DynamicCache", "8 bits"]:
                raise KeyboardInterrupt
            return cache.prepare(model)

        return dataclasses.replace(cache, prepare=prepare)

    def rows(*sizes):
        return [noted(x) for x in cache_rows(*sizes) if x.name in ("DynamicCache", "8 bits", "window of 276")]

    return rows


@pytest.mark.full
def test_a_comparison_goes_on_where_it_was_interrupted(folder, book, tmp_path) -> None:
    config, out, measured = settings(folder, book, num_windows=1), tmp_path / "out", []
    options = {"rows": counting(measured), "show_progress": False}
    with pytest.raises(KeyboardInterrupt):
        compare_caches(config, out, **options)
    assert sorted(path.name for path in (out / "rows").iterdir()) == ["dynamiccache.json"]
    with pytest.raises(ConfigError, match="already has results: give --resume"):
        compare_caches(config, out, **options)
    with pytest.raises(ConfigError, match="begun with task.seed = 0, now 1"):
        compare_caches(settings(folder, book, num_windows=1, seed=1), out, resume=True, **options)
    record = compare_caches(config, out, resume=True, **options).record
    assert measured == ["DynamicCache", "8 bits", "8 bits", "window of 276"]
    assert record == compare_caches(config, out, resume=True, **options).record  # it is only read
    assert len(measured) == 4
    whole = compare_caches(config, tmp_path / "whole", **options).record
    for row, same in zip(record.rows, whole.rows, strict=True):
        assert (row.name, row.losses, row.recall, row.nbytes) == (same.name, same.losses, same.recall, same.nbytes)

    some = settings(folder, book, num_windows=1, only="window")
    assert [x.name for x in compare_caches(some, out, resume=True, **options).record.rows] == [
        "DynamicCache",
        "window of 276",
    ]
    assert len(measured) == 7
    (out / "rows" / "dynamiccache.json").write_text("{")
    with pytest.raises(CheckpointError, match="remove it to measure DynamicCache again"):
        compare_caches(config, out, resume=True, **options)
    with pytest.raises(ConfigError, match="no cache has 'widow' in its name or description"):
        compare_caches(settings(folder, book, only="widow"), tmp_path / "none", **options)


def test_other_text_is_another_comparison(folder, book, tmp_path) -> None:
    path, options = tmp_path / "book.txt", {"rows": _only_plain_and_window, "show_progress": False}
    path.write_text(book.read_text())
    config = settings(folder, path, num_windows=1, num_prompts=0)
    compare_caches(config, tmp_path / "out", **options)
    path.write_text(book.read_text()[1:])
    with pytest.raises(ConfigError, match="begun with text_sha256"):
        compare_caches(config, tmp_path / "out", resume=True, **options)


@pytest.mark.full
def test_other_weights_or_another_calibration_are_another_comparison(folder, book, tmp_path) -> None:
    from structattn.integrations.transformers import calibrate

    model_folder, file = tmp_path / "model", tmp_path / "calibration.safetensors"
    shutil.copytree(folder, model_folder)
    model = transformers.LlamaForCausalLM.from_pretrained(model_folder).eval()

    def save_calibration(length):
        calibrate(model, [torch.randint(256, (2, length))], methods=("heads", "bits")).save(file)

    save_calibration(300)
    options = {"rows": _only_plain, "show_progress": False}
    small = {"num_windows": 1, "num_prompts": 0, "num_steps": 1, "calibration": str(file)}
    config, out = settings(model_folder, book, **small), tmp_path / "out"
    compare_caches(config, out, **options)
    compare_caches(config, out, resume=True, **options)
    before = file.read_bytes()
    save_calibration(200)
    with pytest.raises(ConfigError, match="begun with calibration_sha256"):
        compare_caches(config, out, resume=True, **options)
    file.write_bytes(before)
    with torch.no_grad():
        model.lm_head.weight += 1
    model.save_pretrained(model_folder)
    with pytest.raises(ConfigError, match="begun with model_sha256"):
        compare_caches(config, out, resume=True, **options)


def test_presses_keep_what_they_say(folder, book, tmp_path) -> None:
    pytest.importorskip("kvpress")
    # No prompts: for many random queries at once kvpress finds no key that none of them sees, and raises.
    config = settings(folder, book, num_windows=1, num_prompts=0, only="kvpress")
    record = compare_caches(config, tmp_path / "out", show_progress=False).record
    rows = {row.name: row for row in record.rows}
    assert len(rows) == 1 + 2 * len(PRESSES)
    assert [row.note for row in record.rows] == [""] * len(rows)
    for name, row in rows.items():
        if name in ("DynamicCache", "ThinK, 0.5 of keys", "ThinK, 0.25 of keys"):
            continue
        share = float(name.partition(", ")[2])
        assert row.needed == pytest.approx(2 * (share * 560 + 3) / 563)
        assert row.size == pytest.approx(2 if name.startswith("KVzip") else row.needed)
        assert row.above != 0
    assert rows["ThinK, 0.5 of keys"].needed == pytest.approx(2 * (0.75 * 560 + 3) / 563)
    shown = text(report(record))
    assert "if freed" in shown
    assert "if freed" not in text(report(dataclasses.replace(record, rows=record.rows[:1])))


def test_names_of_many_rows_do_not_overlap(folder) -> None:
    def row(number, size, above, recall):
        found = RecallRow(task="copy", distance=9, share=recall, count=9)
        values = {"nbytes": 1, "size": size, "loss": 2 + above, "losses": (2.0,), "above": above}
        return CacheRow(name=f"a cache, number {number}", about="", recall=(found,), **values)

    made = torch.Generator().manual_seed(0)
    points = torch.rand(30, 3, generator=made).tolist()
    rows = [row(number, 0.1 + x * 0.9, 10 ** (-4 * y), round(4 * z) / 4) for number, (x, y, z) in enumerate(points)]
    sizes = {"config": {}, "model_name": "", "text_name": "", "num_tokens": 1, "num_windows": 1}
    record = CachesRecord(created="", versions={}, hardware=hardware(), rows=(row(30, 1, 0, 1), *rows), **sizes)
    for draw in (draw_loss, draw_recall):
        with in_style():
            figure, _, _ = draw(record)
            figure.draw_without_rendering()
        (ax,) = figure.axes
        boxes = [Text.get_window_extent(label) for label in ax.texts]  # without leaders
        assert len(boxes) == (30 if draw is draw_loss else 31)
        for one, other in combinations(boxes, 2):
            assert Bbox.intersection(one, other) is None


def test_mistakes_are_one_line(folder, book, tmp_path, capsys) -> None:
    def refused(kind, match, config):
        with pytest.raises(kind, match=match):
            compare_caches(config, tmp_path / "out", show_progress=False)
        assert not (tmp_path / "out" / "results.json").exists()

    refused(ConfigError, "expected task.model, got none: give --set task.model=FOLDER", settings("", book))
    refused(ConfigError, "expected task.data, got none: give --data TEXT", settings(folder, ""))
    refused(ConfigError, "no such folder", settings(tmp_path / "none", book))
    refused(ConfigError, "at most 1,020, the positions .* less 4", settings(folder, book, context_length=1200))
    refused(DataError, "no such file", settings(folder, tmp_path / "none.txt"))
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    refused(DataError, "the longest text has 12 tokens, and a window takes 564", settings(folder, short))
    for name, value in (("num_steps", 0), ("num_prompts", -1), ("seed", -1)):
        with pytest.raises(ConfigError, match=f"task.{name} must be"):
            settings(folder, book, **{name: value})
    assert cli.main(["compare", "caches", "--set", "task.modell=x"]) == 2
    assert "did you mean 'task.model'" in capsys.readouterr().err
