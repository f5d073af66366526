"""Work for several processes: given out one after the other, stopped together, and a process that dies is named with what it did."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from structattn.errors import StructAttnError, TrainingFailedError
from structattn.studies import interrupt

_TICK_S = 0.2
_RESERVE_S = 1.0  # of the time that there is to stop


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process does.

    Args:
        run: does it; can be pickled.
        name: for messages.
        log: the file that gets what the process writes meanwhile; removed if that is nothing.
    """

    run: Callable[[], None]
    name: str
    log: Path


class _Worker:
    """A process and what it does now."""

    def __init__(self, context: Any, begin: Callable[[], None], stop: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.work: Work | None = None
        self.process = context.Process(target=_serve, args=(theirs, begin, stop), daemon=True)
        # A Ctrl-C goes to every process of the terminal: only this one handles it. Blocked here, it waits for the next line.
        with _blocked(signal.SIGINT):
            self.process.start()
        theirs.close()

    def give(self, work: Work | None) -> None:
        """Gives it something to do, or ``None`` to end."""
        self.work = work
        with contextlib.suppress(OSError):  # it died: that is found where its answer is read
            self.pipe.send(work)

    def answer(self) -> Exception | None:
        """What came of it: nothing, or the error it ended with."""
        work = self.work
        assert work is not None
        try:
            error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_RESERVE_S)
            code = self.process.exitcode
            by = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
            hint = ": the machine may be out of memory" if code == -signal.SIGKILL else ""
            error = TrainingFailedError(f"its process was ended by {by}{hint}")
        if error is not None:
            kind = type(error) if isinstance(error, StructAttnError) else TrainingFailedError
            log = f"; its log is {work.log}" if work.log.exists() else ""
            error = kind(f"{work.name}: {error}{log}. The other runs are kept, and --resume continues them")
        return error


@contextlib.contextmanager
def _blocked(number: int) -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_all(
    works: Sequence[Work], *, workers: int, begin: Callable[[], None], on_tick: Callable[[int], None] = lambda _: None
) -> None:
    """Does all of it, in as many processes as ``workers``.

    Asked to stop (see ``interrupt``) it asks the processes, begins nothing more, and kills those that have not come to a checkpoint in time.

    Args:
        works: what is to be done, in this order.
        workers: most processes.
        begin: prepares each process.
        on_tick: called several times a second with how much of the work is done.

    Raises:
        StructAttnError: what one of them raised; ``TrainingFailedError`` for other errors, and for a process that died. The others are asked
            to stop.
        Stopped: this process was asked to.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Value("i", 0, lock=False)
    waiting, team, done = list(works), list[_Worker](), 0
    with interrupt.at_steps():
        try:
            for _ in range(min(workers, len(works))):
                interrupt.check()
                team.append(_Worker(context, begin, stop))
                team[-1].give(waiting.pop(0))
            while busy := {worker.pipe: worker for worker in team if worker.work is not None}:
                for pipe in wait(list(busy), timeout=_TICK_S):
                    worker = busy[pipe]
                    error = worker.answer()
                    interrupt.check()  # before an error: a process that was stopped reports none
                    if error is not None:
                        raise error
                    done += 1
                    worker.give(waiting.pop(0) if waiting else None)
                interrupt.check()
                on_tick(done)
        except BaseException:
            stop.value = interrupt.asked() or signal.SIGTERM
            _end(team, interrupt.GRACE_S[stop.value] - _RESERVE_S)
            raise
        _end(team, _RESERVE_S)


def _end(team: Sequence[_Worker], seconds: float) -> None:
    """Waits until the processes are gone, and kills those that stay."""
    until = time.monotonic() + seconds
    for worker in team:
        worker.pipe.close()
    for worker in team:
        worker.process.join(max(0.0, until - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _serve(pipe: Connection, begin: Callable[[], None], stop: Any) -> None:
    """In a worker process: does what comes through the pipe."""
    interrupt.leave_to_parent()
    interrupt.follow(lambda: int(stop.value))
    begin()
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while (work := pipe.recv()) is not None:
            pipe.send(_outcome(work))


def _outcome(work: Work) -> Exception | None:
    with _logged(work.log):
        try:
            work.run()
        except Exception as error:
            traceback.print_exc()
            if isinstance(error, StructAttnError):
                return type(error)(str(error))
            first = next(iter(str(error).splitlines()), "")
            return TrainingFailedError(f"{type(error).__name__}: {first}".removesuffix(": "))
    return None


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Sends what this process writes to a file, if there can be one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:  # such as in a finished run that nobody may write to
        yield
        return
    with file:
        before = {number: os.dup(number) for number in (1, 2)}
        for number in before:
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, copy in before.items():
                os.dup2(copy, number)
                os.close(copy)
            if not file.tell():
                path.unlink(missing_ok=True)
