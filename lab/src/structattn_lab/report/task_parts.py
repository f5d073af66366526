"""What a task adds to a report: its figures, tables and words, from the module ``figures`` of its package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from structattn_lab.tasks.registry import TASKS

if TYPE_CHECKING:
    from structattn_lab.records.comparison import ComparisonRecord
    from structattn_lab.report.plot import Drawing
    from structattn_lab.report.table import Table


def _report(name: str, part: str, default: Any) -> Any:
    """What the module ``figures`` of a task holds; the default where there is none, such as for results of a task that is not installed."""
    if name not in TASKS or find_spec(f"{TASKS[name]}.figures") is None:
        return default
    return getattr(import_module(f"{TASKS[name]}.figures"), part, default)


def figures_of(name: str) -> dict[str, Callable[[ComparisonRecord], Drawing | None]]:
    """What draws the figures of a task, by file name, each from the record of a comparison; needs matplotlib."""
    found: dict[str, Callable[[ComparisonRecord], Drawing | None]] = _report(name, "FIGURES", {})
    return found


def spec_namer(name: str) -> Callable[[str], str]:
    """What names the specs of a task in figures; by default a spec is its own name."""
    found: Callable[[str], str] = _report(name, "name_of", str)
    return found


def verdict_of(name: str) -> Callable[[ComparisonRecord], str | None] | None:
    """What says in words what a comparison of a task at one setting shows, where that is not which attention is best; it may have none."""
    found: Callable[[ComparisonRecord], str | None] | None = _report(name, "verdict", None)
    return found


def tables_of(name: str) -> dict[str, Callable[[ComparisonRecord], Table | None]]:
    """What makes the tables that a task adds to a report, by name, each from the record of a comparison."""
    found: dict[str, Callable[[ComparisonRecord], Table | None]] = _report(name, "TABLES", {})
    return found
