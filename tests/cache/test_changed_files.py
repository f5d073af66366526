"""Cache files that another program wrote: their hash fits, and what they say is wrong. Each is refused, or
does what it did before.
"""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import structattn as sa
from structattn.cache import LayerCaches, LevelCache
from structattn.errors import CheckpointError, StructAttnError
from structattn.tensor_files import write_tensors

KEY = "structattn_cache"
WRONG = [-3, "x", 1.5, True, None, 1000, [], {}, [1, 2], 2**70, [[0]], "9" * 5000]
SPECS = ["standard", "mlr:4|2|2", "mlr:4|4,values=4|4", "window:5"]


def saved(tmp_path, spec="mlr:4|2|2", length=20, layers=2, padding=(0, 2)):
    torch.manual_seed(0)
    model = sa.LanguageModel(
        11, spec, num_layers=layers, embed_dim=16, num_heads=2, context_length=64, rotary=sa.Rotary()
    )
    caches = model.new_cache(left_padding=padding)
    ids = torch.randint(11, (2, length + 1))
    model(ids[:, :length], caches=caches)
    path = tmp_path / "cache"
    caches.save(path)
    with safe_open(str(path), framework="pt") as file:
        record = json.loads(file.metadata()[KEY])
    return model, ids, path, record, load_file(path)


def places(value, path=()):
    """Every place of plain data."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(record, path, value):
    record = copy.deepcopy(record)
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    if value is not ...:
        inner[path[-1]] = value
    else:
        del inner[path[-1]]
    return record


@pytest.mark.full
@pytest.mark.parametrize("spec", SPECS)
def test_every_change_of_a_record_is_refused_or_harmless(tmp_path, spec) -> None:
    model, ids, path, record, tensors = saved(tmp_path, spec)
    step = lambda: model(ids[:, -1:], caches=LayerCaches.load(path))  # noqa: E731
    before, refused = step(), 0
    for place in places(record):
        for value in (..., *WRONG) if place else ():
            write_tensors(path, KEY, changed(record, place, value), tensors)
            try:
                LayerCaches.load(path)
            except CheckpointError:
                refused += 1
                continue
            try:  # what describes another model is for the model to refuse
                after = step()
            except StructAttnError:
                continue
            if place[-1] not in (
                "page_size",
                "max_length",
                "scaling",
                "window",
            ):  # these are another cache, and a right one
                torch.testing.assert_close(after, before)
    assert refused > 300


def test_every_change_of_a_tensor_is_refused(tmp_path) -> None:
    *_, path, record, tensors = saved(tmp_path)
    for name, x in tensors.items():
        for wrong in (None, x[..., :1], x[:1], x[:, :, :1], x.half(), x.long(), x[0], x.flatten(), x[..., :0]):
            others = {other: y.contiguous() for other, y in (tensors | {name: wrong}).items() if y is not None}
            write_tensors(path, KEY, record, others)
            with pytest.raises(CheckpointError, match="cache"):
                LayerCaches.load(path)
    for extra in ("2.0", "0.9", "x", "text.0", "0"):
        write_tensors(path, KEY, record, tensors | {extra: torch.zeros(1)})
        with pytest.raises(CheckpointError, match="cache"):
            LayerCaches.load(path)


@pytest.mark.parametrize("name", ["layers", "format_version"])
def test_a_missing_part_of_the_record_is_named(tmp_path, name) -> None:
    *_, path, record, tensors = saved(tmp_path, layers=1)
    write_tensors(path, KEY, {key: value for key, value in record.items() if key != name}, tensors)
    for load in (LayerCaches.load, LevelCache.load):
        with pytest.raises(CheckpointError, match="layers|format version"):
            load(path)


@pytest.mark.parametrize("length", [-3, "x", 1.5, True, 1000, 0])
def test_a_length_that_the_tensors_do_not_have_is_refused(tmp_path, length) -> None:
    *_, path, record, tensors = saved(tmp_path, layers=1, padding=None)
    write_tensors(path, KEY, changed(record, ("layers", 0, "length"), length), tensors)
    for load in (LayerCaches.load, LevelCache.load):
        with pytest.raises(CheckpointError, match="cache"):
            load(path)


def test_layers_of_different_lengths_are_refused(tmp_path) -> None:
    *_, path, record, tensors = saved(tmp_path, padding=None)
    short = saved(tmp_path, length=16, padding=None)
    own = {name: (short[4] if name.startswith("1.") else tensors)[name] for name in tensors}
    write_tensors(path, KEY, changed(record, ("layers", 1), short[3]["layers"][1]), own)
    with pytest.raises(CheckpointError, match="different numbers of tokens"):
        LayerCaches.load(path)
