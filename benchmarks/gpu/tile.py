"""Part "tile": a search for the fastest tiles of each kernel and shape, written as a table that
``ops/triton/config.py`` reads.
"""

from __future__ import annotations

import fcntl
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

import structattn as sa
from benchmarks.attention import AttentionWork, row_reference
from benchmarks.gpu.rows import Row, Settings
from benchmarks.registry import CaseUnavailableError, Check
from benchmarks.timing import QUEUED, Clock, CpuClock, CudaClock, checked_error
from structattn.layout.levels import LevelLayout

if TYPE_CHECKING:
    from structattn.ops.triton.plan import Tiles
    from structattn.ops.triton.tile_table import TileTable

LIMIT_S = 150.0
REPEATS = 7
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What tiles are searched for; tiles of 16-bit numbers serve both dtypes."""

    itemsize: int
    dim: int
    levels: int
    values: bool

    @property
    def name(self) -> str:
        """For names of rows."""
        return f"{8 * self.itemsize} bit, D={self.dim}, {self.levels} levels" + (" with values" if self.values else "")

    def layout(self, context: int) -> LevelLayout:
        """Equal ranks, and blocks that halve."""
        ranks = (self.dim // self.levels,) * self.levels
        return LevelLayout.halving(ranks, context, value_ranks=ranks if self.values else None)


SHAPES = [
    Shape(itemsize=size, dim=dim, levels=levels, values=values)
    for size in (2, 4)
    for dim in (64, 128, 32)
    for levels in (8, 4, 1)
    for values in ((False, True) if levels > 1 else (False,))
]
# Own rows, walked rows, warps, stages; those that need more shared memory than there is fail quickly, and say
# so.
CANDIDATES = {
    "forward": [
        *((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 32, 8, 3), (128, 32, 4, 3)),
        *((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3)),
        *((64, 64, 4, 4), (128, 64, 4, 2)),
    ],
    "grad_queries": [
        *((64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 1), (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2)),
        *((64, 64, 8, 2), (64, 128, 8, 1), (128, 32, 4, 2)),
    ],
    "grad_keys": [
        *((64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2), (64, 64, 8, 1)),
        *((128, 64, 8, 1), (64, 128, 8, 1), (32, 64, 4, 2)),
    ],
    "decode": [
        *((16, 64, 4, 3), (16, 128, 4, 2), (16, 128, 4, 3), (16, 64, 2, 3), (16, 32, 4, 3), (16, 64, 4, 4)),
        (16, 256, 8, 2),
    ],
    "cached": [
        *((64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 128, 8, 2), (64, 32, 4, 3), (64, 32, 2, 3)),
        *((64, 64, 8, 3), (64, 128, 4, 3)),
    ],
}
LARGE_CANDIDATES = {  # float32, without tensor cores
    "forward": [(64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 2), (64, 16, 4, 2), (32, 16, 4, 2)],
    "grad_queries": [(32, 32, 4, 2), (32, 32, 8, 2), (64, 32, 8, 1), (32, 16, 4, 2), (16, 32, 4, 2)],
    "grad_keys": [(32, 32, 8, 2), (32, 32, 4, 2), (64, 32, 8, 1), (32, 16, 4, 2), (16, 32, 4, 2)],
    "decode": [(16, 32, 4, 2), (16, 64, 4, 2), (16, 32, 8, 2), (16, 16, 4, 2)],
    "cached": [(16, 64, 8, 3), (16, 64, 8, 2), (16, 32, 8, 2), (16, 64, 4, 2), (16, 32, 4, 2)],
}
REHEARSED = [Shape(itemsize=4, dim=32, levels=2, values=True)]
RULE = "rule"
TILES = ("own", "walk", "num_warps", "num_stages")
NO_CAPABILITY = (0, 0)  # of a rehearsal


def candidates(kernel: str, itemsize: int) -> list[tuple[int, int, int, int]]:
    """The tiles that are tried for a kernel beside those of the rule."""
    return (CANDIDATES if itemsize == 2 else LARGE_CANDIDATES)[kernel]


def rows(settings: Settings) -> Iterator[Row]:
    """Rank 2: 8 levels of 64 dimensions; 4: the other shapes of 16 bits; 6: float32. A rehearsal has two
    candidates.
    """
    for shape in REHEARSED if settings.rehearse else SHAPES:
        for kernel in CANDIDATES:
            tried: list[tuple[int, int, int, int] | None] = [None, *candidates(kernel, shape.itemsize)]
            if settings.rehearse:
                tried = [None, (16, 32, 4, 1)]
            for numbers in tried:
                name = RULE if numbers is None else "own={} walk={} warps={} stages={}".format(*numbers)
                yield Row(
                    name=f"tile/{kernel}/{shape.name}/{name}",
                    rank=6 if shape.itemsize == 4 else 2 if (shape.dim, shape.levels) == (64, 8) else 4,
                    limit_s=LIMIT_S,
                    run=_row(kernel, shape, numbers, settings),
                )


def _row(
    kernel: str, shape: Shape, numbers: tuple[int, int, int, int] | None, settings: Settings
) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        return _measured(kernel, shape, numbers, settings)

    return run


def _measured(
    kernel: str, shape: Shape, numbers: tuple[int, int, int, int] | None, settings: Settings
) -> dict[str, Any]:
    """Compiles a kernel while others are measured, compares its result with float64, then times it while no
    other row uses the GPU.

    Raises:
        CaseUnavailableError: the tiles need more shared memory than there is.
    """
    # Only a worker imports Triton, after the choice of its interpreter.
    from structattn.ops.triton import config
    from structattn.ops.triton.tile_table import TileEntry, TileTable

    torch.manual_seed(0)
    capability = config.capability_of(settings.device)
    fields = {name: getattr(shape, name) for name in ("itemsize", "dim", "levels", "values")}
    tiles = dict(zip(TILES, numbers or (), strict=False))
    asked = TileEntry(kernel=kernel, **fields, **tiles) if tiles and capability is not None else None
    entries = {} if asked is None or capability is None else {capability: (asked,)}
    with tiles_of(TileTable(entries)):
        measured = _timed(kernel, shape, None if asked is None else asked.tiles, settings)
    about = {"is_rule": numbers is None, "capability": capability or NO_CAPABILITY}
    return {"kernel": kernel, **fields, **about, **measured}


def _timed(kernel: str, shape: Shape, asked: Tiles | None, settings: Settings) -> dict[str, Any]:
    """The tiles that the kernel takes, its error, and the median of its time; ``asked`` are those that it
    should take.
    """
    from triton.runtime.errors import OutOfResources

    dtype = DTYPES[shape.itemsize]
    work = Cached(shape, dtype, settings) if kernel == "cached" else Direct(kernel, shape, dtype, settings)
    used = work.tiles()
    if kernel == "cached":  # own rows are as many as heads share a key, up to those of the entry
        used = replace(used, own=candidates(kernel, shape.itemsize)[0][0])
    if asked is not None and used != asked:
        raise CaseUnavailableError("its tiles do not fit in the shared memory of this GPU")
    try:
        if settings.device.type == "cuda":
            with compiled_only():
                work.prepare()
                work.measured()
        with _turn(settings):
            largest_error = checked_error(f"{kernel}, {shape.name}", work, dtype)
            # Small kernels are searched by their own time, not by that of their launches.
            clock: Clock = CpuClock() if settings.rehearse else CudaClock(settings.device, QUEUED)
            repeats = 1 if settings.rehearse else REPEATS
            samples = [clock.time_ms(work.measured, 1, work.prepare) for _ in range(repeats + 1)][1:]
    except OutOfResources as error:
        raise CaseUnavailableError(f"the compiled kernel does not fit: {error}") from error
    return {**asdict(used), "error": largest_error, "median_ms": statistics.median(samples)}


@contextmanager
def tiles_of(table: TileTable) -> Iterator[None]:
    """Kernels take the tiles of a table; afterwards those of before, for the next row of this process."""
    from structattn.ops.triton import config

    before = config.tiles_in_use()
    config.use_tiles(table)
    try:
        yield
    finally:
        config.use_tiles(before)


@contextmanager
def compiled_only() -> Iterator[None]:
    """Launches compile their kernels, and do not run them."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, warmup=True, **options)

    with patch.object(JITFunction, "run", compiled):
        yield


