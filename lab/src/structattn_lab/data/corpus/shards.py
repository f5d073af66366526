"""Writes the shards of a corpus: tokens and lengths of documents in files of a bounded size, and the record
from which a later call continues.
"""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from structattn.files import signed, write_atomic
from structattn_lab.data.corpus.corpus import FORMAT, LENGTH_TYPE
from structattn_lab.data.corpus.tokenizers import Tokenizer
from structattn_lab.data.splits import SPLITS, DataSplit

PROGRESS = "progress.json"


class _Buffer:
    """The documents of a split in memory, and the shards on disk."""

    def __init__(self, dtype: np.dtype[Any], shards: list[dict[str, Any]]) -> None:
        self._dtype, self.shards = dtype, shards
        self._tokens, self._lengths = bytearray(), array(LENGTH_TYPE.char)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens) // self._dtype.itemsize

    def add(self, tokens: npt.NDArray[Any]) -> None:
        self._tokens += tokens.astype(self._dtype, copy=False).data
        self._lengths.append(len(tokens))

    def write(self, out: Path, split: str) -> None:
        """Writes a shard, if there are documents, and clears the memory."""
        if not self._lengths:
            return
        stem = f"{split}-{len(self.shards):05d}"
        entry: dict[str, Any] = {"tokens": self.num_tokens, "documents": len(self._lengths)}
        lengths = np.array(self._lengths, dtype=LENGTH_TYPE).tobytes()
        for kind, name, data in (
            ("file", f"{stem}.tokens", bytes(self._tokens)),
            ("lengths_file", f"{stem}.lengths", lengths),
        ):
            write_atomic(out / name, data)
            entry |= {kind: name, f"{kind}_sha256": hashlib.sha256(data).hexdigest()}
        self.shards.append(entry)
        self._tokens, self._lengths = bytearray(), array(LENGTH_TYPE.char)


def text_sha256(before: str, text: str) -> str:
    """The digest of documents in their order, from that of those before a text."""
    return hashlib.sha256(before.encode() + text.encode("utf-8", errors="surrogatepass")).hexdigest()


class ShardWriter:
    """Writes shards and, after each, the record from which a later call continues."""

    def __init__(
        self,
        out: Path,
        tokenizer: Tokenizer,
        settings: dict[str, Any],
        files: str | None,
        progress: dict[str, Any] | None,
    ) -> None:
        self.out, self.vocab_size = out, tokenizer.vocab_size
        self.dtype = np.dtype("<u1" if self.vocab_size <= 2**8 else "<u2" if self.vocab_size <= 2**16 else "<u4")
        new = {"documents": 0, "characters": 0, "text_sha256": "", "splits": {name: [] for name in SPLITS}}
        written: dict[str, Any] = progress or new
        self._record: dict[str, Any] = {
            "settings": settings,
            "files": files,
            "tokenizer": tokenizer.description(),
            "documents": int(written["documents"]),
            "characters": int(written["characters"]),
            "splits": {name: written["splits"][name] for name in SPLITS},
        }
        if "text_sha256" in written:  # of a corpus of an earlier version it is not known
            self._record["text_sha256"] = written["text_sha256"]
        # Each buffer adds its shards to the list in the record.
        self._buffers = {name: _Buffer(self.dtype, shards) for name, shards in self._record["splits"].items()}

    @property
    def num_documents(self) -> int:
        """The documents that were added, here and in earlier calls."""
        return int(self._record["documents"])

    @property
    def num_characters(self) -> int:
        """Their characters."""
        return int(self._record["characters"])

    def add(self, split: DataSplit, tokens: npt.NDArray[Any], text: str) -> int:
        """Adds a document; returns the number of tokens of this split in memory."""
        if len(tokens):
            self._buffers[split].add(tokens)
        self._record["documents"] += 1
        self._record["characters"] += len(text)
        if "text_sha256" in self._record:
            self._record["text_sha256"] = text_sha256(self._record["text_sha256"], text)
        return self._buffers[split].num_tokens

    def flush(self) -> None:
        """Writes the documents in memory, then their record: shards without a record are written again."""
        for split, buffer in self._buffers.items():
            buffer.write(self.out, split)
        write_atomic(self.out / PROGRESS, signed(self._record))

    def manifest(self) -> dict[str, Any]:
        """The contents of ``manifest.json``, when everything is written."""
        splits = {
            name: {
                "documents": sum(shard["documents"] for shard in shards),
                "tokens": sum(shard["tokens"] for shard in shards),
                "shards": shards,
            }
            for name, shards in self._record["splits"].items()
        }
        hashes = [shard["file_sha256"] + shard["lengths_file_sha256"] for s in splits.values() for shard in s["shards"]]
        return {
            "format": FORMAT,
            "settings": self._record["settings"],
            "tokenizer": self._record["tokenizer"],
            "vocab_size": self.vocab_size,
            "dtype": self.dtype.str,
            "documents": self.num_documents,
            "characters": self.num_characters,
            "splits": splits,
            "sha256": hashlib.sha256("".join(hashes).encode()).hexdigest(),
        }
