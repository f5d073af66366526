"""Model selection: for each method the setting that validation chose."""

from __future__ import annotations

import statistics

from structattn_lab.records.comparison import BaselineRow, Choice, ComparisonRecord, Row
from structattn_lab.report.comparison import byline, facts, task_tables
from structattn_lab.report.figures.selection import drawings
from structattn_lab.report.numbers import DASH, finite, fmt_count, fmt_score, fmt_seconds
from structattn_lab.report.report import Origin, Report, Section
from structattn_lab.report.rows import (
    Column,
    baseline_score,
    choices_of,
    fmt_row,
    group_record,
    metric_columns,
    named,
    rates_at_an_end,
    searched_settings,
)
from structattn_lab.report.table import Line, Table
from structattn_lab.report.task_report import TaskReport


def _epochs(record: ComparisonRecord, row: Row) -> str:
    """Of the weights that count, where the task says how many examples an epoch has."""
    windows = finite(row.details.get("train_windows"))
    if windows is None:
        return DASH
    # Without early stopping the last weights count, not those of the best validation.
    steps = row.steps if record.config["training"]["patience"] is None else row.best_steps
    return f"{statistics.fmean(steps) * row.batch_size / windows:.1f}"


def _table(record: ComparisonRecord) -> Table:
    """A line for each method and group, the lowest of the trained ones marked."""

    def unknown(_: BaselineRow) -> str:
        return DASH

    columns = [Column("method", lambda row: row.spec, lambda baseline: baseline.name)]
    if len(choices_of(record)) > 1:
        columns.append(Column("settings", lambda row: row.group or DASH, lambda baseline: baseline.group or DASH))
    columns += [
        *metric_columns(record),
        Column("chosen", lambda row: row.searched or DASH, lambda baseline: baseline.searched or DASH),
        Column("learning rate", lambda row: f"{row.learning_rate:g}", unknown),
        Column("epochs", lambda row: _epochs(record, row), unknown),
        Column("seeds", lambda row: str(len(row.scores)), unknown),
        Column("seconds", lambda row: fmt_seconds(row.seconds), unknown),
        Column("parameters", lambda row: fmt_count(row.num_params), unknown),
    ]
    lines = []
    for choice in choices_of(record):
        rows = [record.rows[i] for i in choice.rows]
        best = min(rows, key=lambda row: row.score)
        lines += [Line(cells=tuple(column.of_row(row) for column in columns), is_best=row is best) for row in rows]
        baselines = [record.baselines[i] for i in choice.baselines]
        lines += [Line(cells=tuple(column.of_baseline(row) for column in columns)) for row in baselines]
    return Table(
        header=tuple(column.name for column in columns),
        lines=tuple(lines),
        words=("settings", "chosen"),
        notes=_notes(record),
    )


def _notes(record: ComparisonRecord) -> tuple[str, ...]:
    chosen = ", ".join(searched_settings(record))
    words = [
        f"{record.metric}: {record.metric_label}, on the test split, lower is better; the lowest of the trained "
        "methods is marked",
        f"chosen: of {chosen}, the one with the lowest validation score, for each method separately",
    ]
    if len(record.seeds) > 1:
        words.append("± standard deviation over seeds")
    return (*words, *rates_at_an_end(record.rows[i] for choice in choices_of(record) for i in choice.rows))


def _verdict(record: ComparisonRecord) -> str:
    """For each group: the lowest, what is not statistically distinguishable from it, and whether a baseline
    is lower.
    """
    return "\n".join(_of_group(record, choice) for choice in choices_of(record))


def _of_group(record: ComparisonRecord, choice: Choice) -> str:
    rows = sorted((record.rows[i] for i in choice.rows), key=lambda row: float(row.score))
    best = rows[0]
    where = f"{choice.group}: " if choice.group else ""
    parts = [f"{where}{best.spec} is lowest ({fmt_row(best)}, {best.searched}).", *_beyond_noise(record, choice)]
    lower = [
        f"{row.name} ({fmt_score(baseline_score(record, row))})"
        for row in (record.baselines[i] for i in choice.baselines)
        if (score := baseline_score(record, row)) is not None and score < best.score
    ]
    if lower:
        parts.append(f"Lower without training: {', '.join(lower)}.")
    return " ".join(parts)