@contextmanager
def _turn(settings: Settings) -> Iterator[None]:
    """One row at a time; the lock of a process that is ended is free."""
    with (settings.folder / ".device").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Direct:
    """A call of ``structured_attention``, of which the forward or the backward pass or a decoding step is
    timed.
    """

    def __init__(self, kernel: str, shape: Shape, dtype: torch.dtype, settings: Settings) -> None:
        self.kernel, self.is_gradient = kernel, kernel.startswith("grad")
        batch, heads, length = (1, 2, 64) if settings.rehearse else (2, 16, 8192)
        queries = 1 if kernel == "decode" else length
        if kernel == "decode" and settings.rehearse:
            length = 512
        layout = shape.layout(length)
        q, k, v = (
            torch.randn(batch, heads, n, shape.dim, dtype=dtype, device=settings.device, requires_grad=self.is_gradient)
            for n in (queries, length, length)
        )
        cotangent = torch.randn_like(q) if self.is_gradient else None

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sa.structured_attention(q, k, v, layout, backend="triton")

        self.work = AttentionWork(attend, layout, q, k, v, cotangent)
        self._out: Tensor | None = None

    def tiles(self) -> Tiles:
        """Those that the call takes."""
        from structattn.ops.triton import config

        work, capability = self.work, config.capability_of(self.work.q.device)
        found = config.default_config(work.layout, work.q.dtype, work.v.shape[3], capability=capability)
        assert found is not None
        return getattr(found, self.kernel)

    def __call__(self) -> object:
        return self.work()

    def check(self) -> Iterator[Check]:
        """The output, and the gradients of what has some, against the definition."""
        return self.work.check()

    def prepare(self) -> None:
        """The output, where only the backward pass is timed."""
        if self.is_gradient:
            self._out = self.work.attend(self.work.q, self.work.k, self.work.v)

    def measured(self) -> object:
        """What is timed; both gradient kernels are, of which the other one does not change."""
        work = self.work
        return work() if self._out is None else torch.autograd.grad(self._out, (work.q, work.k, work.v), work.cotangent)


