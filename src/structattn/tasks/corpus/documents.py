"""Documents, one at a time: from text files, folders, JSON lines, or a streamed data set."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from structattn.errors import ConfigError, DataError, MissingDependencyError

_TEXTS = (".txt", ".md", ".rst", ".text")
_LINES = (".jsonl", ".ndjson")
# Names that people say, and what the data set is called where it is kept.
KNOWN_DATASETS = {"openwebtext": "Skylion007/openwebtext"}


@dataclass(frozen=True)
class Document:
    """A text and where it is from."""

    text: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents come from.

    Args:
        path: a text file; a file of JSON lines (``.jsonl``); a folder, all of whose such files are read in the order of their paths;
            each also with ``.gz``; or else the name of a data set for the library ``datasets``, which is streamed.
        document_start: in text files a line that begins with this begins a document. Default: a file is a document.
        text_column: of JSON lines and data sets, the field with the text.
        dataset_split: of a data set.
        max_documents: the first so many alone. Default ``None``: all.
    """

    path: str
    document_start: str = ""
    text_column: str = "text"
    dataset_split: str = "train"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError(f"max_documents must be at least 1, got {self.max_documents}")

    def files(self) -> list[Path] | None:
        """The files that are read, ``None`` for a data set.

        Raises:
            DataError: a folder without any.
        """
        root = Path(self.path)
        if root.is_file():
            return [root]
        if not root.is_dir():
            if self.path.startswith((".", "/", "~")) or root.suffix in (*_TEXTS, *_LINES, ".gz"):
                raise DataError(f"expected a text file or a folder at {self.path}, got no such file. Check the path")
            return None
        hidden = (path for path in root.rglob("*") if path.is_file() and _kind(path) in (*_TEXTS, *_LINES))
        found = sorted(
            path for path in hidden if not any(part.startswith(".") for part in path.relative_to(root).parts)
        )
        if not found:
            raise DataError(f"{self.path}: expected files with one of {', '.join((*_TEXTS, *_LINES))}, got none")
        return found

    def documents(self, skip: int = 0) -> Iterator[Document]:
        """The documents that are not empty, in a fixed order, from number ``skip`` on; each is in memory alone.

        Raises:
            DataError: a file cannot be read, or has not the field.
            MissingDependencyError: a data set, and ``datasets`` is not installed.
        """
        files = self.files()
        every = _dataset(self) if files is None else (doc for path in files for doc in self._read(path))
        return islice((doc for doc in every if doc.text.strip()), skip, self.max_documents)

    def _read(self, path: Path) -> Iterator[Document]:
        try:
            with _opened(path) as file:
                yield from (
                    _json_lines(file, path, self.text_column)
                    if _kind(path) in _LINES
                    else _pieces(file, path, self.document_start)
                )
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: expected text in UTF-8, got: {error}. Save it as plain text") from error
        except (EOFError, zlib.error) as error:
            raise DataError(
                f"{path}: expected a whole gzip file, got a damaged one: {error}. Fetch it again"
            ) from error
        except OSError as error:
            raise DataError(
                f"expected a readable text file at {path}, got: {error}. Check that it is a file"
            ) from error


def _kind(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def _opened(path: Path) -> IO[str]:
    if path.suffix.lower() == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _pieces(file: IO[str], path: Path, start: str) -> Iterator[Document]:
    if not start:
        yield Document(file.read(), str(path))
        return
    lines: list[str] = []
    begun = 1
    for number, line in enumerate(file, start=1):
        if line.startswith(start) and lines:
            yield Document("".join(lines), f"{path}, line {begun}")
            lines, begun = [], number
        lines.append(line)
    yield Document("".join(lines), f"{path}, line {begun}")


def _json_lines(file: IO[str], path: Path, column: str) -> Iterator[Document]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # besides what is no JSON, numbers too long and lists too deep
            raise DataError(f"{where}: expected JSON, got: {error}") from None
        yield Document(_field(record, column, where), where)


def _field(record: Any, column: str, where: str) -> str:
    value = record.get(column) if isinstance(record, dict) else None
    if not isinstance(value, str):
        has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where}: expected a text in the field {column!r}, got {has}. Name another with --text-column")
    return value


def _dataset(source: Source) -> Iterator[Document]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"{source.path} is no file here, and data sets need datasets, which is not installed; pip install 'structattn[data]'"
        ) from error
    name = KNOWN_DATASETS.get(source.path, source.path)
    try:
        stream = datasets.load_dataset(name, split=source.dataset_split, streaming=True)
    except Exception as error:  # anything from a name that is not there to a network that is down
        raise DataError(
            f"expected a file, a folder or a data set named {source.path!r}, got: {str(error).strip().splitlines()[0]}"
        ) from error
    for number, record in enumerate(stream):
        where = f"{name}, record {number}"
        yield Document(_field(record, source.text_column, where), where)
