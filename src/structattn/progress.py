"""Progress bars: one line that moves on a terminal; in a log, where it would be thousands, a line once a minute."""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any, TextIO

LOG_INTERVAL_S = 60.0
_LOG_SHAPE = "{desc}: {percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


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

    # Its own lock is one of all processes: a killed worker would leave it behind, and Python would warn of it.
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


def say(bar: Any, text: str) -> None:
    """Says on a bar what is done now; in a log only if nothing was said for long."""
    bar.set_description_str(text, refresh=False)
    if not bar.disable and time.time() - bar.last_print_t >= bar.mininterval:
        bar.refresh()
        bar.last_print_t = time.time()
