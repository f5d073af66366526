"""Text out of files of any encoding that says what it is: gzip and UTF-16 are read, other formats are named."""

from __future__ import annotations

import codecs
import gzip
import io
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


class ReadingStoppedError(DataError):
    """A source stopped answering; what was read before is right, and the same call can continue when it answers again."""


def is_there(path: str) -> bool:
    """Whether there is a file or a folder; raises ``ReadingStoppedError`` where that cannot be found out."""
    try:
        return Path(path).exists()
    except OSError as error:
        raise ReadingStoppedError(f"{path} cannot be read: {error.strerror or error}. Check its permissions") from error


@contextmanager
def open_text(path: str, expected: str = "text") -> Iterator[IO[str]]:
    """A file for reading as text, with ``\\r\\n`` and ``\\r`` as ``\\n``; gzip and the encoding are found by its first bytes.

    Args:
        path: a file in UTF-8, or in UTF-16 or UTF-32 with a byte order mark; also compressed with gzip, whatever its name.
        expected: what the file should be, for errors.

    Raises:
        DataError: no such file, not a regular one, of another format, damaged, or of an encoding that does not say what it is; also while
            it is read inside of the ``with``.
        ReadingStoppedError: the operating system cannot read it.
    """
    try:
        if "\0" in path:
            raise FileNotFoundError
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise DataError(f"expected {expected} at {path}, got a folder. Name a file in it")
        if not stat.S_ISREG(mode):  # a pipe can be read once, and may have no end
            raise DataError(f"expected {expected} at {path}, got a pipe or a device. Save it as a file first")
        with Path(path).open("rb") as raw:
            is_gzip = raw.peek(2)[:2] == _GZIP
            data: IO[bytes] = gzip.GzipFile(fileobj=raw) if is_gzip else raw  # type: ignore[assignment]
            with io.TextIOWrapper(data, encoding=_encoding(data, path, expected)) as text:
                yield text
    except UnicodeError as error:
        at = error.object[error.start : error.start + 1] if isinstance(error, UnicodeDecodeError) else b""
        got = f"the byte 0x{at.hex()}, as in Latin-1 or Windows-1252" if at else str(error)
        raise DataError(f"{path}: expected text in UTF-8, got {got}. Save it as UTF-8") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: expected a whole gzip file, got a damaged one: {error}. Fetch it again") from error
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"expected {expected} at {path}, got no such file. Check the path") from None
    except OSError as error:
        raise ReadingStoppedError(
            f"expected {expected} at {path}, got: {error.strerror or error}. Check its permissions"
        ) from error


def _encoding(data: IO[bytes], path: str, expected: str) -> str:
    head: bytes = data.peek(4096)[:4096]  # type: ignore[attr-defined]
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    for begin, kind in _FORMATS:
        if head.startswith(begin):
            raise DataError(f"{path}: expected {expected}, got {kind}. Save what it holds as plain text")
    if b"\0" in head:
        raise DataError(
            f"{path}: expected {expected} in UTF-8, got zero bytes: a binary file, or UTF-16 without a byte order mark. Save it as UTF-8"
        )
    return "utf-8"
