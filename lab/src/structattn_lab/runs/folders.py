"""Output folders: the owner of a folder, and a lock that lets one process at a time write to it."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from structattn.errors import ConfigError
from structattn.files import TEMPORARY, remove_temporary, write_atomic
from structattn_lab.old_formats import is_same_setting, with_todays_specs
from structattn_lab.settings.config_file import CONFIG

T = TypeVar("T")
logger = logging.getLogger(__name__)
OWNER = "owner.json"
RUNS = Path("runs")
FORMAT_VERSION = 1
_LOCK = ".lock"
OF_EVERY_FOLDER = (OWNER, _LOCK)  # names of the files that are written here
_SHOWN = 4  # names or differences of one message


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The owner of a folder: the contents of its ``owner.json``.

    Args:
        command: such as ``"compare"``.
        task: of the command; empty for a command without one.
        settings: everything that determines the results, as plain data.
        free: settings that may differ when it is resumed, such as ``"seeds"`` or
            ``"training.process_timeout"``.
        recorded: reads the settings of a folder without an owner file, as version 0.1.0 left it, as far as
            its files contain them; ``None`` if it holds nothing of this command. Default: such a folder is of
            another command.
        last: the name of the file that is written last. A command that cannot be resumed begins anew in a
            folder of the same settings without it. Default: in no folder with results.
        label: the beginning of the names of new folders. Default: from the command and the task.
    """

    command: str
    task: str
    settings: dict[str, Any]
    free: tuple[str, ...] = ()
    recorded: Callable[[Path], dict[str, Any] | None] = lambda folder: None
    last: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """The command line in two words."""
        return f"structattn {self.command} {self.task}".strip()

    def differences(self, settings_before: dict[str, Any], *, free: bool = True) -> list[str]:
        """The differences between other settings and these, in words; with ``free=False`` including those
        that may differ.

        A setting that only one of them has is of another version of structattn and is ignored.
        """
        found = differences(settings_before, self.settings, self.free if free else ())
        return [f"{name} = {was!r}, now {value!r}" for name, was, value in found]


