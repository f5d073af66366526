"""Rows on some workers, each with a limit of time, until all are done or the time is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from typing import Any

from benchmarks.gpu.rows import Row, Settings
from benchmarks.gpu.worker import Worker

START_S = 60.0  # more for the first row of a process, which imports and compiles


def run_rows(
    rows: Iterable[Row],
    settings: Settings,
    *,
    jobs: int,
    seconds: float,
    on_result: Callable[[Row, dict[str, Any]], object],
) -> None:
    """Does rows in their order.

    Args:
        rows: what to do.
        settings: for the workers.
        jobs: rows at the same time, but for those that run alone.
        seconds: no row starts after them, and what runs then is ended without a result.
        on_result: called with each row and its result: ``status``, ``seconds`` and what the row gave.
    """
    deadline = time.monotonic() + seconds
    left, workers = deque(rows), list[Worker]()
    try:
        while True:
            busy = [worker for worker in workers if worker.row]
            while left and time.monotonic() < deadline and _may_start(left[0], busy, jobs):
                idle = next((worker for worker in workers if not worker.row), None)
                extra = 0.0 if idle else START_S
                if idle is None:
                    workers.append(idle := Worker(settings))
                row = left.popleft()
                idle.give(row, min(row.limit_s + extra, deadline - time.monotonic()))
                busy.append(idle)
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy], max(0.0, min(worker.left_s for worker in busy)))
            for worker in busy:
                is_late = worker.left_s <= 0
                if worker.pipe in ready or is_late:
                    _finish(worker, workers, worker.pipe in ready, deadline, on_result)
    finally:
        for worker in workers:
            worker.end()


def _may_start(row: Row, busy: list[Worker], jobs: int) -> bool:
    """Whether there is room: nothing runs beside a row that runs alone."""
    if row.alone:
        return not busy
    return len(busy) < jobs and not any(worker.row and worker.row.alone for worker in busy)


def _finish(
    worker: Worker,
    workers: list[Worker],
    is_ready: bool,
    deadline: float,
    on_result: Callable[[Row, dict[str, Any]], object],
) -> None:
    """Takes the result of a worker, or ends one that takes too long."""
    row, taken = worker.row, time.monotonic() - worker.started
    assert row is not None
    if is_ready:
        result = worker.result()
        worker.row = None
        has_ended = result["status"] == "crash"
    else:
        result, has_ended = {"status": "timeout", "message": f"not done after {taken:.0f} s"}, True
    if has_ended:
        worker.end()
        workers.remove(worker)
    if is_ready or time.monotonic() < deadline:  # what only the end of the run stopped is not done
        on_result(row, result | {"seconds": round(taken, 1)})
