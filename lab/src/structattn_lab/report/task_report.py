"""What a task adds to the report of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structattn_lab.records.comparison import ComparisonRecord
    from structattn_lab.report.plot import Drawing
    from structattn_lab.report.table import Table


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What a task adds to the report of a comparison; by default nothing.

    Attributes:
        figures: what draws its figures, by file name; needs matplotlib.
        tables: what makes its tables, by name.
        name_of: the name of a spec in figures.
        verdict: says in words what a comparison at one setting shows, where that is not which attention is
            best.
        baselines_title: the heading of the baselines.
        baselines_note: what the baselines are, one sentence.
        no_skill_score: the score of a model that has learned nothing, where that is the same for all data.
    """

    figures: Mapping[str, Callable[[ComparisonRecord], Drawing | None]] = field(default_factory=dict)
    tables: Mapping[str, Callable[[ComparisonRecord], Table | None]] = field(default_factory=dict)
    name_of: Callable[[str], str] = str
    verdict: Callable[[ComparisonRecord], str | None] | None = None
    baselines_title: str = "Baselines without attention"
    baselines_note: str = "Baselines are computed without attention on the same data; their costs were not measured."
    no_skill_score: float | None = None
