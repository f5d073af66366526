"""Caches as safetensors files: the tensors, and in the metadata all else, with a hash of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structattn.checks import check_device, check_path
from structattn.errors import CheckpointError
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextHistory, TextUnits
from structattn.tensor_files import read_tensors, write_tensors

FORMAT_VERSION = 1
_KEY = "structattn_cache"


def _layout_data(layout: Layout | None) -> dict[str, Any] | None:
    return None if layout is None else dataclasses.asdict(layout)


def _layout_of(data: dict[str, Any] | None) -> Layout | None:
    if data is None:
        return None
    if "window" in data:
        first, second = data["ranks"]
        return GlobalWindowLayout((first, second), data["window"], data.get("scaling", "variance"))
    return LevelLayout(
        tuple(data["ranks"]),
        tuple(data["block_sizes"]),
        data["scaling"],
        data["value_ranks"],
        data["boundaries"],
        data.get("windows"),
    )


State = tuple[dict[str, Any], dict[str, Tensor]]


def save(path: str | Path, layers: Sequence[tuple[State, Layout | None]], text: TextHistory | None = None) -> None:
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
        for number, ((_, found), _) in enumerate(layers)
        for name, x in found.items()
    }
    plain = [{**state, "layout": _layout_data(layout)} for (state, _), layout in layers]
    data: dict[str, Any] = {"format_version": FORMAT_VERSION, "layers": plain}
    if text is not None:
        data["text"] = {"units": text.units, "rows": len(text.marks)}
        tensors["text.table"] = torch.tensor(list(text.table.marks), dtype=torch.uint8)
        for row, marks in enumerate(text.marks):
            tensors[f"text.{row}"] = torch.tensor(list(marks), dtype=torch.uint8)
    write_tensors(path, _KEY, data, tensors)


def load(
    path: str | Path, device: torch.device | str | None
) -> tuple[list[tuple[State, Layout | None]], TextHistory | None]:
    """What ``save`` wrote, verified, with the tensors on ``device`` (default: the CPU).

    Raises:
        ConfigError: the path or the device is none.
        CheckpointError: the file is missing, truncated, changed, or not a cache.
    """
    device = None if device is None else check_device("device", device)
    data, tensors = read_tensors(path, _KEY, what="cache", remedy="decode again", version=FORMAT_VERSION)
    found: list[tuple[State, Layout | None]] = []
    for number, plain in enumerate(data["layers"]):
        own = {name.partition(".")[2]: x for name, x in tensors.items() if name.partition(".")[0] == str(number)}
        moved = {name: x if device is None else x.to(device) for name, x in own.items()}
        found.append(((plain, moved), _layout_of(plain["layout"])))
    text = None
    if "text" in data:
        padding = data["layers"][0]["left_padding"]
        table = TextUnits(bytes(tensors["text.table"].tolist()))
        text = TextHistory(table, tuple(data["text"]["units"]), padding)
        text.restore([bytes(tensors[f"text.{row}"].tolist()) for row in range(data["text"]["rows"])])
    return found, text
