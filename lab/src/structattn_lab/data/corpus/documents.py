"""Documents, one at a time: from text files, folders, JSON lines, Parquet, or a streamed data set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from structattn.checks import MAX_LENGTH, check_size, describe
from structattn.errors import ConfigError, DataError, MissingDependencyError
from structattn.extras import install_command
from structattn_lab.data.plain_text import ReadingStoppedError, check_regular, is_there, open_text, read_text

_TEXTS = (".txt", ".md", ".rst", ".text")
_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"
# The endings of names: of the files of a folder, and of those with one record in each line.
_READ = (*_TEXTS, *_LINES, _PARQUET, *(f"{ending}.gz" for ending in (*_TEXTS, *_LINES)))
_OF_LINES = (*_LINES, ".json", *(f"{ending}.gz" for ending in (*_LINES, ".json")))
# Common names of data sets, and their names on the hub.
KNOWN_DATASETS = {"openwebtext": "Skylion007/openwebtext"}


class Document(NamedTuple):
    """A text and where it is from."""

    text: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents come from.

    Args:
        path: a text file; a file of JSON lines (``.jsonl``) or Parquet; a folder, all of whose such files are
            read in the order of their paths, without hidden ones; each also compressed with gzip; or else the
            name of a data set for the library ``datasets``, which is streamed.
        document_start: in text files a line that begins with this begins a document. Default: a file is a
            document.
        text_column: of JSON lines, Parquet and data sets, the field with the text.
        dataset_split: of a data set.
        max_documents: the number of leading documents to read. Default ``None``: all.
        longest_document: a longer text is cut into documents of at most that many characters, after the end
            of a line where there is one. Default ``None``: none is cut.
    """

    path: str
    document_start: str = ""
    text_column: str = "text"
    dataset_split: str = "train"
    max_documents: int | None = None
    longest_document: int | None = None

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ConfigError("a source is a text file, a folder or the name of a data set, got an empty text")
        for name in ("max_documents", "longest_document"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name), MAX_LENGTH)

    def files(self) -> Iterator[str] | None:
        """The files that are read, in the order of their paths; ``None`` for a data set.

        Raises:
            DataError: nothing is there, a pipe or a device, or a folder without any.
            ReadingStoppedError: a folder cannot be read; also while the files are asked for.
            MissingDependencyError: a data set, and ``datasets`` is not installed.
        """
        root, there = Path(self.path), is_there(self.path)
        if there and root.is_dir():
            paths = _texts_in(root)
            first = next(paths, None)
            if first is None:
                raise DataError(
                    f"{self.path}: expected files with one of {', '.join((*_TEXTS, *_LINES, _PARQUET))}, got none"
                )
            return chain([first], paths)
        if there:
            check_regular(root.stat(), self.path, "a text file")
            return iter([str(root)])
        if self.path.startswith((".", "/", "~")) or root.suffix.lower() in (*_TEXTS, *_LINES, _PARQUET, ".json", ".gz"):
            raise DataError(f"expected a text file or a folder at {self.path}, got no such file. Check the path")
        _datasets(self)
        return None

    def documents(self, skip: int = 0) -> Iterator[Document]:
        """The documents that are not empty, in a fixed order, from number ``skip`` on; one at a time is in
        memory.

        Raises:
            DataError: a file has another format, or lacks the field.
            ReadingStoppedError: a file cannot be read, or a data set stops in the middle.
            MissingDependencyError: a data set or Parquet, and ``datasets`` or ``pyarrow`` is not installed.
        """
        files = self.files()
        every = _dataset(self) if files is None else (doc for path in files for doc in self._read(path))
        if self.longest_document is not None:
            every = chain.from_iterable(_parts(doc, self.longest_document) for doc in every)
        return islice((doc for doc in every if not doc.text.isspace() and doc.text), skip, self.max_documents)

    def _read(self, path: str) -> Iterator[Document]:
        if path.lower().endswith(_PARQUET):
            yield from _parquet(path, self.text_column)
            return
        of_lines = path.lower().endswith(_OF_LINES)
        if not of_lines and not self.document_start:
            yield Document(read_text(path, "a text file"), path)
            return
        with open_text(path, "a text file") as file:
            if of_lines:
                yield from _json_lines(file, path, self.text_column)
            else:
                yield from _cut(file, path, self.document_start)