def differences(settings: dict[str, Any], now: dict[str, Any], free: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Name, old and new value of each setting that differs, without those that may differ."""
    old, new = (with_todays_specs(json.loads(json.dumps(values))) for values in (settings, now))
    return [
        (name, was, value)
        for name, was, value in _differences(old, new)
        if not any(f"{name}.".startswith(f"{setting}.") for setting in free)
    ]


def _differences(settings: dict[str, Any], now: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, old and new value of each setting that differs."""
    for key in (key for key in settings if key in now):
        old, new = settings[key], now[key]
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{path}{key}.")
        elif not is_same_setting(old, new):
            yield f"{path}{key}", old, new


def _listing(words: list[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more


@contextmanager
def opened(
    out: Path | None,
    owner: Owner,
    *,
    resume: bool | None,
    on_open: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """Creates an output folder or continues one, and keeps it for this process until the end of the block.

    The lock is a kernel lock on a file in the folder, which is released when its process ends. Of the
    processes of a launcher, which share a folder, the first one opens it.

    Args:
        out: the folder. Default (``None``): a new one below ``runs/``; with ``resume`` the last one there of
            the same owner.
        owner: of the folder.
        resume: whether it may hold results of the same command; ``None`` for a command that cannot be
            resumed.
        on_open: called with the folder once this process has locked it.

    Yields:
        The folder.

    Raises:
        ConfigError: it cannot be written, another process uses it, it holds files of another command, task or
            settings, or it holds results and ``resume`` is off. Nothing in it was changed.
    """
    if os.environ.get("RANK", "0") != "0" and out is not None:
        yield out
        return
    folder = out if out is not None else _last_folder(owner) if resume else _new(owner)
    made = not folder.exists() or (out is None and not resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{TEMPORARY}{os.getpid()}-write-test"
        probe.write_text("")
        probe.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{folder} is not a folder: give another --out") from error
    except OSError as error:
        raise ConfigError(f"cannot write to the output folder {folder}: {error.strerror or error}") from error
    try:
        with _locked(folder):
            _check_owner(folder, owner, resume=resume)
            content = {
                "format_version": FORMAT_VERSION,
                "command": owner.command,
                "task": owner.task,
                "settings": owner.settings,
            }
            remove_temporary(folder)  # of writers that were killed
            if _read(folder) != json.loads(json.dumps(content)):
                write_atomic(folder / OWNER, json.dumps(content, indent=1))
            if on_open is not None:
                on_open(folder)
            try:
                yield folder
            finally:
                if not _names(folder):  # nothing came of it
                    for name in (OWNER, CONFIG):
                        (folder / name).unlink(missing_ok=True)
    finally:
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if it is empty
                if out is None:
                    RUNS.rmdir()


def finished_in(
    out: Path | None, owner: Owner, *, resume: bool, read: Callable[[Path], T | None]
) -> tuple[Path | None, T | None]:
    """The results of a folder that is resumed, where they are complete: such a folder is only read, and may
    be read-only.

    Args:
        out, owner, resume: see ``opened``.
        read: the results in a folder, or ``None`` if something is missing.

    Returns:
        The folder for ``opened``, and the results.

    Raises:
        ConfigError: the folder is not of this owner.
    """
    folder = _last_folder(owner) if resume and out is None else out
    if not resume or folder is None or not folder.is_dir():
        return folder, None
    _check_owner(folder, owner, resume=True)
    return folder, read(folder)


def _names(folder: Path) -> list[str]:
    """The names in a folder, without the files that this module writes, and without the settings that a
    folder with an owner has.
    """
    names = {path.name for path in folder.iterdir()}
    left_out = {*OF_EVERY_FOLDER, *([CONFIG] if OWNER in names else [])}
    return sorted(name for name in names - left_out if not name.startswith(TEMPORARY))


def _check_owner(folder: Path, owner: Owner, *, resume: bool | None) -> None:
    """Raises ``ConfigError`` unless a folder is empty or an owner may continue it; see ``opened`` for the
    arguments.
    """
    names = _names(folder)
    if not names:
        return
    content = _read(folder)
    if content is None:
        settings = owner.recorded(folder)
        if settings is None:
            raise ConfigError(
                f"{folder} holds {_listing([repr(name) for name in names])}, which {owner.name} did not write: give "
                "--out a folder that is empty or new"
            )
    else:
        if (content["command"], content["task"]) != (owner.command, owner.task):
            other = f"structattn {content['command']} {content['task']}".strip()
            raise ConfigError(f"{folder} holds the results of {other}, this is {owner.name}: give another --out")
        settings = content["settings"]
    if resume is None and (not owner.last or owner.last in names):
        raise ConfigError(f"{folder} already has results: give another --out")
    if resume is False:
        raise ConfigError(f"{folder} already has results: give --resume to continue them, or another --out")
    if different := owner.differences(settings):
        how = "resume" if resume else "begin again"
        raise ConfigError(
            f"{folder} was begun with {_listing(different)}: {how} with the same settings, or give another --out"
        )


def _read(folder: Path) -> dict[str, Any] | None:
    """The contents of the owner file, or ``None`` if there is none."""
    path = folder / OWNER
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        if content["format_version"] != FORMAT_VERSION:
            raise ConfigError(
                f"{path}: expected format version {FORMAT_VERSION}, got {content['format_version']!r}: it was written "
                "by another version of structattn"
            )
        if not (isinstance(content["settings"], dict) and isinstance(content["command"], str) and "task" in content):
            raise ValueError("a field has a wrong type")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is damaged ({error}), so that the owner of the folder is unknown: give another --out, or remove "
            "the file if you know it"
        ) from error
    return dict(content)


def _last_folder(owner: Owner) -> Path:
    """The folder below ``runs/`` that was begun last with the same command, task and settings; raises
    ``ConfigError`` if there is none.
    """
    folders = []
    for path in RUNS.glob(f"*/{OWNER}"):
        with contextlib.suppress(ConfigError, OSError):
            content = _read(path.parent)
            if (
                content
                and (content["command"], content["task"]) == (owner.command, owner.task)
                and not owner.differences(content["settings"], free=False)
            ):
                folders.append((path.stat().st_mtime_ns, path.parent))
    if not folders:
        raise ConfigError(
            f"no folder below {RUNS}/ was begun by {owner.name} with these settings: give --out the folder to resume"
        )
    latest = sorted(folder for time, folder in folders if time == max(folders)[0])
    if len(latest) > 1:
        raise ConfigError(
            f"{_listing(list(map(str, latest)))} were begun at the same time with these settings: give --out the one "
            "to resume"
        )
    return latest[0]


def _new(owner: Owner) -> Path:
    """A new folder below ``runs/``, also if two processes start in the same second."""
    first = owner.command.split()[0]
    name = owner.label or (owner.task if first in ("compare", "train") else f"{first}-{owner.task}".strip("-"))
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = RUNS / (f"{name}-{now}" if number == 1 else f"{name}-{now}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot write to the output folder {folder}: {error.strerror or error}") from error
        else:
            return folder
    raise AssertionError


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock of the folder; fails at once if it is taken.

    Raises:
        ConfigError: another process has it.
    """
    if sys.platform == "win32":
        yield
        return
    path = folder / _LOCK
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    while not lock.is_locked:
        try:
            lock.acquire()
        except Timeout:
            with contextlib.suppress(FileNotFoundError):  # its process has just removed it: try again
                holder = path.read_bytes()[:200].decode(errors="replace") or "another process"
                raise ConfigError(
                    f"{folder} is in use by {holder}: wait until it ends, or give another --out"
                ) from None
        except OSError as error:
            if error.filename is not None:  # it cannot be opened
                raise
            # Some network file systems have no locks; they are allowed.
            logger.warning("%s cannot be locked (%s): let one process at a time write to it", folder, error)
            break
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while it is locked: afterwards, it may be that of another process
        lock.release()
