"""One comparison of several that were made in parts: on other days, or on other machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from structattn.checks import shortened
from structattn.errors import CheckpointError, ConfigError
from structattn.files import write_atomic
from structattn_lab.analysis.model_selection import search
from structattn_lab.analysis.scaling_law import scaling_laws
from structattn_lab.compare.pages import write_pages
from structattn_lab.records.common import REPORT, RESULTS, Results, to_json
from structattn_lab.records.comparison import BaselineRow, ComparisonRecord, Row, position_of, read_comparison
from structattn_lab.records.environment import origin
from structattn_lab.report.runs_csv import runs_csv
from structattn_lab.runs.folders import Owner, differences, opened
from structattn_lab.settings.recipe import Variation

# Parts have other rows.
_ROWS = ("attention", "widths", "budgets", "variants")
_PARTS = "parts"  # the entry of a record's data that says where each comes from
_PLACE = "data"  # the entry that says where the data are


def merge(
    parts: Sequence[Path],
    out: Path | None = None,
    *,
    command: str = "",
    on_open: Callable[[Path], None] | None = None,
) -> Results[ComparisonRecord]:
    """Writes the results, the figures and the report of several comparisons as those of one.

    They may differ in specs, widths, budgets and variants. A row that several have is taken from the first.
    Their data may be in other places, such as those of another machine: baselines that parts have in common
    need the same scores.
    Without budgets the first spec decides how many steps the others take, so that all parts need the same.
    The record has the machine and the versions of the first part, and names those of each under ``data``.

    Args:
        parts: folders of finished comparisons; they are only read.
        out: output folder, created. Default: see ``folders.opened``.
        command: the command line, for the record.
        on_open: called with the output folder before anything is written.

    Raises:
        ConfigError: fewer than two parts, other differences between them, or an unusable folder.
        CheckpointError: a part holds no comparison, or results cannot be written.

    Cost: laws are fitted again, some seconds for each; no model is trained.
    """
    if len(parts) < 2:
        raise ConfigError(f"give at least two folders of comparisons, got {len(parts)}")
    now = origin(command)
    record = _merged([(part, read_comparison(part)) for part in parts])
    record = replace(record, created=now["created"], command=now["command"])
    owner = Owner(command="merge", task=record.task, settings={"parts": [str(part) for part in parts]}, last=REPORT)
    with opened(out, owner, resume=None, on_open=on_open) as folder:
        try:
            write_atomic(folder / RESULTS, to_json(record))
            write_atomic(folder / "runs.csv", runs_csv(record))
            write_pages(record, folder)
        except OSError as error:
            raise CheckpointError(f"could not write the results to {folder}: {error.strerror or error}") from error
    return Results(record=record, folder=folder)


def _merged(parts: Sequence[tuple[Path, ComparisonRecord]]) -> ComparisonRecord:
    """One record of several, but for where it comes from."""
    (folder, first), *others = parts
    for other_folder, other in others:
        places: tuple[str | None, ...] = ()
        left_out = [_PARTS]
        scores = _common_scores(first, other)
        changed = [name for name, (x, y) in scores.items() if not _is_equal(x, y)]
        if scores and not changed:  # then the data are the same, wherever they are
            places = tuple(record.data.get(_PLACE) for record in (first, other))
            left_out.append(_PLACE)
        compared: list[tuple[str, Any, Any]] = [
            ("task", first.task, other.task),
            ("data", _data_without(first, left_out), _data_without(other, left_out)),
            ("the first spec, which decides the steps of the others", _leading(first), _leading(other)),
        ]
        mismatches = [one for one in compared if one[1] != one[2]]
        mismatches += [one for one in differences(first.config, other.config, _ROWS) if one[1:] != places]
        if mismatches:
            words = "; ".join(f"{name} ({value!r} and {other_value!r})" for name, value, other_value in mismatches)
            raise ConfigError(
                f"{folder} and {other_folder} are no parts of one comparison, they differ in {shortened(words)}: parts "
                f"may differ in {', '.join(_ROWS)}"
            )
        if changed:  # data may change at their place
            raise ConfigError(
                f"{folder} and {other_folder} are no parts of one comparison, their data differ: the {changed[0]} is "
                "{:.6g} and {:.6g}".format(*scores[changed[0]])
            )
    _check_variants(parts)
    records = [record for _, record in parts]
    rows: dict[Any, Row] = {}
    baselines: dict[Any, BaselineRow] = {}
    for record in records:
        for row in record.rows:
            rows.setdefault((position_of(row), row.spec), row)
        for baseline in record.baselines:
            baselines.setdefault((position_of(baseline), baseline.name), baseline)
    config = dict(first.config)
    for name in _ROWS:
        config[name] = list(dict.fromkeys(value for record in records for value in record.config.get(name, ())))
    # In the order in which one comparison has them: by position, each with all specs.
    specs, positions = config["attention"], list(dict.fromkeys(position for position, _ in rows))
    settings = list(dict.fromkeys(position.setting for position in positions))
    positions.sort(key=lambda at: (settings.index(at.setting), at.width or 0, at.budget or 0))
    ordered = [rows[position, spec] for position in positions for spec in specs if (position, spec) in rows]
    return replace(
        first,
        config=config,
        data=_data_without(first, [_PARTS]) | {_PARTS: "; ".join(map(_origin_of, parts))},
        meanings={spec: meaning for record in records for spec, meaning in record.meanings.items()},
        rows=tuple(ordered),
        baselines=tuple(baselines.values()),
        scaling=scaling_laws(ordered, specs) if config["budgets"] else None,
        search=search(ordered, list(baselines.values())) if config.get("search") else None,
    )


def _check_variants(parts: Sequence[tuple[Path, ComparisonRecord]]) -> None:
    """Raises ``ConfigError`` for variants of one name with other settings, whose rows are told apart by
    name.
    """
    known: dict[str, tuple[Path, dict[str, str]]] = {}
    for folder, record in parts:
        for text in record.config.get("variants") or ():
            variation = Variation.parse(text)
            settings = {change.name: str(change.text) for change in variation.changes.values()}
            before, others = known.setdefault(variation.name, (folder, settings))
            if others != settings:
                raise ConfigError(
                    f"{before} and {folder} have other settings under the name of the variant "
                    f"{shortened(variation.name)}: give the variants of one of them other names"
                )


def _leading(record: ComparisonRecord) -> str | None:
    """The spec that comes first, where that matters."""
    return None if record.config.get("budgets") else str(record.config["attention"][0])


def _data_without(record: ComparisonRecord, names: Sequence[str]) -> dict[str, str]:
    """What is said of the data, without the entries of these names."""
    return {name: words for name, words in record.data.items() if name not in names}


def _common_scores(first: ComparisonRecord, other: ComparisonRecord) -> dict[str, tuple[float, float]]:
    """The scores of the baselines that both records have, by their names and settings in words."""
    found, expected = (
        {
            f"{name} of {row.name} {row.setting or ''}".strip(): x
            for row in record.baselines
            for name, x in row.metrics.items()
        }
        for record in (first, other)
    )
    return {name: (x, expected[name]) for name, x in found.items() if name in expected}


def _is_equal(x: float, y: float) -> bool:
    """Whether two scores are the same; on another machine they may differ by rounding."""
    return math.isclose(x, y, rel_tol=1e-6) or (math.isnan(x) and math.isnan(y))


def _origin_of(part: tuple[Path, ComparisonRecord]) -> str:
    """Where a part comes from, in words."""
    folder, record = part
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return record.data.get(_PARTS) or f"{folder.name} of {record.created[:10]} ({record.hardware.cpu}; {versions})"
