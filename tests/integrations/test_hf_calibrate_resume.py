"""A calibration that is stopped goes on after its last pass, to the same numbers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from structattn.errors import CheckpointError, ConfigError
from structattn.integrations.transformers import Calibration, calibrate

transformers = pytest.importorskip("transformers")

METHODS = ("tokens", "heads", "bits", "levels")
LENGTH = 160
AT_ONCE = 4  # passes of a call that is stopped: no result takes more


def small_model(seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=97,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def small_texts():
    ids = torch.randint(97, (6, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :20] = 0
    return [{"input_ids": ids[:2], "attention_mask": mask}, *ids[2:].split(1)]


def read(model, path, *, passes=None, texts=None, methods=METHODS, **options):
    """A calibration, and how many passes it took; stopped as by Ctrl-C before one more than ``passes``."""
    done = 0

    def count(_, args, inputs):
        nonlocal done
        if inputs["input_ids"].shape[1] < LENGTH:  # the model is looked at
            return
        if done == passes:
            raise KeyboardInterrupt
        done += 1

    handle = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        texts = small_texts() if texts is None else texts
        return calibrate(model, texts, methods=methods, resume=path, **options), done
    finally:
        handle.remove()


def content(calibration, folder):
    """The hash of all numbers of a calibration, bit by bit, which its file has."""
    calibration.save(folder / "calibration.safetensors")
    with safe_open(str(folder / "calibration.safetensors"), framework="pt") as file:
        return file.metadata()["sha256"]


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """The numbers and the passes of a calibration that is not stopped."""
    found, passes = read(model, None)
    assert found.bits is not None
    assert found.tokens is not None
    assert all(layer.sensitivity > 0 for layer in found.layers)
    return content(found, tmp_path_factory.mktemp("whole")), passes


@pytest.mark.full
def test_one_that_is_stopped_again_and_again_ends_with_the_same_numbers(model, whole, tmp_path) -> None:
    path, calls = tmp_path / "partial.safetensors", 0
    implementation = model.config._attn_implementation
    while True:
        calls += 1
        assert calls < 100
        try:
            found, last = read(model, path, passes=AT_ONCE)
            break
        except KeyboardInterrupt:
            assert model.config._attn_implementation == implementation
    wanted, passes = whole
    assert content(found, tmp_path) == wanted
    assert passes <= AT_ONCE * (calls - 1) + last
    assert calls > passes // AT_ONCE  # so that it was stopped in every kind of pass
    again, passes = read(model, path)
    assert (content(again, tmp_path), passes) == (wanted, 0)
    assert list(tmp_path.glob(".tmp-*")) == []


@pytest.mark.quick(passes=[3])
@pytest.mark.parametrize("passes", [1, 3, 6, 12, 30])
def test_passes_that_are_kept_are_not_done_again(model, whole, tmp_path, passes) -> None:
    path = tmp_path / "partial.safetensors"
    with pytest.raises(KeyboardInterrupt):
        read(model, path, passes=passes)
    found, others = read(model, path)
    assert content(found, tmp_path) == whole[0]
    assert whole[1] - passes <= others <= whole[1] - passes + AT_ONCE


def test_what_is_kept_of_another_calibration_is_refused(model, tmp_path) -> None:
    path = tmp_path / "partial.safetensors"
    with pytest.raises(KeyboardInterrupt):
        read(model, path, passes=2)
    before = path.read_bytes()
    texts = small_texts()
    changed = small_model()
    changed.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    for other, options, match in (
        (changed, {}, "is a partial calibration of another model: name another file with resume=, or remove it"),
        (model, {"texts": texts[:-1]}, "calibration of other texts: name"),
        (model, {"texts": [*texts[:-1], (texts[-1] + 1) % 97]}, "calibration of other texts: name"),
        (model, {"num_queries": 8}, "calibration with other options: name"),
        (model, {"methods": ("bits",)}, "calibration with other options: name"),
        (changed, {"texts": texts[:2], "retrieval": False}, "of another model and of other texts and with other opt"),
    ):
        with pytest.raises(ConfigError, match=match):
            read(other, path, **options)
        assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="resume must be the name of a file"):
        read(model, 3)


def test_a_file_that_is_no_partial_calibration_is_refused(model, tmp_path) -> None:
    path = tmp_path / "partial.safetensors"
    with pytest.raises(KeyboardInterrupt):
        read(model, path, passes=2)
    kept = path.read_bytes()
    path.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(CheckpointError, match="cannot read the partial calibration"):
        read(model, path)
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="was changed since it was written.*remove it to calibrate from the star"):
        read(model, path)
    found, _ = read(model, None, methods=("levels",))
    found.save(path)
    with pytest.raises(CheckpointError, match="is not a partial calibration that structattn saved"):
        read(model, path)
    assert Calibration.load(path).layers


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL")
def test_a_killed_process_loses_one_pass(model, whole, tmp_path) -> None:
    path, passes = tmp_path / "partial.safetensors", whole[1]
    for stop in (2, 5, passes // 2):
        code = (
            "import os, signal\n"
            "from test_hf_calibrate_resume import read, small_model\n"
            "try:\n"
            f"    read(small_model(), {str(path)!r}, passes={stop})\n"
            "except KeyboardInterrupt:\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        folder = str(Path(__file__).parent)
        paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        killed = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    found, _ = read(model, path)
    assert content(found, tmp_path) == whole[0]
