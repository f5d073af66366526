"""Caches as safetensors files: the tensors, and in the metadata all else, with a hash of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from structattn.cache.contents import OtherLatentError
from structattn.cache.storage import storage_data, storage_from
from structattn.checks import check_device, check_path, describe, quoted
from structattn.errors import CheckpointError, ConfigError, StructAttnError
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextHistory, TextLayout, TextUnits, Unit
from structattn.tensor_files import read_tensors, write_tensors
from structattn.typed_records import read_as

FORMAT_VERSION = 1
_KEY = "structattn_cache"


def _layout_data(layout: AnyLayout | None) -> dict[str, Any] | None:
    return None if layout is None else dataclasses.asdict(layout)


def _layout_of(data: object) -> AnyLayout | None:
    """Raises ``ConfigError`` where a layout is written otherwise."""
    if isinstance(data, dict) and data.keys() == {"layouts"} and isinstance(data["layouts"], list):
        return HeadLayouts([_layout_of_head(layout) for layout in data["layouts"]])
    return _layout_of_head(data)


def _layout_of_head(data: object) -> Layout | None:
    """``_layout_of`` of one head."""
    if data is None:
        return None
    kind: type[Layout] = GlobalWindowLayout if isinstance(data, dict) and "window" in data else LevelLayout
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(data, dict) or not {"ranks"} <= data.keys() <= set(names):
        raise ConfigError(f"a layout has the fields {', '.join(names)}, got {describe(data)}")
    if kind is LevelLayout:
        data = {"block_sizes": (), **data}
    return kind(**data)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state as a file has it: as files of earlier versions where numbers are stored as they are."""
    storage = state["storage"]
    if storage is None:
        return {name: value for name, value in state.items() if name not in ("storage", "quantized")}
    return {**state, "storage": storage_data(storage)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """What a file holds of the cache of a layer, without the tensors; see ``LevelCache.state``. What has a
    default is newer than some files.
    """

    length: int
    oldest: tuple[tuple[int, ...], ...]
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    window: int | None
    chunk_size: int | None = None
    max_length: int | None
    page_size: int
    left_padding: tuple[int, ...] | None
    keeps: Literal["key features", "hidden state"]
    text: tuple[Unit, ...] | None = None
    storage: Any = None
    quantized: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    layout: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TextRecord:
    units: tuple[Unit, ...]
    rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FileRecord:
    format_version: int
    layers: tuple[LayerRecord, ...]
    text: _TextRecord | None = None


State = tuple[dict[str, Any], dict[str, Tensor]]


@contextmanager
def damaged(path: str | Path, what: str) -> Iterator[None]:
    """A context in which what a file holds is used: an error says that the file is damaged, and where.

    Raises:
        CheckpointError: something of structattn's own was raised.
        OtherLatentError: the latent that the caller gave does not fit, as it was raised.
    """
    try:
        yield
    except OtherLatentError:
        raise
    except StructAttnError as error:
        raise CheckpointError(
            f"{path} was changed since it was written, or is of another program: {what}: {error}"
        ) from error


def save(path: str | Path, layers: Sequence[tuple[State, AnyLayout | None]], text: TextHistory | None = None) -> None:
    """Writes the states of caches, with their layouts and what is remembered of the text, to one file.

    Raises:
        ConfigError: the path is none.
        CheckpointError: it cannot be written; a file that was there is untouched, and no folder is made.
    """
    path = check_path("path", path)
    if not path.parent.is_dir():
        raise CheckpointError(
            f"cannot write the cache {path}: there is no folder {path.parent}; make it, or correct the path"
        )
    tensors = {
        f"{number}.{name}": x.cpu().contiguous()
        for number, ((_, layer_tensors), _) in enumerate(layers)
        for name, x in layer_tensors.items()
    }
    layer_records = [_plain(state) | {"layout": _layout_data(layout)} for (state, _), layout in layers]
    data: dict[str, Any] = {"format_version": FORMAT_VERSION, "layers": layer_records}
    if text is not None:
        data["text"] = {"units": text.units, "rows": len(text.marks)}
        tensors["text.table"] = torch.tensor(list(text.table.marks), dtype=torch.uint8)
        for row, marks in enumerate(text.marks):
            tensors[f"text.{row}"] = torch.tensor(list(marks), dtype=torch.uint8)
    write_tensors(path, _KEY, data, tensors)


def load(
    path: str | Path, device: torch.device | str | None
) -> tuple[list[tuple[State, AnyLayout | None]], TextHistory | None]:
    """What ``save`` wrote, verified, with the tensors on ``device`` (default: the CPU).

    Raises:
        ConfigError: the path or the device is none.
        CheckpointError: the file is missing, truncated, changed, or not a cache.
    """
    device = None if device is None else check_device("device", device)
    data, tensors = read_tensors(path, _KEY, what="cache", remedy="decode again", version=FORMAT_VERSION)
    record = read_as(_FileRecord, data, str(path))
    if not record.layers:
        raise CheckpointError(f"{path} holds the caches of no layers")
    text_names = ["text.table", *(f"text.{row}" for row in range(record.text.rows))] if record.text is not None else []
    layer_numbers = [str(number) for number in range(len(record.layers))]
    for name in tensors:
        if name not in text_names and name.partition(".")[0] not in layer_numbers:
            raise CheckpointError(f"{path} holds a tensor {quoted(name)} of nothing that its record names")
    layers: list[tuple[State, AnyLayout | None]] = []
    for number, layer in enumerate(record.layers):
        layer_tensors = {
            name.partition(".")[2]: x for name, x in tensors.items() if name.partition(".")[0] == str(number)
        }
        layer_tensors = {name: x if device is None else x.to(device) for name, x in layer_tensors.items()}
        with damaged(path, f"layer {number}"):
            state = vars(layer) | {"storage": storage_from(layer.storage)}
            layers.append(((state, layer_tensors), _layout_of(layer.layout)))
    text = None
    if record.text is not None:
        with damaged(path, "the text"):
            text = _text_of(
                record.text, {name.partition(".")[2]: tensors.get(name) for name in text_names}, record.layers[0]
            )
    units = {unit for layer in record.layers for unit in layer.text or ()}
    if not units <= set(() if record.text is None else record.text.units) and len(record.layers) > 1:
        raise CheckpointError(
            f"{path} has levels of text units {sorted(units)}, and does not hold which tokens begin them"
        )
    return layers, text


def _text_of(record: _TextRecord, marks: dict[str, Tensor | None], layer: LayerRecord) -> TextHistory:
    """The text of the caches, of whose layers this is one; raises ``CheckpointError`` where it is of other
    tokens.
    """
    rows = []
    for name, x in marks.items():
        if x is None or x.dtype != torch.uint8 or x.dim() != 1:
            raise CheckpointError(f"text.{name} must be a uint8 tensor of one dimension, got {describe(x)}")
        rows.append(bytes(x.tolist()))
    table, *rows = rows
    padding = layer.left_padding or (0,) * record.rows
    lengths, expected = [len(row) for row in rows], [max(0, layer.length - pad) for pad in padding]
    if lengths != expected:
        raise CheckpointError(f"expected rows of {expected} tokens, got {lengths}")
    TextLayout((1,) * (len(record.units) + 1), record.units)  # checks them
    text = TextHistory(TextUnits(table), record.units, layer.left_padding)
    text.restore(rows)
    return text
