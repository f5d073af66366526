"""Connecting to Ray: on this machine, or a cluster."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from structattn.errors import ConfigError, MissingDependencyError

_ANSWER_S = 5.0


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


def work_in(folder: Path) -> None:
    """In a process of Ray's, which has a folder of its own: paths of data are meant from where the command was begun."""
    if folder.is_dir():
        os.chdir(folder)
