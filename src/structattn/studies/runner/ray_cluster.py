"""Connecting to Ray: on this machine, or a cluster."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment

from structattn.errors import ConfigError, MissingDependencyError
from structattn.studies import interrupt

_ANSWER_S = 5.0
_LOOK_S = 0.5  # between two looks at a file
_RESERVE_S = 1.0  # of the time that there is to stop
_STOP, _RUNNING = "stop", "running"


def import_ray() -> tuple[Any, Any]:
    """The modules ``ray`` and ``ray.tune``; raises ``MissingDependencyError`` without them."""
    try:
        ray, tune = (importlib.import_module(name) for name in ("ray", "ray.tune"))
    except ImportError as error:
        raise MissingDependencyError(
            f"Ray Tune is not installed: pip install 'structattn[sweep]' brings it ({error})"
        ) from error
    return ray, tune


@contextmanager
def connected(address: str) -> Iterator[dict[str, float]]:
    """Joins a cluster, or starts one on this machine, and leaves it at the end, unless this process was in one before.

    Args:
        address: as ``ray.init`` takes it: ``"auto"`` for the cluster that this machine belongs to, ``"HOST:PORT"`` or
            ``"ray://HOST:PORT"`` for another, ``"local"`` for this machine alone.

    Yields:
        What the cluster has: ``CPU``, ``GPU`` and so on.

    Raises:
        MissingDependencyError: without Ray Tune.
        ConfigError: nothing answers at the address, or this machine cannot start one.
    """
    ray, _ = import_ray()
    began = not ray.is_initialized()
    if began:
        try:
            _check_answers(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except Exception as error:  # Ray raises plain ones, too, such as for a machine too busy to start it in time
            reason = str(error).strip().splitlines()[0]
            if address == "local":
                raise ConfigError(
                    f"Ray did not start on this machine: {reason} What was done is kept: try --resume"
                ) from error
            raise ConfigError(
                f"expected a Ray cluster at {address!r}: {reason}. Start one with `ray start --head`, or give local"
            ) from error
    interrupt.listen()
    try:
        yield ray.cluster_resources()
    finally:
        if began:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray waits minutes for a port that is closed, and then ends the process: a look at it takes no time."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            pass


@contextmanager
def trials_stopped(folder: Path) -> Iterator[None]:
    """Around the trials of Ray Tune: asked to stop, this process asks them, and waits until they have written checkpoints.

    Args:
        folder: that all machines share; a file in it says so, and one for each trial that it runs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / _RUNNING).mkdir(parents=True)
    try:
        with patch_environment(TUNE_DISABLE_SIGINT_HANDLER="1"):  # an interruption ends it as it does every command
            yield
    except KeyboardInterrupt:
        (folder / _STOP).touch()
        number = signal.Signals(interrupt.asked() or signal.SIGINT)
        until = time.monotonic() + interrupt.GRACE_S[number] - _RESERVE_S
        while any((folder / _RUNNING).iterdir()) and time.monotonic() < until:
            time.sleep(_LOOK_S / 5)
        raise


@contextmanager
def stopping(folder: Path, name: str) -> Iterator[None]:
    """Around the work of a trial: it stops where ``trials_stopped`` asks for it; the process is then ended from there."""
    running, stop = folder / _RUNNING / name, folder / _STOP
    looked, found = 0.0, 0

    def asked() -> int:
        nonlocal looked, found
        if time.monotonic() - looked > _LOOK_S:
            looked, found = time.monotonic(), signal.SIGTERM if stop.exists() else 0
        return found

    running.touch()
    interrupt.follow(asked)
    try:
        interrupt.check()
        yield
    except interrupt.Stopped:
        running.unlink(missing_ok=True)
        time.sleep(interrupt.GRACE_S[signal.SIGTERM])  # a trial that returned would count as one that is over
        raise
    finally:
        running.unlink(missing_ok=True)
        interrupt.follow(None)


def work_in(folder: Path) -> None:
    """In a process of Ray's, which has a folder of its own: paths of data are meant from where the command was begun."""
    if folder.is_dir():
        os.chdir(folder)