def _gaps(record: ComparisonRecord, choice: Choice) -> list[tuple[str, float, float]]:
    """Of every other method: its name, how far it is above the lowest, and how far it must be."""
    needed = choice.critical_differences
    assert needed is not None  # where there are several seeds
    rows = [record.rows[i] for i in choice.rows]
    lowest = rows[needed.best].score
    gaps = [
        (row.spec, row.score - lowest, difference)
        for i, (row, difference) in enumerate(zip(rows, needed.differences, strict=True))
        if i != needed.best
    ]
    return sorted(gaps, key=lambda gap: gap[1])


def _beyond_noise(record: ComparisonRecord, choice: Choice) -> list[str]:
    needed = choice.critical_differences
    if needed is None:
        return ["The spread over seeds is unknown."]
    gaps = _gaps(record, choice)
    beyond = ", ".join(spec for spec, gap, difference in gaps if gap > difference)
    within = ", ".join(spec for spec, gap, difference in gaps if gap <= difference)
    said = [f"Worse beyond seed noise: {beyond}."] if beyond else []
    return [*said, *([f"Not statistically distinguishable with {needed.seeds} seeds: {within}."] if within else [])]


def _matrix(record: ComparisonRecord, choice: Choice) -> Table:
    """Every method with every setting that it could have."""
    settings = searched_settings(record)
    rows: dict[str, dict[str, str]] = {}
    for row in record.rows:
        if row.group == choice.group:
            rows.setdefault(row.spec, {})[row.searched or ""] = fmt_row(row)
    for baseline in record.baselines:
        if baseline.group == choice.group:
            found = rows.setdefault(baseline.name, {})
            found[baseline.searched or ""] = fmt_score(baseline_score(record, baseline))
    lines = [[name, *(found.get(setting, DASH) for setting in settings)] for name, found in rows.items()]
    return Table.of(("method", *settings), lines)


def _differences(record: ComparisonRecord, choice: Choice) -> Table:
    rows = [[spec, fmt_score(gap), fmt_score(needed)] for spec, gap, needed in _gaps(record, choice)]
    title = "Differences from the lowest, at the chosen settings"
    return Table.of(("method", "above the lowest", "critical difference"), rows, title=title)


def report(record: ComparisonRecord, task: TaskReport) -> Report:
    """Verdict, the chosen rows, figures, every setting, how to repeat it."""
    chosen = _table(record)
    sections = [
        Section(heading="Results", table=chosen),
        Section(heading="Figures", drawings=drawings(named(record, task.name_of), task)),
    ]
    for choice in choices_of(record):
        of_group = f": {choice.group}" if choice.group else ""
        sections.append(Section(heading=f"Every setting{of_group}", table=_matrix(record, choice)))
        if choice.critical_differences is not None:
            sections.append(Section(table=_differences(record, choice)))
        sections += [Section(table=table) for table in task_tables(group_record(record, choice), task)]
    settings, rates = len(searched_settings(record)), max(1, len(record.config.get("learning_rates") or []))
    return Report(
        title=f"Methods compared, each with its best settings: {record.task}",
        question=record.question,
        byline=byline(record),
        facts=facts(record),
        verdict=_verdict(record),
        sections=sections,
        tables=(chosen,),
        origin=Origin.of(record),
        notes=(
            f"Every method had {settings * rates} trials: {settings} settings, at each of them the best of {rates} "
            "learning rates by the validation score of seed 0. The test split decided nothing.",
            "A method is worse beyond seed noise if its mean is farther above the lowest than the critical difference "
            "of the two: Games and Howell's, at 95 % for all pairs together, with each method's own variance. It says "
            "which differences another draw of seeds "
            "would keep, and nothing of other test data; with three seeds it is wide.",
            "Seconds are of one training run on this machine, early stopping included; epochs are those of the weights "
            "that count.",
        ),
    )
