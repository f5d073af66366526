"""Processes that depend on others: workers end with their parent, and processes of a launcher name the one
that no longer answers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import logging
import multiprocessing
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch

from structattn.errors import CommunicationError, TrainingFailedError

logger = logging.getLogger(__name__)
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
# A process that waits for a stopped one is ended by the watchdog, which knows which one it is, and only if
# that fails by its process group.
_LATER = 30.0


def end_with_parent() -> None:
    """Ends this process, at once, when the process that started it ends, however that ends; also where it has
    ended before this call.

    For worker processes: one that outlives its parent would write to the same folders as the workers of the
    next call. Ending at any moment is safe, since files are written under temporary names.
    """
    parent = multiprocessing.parent_process()
    parent_id = os.getppid()
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if parent is not None and parent_id != parent.pid:
            os._exit(1)
        return

    def follow() -> None:
        if parent is not None:
            parent.join()
        else:
            while os.getppid() == parent_id:
                time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def follow_launcher() -> None:
    """Under torchrun or accelerate launch: ends this process when the launcher ends.

    Raises:
        TrainingFailedError: the launcher has ended already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        try:
            socket.create_connection((host, int(port)), timeout=60).close()
        except OSError as error:
            raise TrainingFailedError(
                f"the launcher does not answer at {host}:{port} ({error}): start it again"
            ) from error


def group_timeout(seconds: float) -> timedelta:
    """The timeout of collective operations in PyTorch."""
    return timedelta(seconds=seconds + _LATER)


@contextlib.contextmanager
def named_loss(index: int, count: int) -> Iterator[None]:
    """If another process ends during a collective operation, the error is a ``TrainingFailedError`` of one
    line.
    """
    try:
        yield
    except RuntimeError as error:
        # Of a loss within attention, the reason is what the collective said.
        cause = (error.__cause__ or error) if isinstance(error, CommunicationError) else error
        if count > 1 and (cause is not error or isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            reason = str(cause).strip().splitlines()[0]
            raise TrainingFailedError(
                f"process {index} of {count} (counted from 0) lost the others, of which one has ended or no longer "
                f"answers: --resume continues from the last checkpoint ({reason})"
            ) from error
        raise


@functools.cache
def watch(index: int, count: int, seconds: float) -> None:
    """Ends this process with a one-line reason when another one has not answered for that time: stopped,
    killed, or its machine lost.

    Each of the ``count`` processes writes a heartbeat to the launcher's store. Without this, the remaining
    ones wait for the others in the middle of a step. Called again, it does nothing.

    Args:
        index, count: of this process, and how many there are.
        seconds: after which a silent process counts as lost.
    """
    if count > 1 and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        _Watch(index, count, seconds)


class _Watch:
    """Two threads: one polls the store, the other checks the time, also while the store does not answer."""

    def __init__(self, index: int, count: int, seconds: float) -> None:
        self.index, self.count, self.seconds = index, count, seconds
        self.interval = min(1.0, seconds / 4)
        self.left = threading.Event()
        self.answered = time.monotonic()  # of the last answer of the store
        self.seen = {other: self.answered for other in range(count) if other != index}
        threads = [threading.Thread(target=run, name="watch-processes", daemon=True) for run in (self._ask, self._look)]
        for thread in threads:
            thread.start()

        def leave() -> None:
            self.left.set()
            threads[0].join(timeout=2)

        atexit.register(leave)

    def _ask(self) -> None:
        """Writes the heartbeat of this process, and reads those of the others."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore  # not in every build of PyTorch

        prefix = f"structattn-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = PrefixStore(prefix, TCPStore(host, port, is_master=False))
            beats = dict.fromkeys(self.seen, b"")
            for beat in itertools.count(1):
                store.set(f"beat-{self.index}", str(beat))
                for other, last in beats.items():
                    last_beat = store.get(f"beat-{other}") if store.check([f"beat-{other}"]) else b""
                    if last_beat != last or store.check([f"left-{other}"]):
                        beats[other], self.seen[other] = last_beat, time.monotonic()
                self.answered = time.monotonic()
                if self.left.wait(self.interval):
                    store.set(f"left-{self.index}", "")
                    return
        except RuntimeError as error:
            # The store is gone: the launcher has ended, which ends this process as well, or the first process
            # has finished.
            logger.debug("the other processes are no longer watched: %s", error)
            self.left.set()

    def _look(self) -> None:
        last_look = time.monotonic()
        while not self.left.wait(self.interval):
            now = time.monotonic()
            if now - last_look > self.seconds / 2:  # this process was stopped itself, and has no news of the others
                self.answered = now
                self.seen.update(dict.fromkeys(self.seen, now))
            silent = [other for other, last in self.seen.items() if now - last > self.seconds]
            if now - self.answered > self.seconds:
                silent = [0]  # which has the store, where no launcher has it
            if silent:
                self._end(silent)
            last_look = now

    def _end(self, silent: list[int]) -> None:
        names = ", ".join(map(str, silent))
        logger.error(
            "process %s of %d (counted from 0) has not answered for %g s (training.process_timeout): it was stopped, "
            "or its machine is gone. This process ends; --resume continues from the last checkpoint",
            names,
            self.count,
            self.seconds,
        )
        os._exit(1)
