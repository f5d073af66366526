"""What the reports read from the record of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from structattn_lab.records.comparison import BaselineRow, Choice, ComparisonRecord, LawPoint, Row, Scaling, Series
from structattn_lab.report.numbers import finite, finite_list, fmt_pm, fmt_score
from structattn_lab.settings.overrides import convert
from structattn_lab.settings.recipe import Variation

AnyRow = TypeVar("AnyRow", Row, BaselineRow)


def score_of(row: Row) -> float | None:
    """The mean score of an attention row."""
    return finite(row.score)


def baseline_score(record: ComparisonRecord, baseline: BaselineRow) -> float | None:
    """A baseline's value of the metric that the comparison is decided by."""
    return finite(baseline.metrics.get(record.metric))


def fmt_row(row: Row) -> str:
    """The score of an attention row with its spread over seeds."""
    return fmt_pm(score_of(row), finite(row.score_std))


def row_name(row: Row) -> str:
    """What a row is called in a figure: its spec, and the settings that it differs in from other rows."""
    return f"{row.spec} ({row.variant})" if row.variant else row.spec


def ranked_rows(record: ComparisonRecord) -> list[Row]:
    """The rows with a finite score, best (lowest) first."""
    scored = [(s, i, row) for i, row in enumerate(record.rows) if (s := score_of(row)) is not None]
    return [row for _, _, row in sorted(scored, key=lambda t: t[:2])]


def by_variant(record: ComparisonRecord) -> dict[str, ComparisonRecord]:
    """The part of a record at each variant of the settings, by its text; by an empty text where there is only
    one.
    """

    def at(name: str, rows: Sequence[AnyRow]) -> tuple[AnyRow, ...]:
        return tuple(row for row in rows if (row.variant or "") == name)

    names = dict.fromkeys(row.variant or "" for row in record.rows)
    return {name: replace(record, rows=at(name, record.rows), baselines=at(name, record.baselines)) for name in names}


def context_length(record: ComparisonRecord, row: Row) -> int:
    """Tokens of a window at the settings of a row, which variants and a search may change."""
    length: int = record.config["task"]["context_length"]
    for axis, name in (("variants", row.setting or row.variant), ("search", row.searched)):
        for variation in map(Variation.parse, record.config.get(axis) or ()):
            if variation.name == name:
                for change in variation.changes.values():
                    if change.name == "task.context_length":
                        length = convert(change.text, int, change.name)
    return length


def context_lengths(record: ComparisonRecord, rows: Iterable[Row]) -> str:
    """Those of rows, in words."""
    return " or ".join(f"{length:,}" for length in sorted({context_length(record, row) for row in rows}))


def rates_at_an_end(rows: Iterable[Row]) -> list[str]:
    """A note on rows whose chosen learning rate is the lowest or the highest of those that were tried, since
    a better one may lie beyond; none without such rows.
    """
    names: dict[str, None] = {}
    for row in rows:
        tried = [] if row.sweep is None else [run.learning_rate for run in row.sweep.runs]
        if len(tried) > 1 and row.learning_rate in (min(tried), max(tried)):
            names.setdefault(f"{row.spec} ({row.learning_rate:g})")
    if not names:
        return []
    return [
        f"the best learning rate lies at an end of those that were tried for {', '.join(names)}: more learning_rates "
        "may have a better one"
    ]


def standard_row(record: ComparisonRecord) -> Row | None:
    """The row of standard attention with a finite score, if the comparison has one."""
    rows = ranked_rows(record)
    exact = [row for row in rows if row.spec == "standard"]
    return next(iter(exact or [row for row in rows if row.spec.startswith("standard:")]), None)


def other_metrics(record: ComparisonRecord) -> list[str]:
    """Names of the metrics besides the score, in the order in which they first appear."""
    names: dict[str, None] = {}
    for metrics in [row.metrics for row in record.rows] + [row.metrics for row in record.baselines]:
        names.update(dict.fromkeys(metrics))
    names.pop(record.metric, None)
    return list(names)


class Column(NamedTuple):
    """A column of a table: its name, and what it shows of an attention row and of a baseline."""

    name: str
    of_row: Callable[[Row], str]
    of_baseline: Callable[[BaselineRow], str] = lambda _: ""


