"""A prepared corpus: token shards on disk, mapped into memory, with the lengths of documents."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from structattn.errors import CheckpointError, DataError
from structattn.files import read_signed
from structattn_lab.data.corpus.tokenizers import Tokenizer, tokenizer_from
from structattn_lab.data.plain_text import is_there
from structattn_lab.data.splits import SPLITS, DataSplit
from structattn_lab.old_formats import UNSIGNED_CORPUS

FORMAT = 1
MANIFEST = "manifest.json"
LENGTH_TYPE = np.dtype("<u4")
_HINT = "Prepare it with `structattn data prepare text`"


@dataclass(frozen=True)
class Windows:
    """Spans of text of one length.

    Attributes:
        tokens: (N, length) int64.
        documents: (N, length) int64, the number of the document that each token is of; equal numbers, one
            document.
    """

    tokens: Tensor
    documents: Tensor


class SplitTokens:
    """The tokens of a split, documents concatenated, in one or more arrays that are not copied.

    Args:
        arrays: the concatenated tokens, in order.
        lengths: tokens of each document, in their order.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], lengths: npt.NDArray[np.integer[Any]]) -> None:
        self._arrays = list(arrays)
        self._edges = np.cumsum([0, *map(len, self._arrays)])
        self._document_ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._edges[-1])

    @property
    def num_documents(self) -> int:
        """The documents of the split."""
        return len(self._document_ends)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens start ... stop - 1, a copy."""
        first = int(np.searchsorted(self._edges, start, side="right")) - 1
        parts = []
        while start < stop:
            begin = int(self._edges[first])
            end = min(stop, int(self._edges[first + 1]))
            parts.append(self._arrays[first][start - begin : end - begin])
            start, first = end, first + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def windows(self, starts: Tensor, length: int) -> Windows:
        """The ``length`` tokens from each position of ``starts``, (N,) ints."""
        first = starts.tolist()
        tokens = np.stack([self.read(start, start + length) for start in first])
        positions = np.asarray(first)[:, None] + np.arange(length)
        documents = np.searchsorted(self._document_ends, positions, side="right")
        return Windows(torch.from_numpy(tokens), torch.from_numpy(documents))


Tokens = SplitTokens  # its name until 0.2


class Corpus:
    """A prepared corpus, opened for reading: only the lengths of the documents are loaded.

    Args:
        folder: the corpus.

    Attributes:
        manifest: contents of ``manifest.json``: tokenizer, source, counts, and the files with their hashes.
        tokenizer: of the tokens.
        splits: ``SplitTokens`` by name.

    Raises:
        DataError: not a corpus, one of a newer format, or with a file of another size than written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest = read_signed(folder / MANIFEST, UNSIGNED_CORPUS)
        except CheckpointError as error:
            if not is_there(str(folder / MANIFEST)):
                got = f"a folder without {MANIFEST}" if folder.is_dir() else "no such folder"
                raise DataError(f"{folder}: expected a corpus, got {got}. {_HINT}") from None
            raise DataError(f"expected the manifest of a corpus: {error}. {_HINT}") from None
        try:
            if self.manifest.get("format") != FORMAT:
                raise DataError(
                    f"{folder}: expected a corpus of format {FORMAT}, got {self.manifest.get('format')!r}. Prepare it "
                    "anew, or update structattn"
                )
            self.tokenizer: Tokenizer = tokenizer_from(self.manifest["tokenizer"])
            self._type = np.dtype(self.manifest["dtype"])
            if self._type.kind != "u":
                raise ValueError(f"tokens of type {self.manifest['dtype']!r}")
            self.splits: dict[str, SplitTokens] = {name: self._open(name) for name in SPLITS}
        except DataError:
            raise
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            got = str(error) if isinstance(error, ValueError) else "a field of a wrong type"
            if isinstance(error, KeyError):
                got = f"one without {error}"
            raise DataError(f"{folder / MANIFEST}: expected the manifest of a corpus, got {got}. {_HINT}") from None

    @property
    def sha256(self) -> str:
        """A hash of the tokenizer and the hashes of all files: equal for equal tokens, regardless of where
        they were made.
        """
        content = {name: self.manifest[name] for name in ("tokenizer", "dtype", "splits")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _open(self, split: DataSplit) -> SplitTokens:
        arrays: list[npt.NDArray[Any]] = []
        lengths: list[npt.NDArray[Any]] = []
        for shard in self.manifest["splits"][split]["shards"]:
            counts = shard["tokens"], shard["documents"]
            if not all(type(count) is int and count > 0 for count in counts):
                raise ValueError(f"a shard of {split} has {counts[0]!r} tokens in {counts[1]!r} documents")
            file = self._checked(shard["file"], shard["tokens"] * self._type.itemsize)
            path = self._checked(shard["lengths_file"], shard["documents"] * LENGTH_TYPE.itemsize)
            # NumPy's mapping would keep every file open, and there may be thousands.
            mapped = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8).numpy()
            arrays.append(mapped.view(self._type))
            lengths.append(np.fromfile(path, dtype=LENGTH_TYPE))
            if (total := int(lengths[-1].sum(dtype=np.int64))) != shard["tokens"]:
                raise DataError(
                    f"{path}: expected lengths of {shard['tokens']:,} tokens in all, got {total:,}. {_HINT}"
                )
        return SplitTokens(arrays, np.concatenate(lengths) if lengths else np.zeros(0, LENGTH_TYPE))

    def _checked(self, name: str, size: int) -> Path:
        if Path(name).name != name:
            raise ValueError(f"a file outside of the folder, {name!r}")
        path = self.folder / name
        actual_size = path.stat().st_size if path.is_file() else None
        if actual_size != size:
            got = "no such file" if actual_size is None else f"{actual_size:,} bytes"
            raise DataError(f"{path}: expected {size:,} bytes, got {got}. {_HINT}")
        return path

    def summary(self) -> str:
        """The tokenizer, and documents and tokens of each split, one line each."""
        lines = [f"{self.tokenizer.vocab_size:,} different tokens ({self.manifest['tokenizer']['kind']})"]
        for name, tokens in self.splits.items():
            lines.append(f"{name:<10} {tokens.num_documents:>12,} documents {len(tokens):>16,} tokens")
        return "\n".join(lines)

    def verify(self) -> None:
        """Reads every file and compares its hash with the manifest; raises ``DataError`` with the first that
        differs.

        Cost: reading all files once in a process, about 1 GB/s where they are in memory; those that have not
            changed since are not read again.
        """
        for split in self.manifest["splits"].values():
            for shard in split["shards"]:
                for kind in ("file", "lengths_file"):
                    path = self.folder / shard[kind]
                    status = path.stat()
                    if _digest(path.absolute(), status.st_size, status.st_mtime_ns) != shard[f"{kind}_sha256"]:
                        raise DataError(f"{path}: the contents have changed since it was written. {_HINT}")


@functools.cache
def _digest(path: Path, size: int, changed: int) -> str:
    """The hash of a file as it was at a time, in nanoseconds."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
