"""Progress bars: one line that moves on a terminal; in a log, where it would be thousands, a line once a
minute.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

LOG_INTERVAL_S = 60.0
_SOON_S = 0.5  # what is done sooner needs no bar
_LOG_SHAPE = "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


Part = TypeVar("Part")


class _Lines:
    """A stream for tqdm that ends lines instead of going back to their start."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if line := text.strip():
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        self._stream.flush()


@functools.cache
def _tqdm() -> Any:
    from tqdm import tqdm  # optional: the library itself has no bars

    # Its own lock is one of all processes: a killed worker would leave it behind, and Python would warn of
    # it.
    tqdm.set_lock(threading.RLock())
    return tqdm


def progress_bar(*, show: bool, **options: Any) -> Any:
    """A bar of tqdm on standard error.

    Args:
        show: off, it counts and shows nothing.
        options: of tqdm: ``total``, ``desc``, ``unit`` ...

    Raises:
        ImportError: without tqdm, which the extra ``train`` brings.
    """
    tqdm = _tqdm()
    if not show or sys.stderr is None:
        return tqdm(disable=True, **options)
    if sys.stderr.isatty():
        return tqdm(**options)
    if options.get("total"):
        options = {"bar_format": _LOG_SHAPE} | options
    elif not options.get("leave", True):
        options["delay"] = LOG_INTERVAL_S  # a short one leaves nothing
    return tqdm(file=_Lines(sys.stderr), mininterval=LOG_INTERVAL_S, maxinterval=LOG_INTERVAL_S, **options)


_inside = False


@contextmanager
def inner_bars() -> Iterator[None]:
    """Inside, ``counted`` and ``doing`` show what they do: for the command line, whose reader waits."""
    global _inside
    before, _inside = _inside, True
    try:
        yield
    finally:
        _inside = before


def counted(parts: Iterable[Part], text: str) -> Iterator[Part]:
    """The parts of work that may take minutes, one after the other, below ``inner_bars`` with a bar that is
    removed at the end.

    Args:
        parts: what is done; how much of it is shown if there is a length.
        text: what it is.
    """
    total = len(parts) if isinstance(parts, Sized) else None
    with progress_bar(total=total, desc=text, leave=False, delay=_SOON_S, show=_inside) as bar:
        for part in parts:
            yield part
            bar.update()


@contextmanager
def doing(text: str) -> Iterator[None]:
    """Below ``inner_bars``, a line on a terminal while something is done that has no parts; it is removed at
    the end.
    """
    with progress_bar(desc=text, leave=False, bar_format="{desc} ...", show=_inside):
        yield


def say(bar: Any, text: str) -> None:
    """Says on a bar what is done now; in a log only if nothing was said for long."""
    bar.set_description_str(text, refresh=False)
    if not bar.disable and time.time() - bar.last_print_t >= bar.mininterval:
        bar.refresh()
        bar.last_print_t = time.time()
