"""Reads text files: UTF-8, UTF-16 and UTF-32 with a byte order mark, also in gzip; the error names other
formats.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from structattn.errors import DataError

_GZIP = b"\x1f\x8b"
# UTF-32 first: its mark begins like that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_FORMATS = (
    (b"PK\x03\x04", "a zip archive (such as .xlsx, .docx or .npz)"),
    (b"\xd0\xcf\x11\xe0", "an old Office document (such as .xls)"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"SQLite format 3", "a SQLite data base"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"%PDF", "a PDF"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
)
_BEGINNINGS = tuple(begin for begin, _ in (*_MARKS, *_FORMATS))
_UNREADABLE = (OSError, UnicodeError, EOFError, zlib.error)
_HEAD = 4096  # bytes that identify the format of a file
_AT_ONCE = 2**20  # bytes that one system call reads in full
# Without the third flag, opening a pipe would wait for a writer.
_READ_ONLY = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class ReadingStoppedError(DataError):
    """A source stopped answering; earlier data are correct, and the same call can continue when it answers
    again.
    """


def is_there(path: str) -> bool:
    """Whether there is a file or a folder; raises ``ReadingStoppedError`` where that cannot be determined."""
    try:
        return Path(path).exists()
    except OSError as error:
        raise ReadingStoppedError(f"{path} cannot be read: {error.strerror or error}. Check its permissions") from error


@contextmanager
def open_text(path: str, expected: str = "text") -> Iterator[IO[str]]:
    """A file for reading as text, with ``\\r\\n`` and ``\\r`` as ``\\n``; gzip and the encoding are detected
    by its first bytes.

    Args:
        path: a file in UTF-8, or in UTF-16 or UTF-32 with a byte order mark; also compressed with gzip,
            whatever its name.
        expected: what the file should be, for errors.

    Raises:
        DataError: no such file, not a regular one, of another format, damaged, or of an encoding without a
            mark; also while it is read inside of the ``with``.
        ReadingStoppedError: the operating system cannot read it.
    """
    try:
        if "\0" in path:
            raise FileNotFoundError
        check_regular(Path(path).stat(), path, expected)
        with Path(path).open("rb") as raw:
            is_gzip = raw.peek(2)[:2] == _GZIP
            data: IO[bytes] = gzip.GzipFile(fileobj=raw) if is_gzip else raw  # type: ignore[assignment]
            head: bytes = data.peek(_HEAD)[:_HEAD]  # type: ignore[attr-defined]
            with io.TextIOWrapper(data, encoding=_encoding(head, path, expected)) as text:
                yield text
    except _UNREADABLE as error:
        raise _named(error, path, expected) from error


def read_text(path: str, expected: str = "text") -> str:
    """All text of a file, as ``open_text`` gives it; for small files, of which there may be many, in a third
    of the time.
    """
    if "\0" not in path:
        try:
            handle = os.open(path, _READ_ONLY)
            try:
                status = os.fstat(handle)
                check_regular(status, path, expected)
                data = os.read(handle, min(status.st_size, _AT_ONCE) + 1)
            finally:
                os.close(handle)
            if len(data) == status.st_size and not data.startswith(_GZIP):
                text = data.decode(_encoding(data[:_HEAD], path, expected))
                return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
        except _UNREADABLE as error:
            raise _named(error, path, expected) from error
    with open_text(path, expected) as file:
        return file.read()


def _named(error: Exception, path: str, expected: str) -> DataError:
    """Our error for one of ``_UNREADABLE``."""
    if isinstance(error, UnicodeError):
        at = error.object[error.start : error.start + 1] if isinstance(error, UnicodeDecodeError) else b""
        got = f"the byte 0x{at.hex()}, as in Latin-1 or Windows-1252" if at else str(error)
        return DataError(f"{path}: expected text in UTF-8, got {got}. Save it as UTF-8")
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return DataError(f"{path}: expected a whole gzip file, got a damaged one: {error}. Fetch it again")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return DataError(f"expected {expected} at {path}, got no such file. Check the path")
    why = error.strerror if isinstance(error, OSError) else None
    return ReadingStoppedError(f"expected {expected} at {path}, got: {why or error}. Check its permissions")


def check_regular(status: os.stat_result, path: str, expected: str) -> None:
    """Raises ``DataError`` unless this is a file, and not a folder, a pipe or a device."""
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"expected {expected} at {path}, got a folder. Name a file in it")
    # a pipe can be read once, and may have no end
    raise DataError(f"expected {expected} at {path}, got a pipe or a device. Save it as a file first")


def _encoding(head: bytes, path: str, expected: str) -> str:
    if head.startswith(_BEGINNINGS):
        for mark, name in _MARKS:
            if head.startswith(mark):
                return name
        kind = next(kind for begin, kind in _FORMATS if head.startswith(begin))
        raise DataError(f"{path}: expected {expected}, got {kind}. Save what it holds as plain text")
    if b"\0" in head:
        raise DataError(
            f"{path}: expected {expected} in UTF-8, got zero bytes: a binary file, or UTF-16 without a byte order "
            "mark. Save it as UTF-8"
        )
    return "utf-8"
