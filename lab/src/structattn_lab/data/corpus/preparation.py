"""Prepares a corpus: documents to tokens to shards, in constant memory, resumable after a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from structattn.checks import check_choice, check_int, check_number
from structattn.errors import CheckpointError, ConfigError, DataError
from structattn.files import TEMPORARY, read_signed, remove_temporary, signed, write_atomic
from structattn.progress import progress_bar
from structattn_lab.data.corpus.corpus import MANIFEST, Corpus
from structattn_lab.data.corpus.documents import Document, Source
from structattn_lab.data.corpus.shards import PROGRESS, ShardWriter, text_sha256
from structattn_lab.data.corpus.tokenizers import (
    BytePairs,
    Bytes,
    Characters,
    ModelTokens,
    Tokenizer,
    tokenizer_from,
)
from structattn_lab.data.plain_text import ReadingStoppedError
from structattn_lab.data.splits import SPLITS, DataSplit
from structattn_lab.runs.folders import OF_EVERY_FOLDER, Owner, finished_in, opened

_RECORD = ("settings", "files", "tokenizer", "documents", "characters", "splits")
_FEW = 1000
_LARGEST_VOCABULARY = 2**24
# The names of all files that a corpus has, and of those that are not complete yet.
_OWN = re.compile(
    rf"{re.escape(TEMPORARY)}.*|{re.escape(PROGRESS)}|{re.escape(MANIFEST)}|({'|'.join(SPLITS)})-\d+\.(tokens|lengths)"
)


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Settings of the preparation of a corpus.

    Args:
        source: where the documents are from.
        tokens: ``"chars"``, the 96 of the paper; ``"bytes"`` of UTF-8; ``"bpe"``, byte pairs learned from the
            training documents; or ``"model"``, those of a trained model.
        model: of ``tokens="model"``: its folder, or its name on the hub.
        vocab_size: of the byte pairs.
        bpe_characters: the number of leading characters of the training documents from which byte pairs are
            learned.
        unknown: what happens to a character that is not one of the 96: ``"error"`` or ``"drop"``.
        validation, test: shares of the documents that are held out for validation and test. The choice is a
            function of their text, so that equal documents are in one split, however often they occur and
            independent of other documents.
        shard_tokens: approximate tokens of a file; the same number of each split is in memory.

    Raises:
        ConfigError: a share is negative, or no share is left for training.
    """

    source: Source
    tokens: Literal["chars", "bytes", "bpe", "model"] = "chars"
    model: str = ""
    vocab_size: int = 4096
    bpe_characters: int = 50_000_000
    unknown: Literal["error", "drop"] = "error"
    validation: float = 0.05
    test: float = 0.05
    shard_tokens: int = 2**24

    def __post_init__(self) -> None:
        check_choice("tokens", self.tokens, ("chars", "bytes", "bpe", "model"))
        if bool(self.model) != (self.tokens == "model"):
            raise ConfigError(
                f"tokens=model and a model belong together: got tokens={self.tokens} and model={self.model!r}"
            )
        for name in ("validation", "test"):
            check_number(name, getattr(self, name), above=0, below=1)
        if self.validation + self.test >= 1:
            raise ConfigError(
                f"validation and test are positive shares that sum to less than 1, got {self.validation} and "
                f"{self.test}"
            )
        for name in ("bpe_characters", "shard_tokens"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("vocab_size", self.vocab_size, minimum=256, maximum=_LARGEST_VOCABULARY)
        check_choice("value of unknown", self.unknown, ("error", "drop"))
        if self.unknown == "drop" and self.tokens != "chars":
            raise ConfigError(f"{self.tokens} have a token for every character: unknown=drop is only for chars")


def split_of(text: str, validation: float, test: float) -> DataSplit:
    """The split of a document, by a hash of its text."""
    digest = hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()
    fraction = int.from_bytes(digest[:8], "little") / 2**64
    return "test" if fraction < test else "validation" if fraction < test + validation else "train"


def prepare(
    config: PrepareConfig,
    out: Path,
    *,
    resume: bool = False,
    show_progress: bool = True,
    on_open: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Writes a corpus: token shards ``SPLIT-NNNNN.tokens``, files with the lengths of documents, and
    ``manifest.json`` at the end.

    The same documents and settings give the same files, also after an interruption.

    Args:
        config: settings.
        out: the folder, made when missing.
        resume: continue an unfinished corpus there; a finished one of the same settings is returned at once,
            also where its source is gone.
        show_progress: a progress bar on stderr.
        on_open: called with the folder before anything is read, unless it holds the finished corpus.

    Returns:
        The manifest.

    Raises:
        ConfigError: the folder cannot be written, is not empty and ``resume`` is off, or was begun with other
            settings or other files.
        DataError: a document cannot be read or encoded; a split has no documents.
        CheckpointError: a file cannot be written, such as on a full disk: free some space and resume.

    Cost: memory of one document and ``shard_tokens`` tokens of each split.
    """
    settings: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    owner = Owner(command="data prepare", task="text", settings=settings, recorded=_recorded_settings)
    _, finished = finished_in(out, owner, resume=resume, read=lambda folder: _finished(config, folder))
    if finished is not None:
        return finished
    with opened(out, owner, resume=resume):
        return _prepared(config, out, settings, show_progress, on_open or (lambda _: None))


def _prepared(
    config: PrepareConfig, out: Path, settings: dict[str, Any], show_progress: bool, on_open: Callable[[Path], None]
) -> dict[str, Any]:
    """The manifest of a new corpus in a folder, or of one that is continued."""
    progress = _begun(out)
    fingerprint, size = _fingerprint(config.source)
    if progress is not None:
        _check_files(out, progress, fingerprint)
    documents = config.source.documents()
    if progress is not None:
        _check_text(out, progress, documents)
    else:
        documents = chain(list(islice(documents, 1)), documents)  # what cannot be read at all is named first
    on_open(out)
    remove_temporary(out)
    try:
        with progress_bar(total=size, unit="B", unit_scale=True, show=show_progress, desc="reading") as bar:
            tokenizer = _tokenizer(config) if progress is None else tokenizer_from(progress["tokenizer"])
            writer = ShardWriter(out, tokenizer, settings, fingerprint, progress)
            bar.update(writer.num_characters)
            for document in documents:
                tokens = tokenizer.encode(document.text, document.name)
                # By what is left of it: copies may differ in characters that are left out.
                text = tokenizer.decode(tokens.tolist()) if config.unknown == "drop" else document.text
                waiting = writer.add(split_of(text, config.validation, config.test), tokens, document.text)
                bar.update(len(document.text))
                if waiting >= config.shard_tokens:
                    writer.flush()
            writer.flush()
        manifest = writer.manifest()
        _check_splits(manifest, config)
    except ReadingStoppedError:
        raise  # the files so far are valid: with resume, it continues
    except (ConfigError, DataError):
        _discard(out)  # an error in a document or a setting: after a fix the shards differ, so these are removed
        raise
    write_atomic(out / MANIFEST, signed(manifest))
    return manifest


def _finished(config: PrepareConfig, out: Path) -> dict[str, Any] | None:
    """The manifest of the finished corpus in a folder, which may be read-only; ``None`` if there is none."""
    progress = _begun(out)
    if progress is None or not (out / MANIFEST).exists():
        return None
    if Path(config.source.path).exists():
        _check_files(out, progress, _fingerprint(config.source)[0])
        written = (out / MANIFEST).stat().st_mtime_ns
        if any(Path(path).stat().st_mtime_ns > written for path in config.source.files() or ()):
            _check_text(out, progress, config.source.documents())
    return Corpus(out).manifest


def _recorded_settings(out: Path) -> dict[str, Any] | None:
    """The settings of a corpus that was begun without an owner file, as far as they can be read; ``None`` if
    there is none.
    """
    if not all(_OWN.fullmatch(path.name) for path in out.iterdir() if path.name not in OF_EVERY_FOLDER):
        return None
    try:
        return dict(json.loads((out / PROGRESS).read_text(encoding="utf-8"))["settings"])
    except (ValueError, KeyError, TypeError, OSError):
        return {}


def _begun(out: Path) -> dict[str, Any] | None:
    """The record of an earlier call, ``None`` if there is none."""
    names = {path.name for path in out.iterdir()}
    if PROGRESS not in names:
        if MANIFEST in names:
            raise ConfigError(f"{out} holds a finished corpus without its {PROGRESS}: use another folder")
        return None  # shards without a record are written again
    try:
        progress = read_signed(out / PROGRESS, _RECORD)
        shards = [shard for split in SPLITS for shard in progress["splits"][split]]
        lost = next((shard["file"] for shard in shards if shard["file"] not in names), None)
        int(progress["documents"]) + int(progress["characters"])
        tokenizer_from(progress["tokenizer"])
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        why = f" ({error})" if isinstance(error, CheckpointError | DataError) else ""
        raise DataError(
            f"{out / PROGRESS}: expected the record of a begun corpus, got a damaged one{why}. Use another folder"
        ) from None
    if lost is not None:
        raise DataError(f"{out / lost}: expected a file of the begun corpus, got no such file. Use another folder")
    return progress


def _discard(out: Path) -> None:
    """Removes what a failed call wrote, the record first."""
    (out / PROGRESS).unlink(missing_ok=True)
    for path in out.iterdir():
        if _OWN.fullmatch(path.name):
            path.unlink()


def _fingerprint(source: Source) -> tuple[str | None, int | None]:
    """A hash of the names and sizes of the files of a source, ``None`` for a data set; and their bytes,
    ``None`` where some are compressed.
    """
    files = source.files()
    if files is None:
        return None, None
    digest, size, compressed = hashlib.sha256(), 0, False
    for path in files:
        try:
            file_size = os.stat(path).st_size  # noqa: PTH116 - a Path takes as long as the call
        except OSError as error:
            raise ReadingStoppedError(f"{path} cannot be read: {error.strerror or error}") from error
        digest.update(f"{path}\0{file_size}\n".encode(errors="surrogateescape"))
        size += file_size
        compressed = compressed or path.lower().endswith(".gz")
    return digest.hexdigest(), None if compressed else size


def _check_files(out: Path, progress: dict[str, Any], fingerprint: str | None) -> None:
    """Documents are skipped by number: with other files, some would be skipped and others repeated."""
    begun = progress.get("files")
    if begun is not None and fingerprint != begun:
        raise ConfigError(
            f"{out} was begun when its source had other files, or files of other sizes: begin anew in another folder"
        )


def _check_text(out: Path, progress: dict[str, Any], documents: Iterator[Document]) -> None:
    """Reads the documents that a corpus has already; raises ``ConfigError`` if they are not those that it was
    made from, also where the sizes of their files are the same.
    """
    found = ""
    for document in islice(documents, progress["documents"]):
        found = text_sha256(found, document.text)
    if progress.get("text_sha256", found) != found:
        raise ConfigError(f"{out} was begun when its source had other text: begin anew in another folder")


def _tokenizer(config: PrepareConfig) -> Tokenizer:
    if config.tokens == "chars":
        return Characters(config.unknown)
    if config.tokens == "bytes":
        return Bytes()
    if config.tokens == "model":
        return ModelTokens.of(config.model)
    return BytePairs.train(_training_texts(config), config.vocab_size)


def _training_texts(config: PrepareConfig) -> Iterator[str]:
    """The first training documents, up to ``bpe_characters`` in all."""
    left = config.bpe_characters
    for document in config.source.documents():
        if split_of(document.text, config.validation, config.test) == "train":
            # Text that UTF-8 cannot encode is reported here, since the library gives no position.
            Bytes().encode(document.text, document.name)
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                return


def _few_different(source: Source) -> int | None:
    """The number of different texts, ``None`` if there are many."""
    digests: set[bytes] = set()
    for document in source.documents():
        digests.add(hashlib.sha256(document.text.encode("utf-8", errors="surrogatepass")).digest())
        if len(digests) > _FEW:
            return None
    return len(digests)


def _check_splits(manifest: dict[str, Any], config: PrepareConfig) -> None:
    count = manifest["documents"]
    for name in SPLITS:
        if not manifest["splits"][name]["tokens"]:
            few, same = _few_different(config.source), " in all"
            if few is not None and few < count:
                same = f", but only {few} different, and equal ones are in one split"
            raise DataError(
                f"{config.source.path}: expected documents for each split, got {count}{same}, and none for {name}. "
                "Give more documents (--document-start and --longest-document cut a text into several), or larger "
                "shares"
            )
