"""The common parts of records: machine and versions, reading a file, refusing a newer format."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from structattn.errors import CheckpointError, ConfigError
from structattn.machine import Hardware
from structattn.typed_records import read_as
from structattn_lab.old_formats import with_todays_specs

Json = dict[str, Any]  # chosen by a task or a user: settings, and data for the figures of a task
RESULTS, REPORT = "results.json", "report.html"
FORMAT_VERSION = 2  # 1: before records had a version
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ResultRecord:
    """What every ``results.json`` has.

    Attributes:
        created: when it was finished, ISO 8601 in UTC.
        command: as it was begun.
        versions, hardware: on which results and timings depend.
    """

    format_version: int = FORMAT_VERSION
    created: str
    command: str = ""
    versions: dict[str, str]
    hardware: Hardware


R = TypeVar("R", bound=ResultRecord)


@dataclass(frozen=True, kw_only=True)
class Results(Generic[R]):
    """The output of a command: a folder, and the record that its ``results.json`` holds.

    Attributes:
        record: the results.
        folder: of all output.
        runs: of a comparison, the folders of the runs of every row of the record, one for each seed.
    """

    record: R
    folder: Path
    runs: tuple[tuple[Path, ...], ...] = ()

    @property
    def report(self) -> Path:
        """The self-contained HTML page."""
        return self.folder / REPORT


def read_versioned(kind: type[T], data: object, where: str) -> T:
    """A record of any known format: fields that an older one lacks get their defaults.

    Raises:
        ConfigError: it was written by a newer version: it is not damaged, and must not be overwritten.
        CheckpointError: a field is wrong (see ``read_as``).
    """
    if not isinstance(data, dict):
        return read_as(kind, data, where)
    version = data.get("format_version", 1)
    if version not in range(1, FORMAT_VERSION + 1):
        raise ConfigError(
            f"{where}: expected format version {FORMAT_VERSION} or older, got {version!r}: it was written by another "
            "version of structattn, read it with that one"
        )
    return read_as(kind, with_todays_specs({**data, "format_version": FORMAT_VERSION}), where)


def read_file(kind: type[T], path: Path) -> T:
    """The record of a JSON file.

    Raises:
        CheckpointError: the file is missing or not JSON, or as ``read_versioned``.
        ConfigError: as ``read_versioned``.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return read_versioned(kind, data, str(path))


def to_json(record: Any) -> str:
    """A record as the text of its file."""
    return json.dumps(dataclasses.asdict(record), indent=1)