def metric_columns(record: ComparisonRecord) -> list[Column]:
    """The score, with its spread over seeds, and the other metrics."""

    def column(name: str) -> Column:
        def text(row: Row | BaselineRow) -> str:
            return fmt_score(finite(row.metrics.get(name)))

        return Column(name, text, text)

    score = Column(record.metric, fmt_row, lambda baseline: fmt_score(baseline_score(record, baseline)))
    return [score, *(column(name) for name in other_metrics(record))]


def seed_words(record: ComparisonRecord) -> str:
    """How many seeds were run, in words."""
    count = max((len(finite_list(row.scores)) for row in record.rows), default=0)
    return f"{count} seeds" if count > 1 else "one seed, so the spread is unknown"


def lowest(record: ComparisonRecord) -> str:
    """The best row and its score, as the end of a sentence."""
    ranked = ranked_rows(record)
    return f"; lowest: {ranked[0].spec} at {fmt_score(score_of(ranked[0]))}" if ranked else ""


def curve(record: ComparisonRecord, row: Row, key: str = "step") -> tuple[list[float], list[list[float]]]:
    """Where a row was validated, as steps or another number of its histories, and all seeds' values there."""
    found: dict[float, list[float]] = {}
    for history in row.histories:
        for point in history:
            step, value = finite(point.get(key)), finite(point.get(f"validation_{record.metric}"))
            if step is not None and value is not None:
                found.setdefault(step, []).append(value)
    return sorted(found), [found[step] for step in sorted(found)]


def baselines_in_view(record: ComparisonRecord, values: Sequence[float]) -> tuple[list[tuple[float, str]], str]:
    """The baselines near enough to the scores of the attention variants to share an axis, and words about the
    others.
    """
    shown, away = [], ""
    for baseline in record.baselines:
        value, name = baseline_score(record, baseline), baseline.name
        if value is None:
            continue
        if min(values) <= 0 or min(values) / 50 <= value <= max(values) * 50:
            shown.append((value, name))
        else:
            away += f"; {name} ({fmt_score(value)}) lies outside the axis"
    return shown, away


def named(record: ComparisonRecord, name_of: Callable[[str], str]) -> ComparisonRecord:
    """The record with every spec by the name that figures give it."""
    laws = record.scaling
    if laws is not None:
        series = tuple(replace(line, spec=name_of(line.spec)) for line in laws.series)
        laws = replace(laws, baseline=name_of(laws.baseline), series=series)
    rows = tuple(replace(row, spec=name_of(row.spec)) for row in record.rows)
    return replace(record, rows=rows, scaling=laws)


def group_record(record: ComparisonRecord, choice: Choice) -> ComparisonRecord:
    """The record of one group with the chosen row of each method alone, as a comparison of one size has
    them.
    """
    rows = tuple(replace(record.rows[i], variant=None) for i in choice.rows)
    baselines = tuple(replace(record.baselines[i], variant=None) for i in choice.baselines)
    return replace(record, rows=rows, baselines=baselines, search=None)


def choices_of(record: ComparisonRecord) -> tuple[Choice, ...]:
    """The choices of a comparison that has a search."""
    assert record.search is not None
    return record.search


def searched_settings(record: ComparisonRecord) -> list[str]:
    """What there was to choose from, in the order of the recipe."""
    return list(dict.fromkeys(row.searched or "" for row in record.rows))


def laws(record: ComparisonRecord) -> Scaling:
    """The scaling laws of a comparison that has them."""
    assert record.scaling is not None
    return record.scaling


def settings_of(record: ComparisonRecord) -> list[str | None]:
    """What is varied besides width and budget, in order; ``[None]`` where nothing is."""
    return list(dict.fromkeys(series.setting for series in laws(record).series))


def series_of(record: ComparisonRecord, setting: str | None) -> list[Series]:
    """The series of a setting, in the order of the recipe."""
    return [series for series in laws(record).series if series.setting == setting]


def compared_budget(record: ComparisonRecord) -> float:
    """The largest budget at which all series have a loss; where there is none, the largest of any."""
    budgets = [{point.budget for point in series.frontier.points} for series in laws(record).series]
    return max(set.intersection(*budgets) or set.union(*budgets))


def point_at(series: Series, budget: float) -> LawPoint | None:
    """The point of a series at a budget, if it has one."""
    return next((point for point in series.frontier.points if point.budget == budget), None)


def mean_loss(point: LawPoint) -> float:
    """Over the seeds."""
    return statistics.fmean(point.losses)
