"""Runs jobs on a Ray cluster, or on this machine through Ray."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from structattn.checks import check_int
from structattn.errors import ConfigError, MissingDependencyError, TrainingFailedError
from structattn.extensions import VARIABLE
from structattn.extras import install_command
from structattn_lab.runner.base import Listener, run_in_worker
from structattn_lab.runner.job import Job
from structattn_lab.runs import interrupt
from structattn_lab.tasks.factory import TaskFactory

_ANSWER_S = 5.0
_TICK_S = 0.2
_LOOK_S = 0.5  # between two checks of a job for a request to stop
_RESERVE_S = 1.0  # of the time that there is to stop
# What makes tasks in a process of Ray, which gets several jobs in turn: the next job finds its data read.
_TASKS: dict[str, TaskFactory] = {}
_RETRIES = 2  # of a job whose machine was lost; it continues from its last checkpoint


def import_ray() -> Any:
    """The module ``ray``; raises ``MissingDependencyError`` without it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingDependencyError(f"Ray is not installed: {install_command('ray')} brings it ({error})") from error


@contextmanager
def connected(address: str) -> Iterator[dict[str, float]]:
    """Joins a cluster, or starts one on this machine, and leaves it at the end, unless this process was in
    one before.

    Args:
        address: see ``RayRunner``.

    Yields:
        The resources of the cluster: ``CPU``, ``GPU`` and so on.

    Raises:
        MissingDependencyError: without Ray.
        ConfigError: nothing answers at the address, or this machine cannot start one.
    """
    ray = import_ray()
    began = not ray.is_initialized()
    if began:
        _check_answers(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except Exception as error:  # Ray raises plain ones, too, such as for a machine too busy to start it in time
            reason = str(error).strip().splitlines()[0]
            if address == "local":
                raise ConfigError(
                    f"Ray did not start on this machine: {reason} What was done is kept: try --resume"
                ) from error
            raise _no_cluster(address, reason) from error
    interrupt.listen()
    try:
        yield ray.cluster_resources()
    finally:
        if began:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Raises ``ConfigError`` where no port answers: Ray waits minutes for one that is closed, and then ends
    the process.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
            pass
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: no port, and no name of a machine
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"expected a Ray cluster at {address!r}: {reason}. Start one with `ray start --head`, or give local"
    )


class RayRunner:
    """Runs jobs on the machines of a cluster; see ``Runner``. The folders of the jobs must be on a file
    system that all machines share.

    Args:
        address: as ``ray.init`` takes it: ``"auto"`` for the cluster that this machine belongs to,
            ``"HOST:PORT"`` or ``"ray://HOST:PORT"`` for another, ``"local"`` for only this machine.
        workers: jobs at the same time. ``None``: as many as the cluster has GPUs, or without any, cores.

    Raises:
        MissingDependencyError: without Ray.
        ConfigError: fewer than one worker, or nothing answers at the address.
    """

    def __init__(self, address: str, workers: int | None = None) -> None:
        if workers is not None:
            check_int("jobs", workers, minimum=1)
        import_ray()
        _check_answers(address)
        self.address, self.workers = address, workers

    def run(self, jobs: Iterable[Job], listener: Listener) -> None:
        """See ``Runner``."""
        with connected(self.address) as resources:
            _Cluster(self.workers, resources, listener).run(iter(jobs))


