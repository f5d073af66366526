"""Runs jobs in processes of this machine; an error for a process that dies names its job.

The pools of Python do not replace this: where a process dies, ``ProcessPoolExecutor`` fails all jobs without
saying which one ended it, and ``multiprocessing.Pool`` waits for its job forever. Neither lets a running job
ask its parent whether to continue, nor gives running jobs a time in which to write a checkpoint and end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment

from structattn.checks import check_int
from structattn.errors import TrainingFailedError
from structattn_lab.runner.base import Listener, run_in_worker, run_job
from structattn_lab.runner.job import Job
from structattn_lab.runs import interrupt
from structattn_lab.training.processes import end_with_parent

_TICK_S = 0.2
_RESERVE_S = 1.0  # of the time that there is to stop
_STEPS, _EVALUATION, _END = "steps", "evaluation", "end"  # kinds of messages


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalRunner:
    """Runs jobs on this machine; see ``Runner``.

    Args:
        workers: jobs at the same time, each in a process with its share of the cores and, where there are
            several, with one GPU. With 1 the jobs run in this process, one at a time. ``None``: as many as
            there are GPUs, or without any, cores.

    Raises:
        ConfigError: fewer than one worker.
    """

    def __init__(self, workers: int | None = 1) -> None:
        if workers is not None:
            check_int("jobs", workers, minimum=1)
        self.workers = workers or torch.cuda.device_count() or cores()

    def run(self, jobs: Iterable[Job], listener: Listener) -> None:
        """See ``Runner``."""
        if self.workers == 1 or operator.length_hint(jobs, 2) < 2:
            _run_here(jobs, listener)
        else:
            _run_in_processes(iter(jobs), self.workers, listener)


def _run_here(jobs: Iterable[Job], listener: Listener) -> None:
    for job in jobs:
        interrupt.check()
        error = None
        try:
            run_job(
                job,
                on_steps=lambda steps, job=job: listener.stepped(job, steps),  # type: ignore[misc]
                on_evaluation=lambda entry, job=job: listener.evaluated(job, entry),  # type: ignore[misc]
            )
        except Exception as raised:
            error = raised
        listener.ended(job, error)


def _run_in_processes(jobs: Iterator[Job], workers: int, listener: Listener) -> None:
    context = multiprocessing.get_context("spawn")
    stop = context.Value("i", 0, lock=False)
    processes: list[_Worker] = []
    with interrupt.at_steps():
        try:
            for index in range(workers):
                interrupt.check()
                if (job := next(jobs, None)) is None:
                    break
                processes.append(_Worker(context, index, workers, stop))
                processes[-1].give(job)
            while busy := {worker.pipe: worker for worker in processes if worker.job is not None}:
                for pipe in wait(list(busy), timeout=_TICK_S):
                    _handle_message(busy[pipe], listener)
                for index, worker in enumerate(processes):
                    interrupt.check()
                    if worker.job is None and (job := next(jobs, None)) is not None:
                        if not worker.process.is_alive():
                            processes[index] = worker = _Worker(context, index, workers, stop)
                        worker.give(job)
        except BaseException:
            stop.value = interrupt.asked() or signal.SIGTERM
            _end(processes, interrupt.GRACE_S[stop.value] - _RESERVE_S)
            raise
        _end(processes, _RESERVE_S)


class _Worker:
    """A process and its current job."""

    def __init__(self, context: Any, index: int, workers: int, stop: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.job: Job | None = None
        threads = max(1, cores() // workers)
        self.process = context.Process(target=_serve, args=(theirs, threads, stop), daemon=True)
        # A Ctrl-C goes to every process of the terminal: only this one handles it. Blocked here, it waits for
        # the next line.
        with _blocked(signal.SIGINT), patch_environment(**_gpu(index)):
            self.process.start()
        theirs.close()

    def give(self, job: Job) -> None:
        """Sends a job to the process."""
        self.job = job
        self.send(job)

    def send(self, message: object) -> None:
        """A process that died is noticed where its messages are read."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> tuple[str, Any]:
        """The next message: its kind and its content."""
        try:
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_RESERVE_S)
            code = self.process.exitcode
            by = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"status {code}"
            hint = ": the machine may be out of memory" if code == -signal.SIGKILL else ""
            return _END, TrainingFailedError(f"its process was ended by {by}{hint}")
        return kind, content


def _handle_message(worker: _Worker, listener: Listener) -> None:
    """Reads one message of a process."""
    job = worker.job
    assert job is not None
    kind, content = worker.receive()
    if kind == _STEPS:
        listener.stepped(job, content)
    elif kind == _EVALUATION:
        worker.send(listener.evaluated(job, content))
    else:
        interrupt.check()  # before an error: a process that was stopped reports none
        worker.job = None
        listener.ended(job, content)


def _gpu(index: int) -> dict[str, str]:
    """The environment in which a process has one GPU of several."""
    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(names) != count:
        names = [str(number) for number in range(count)]
    return {"CUDA_VISIBLE_DEVICES": names[index % count]} if count > 1 else {}


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


def _end(processes: Sequence[_Worker], seconds: float) -> None:
    """Waits until the processes are gone, and kills those that stay."""
    until = time.monotonic() + seconds
    for worker in processes:
        worker.pipe.close()
    for worker in processes:
        worker.process.join(max(0.0, until - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _serve(pipe: Connection, threads: int, stop: Any) -> None:
    """In a worker process: runs the jobs that come through the pipe."""
    end_with_parent()
    interrupt.leave_to_parent()
    interrupt.follow(lambda: int(stop.value))
    torch.set_num_threads(threads)

    def send_steps(steps: int) -> None:
        with contextlib.suppress(OSError):  # the parent no longer listens: stop at the next step
            pipe.send((_STEPS, steps))

    def ask_to_continue(entry: dict[str, float]) -> bool:
        with contextlib.suppress(EOFError, OSError):
            pipe.send((_EVALUATION, entry))
            return bool(pipe.recv())
        return True

    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        tasks = None
        while True:
            job = pipe.recv()
            tasks = tasks or job.tasks  # those of the first job: the next one finds its data read
            job = replace(job, tasks=tasks)
            with _logged(job.log):
                error = run_in_worker(job, send_steps, ask_to_continue)
            pipe.send((_END, error))
    os._exit(0)  # at once: exit handlers of libraries take long on a busy machine, and the parent waits


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Redirects the output of this process to a file, if it can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:  # such as in a read-only finished run
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
