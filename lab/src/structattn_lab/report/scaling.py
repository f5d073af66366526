"""Scaling laws of a grid of widths and budgets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from structattn_lab.analysis.scaling_law import best_width
from structattn_lab.records.comparison import ComparisonRecord, Law, LawPoint, Row, Series
from structattn_lab.report.comparison import byline, facts
from structattn_lab.report.figures.scaling import drawings
from structattn_lab.report.numbers import DASH, fmt_count, fmt_flops, fmt_mib, fmt_pm, fmt_score
from structattn_lab.report.report import Origin, Report, Section
from structattn_lab.report.rows import (
    compared_budget,
    fmt_row,
    laws,
    mean_loss,
    named,
    point_at,
    rates_at_an_end,
    row_name,
    series_of,
    settings_of,
)
from structattn_lab.report.table import Table
from structattn_lab.report.task_report import TaskReport

OneLaw = tuple[Series, Law]  # a law, and the series that it is of


def multiplier_words(law: Law, *, is_baseline: bool) -> str:
    """The compute for the baseline's losses, as a share, with its interval."""
    found = law.multiplier
    if is_baseline:
        return "1"
    if found is None:
        return DASH
    if found.interval is None:
        return f"{found.estimate:.2f} (spread unknown)"
    low, high = found.interval
    return f"{found.estimate:.2f} ({low:.2f} to {high:.2f})"


def _fitted(law: Law, name: str) -> str:
    if law.fit is None:
        return DASH
    text = fmt_score(getattr(law.fit, name))
    if law.intervals is None:
        return text
    low, high = law.intervals[name]
    return f"{text} ({fmt_score(low)} to {fmt_score(high)})"


def _law_columns(record: ComparisonRecord) -> list[tuple[str, Callable[[OneLaw], str]]]:
    baseline = laws(record).baseline
    return [
        ("irreducible", lambda one: _fitted(one[1], "irreducible")),
        ("exponent", lambda one: _fitted(one[1], "exponent")),
        (f"compute, {baseline} = 1", lambda one: multiplier_words(one[1], is_baseline=one[0].spec == baseline)),
    ]


def _table(record: ComparisonRecord) -> Table:
    """A line for each attention variant and setting."""
    budget = compared_budget(record)
    columns: list[tuple[str, Callable[[OneLaw], str]]] = [("attention", lambda one: one[0].spec)]
    if settings_of(record) != [None]:
        columns.append(("settings", lambda one: one[0].setting or DASH))
    columns += [
        (f"at {fmt_flops(budget)} FLOPs", lambda one: DASH if (at := point_at(one[0], budget)) is None else _loss(at)),
        ("best width", lambda one: DASH if (at := point_at(one[0], budget)) is None else str(at.width or DASH)),
        *_law_columns(record),
    ]
    rows = [(series, series.frontier) for series in laws(record).series]
    return Table.of_columns(columns, rows, words=("settings",), notes=_notes(record))


def _loss(point: LawPoint) -> str:
    """With the spread over seeds."""
    return fmt_pm(mean_loss(point), statistics.stdev(point.losses) if len(point.losses) > 1 else None)


def _notes(record: ComparisonRecord) -> tuple[str, ...]:
    baseline = laws(record).baseline
    words = [
        f"at each budget the best width counts, {_chosen_on(record)}; {record.metric}: {record.metric_label}, on the "
        "test split, lower is better",
        "loss = irreducible + c * compute^-exponent, in forward FLOPs of all training examples; in brackets 95 % "
        "intervals",
        f"compute: what an attention variant needs for a loss, over what {baseline} needs for the same",
    ]
    if len(record.seeds) > 1:
        words.append("± standard deviation over seeds")
    if laws(record).series[0].frontier.fit is None:
        words.append("a law is fitted to three budgets or more")
    return (*words, *rates_at_an_end(record.rows))


def _chosen_on(record: ComparisonRecord) -> str:
    """The split that the best widths were chosen on; earlier versions looked at the test split."""
    for series in laws(record).series:
        for point in series.frontier.points:
            rows = [
                row
                for row in record.rows
                if (row.setting, row.spec, row.budget) == (series.setting, series.spec, point.budget)
                and math.isfinite(row.validation)
            ]
            if rows and best_width(rows).width != point.width:
                return "chosen on the test split by an earlier version (`structattn merge` chooses by validation)"
    return "chosen by validation"