class Cached:
    """A decoding step over a ``LevelCache`` whose blocks are all full."""

    def __init__(self, shape: Shape, dtype: torch.dtype, settings: Settings) -> None:
        batch, heads, self.length = (1, 2, 64) if settings.rehearse else (8, 8, 8192)
        self.shape, self.layout = shape, shape.layout(self.length)
        self.q, self.k, self.v = (
            torch.randn(batch, heads, n, shape.dim, dtype=dtype, device=settings.device)
            for n in (1, self.length, self.length)
        )
        self.cache = sa.LevelCache(self.layout, max_length=self.length)
        self.cache.append(self.k[:, :, :-1], self.v[:, :, :-1])

    def tiles(self) -> Tiles:
        """Those that the step takes."""
        from structattn.ops.triton import cached_attention, config

        ranks = self.layout.ranks
        found = cached_attention.tiles_for(
            ranks, self.layout.value_ranks or (self.shape.dim,), self.shape.itemsize, 1, False,
            config.capability_of(self.q.device), config.tiles_in_use(),
        )  # fmt: skip
        assert found is not None
        return found

    def prepare(self) -> None:
        """Forgets what the step before appended."""
        self.cache.crop(self.length - 1)

    def measured(self) -> Tensor:
        """The attention of the last token."""
        with torch.no_grad():
            return self.cache.attend(self.q, self.k[:, :, -1:], self.v[:, :, -1:], backend="triton")

    def __call__(self) -> Tensor:
        self.prepare()
        return self.measured()

    def check(self) -> Iterator[Check]:
        """Every row."""
        (expected,) = row_reference(self.q, self.k, self.v, self.layout, torch.zeros(1).long().to(self.q.device), None)
        yield self(), expected


def table(results: Iterable[Mapping[str, Any]]) -> TileTable:
    """The fastest tiles of each kernel and shape that had more than one candidate, by capability."""
    from structattn.ops.triton.tile_table import Capability, TileEntry, TileTable

    names = ("kernel", "itemsize", "dim", "levels", "values")
    tried: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        tried[(*result["capability"], *(result[name] for name in names))].append(result)
    found: dict[Capability, list[TileEntry]] = defaultdict(list)
    for (major, minor, *shape), of_shape in tried.items():
        if len(of_shape) > 1:
            best = min(of_shape, key=lambda result: result["median_ms"])
            tiles = {name: best[name] for name in TILES}
            found[major, minor].append(TileEntry(**dict(zip(names, shape, strict=True)), **tiles))
    return TileTable(dict(found))


def gains(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each kernel and shape: the fastest tiles, their time, and that of the rule over it."""
    tried: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        shape = Shape(**{name: result[name] for name in ("itemsize", "dim", "levels", "values")})
        tried[result["kernel"], shape.name].append(result)
    found = []
    for (kernel, shape), of_shape in tried.items():
        best = min(of_shape, key=lambda result: result["median_ms"])
        rule = next((result for result in of_shape if result["is_rule"]), None)
        found.append(
            {
                "kernel": kernel,
                "shape": shape,
                "tiles": " ".join(f"{name}={best[name]}" for name in TILES),
                "median_ms": best["median_ms"],
                "gain": None if rule is None else rule["median_ms"] / best["median_ms"],
                "tried": len(of_shape),
            }
        )
    return found
