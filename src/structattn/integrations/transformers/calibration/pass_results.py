"""What the passes of a calibration have measured so far, in a file, so that a stopped one can go on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from structattn.errors import ConfigError
from structattn.tensor_files import read_tensors, write_tensors

_KEY = "structattn_partial_calibration"
_VERSION = 1
_BYTES_AT_ONCE = 2**26  # of a parameter that is hashed


class PassResults:
    """Named sets of tensors, written to a file whenever one changes.

    Args:
        path: the file, which need not exist; ``None``: nothing is kept, and nothing is there.
        of: plain data that tells whose results these are, by what an error calls a partial calibration where
            the data differ, such as "of other texts".

    Raises:
        ConfigError: the file has the results of another model, of other texts or options.
        CheckpointError: the file is damaged, or no such file.
    """

    def __init__(self, path: Path | None, of: Mapping[str, Any]) -> None:
        self.path, self._of = path, json.loads(json.dumps(dict(of)))
        self._sets: dict[str, dict[str, Tensor]] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        remedy = "remove it to calibrate from the start"
        data, tensors = read_tensors(path, _KEY, what="partial calibration", remedy=remedy, version=_VERSION)
        others = [words for words, value in self._of.items() if data["of"].get(words) != value]
        if others:
            raise ConfigError(
                f"{path} is a partial calibration {' and '.join(others)}: name another file with resume=, or {remedy}"
            )
        for name in data["sets"]:
            self._sets[name] = {}
        for key, tensor in tensors.items():
            name, _, part = key.partition("/")
            self._sets[name][part] = tensor

    def get(self, name: str) -> dict[str, Tensor] | None:
        """A set, on the CPU; ``None``: it was not kept."""
        return self._sets.get(name)

    def passes(self, name: str) -> int:
        """How many passes have been added to a set; 0: there is none."""
        return int(self._sets[name]["passes"]) if name in self._sets else 0

    def keep(self, name: str, tensors: Mapping[str, Tensor], *, passes: int = 0, drop: Sequence[str] = ()) -> None:
        """Keeps a set in place of what had its name, and writes the file.

        Args:
            name: of the set.
            tensors: copied.
            passes: how many have been added to it.
            drop: names of sets that are needed no longer.

        Raises:
            CheckpointError: the file cannot be written.
        """
        if self.path is None:
            return
        copies = {part: x.detach().to("cpu", copy=True).contiguous() for part, x in tensors.items()}
        self._sets[name] = {**copies, "passes": torch.tensor(passes)}
        for other in drop:
            self._sets.pop(other, None)
        flat = {f"{name}/{part}": x for name, parts in self._sets.items() for part, x in parts.items()}
        write_tensors(self.path, _KEY, {"format_version": _VERSION, "of": self._of, "sets": [*self._sets]}, flat)

    def remove(self) -> None:
        """Removes the file, once all is done."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


def digest_of_model(model: PreTrainedModel) -> str:
    """SHA-256 of all parameters and buffers, with their names."""
    digest = hashlib.sha256()
    for name, x in model.state_dict().items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        for part in x.detach().contiguous().flatten().split(_BYTES_AT_ONCE // x.element_size()):
            digest.update(part.cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def digest_of_tensors(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of some tensors, in their order."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode() + x.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