def _verdict(record: ComparisonRecord) -> str:
    """Which variants need less compute than the baseline, which more, and which are not statistically
    distinguishable from it.
    """
    return "\n".join(_of_setting(record, setting) for setting in settings_of(record))


def _of_setting(record: ComparisonRecord, setting: str | None) -> str:
    series = series_of(record, setting)
    baseline = laws(record).baseline
    where = "" if setting is None else f"{setting}: "
    budget = compared_budget(record)
    points = [(mean_loss(at), one.spec) for one in series if (at := point_at(one, budget)) is not None]
    sentence = f"{where}No attention has a loss at {fmt_flops(budget)} FLOPs."
    if points:
        loss, best = min(points)
        sentence = f"{where}{best} has the lowest loss at {fmt_flops(budget)} FLOPs ({fmt_score(loss)})."
    groups: dict[str, list[str]] = {"less": [], "more": [], "same": []}
    for one in series:
        found = one.frontier.multiplier
        if found is None:
            continue
        kind = "same" if not found.is_distinguishable else "less" if found.estimate < 1 else "more"
        groups[kind].append(f"{one.spec} {multiplier_words(one.frontier, is_baseline=False)}")
    words = {
        "less": f"With less compute than {baseline} for the same loss ({baseline} = 1)",
        "more": f"With more compute than {baseline} for the same loss ({baseline} = 1)",
        "same": f"Not distinguishable from {baseline} in compute for the same loss ({baseline} = 1)",
    }
    return " ".join([sentence, *(f"{words[kind]}: {', '.join(names)}." for kind, names in groups.items() if names)])


def report(record: ComparisonRecord, task: TaskReport) -> Report:
    """Verdict, laws, figures, the laws at each width, all models, how to repeat it."""
    header = facts(record) | {"training": "as many steps as each budget pays for"}
    whole = _table(record)
    return Report(
        title=f"Scaling laws of attention: {record.task}",
        question="Which attention reaches the same loss with less compute?",
        byline=byline(record),
        facts=header,
        verdict=_verdict(record),
        sections=(
            Section(heading="Results", table=whole),
            Section(heading="Figures", drawings=drawings(named(record, task.name_of), task)),
            Section(heading="Laws at each width", table=_by_width(record)),
            Section(heading="All models", table=_models(record)),
        ),
        tables=(whole,),
        origin=Origin.of(record),
        notes=(
            "Compute is counted in closed form from the structure, 2 FLOPs per multiply-add, output head included; "
            "looking up embeddings costs none. Norms and softmax are not counted. Seconds are not compute: see tokens "
            "per second in the table of all models.",
            "The compute ratio is the geometric mean over the losses that both reached, between fitted laws; nothing "
            "is extrapolated. Intervals are from a bootstrap over seeds and points.",
            f"Every model was trained from the start for its budget{_rates(record)}.",
        ),
    )


def _rates(record: ComparisonRecord) -> str:
    """Where the learning rates are from."""
    if record.config.get("sweep_settings"):
        return "; the learning rate of each variant is the best of the same sweep at a small width, transferred by muP"
    if len(record.config.get("learning_rates") or ()) > 1:
        return "; the learning rate of each variant is the best of a sweep of its own"
    return ", with one learning rate for all"


def _by_width(record: ComparisonRecord) -> Table:
    columns: list[tuple[str, Callable[[OneLaw], str]]] = [
        ("attention", lambda one: f"{one[0].spec}, {one[0].setting}" if one[0].setting else one[0].spec),
        ("width", lambda one: str(one[1].width)),
        *_law_columns(record),
    ]
    return Table.of_columns(columns, [(series, law) for series in laws(record).series for law in series.widths])


def _models(record: ComparisonRecord) -> Table:
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("model", row_name),
        (record.metric, fmt_row),
        ("steps", lambda row: str(row.steps[0])),
        ("FLOPs", lambda row: fmt_flops(row.compute)),
        ("parameters", lambda row: fmt_count(row.num_params)),
        ("learning rate", lambda row: f"{row.learning_rate:g}"),
        ("tokens/s", lambda row: fmt_count(row.tokens_per_second)),
        ("peak MiB", lambda row: fmt_mib(row.peak_memory_bytes)),
    ]
    return Table.of_columns(columns, record.rows)