def _texts_in(root: Path) -> Iterator[str]:
    """The text files below a folder in the order of their paths, without hidden ones; links to folders are
    not followed.
    """
    left = [(str(root), True)]  # paths, and whether each is a folder; the next one is the last
    while left:
        path, is_folder = left.pop()
        if not is_folder:
            yield path
            continue
        try:
            with os.scandir(path) as entries:
                shown = ((entry, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name[0] != ".")
                inside = [
                    (entry.path, is_inner)
                    for entry, is_inner in shown
                    if is_inner or (entry.name.lower().endswith(_READ) and entry.is_file())
                ]
        except OSError as error:
            raise ReadingStoppedError(
                f"the folder {path} cannot be read: {error.strerror or error}. Check its permissions"
            ) from error
        left += sorted(inside, reverse=True)


def _cut(file: IO[str], path: str, start: str) -> Iterator[Document]:
    """A document from each line that begins with ``start`` to the next one."""
    lines: list[str] = []
    begun = 1
    for number, line in enumerate(file, start=1):
        if line.startswith(start) and lines:
            yield Document("".join(lines), f"{path}, line {begun}")
            lines, begun = [], number
        lines.append(line)
    yield Document("".join(lines), f"{path}, line {begun}")


def _parts(document: Document, longest: int) -> Iterator[Document]:
    """The document in parts of at most that many characters."""
    text, start = document.text, 0
    while len(text) - start > longest:
        stop = text.rfind("\n", start, start + longest) + 1 or start + longest
        yield Document(text[start:stop], f"{document.name}, from character {start}")
        start = stop
    yield Document(text[start:], f"{document.name}, from character {start}" if start else document.name)


def _json_lines(file: IO[str], path: str, column: str) -> Iterator[Document]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers that are too long and lists that are too deep
            raise DataError(f"{where}: expected JSON, one record in each line, got: {error}") from None
        yield Document(_field(record, column, where), where)


def _parquet(path: str, column: str) -> Iterator[Document]:
    """The texts of a column, a part of the file at a time."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is Parquet, which needs pyarrow, which is not installed; {install_command('data')}"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            number = 0
            for part in file.iter_batches(batch_size=256, columns=[column] if column in names else names[:0]):
                for record in part.to_pylist():
                    number += 1
                    yield Document(
                        _field(record or dict.fromkeys(names), column, f"{path}, record {number}"),
                        f"{path}, record {number}",
                    )
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: expected a Parquet file, got: {_first_line(error)}") from error


def _field(record: Any, column: str, where: str) -> str:
    if not isinstance(record, dict) or column not in record:
        has = (", ".join(map(str, record)) or "no field") if isinstance(record, dict) else "a record without fields"
        raise DataError(
            f"{where}: expected a text in the field {column!r}, got {has}. Name another with `structattn data prepare "
            "text --text-column`"
        )
    value = record[column]
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a text in the field {column!r}, got {describe(value)}: correct the record")
    return value


def _datasets(source: Source) -> Any:
    """The library of data sets; raises ``MissingDependencyError`` where it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"{source.path} is not a file, and data sets need datasets, which is not installed; "
            f"{install_command('data')}"
        ) from error
    return datasets


def _dataset(source: Source) -> Iterator[Document]:
    datasets = _datasets(source)
    name = KNOWN_DATASETS.get(source.path, source.path)
    try:
        stream = datasets.load_dataset(name, split=source.dataset_split, streaming=True)
    except Exception as error:  # anything from a wrong name to a network that is down
        raise DataError(
            f"expected a file, a folder or a data set named {source.path!r}, got: {_first_line(error)}"
        ) from error
    records = enumerate(stream)
    while True:
        try:
            number, record = next(records)
        except StopIteration:
            return
        except Exception as error:  # errors of the network, or of the library that reads the data set
            raise ReadingStoppedError(
                f"the data set {name} stopped: {type(error).__name__}: {_first_line(error)}. Continue with --resume"
            ) from error
        where = f"{name}, record {number}"
        yield Document(_field(record, source.text_column, where), where)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]
