"""A report as one value: what is shown of a record, before anything is drawn or written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from structattn_lab.records.common import ResultRecord
from structattn_lab.report.plot import Drawings
from structattn_lab.report.table import Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """What is below a heading of a page, if it has one: code, a table with its title and notes, figures.

    Attributes:
        drawings: what draws the figures, by file name.
    """

    heading: str = ""
    code: str = ""
    table: Table | None = None
    drawings: Drawings = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What it takes to repeat a run: the command line; seeds, versions and machine by name; all settings by
    their dotted names.
    """

    command: str
    facts: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, record: ResultRecord) -> Origin:
        """From the record of a comparison, of fits, of a muP check or of a sweep."""
        results = vars(record)
        facts: dict[str, Any] = {name: results[name] for name in ("seeds", "seed", "preset") if name in results}
        facts |= {f"version of {name}": version for name, version in record.versions.items()}
        facts |= {name.replace("_gib", " (GiB)"): value for name, value in vars(record.hardware).items()}
        settings = _flat(results["config"]) if results.get("config") else []
        return cls(command=record.command, facts=[(k, _short(v)) for k, v in facts.items()], settings=settings)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report shows, in this order: the whole of it on a page, tables and verdict in a terminal.

    Attributes:
        title, question: what was done, and what it answers.
        byline: preset, date and seeds, or as much of it as there is.
        facts: the data, the training and the specs in words, by name.
        verdict: what the numbers show.
        sections: tables and figures.
        origin: how to repeat it.
        notes: what is measured and how.
        tables: those of a terminal.
    """

    title: str
    question: str
    byline: Sequence[str]
    verdict: str
    sections: Sequence[Section]
    origin: Origin
    notes: Sequence[str]
    tables: Sequence[Table]
    facts: Mapping[str, str] = field(default_factory=dict)


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted names and values."""
    if isinstance(value, Mapping) and value:
        return [pair for key, child in value.items() for pair in _flat(child, f"{name}.{key}" if name else str(key))]
    return [(name, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))]
