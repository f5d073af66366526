"""Making a corpus: documents to tokens to shards, in constant memory, resumable after a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from structattn.errors import CheckpointError, ConfigError, DataError
from structattn.files import TEMPORARY, write_atomic
from structattn.tasks.corpus.corpus import FORMAT, LENGTH_TYPE, MANIFEST, SPLITS, CorpusSplit
from structattn.tasks.corpus.documents import Source
from structattn.tasks.corpus.tokenizers import BytePairs, Bytes, Characters, Tokenizer, tokenizer_from

logger = logging.getLogger(__name__)
_PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How a corpus is made.

    Args:
        source: where the documents are from.
        tokens: ``"chars"``, the 96 of the paper; ``"bytes"`` of UTF-8; or ``"bpe"``, byte pairs learned from the training documents.
        vocab_size: of the byte pairs.
        bpe_characters: so many characters of the training documents, the first ones, are read to learn byte pairs.
        unknown: what happens to a character that is none of the 96: ``"error"`` or ``"drop"``.
        validation, test: shares of the documents that are kept for validation and test. Which ones is a function of their text, so that
            equal documents are in one split, however often they come and whatever else there is.
        shard_tokens: tokens of a file, about; as many of each split are in memory.

    Raises:
        ConfigError: a share is negative, or nothing is left to train on.
    """

    source: Source
    tokens: Literal["chars", "bytes", "bpe"] = "chars"
    vocab_size: int = 4096
    bpe_characters: int = 50_000_000
    unknown: Literal["error", "drop"] = "error"
    validation: float = 0.05
    test: float = 0.05
    shard_tokens: int = 2**24

    def __post_init__(self) -> None:
        if self.tokens not in ("chars", "bytes", "bpe"):
            raise ConfigError(f"tokens: {self.tokens!r} is not chars, bytes or bpe")
        if not (self.validation > 0 and self.test > 0 and self.validation + self.test < 1):
            raise ConfigError(
                f"validation and test are positive shares that sum to less than 1, got {self.validation} and {self.test}"
            )
        for name in ("bpe_characters", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.unknown not in ("error", "drop"):
            raise ConfigError(f"unknown: {self.unknown!r} is not error or drop")
        if self.unknown == "drop" and self.tokens != "chars":
            raise ConfigError(f"{self.tokens} know every character: unknown=drop belongs to chars")


def split_of(text: str, validation: float, test: float) -> CorpusSplit:
    """The split of a document, by a hash of its text."""
    digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()
    place = int.from_bytes(digest[:8], "little") / 2**64
    return "test" if place < test else "validation" if place < test + validation else "train"


@dataclass
class _Buffer:
    """Documents of a split that are not on disk yet, and what is."""

    tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    shards: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


class _Writer:
    """Shards and, after each, the record that a later call continues from."""

    def __init__(
        self,
        out: Path,
        tokenizer: Tokenizer,
        settings: dict[str, Any],
        files: str | None,
        progress: dict[str, Any] | None,
    ) -> None:
        self.out, self.tokenizer, self.settings, self.files = out, tokenizer, settings, files
        self.dtype = np.dtype(
            "<u1" if tokenizer.vocab_size <= 2**8 else "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
        )
        self.num_documents = 0 if progress is None else int(progress["documents"])
        self.num_characters = 0 if progress is None else int(progress["characters"])
        self.buffers = {name: _Buffer() for name in SPLITS}
        if progress is not None:
            for name in SPLITS:
                self.buffers[name].shards = progress["splits"][name]

    def add(self, split: CorpusSplit, tokens: npt.NDArray[Any], characters: int) -> None:
        if len(tokens):
            self.buffers[split].tokens.append(tokens)
        self.num_documents += 1
        self.num_characters += characters

    def flush(self) -> None:
        """Writes what is in memory, then the record of it: what a kill in between leaves is written again."""
        for split, buffer in self.buffers.items():
            if buffer.tokens:
                buffer.shards.append(self._write(f"{split}-{len(buffer.shards):05d}", buffer.tokens))
                buffer.tokens = []
        write_atomic(self.out / _PROGRESS, json.dumps(self._record()))

    def _write(self, stem: str, documents: list[npt.NDArray[Any]]) -> dict[str, Any]:
        lengths = np.array([len(tokens) for tokens in documents], dtype=LENGTH_TYPE)
        tokens = np.concatenate(documents).astype(self.dtype)
        entry: dict[str, Any] = {"tokens": len(tokens), "documents": len(documents)}
        for kind, name, array in (("file", f"{stem}.tokens", tokens), ("lengths_file", f"{stem}.lengths", lengths)):
            data = array.tobytes()
            write_atomic(self.out / name, data)
            entry |= {kind: name, f"{kind}_sha256": hashlib.sha256(data).hexdigest()}
        return entry

    def _record(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "files": self.files,
            "tokenizer": self.tokenizer.description(),
            "documents": self.num_documents,
            "characters": self.num_characters,
            "splits": {name: buffer.shards for name, buffer in self.buffers.items()},
        }

    def manifest(self) -> dict[str, Any]:
        splits = {
            name: {
                "documents": sum(shard["documents"] for shard in buffer.shards),
                "tokens": sum(shard["tokens"] for shard in buffer.shards),
                "shards": buffer.shards,
            }
            for name, buffer in self.buffers.items()
        }
        hashes = [shard["file_sha256"] + shard["lengths_file_sha256"] for s in splits.values() for shard in s["shards"]]
        return {
            "format": FORMAT,
            "settings": self.settings,
            "tokenizer": self.tokenizer.description(),
            "vocab_size": self.tokenizer.vocab_size,
            "dtype": self.dtype.str,
            "documents": self.num_documents,
            "characters": self.num_characters,
            "splits": splits,
            "sha256": hashlib.sha256("".join(hashes).encode()).hexdigest(),
        }


def prepare(config: PrepareConfig, out: Path, *, resume: bool = False, show_progress: bool = True) -> dict[str, Any]:
    """Writes a corpus: token shards ``SPLIT-NNNNN.tokens``, lengths of documents beside them, and ``manifest.json`` at the end.

    The same documents and settings give the same files, whether or not it was killed in between.

    Args:
        config: settings.
        out: the folder, made when missing.
        resume: continue what was begun there; a finished corpus of the same settings is returned at once, also where its source is gone.
        show_progress: a progress bar on stderr.

    Returns:
        The manifest.

    Raises:
        ConfigError: the folder is not empty and ``resume`` is off, or was begun with other settings or other files.
        DataError: a document cannot be read or encoded; no document fell into a split.
        CheckpointError: a file cannot be written, such as on a full disk: free some space and resume.

    Cost: memory of one document and ``shard_tokens`` tokens of each split.
    """
    settings = _settings(config)
    progress = _begun(out, settings, resume)
    if progress is not None:
        _check_files(out, progress, config.source)
    if progress is not None and (out / MANIFEST).exists():
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        return manifest
    for stale in out.glob(f"{TEMPORARY}*"):
        stale.unlink(missing_ok=True)
    files = config.source.files()
    sizes = (
        None
        if files is None or any(path.suffix.lower() == ".gz" for path in files)
        else [p.stat().st_size for p in files]
    )
    with tqdm(
        total=None if sizes is None else sum(sizes),
        unit="B",
        unit_scale=True,
        disable=not show_progress,
        desc="reading",
    ) as bar:
        tokenizer = _tokenizer(config) if progress is None else tokenizer_from(progress["tokenizer"])
        writer = _Writer(out, tokenizer, settings, _fingerprint(files), progress)
        bar.update(writer.num_characters)
        for document in config.source.documents(skip=writer.num_documents):
            split = split_of(document.text, config.validation, config.test)
            writer.add(split, tokenizer.encode(document.text, document.name), len(document.text))
            bar.update(len(document.text))
            if max(buffer.num_tokens for buffer in writer.buffers.values()) >= config.shard_tokens:
                writer.flush()
        writer.flush()
    manifest = writer.manifest()
    _check_splits(manifest, config)
    write_atomic(out / MANIFEST, json.dumps(manifest, indent=1))
    return manifest


def _settings(config: PrepareConfig) -> dict[str, Any]:
    """The settings that decide what is written, as plain data."""
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return settings


def _begun(out: Path, settings: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """What a call before this one recorded, ``None`` if there is nothing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in out.iterdir()}
    except OSError as error:
        raise CheckpointError(f"cannot write to {out}: {error.strerror or error}") from error
    if names and not resume:
        raise ConfigError(f"{out} is not empty: resume what was begun there, or use another folder")
    if _PROGRESS not in names:
        if foreign := sorted(name for name in names if not name.startswith((TEMPORARY, *SPLITS))):
            raise ConfigError(f"{out} holds {foreign[0]!r}, which is not of a corpus: use another folder")
        return None
    try:
        progress: dict[str, Any] = json.loads((out / _PROGRESS).read_text(encoding="utf-8"))
        before = progress["settings"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(
            f"{out / _PROGRESS}: expected the record of a begun corpus, got: {error!r}. Begin anew"
        ) from None
    different = [key for key in settings if before.get(key) != settings[key]]
    if different:
        key = different[0]
        raise ConfigError(
            f"{out} was begun with {key} = {before.get(key)!r}, now {settings[key]!r}: use another folder"
        )
    return progress


def _fingerprint(files: list[Path] | None) -> str | None:
    """A hash of which files a source has, and of their sizes; ``None`` for a data set."""
    if files is None:
        return None
    return hashlib.sha256(
        "".join(f"{path}\0{path.stat().st_size}\n" for path in files).encode(errors="surrogateescape")
    ).hexdigest()


def _check_files(out: Path, progress: dict[str, Any], source: Source) -> None:
    """Documents are skipped by their number: among other files, some would be left out and others come twice."""
    begun = progress.get("files")
    if begun is not None and Path(source.path).exists() and _fingerprint(source.files()) != begun:
        raise ConfigError(
            f"{out} was begun when {source.path} had other files, or files of other sizes: begin anew in another folder"
        )


def _tokenizer(config: PrepareConfig) -> Tokenizer:
    if config.tokens == "chars":
        return Characters(config.unknown)
    if config.tokens == "bytes":
        return Bytes()
    return BytePairs.train(_training_texts(config), config.vocab_size)


def _training_texts(config: PrepareConfig) -> Iterator[str]:
    """The first training documents, up to ``bpe_characters`` in all."""
    left = config.bpe_characters
    for document in config.source.documents():
        if split_of(document.text, config.validation, config.test) == "train":
            Bytes().encode(
                document.text, document.name
            )  # what UTF-8 cannot hold is named here; the library does not say where
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                return


def _check_splits(manifest: dict[str, Any], config: PrepareConfig) -> None:
    count = manifest["documents"]
    for name in SPLITS:
        if not manifest["splits"][name]["tokens"]:
            raise DataError(
                f"{config.source.path}: expected documents for each split, got {count} in all and none for {name}. Give more "
                "documents (--document-start cuts a file into several), or larger shares"
            )
