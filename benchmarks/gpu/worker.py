"""A process that does rows by their names: what breaks a device or hangs ends a worker, not the run."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.parts import all_rows
from benchmarks.gpu.rows import Row, Settings
from benchmarks.registry import CaseUnavailableError
from benchmarks.timing import WrongResultError
from structattn.testing.interpreter import quick_interpreter

LONGEST_MESSAGE = 600


def outcome(row: Row, settings: Settings) -> dict[str, Any]:
    """What a row gave: its numbers with the status ``ok``, or ``wrong``, ``unavailable`` or ``error`` with a
    message.
    """
    try:
        found = {"status": "ok"} | row.run()
        json.dumps(found, allow_nan=False)  # raises for what no file of results can hold
        if settings.device.type == "cuda":
            torch.cuda.synchronize()  # a kernel that fails is noticed here at the latest
        return found
    except WrongResultError as error:
        return {"status": "wrong", "message": _text(error)}
    except CaseUnavailableError as error:
        return {"status": "unavailable", "message": _text(error)}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"  # noqa: PTH119 - no path of this machine
        return {"status": "error", "message": f"{type(error).__name__} at {where}: {_text(error)}"}


def _text(error: Exception) -> str:
    """A message in one line; of a long one the end, where compilers say what is wrong."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_MESSAGE else f"...{text[-LONGEST_MESSAGE:]}"


def is_usable(settings: Settings) -> bool:
    """Whether the device still works: an illegal memory access ends the use of a GPU for its process."""
    if settings.device.type != "cuda":
        return True
    try:
        torch.cuda.empty_cache()
        return bool((torch.ones(8, device="cuda") + 1).sum().item() == 16)
    except Exception:
        return False


def serve(pipe: Connection, settings: Settings) -> None:
    """Answers each name of a row with its result, until the pipe is closed or the device is broken."""
    rows = {row.name: row for row in all_rows(settings)}
    if settings.rehearse:
        importlib.import_module("triton.runtime.interpreter")  # which is made quick

    with quick_interpreter(), contextlib.suppress(EOFError):
        while True:
            row = rows[pipe.recv_bytes().decode()]
            pipe.send_bytes(json.dumps(outcome(row, settings)).encode())
            if not is_usable(settings):
                return


class Worker:
    """One process and the row that it does."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, settings), daemon=False)
        self.process.start()
        other.close()
        self.row: Row | None = None
        self.started = 0.0
        self.limit_s = 0.0

    def give(self, row: Row, limit_s: float) -> None:
        """Starts a row."""
        self.row, self.started, self.limit_s = row, time.monotonic(), limit_s
        self.pipe.send_bytes(row.name.encode())

    @property
    def left_s(self) -> float:
        """Seconds until the row has taken too long."""
        return self.started + self.limit_s - time.monotonic()

    def result(self) -> dict[str, Any]:
        """The answer, once the pipe is ready; a process that ended without one has crashed."""
        try:
            return dict(json.loads(self.pipe.recv_bytes()))
        except (EOFError, OSError):
            self.process.join(10)
            code = self.process.exitcode
            return {"status": "crash", "message": f"its process ended with exit code {code}"}

    def end(self) -> None:
        """Ends the process: it has nothing to lose."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
