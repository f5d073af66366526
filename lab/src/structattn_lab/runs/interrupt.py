"""Requests to stop: Ctrl-C, or SIGTERM, which a cluster sends before it removes a machine."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The signals, and how many seconds after each this process ends at the latest. Clusters kill after 30 s.
GRACE_S = {signal.SIGINT: 3.5, signal.SIGTERM: 25.0}
# The processes of a launcher get one Ctrl-C twice: from the terminal and from the launcher.
_ONCE_S = 2.0

_asked = 0
_waiting = 0
_handles = False
_follows: Callable[[], int] | None = None


class Stopped(KeyboardInterrupt):
    """This process was asked to stop; its results so far are on disk.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number


def stop(number: int) -> None:
    """Raises ``Stopped`` for a signal."""
    raise Stopped(number)


_at_once: Callable[[int], None] = stop


def asked() -> int:
    """The number of the signal that asked this process to stop, 0 if none did."""
    return _asked or (_follows() if _follows is not None else 0)


def check() -> None:
    """Raises ``Stopped`` if this process was asked to stop."""
    if number := asked():
        raise Stopped(number)


@contextmanager
def at_steps() -> Iterator[None]:
    """Inside, a signal waits until the code calls ``check``, where everything is saved; at the latest at the
    end of the block.
    """
    global _waiting
    _waiting += 1
    try:
        yield
    finally:
        _waiting -= 1
    if not _waiting:
        check()


def follow(source: Callable[[], int] | None) -> None:
    """In a process that works for another: asks ``source``, which may name a signal, at each ``check``."""
    global _follows
    _follows = source


def leave_to_parent() -> None:
    """In a worker process: ignores Ctrl-C, which every process of the terminal gets; the parent handles
    it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _note)


def _note(number: int, frame: FrameType | None) -> None:
    global _asked
    first, _asked = not _asked, _asked or number
    if first and not _waiting:
        _at_once(number)


def listen() -> None:
    """Inside ``handled``: installs its handlers again if a library has replaced them."""
    if _handles:
        for number in GRACE_S:
            signal.signal(number, _note)


@contextmanager
def handled(on_end: Callable[[int], None], at_once: Callable[[int], None] = stop) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM raise ``Stopped`` at the next step inside ``at_steps``, and call ``at_once``
    elsewhere.

    A process that does not reach such a step is ended by a thread after ``GRACE_S`` seconds or at a second
    Ctrl-C, since Python handles signals only between its operations, and one of PyTorch may take long.
    Outside the main thread, where Python allows no handlers, this does nothing.

    Args:
        on_end: called in that thread, with the number of the signal, just before it ends the process.
        at_once: called with the number of the signal. Default: it raises ``Stopped``, wherever the code is. A
            process that is the command line's own ends itself here: libraries in the middle of an import, or
            below C++, do not survive an exception.
    """
    global _asked, _follows, _handles, _at_once
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked, _follows, _handles, _at_once = 0, None, True, at_once
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in GRACE_S}
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(ours, on_end), name="watch-signals", daemon=True)
    watch.start()
    listen()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(wakeup)
        _asked, _handles, _at_once = 0, False, stop
        theirs.close()
        watch.join()
        ours.close()


def _watch(signals: socket.socket, on_end: Callable[[int], None]) -> None:
    """Ends the process some time after the first signal, or at the second Ctrl-C."""
    first, since = 0, 0.0
    once = _ONCE_S if "WORLD_SIZE" in os.environ else 0.0
    while True:
        left = None if not first else max(0.0, since + GRACE_S[signal.Signals(first)] - time.monotonic())
        ready, _, _ = select.select([signals], [], [], left)
        data = signals.recv(64) if ready else None
        if data == b"":
            return
        numbers = [number for number in data or b"" if number in GRACE_S]
        again = first and signal.SIGINT in numbers and time.monotonic() - since > once
        if data is None or again:
            with contextlib.suppress(Exception):
                on_end(first)
            os._exit(128 + first)
        if numbers and not first:
            first, since = numbers[0], time.monotonic()