class _Cluster:
    """The running jobs, by their Ray references."""

    def __init__(self, workers: int | None, resources: dict[str, float], listener: Listener) -> None:
        self.ray, self.listener = import_ray(), listener
        cores, gpus = resources.get("CPU", 1), resources.get("GPU", 0)
        self.most = workers or max(1, int(gpus or cores))
        needs: dict[str, Any] = {"num_cpus": 1.0 if self.most <= cores else cores / self.most}
        if gpus >= 1:
            needs["num_gpus"] = min(1.0, gpus / self.most)
        self.start = self.ray.remote(max_retries=_RETRIES, **needs)(_run).remote
        self.mailbox = self.ray.remote(num_cpus=0, max_concurrency=10_000)(_Mailbox).remote()
        self.running: dict[Any, Job] = {}
        self.numbers: list[Job] = []

    def run(self, jobs: Iterator[Job]) -> None:
        with interrupt.at_steps():
            try:
                while self._fill(jobs):
                    done, _ = self.ray.wait(list(self.running), timeout=_TICK_S)
                    self._handle_messages()
                    interrupt.check()
                    for name in done:
                        self._ended(name)
            except BaseException:
                asked = interrupt.asked() or signal.SIGTERM
                with contextlib.suppress(self.ray.exceptions.RayError):
                    self.ray.get(self.mailbox.stop.remote(asked), timeout=_ANSWER_S)
                    seconds = interrupt.GRACE_S[signal.Signals(asked)] - _RESERVE_S
                    self.ray.wait(list(self.running), num_returns=max(1, len(self.running)), timeout=seconds)
                raise

    def _fill(self, jobs: Iterator[Job]) -> bool:
        """Starts jobs where there is room; returns whether there is anything to wait for."""
        while len(self.running) < self.most and (job := next(jobs, None)) is not None:
            interrupt.check()
            self.numbers.append(job)
            there = replace(job, folder=job.folder.resolve())  # workers have other working folders
            modules = os.environ.get(VARIABLE, "")
            self.running[self.start(there, len(self.numbers) - 1, self.mailbox, Path.cwd(), modules)] = job
        return bool(self.running)

    def _handle_messages(self) -> None:
        for number, question, content in self.ray.get(self.mailbox.take.remote()):
            if not question:
                self.listener.stepped(self.numbers[number], content)
            else:
                self.mailbox.answer.remote(number, self.listener.evaluated(self.numbers[number], content))

    def _ended(self, name: Any) -> None:
        job = self.running.pop(name)
        try:
            error = self.ray.get(name)
        except self.ray.exceptions.RayError as lost:
            error = TrainingFailedError(f"its process was lost: {str(lost).strip().splitlines()[0]}")
        self.listener.ended(job, error)


class _Mailbox:
    """The actor between jobs and the process that started them."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bool, Any]] = []
        self.answers: dict[int, asyncio.Future[bool]] = {}
        self.asked = 0

    async def report(self, number: int, steps: int) -> int:
        """From a job: new steps; returns the signal that asks it to stop, 0 if none does."""
        if steps:
            self.messages.append((number, False, steps))
        return self.asked

    async def ask(self, number: int, entry: dict[str, float]) -> bool:
        """From a job: whether it continues; it waits for the answer."""
        self.answers[number] = asyncio.get_running_loop().create_future()
        self.messages.append((number, True, entry))
        return self.asked > 0 or await self.answers[number]

    async def take(self) -> list[tuple[int, bool, Any]]:
        """To the parent: messages since the last call, each with the number of the job and whether it is a
        question.
        """
        messages, self.messages = self.messages, []
        return messages

    async def answer(self, number: int, goes_on: bool) -> None:
        """From the parent: to a job that waits."""
        if (waiting := self.answers.pop(number, None)) is not None and not waiting.done():
            waiting.set_result(goes_on)

    async def stop(self, number: int) -> None:
        """From the parent: all jobs are to stop at their next step."""
        self.asked = number
        for waiting in self.answers.values():
            if not waiting.done():
                waiting.set_result(True)


def _run(job: Job, number: int, mailbox: Any, folder: Path, modules: str) -> Exception | None:
    """One job, in a process of Ray's, with the modules of the process that started it (see
    ``extensions``).
    """
    os.environ[VARIABLE] = modules
    if folder.is_dir():
        os.chdir(folder)  # data paths are relative to the folder in which the command was started
    job = replace(job, tasks=_TASKS.setdefault(job.tasks.name, job.tasks))
    get = importlib.import_module("ray").get

    def ask_to_continue(entry: dict[str, float]) -> bool:
        return bool(get(mailbox.ask.remote(number, entry)))

    with contextlib.suppress(interrupt.Stopped), _polling(lambda: int(get(mailbox.report.remote(number, 0)))):
        interrupt.check()
        return run_in_worker(job, lambda steps: mailbox.report.remote(number, steps), ask_to_continue)
    return None


@contextmanager
def _polling(source: Callable[[], int]) -> Iterator[None]:
    """Inside, ``interrupt`` polls a source, not too often."""
    looked, found = 0.0, 0

    def asked() -> int:
        nonlocal looked, found
        if time.monotonic() - looked > _LOOK_S:
            looked, found = time.monotonic(), source()
        return found

    interrupt.follow(asked)
    try:
        yield
    finally:
        interrupt.follow(None)
