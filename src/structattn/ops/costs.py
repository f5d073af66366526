"""What small operations cost on a CPU, and the counted work that they are multiplied with.

Levels save arithmetic, and each of them takes operations, which cost microseconds in Python however little
they compute. Whether levels are computed apart from each other, or some of them together with masks, follows
from counted work (``Work``) and from the costs of the machine (``Costs``): those of a known machine, until
``measure_costs`` has measured this one.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from structattn.errors import CheckpointError, StructAttnWarning
from structattn.files import cache_folder, write_atomic

_ROUNDS = 60  # of each measurement; the least counts, since other programs only add time


@dataclass(frozen=True)
class Costs:
    """What one unit of ``Work`` costs, in nanoseconds.

    Attributes:
        product: a multiply-add of a matrix product.
        score: to write, scale or add one number in a pass over scores.
        fresh: to write one number of a large new tensor, whose memory the system has to map.
        weight: the exponential of one number, with its sum.
        operation: to call an operation of PyTorch, and to make its views.
        matrix: the same for each further matrix of a batched product, which are small.
    """

    product: float
    score: float
    fresh: float
    weight: float
    operation: float
    matrix: float


# Of one core of an AMD EPYC (AVX2) on 2026-11-23, ``fresh`` of an Intel Xeon on 2026-11-25, PyTorch 2.13 with
# MKL. Every machine that was not measured decides by them, so that numbers do not change from one machine to
# another.
DEFAULT = Costs(product=0.04, score=0.52, fresh=1.2, weight=2.0, operation=10_000.0, matrix=160.0)


@dataclass(frozen=True)
class Work:
    """Counted work; the attributes are those of ``Costs``."""

    product: int = 0
    score: int = 0
    fresh: int = 0
    weight: int = 0
    operation: int = 0
    matrix: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self._counts(), other._counts(), strict=True)))

    def _counts(self) -> tuple[int, ...]:
        return self.product, self.score, self.fresh, self.weight, self.operation, self.matrix

    def time(self, costs: Costs) -> float:
        """In nanoseconds."""
        return (
            self.product * costs.product
            + self.score * costs.score
            + self.fresh * costs.fresh
            + self.weight * costs.weight
            + self.operation * costs.operation
            + self.matrix * costs.matrix
        )


def costs_file() -> Path:
    """The file with the costs of this machine, whether or not it exists: in the user's cache, named by the
    machine.

    Raises:
        CheckpointError: there is no cache folder.
    """
    name = "".join(c if c.isalnum() or c in "-." else "-" for c in platform.node()) or "machine"
    return cache_folder() / f"costs-{name}.json"


def measured_costs() -> Costs | None:
    """What was measured on this machine for this process's number of threads; ``None`` where nothing was."""
    return _measured().get(torch.get_num_threads())


def costs_here() -> Costs:
    """The costs that this process decides by: measured ones where there are some, else ``DEFAULT``."""
    return measured_costs() or DEFAULT


def measure_costs() -> Path:
    """Measures what operations cost on this machine, with one thread and with the present number, and stores
    it for later processes.

    ``backend="auto"`` and ``blocked`` then choose between many small products and few large ones by it.
    Results of calls whose choice changes differ by rounding. Other numbers of threads keep what was measured
    for them.

    Returns:
        The file, JSON, in the user's cache (``~/.cache/structattn``, or the folder that STRUCTATTN_CACHE
        names). Remove it to go back to the costs that the package has.

    Raises:
        CheckpointError: the file cannot be written, or there is no cache folder.

    Cost: about two seconds for each of the two.
    """
    path, present = costs_file(), torch.get_num_threads()
    by_threads = dict(_measured())
    try:
        for threads in sorted({1, present}):
            torch.set_num_threads(threads)
            by_threads[threads] = _measure()
    finally:
        torch.set_num_threads(present)
    record = {
        "machine": platform.node(),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "unit": "nanoseconds",
        "threads": {str(threads): asdict(costs) for threads, costs in sorted(by_threads.items())},
    }
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    _measured.cache_clear()
    return path


@functools.cache
def _measured() -> dict[int, Costs]:
    """The costs in the file of this machine, by the number of threads."""
    try:
        path = costs_file()
        content = path.read_bytes()
    except (OSError, CheckpointError):  # not measured, or no cache folder
        return {}
    try:
        by_threads = json.loads(content)["threads"]
        costs = {int(threads): _read(record) for threads, record in by_threads.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(
            f"{path} does not hold the costs of a machine ({error!r}), and is ignored: "
            "run `structattn measure-costs` again, or remove it",
            StructAttnWarning,
            stacklevel=2,
        )
        return {}
    return costs


def _read(record: dict[str, float]) -> Costs:
    costs = Costs(**{field.name: float(record[field.name]) for field in fields(Costs)})
    if not all(0 < value < math.inf for value in asdict(costs).values()):
        raise ValueError(f"costs must be finite numbers above 0, got {costs}")
    return costs


def _measure() -> Costs:
    with torch.inference_mode(), torch.device("cpu"):
        tiny, square = torch.randn(1, 4, 4), torch.randn(256, 8, 8)
        few_squares = square[:16]
        a, b = torch.randn(16, 64, 32), torch.randn(16, 32, 256)
        scores, uniform = a @ b, torch.rand(16, 64, 256)
        operation = _least(lambda: torch.mul(tiny, 2.0, out=tiny[:, :4]))
        matrix = (_least(lambda: torch.bmm(square, square)) - _least(lambda: torch.bmm(few_squares, few_squares))) / 240
        size = scores.numel()
        rates = [
            _least(f) / n
            for f, n in (
                (lambda: torch.bmm(a, b, out=scores), size * 32),
                (lambda: torch.mul(uniform, 0.5, out=scores), size),
                (lambda: torch.stack([uniform * 0.5 for _ in range(7)]), 8 * size),
                (lambda: torch.softmax(uniform, -1, out=scores), size),
            )
        ]
    least = 1e-3  # a clock that is disturbed in the wrong moment may give a difference below 0
    return Costs(*(max(x, least) for x in (*rates, operation, matrix)))


def _least(run: Callable[[], Tensor]) -> float:
    """The least time of a call, in nanoseconds."""
    least = math.inf
    for _ in range(_ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(8):
            run()
        least = min(least, (time.perf_counter_ns() - start) / 8)
    return least
