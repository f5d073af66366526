"""What a benchmark is: groups of cases that do the same job at one size, one of them the baseline, under one
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# (actual result, float64 reference), or with True as a third: it is a gradient, and has the tolerance of
# gradients.
Check = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, bool]


class CaseUnavailableError(RuntimeError):
    """Raised by ``Case.build``: the variant cannot run on this machine. It is left out, and the report says
    why.
    """


class Work(Protocol):
    """What a case builds: called without arguments it does the work that is timed.

    It may have an attribute ``code``, a text that says which code runs, and a method ``prepare``, which is
    called before every call and not timed: it undoes what the call before changed. With an attribute
    ``tolerances`` its results are compared to these, by dtype, and not to those of one operation.
    """

    def __call__(self) -> object: ...

    def check(self) -> Iterable[Check]:
        """Pairs (actual result of this very work, float64 reference); the driver compares them before it
        times.

        A third element ``True`` marks a gradient, which has a tolerance of its own.
        """
        ...


class CachingWork(Work, Protocol):
    """The work of a case with ``cached_tokens``."""

    @property
    def cache_nbytes(self) -> int:
        """Bytes that the cache allocated."""
        ...


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variant at one size.

    Attributes:
        benchmark: the name of the benchmark.
        label: the variant; the same text at every size.
        sizes: the sizes by name, such as ``{"E": 256, "tokens": 1024}``.
        build: draws weights and inputs (random, never zeros) and returns the work; raises
            ``CaseUnavailableError`` where the variant, not the baseline, cannot run.
        flops: FLOPs of one call, 2 per multiply-add.
        bytes: the fewest bytes that one call must move: every input and weight read once, every output
            written once.
        is_baseline: whether it is what a user would pick instead.
        measures_memory: whether the peak memory of a call is measured too (``memory.peak``).
        tokens: that one call makes or trains on, all rows of the batch together, for the tokens per second;
            ``None`` for no such column.
        cached_tokens: that a key/value cache holds after a call, all rows together, for its bytes per token;
            the work is a ``CachingWork``. ``None`` where there is no cache.
        wire_bytes: that all processes together send to each other in one call; ``None`` where there is one
            process.
    """

    benchmark: str
    label: str
    sizes: Mapping[str, int]
    build: Callable[[], Work]
    flops: int
    bytes: int
    is_baseline: bool = False
    measures_memory: bool = False
    tokens: int | None = None
    cached_tokens: int | None = None
    wire_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The variants that are timed together: the same job at one size, one of them the baseline.

    Args:
        mode: the table that it belongs to, such as ``"forward"``.
        cases: all variants.

    Raises:
        ValueError: not exactly one baseline, a label twice, or cases of different sizes.
    """

    mode: str
    cases: tuple[Case, ...]

    def __post_init__(self) -> None:
        labels = [case.label for case in self.cases]
        if sum(case.is_baseline for case in self.cases) != 1:
            raise ValueError(
                f"a group needs exactly one baseline, got {labels} with {[c.is_baseline for c in self.cases]}"
            )
        if len(set(labels)) < len(labels):
            raise ValueError(f"labels in a group must differ, got {labels}")
        if any(dict(case.sizes) != dict(self.sizes) for case in self.cases):
            raise ValueError(
                f"all cases of a group have the same sizes, got {[dict(case.sizes) for case in self.cases]}"
            )

    @property
    def baseline(self) -> Case:
        """The case that the others are compared with."""
        return next(case for case in self.cases if case.is_baseline)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that all cases share."""
        return self.cases[0].sizes

    def name_of(self, case: Case) -> str:
        """``benchmark/mode/E=256,tokens=1024/label``: what ``--only`` is matched with."""
        sizes = ",".join(f"{name}={size}" for name, size in case.sizes.items())
        return f"{case.benchmark}/{self.mode}/{sizes}/{case.label}"


GroupMaker = Callable[[torch.device, torch.dtype], Iterable[Group]]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A registered benchmark.

    Attributes:
        name: for the command line and the file names.
        about: one sentence.
        baseline: what the variants are compared with, for table heads.
        axis: the size along which a crossover is looked for, such as ``"E"``.
        groups: makes the groups; it must be cheap, since tensors are made by ``Case.build`` alone.
        quick: for each type of device, the sizes along the axis that ``--quick`` measures.
        quick_others: other sizes that ``--quick`` holds fixed where a group has them, such as ``{"B": 1}``.
        fit: the range along the axis, both ends included, in which the exponent of a power law is fitted to
            the times; ``None`` where they follow none.
    """

    name: str
    about: str
    baseline: str
    axis: str
    groups: GroupMaker
    quick: Mapping[str, tuple[int, ...]]
    quick_others: Mapping[str, int] = field(default_factory=dict)
    fit: tuple[int, int] | None = None


BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    name: str,
    about: str,
    *,
    baseline: str,
    axis: str,
    quick: Mapping[str, tuple[int, ...]],
    quick_others: Mapping[str, int] | None = None,
    fit: tuple[int, int] | None = None,
) -> Callable[[GroupMaker], GroupMaker]:
    """Registers a function ``(device, dtype) -> Iterable[Group]``; see ``Benchmark`` for the arguments."""

    def register(groups: GroupMaker) -> GroupMaker:
        if name in BENCHMARKS:
            raise ValueError(f"two benchmarks are called {name!r}")
        BENCHMARKS[name] = Benchmark(
            name=name,
            about=about,
            baseline=baseline,
            axis=axis,
            groups=groups,
            quick=quick,
            quick_others=quick_others or {},
            fit=fit,
        )
        return groups

    return register
