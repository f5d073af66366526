"""A comparison of attention variants at one setting."""

from __future__ import annotations

from collections.abc import Sequence

from structattn_lab.analysis.model_selection import critical_differences
from structattn_lab.records.comparison import ComparisonRecord, Row
from structattn_lab.report.figures.comparison import drawings
from structattn_lab.report.numbers import (
    DASH,
    finite,
    finite_list,
    fmt_count,
    fmt_date,
    fmt_mib,
    fmt_score,
    fmt_seconds,
)
from structattn_lab.report.report import Origin, Report, Section
from structattn_lab.report.rows import (
    Column,
    baseline_score,
    by_variant,
    fmt_row,
    metric_columns,
    named,
    ranked_rows,
    rates_at_an_end,
    score_of,
    standard_row,
)
from structattn_lab.report.table import Line, Table
from structattn_lab.report.task_report import TaskReport
from structattn_lab.settings.recipe import Variation


def _table(record: ComparisonRecord, task: TaskReport) -> Table:
    """A line for each attention variant in the order asked for, the best one marked, and below them the
    baselines.
    """
    best = next(iter(ranked_rows(record)), None)
    scores = [score_of(row) for row in record.rows] + [baseline_score(record, row) for row in record.baselines]
    longest = max((score for score in scores if score is not None), default=0.0)

    def share(score: float | None) -> float | None:
        return max(0.0, score / longest) if score is not None and longest > 0 else None

    columns = [Column("attention", lambda row: row.spec, lambda baseline: baseline.name)]
    if any(row.variant for row in record.rows):
        columns.append(Column("settings", lambda row: row.variant or DASH, lambda baseline: baseline.variant or DASH))
    columns += metric_columns(record)
    if any(row.rank is not None for row in record.rows):
        columns.append(Column("rank", lambda row: DASH if row.rank is None else str(row.rank)))
    if len({steps for row in record.rows for steps in row.steps}) > 1:
        columns.append(Column("steps", lambda row: _range(row.steps)))
    columns += [
        Column("parameters", lambda row: fmt_count(row.num_params)),
        Column("FLOPs/example", lambda row: fmt_count(row.flops_per_example)),
        Column("seconds", lambda row: fmt_seconds(row.seconds)),
        Column("peak MiB", lambda row: fmt_mib(row.peak_memory_bytes)),
    ]
    marks = ["best variant marked"] if best else []
    if any(finite(row.score_std) is not None for row in record.rows):
        marks.append("± standard deviation over seeds")
    return Table(
        header=tuple(column.name for column in columns),
        lines=tuple(
            Line(cells=tuple(column.of_row(row) for column in columns), is_best=row is best, share=share(score_of(row)))
            for row in record.rows
        ),
        baselines=tuple(
            Line(
                cells=tuple(column.of_baseline(row) for column in columns),
                note=row.note,
                share=share(baseline_score(record, row)),
            )
            for row in record.baselines
        ),
        baselines_title=task.baselines_title,
        words=("settings",),
        bars=record.metric,
        notes=(
            "; ".join([f"{record.metric}: {record.metric_label}, lower is better", *marks]),
            *rates_at_an_end(record.rows),
        ),
    )


def report(record: ComparisonRecord, task: TaskReport) -> Report:
    """Verdict, table, the tables and figures of the task, how to repeat it."""
    several = len(record.seeds) > 1
    tables = [_table(record, task), *task_tables(record, task)]
    return Report(
        title=f"Attention compared: {record.task}",
        question=record.question,
        byline=byline(record),
        facts=facts(record),
        verdict=_verdict(record, task),
        sections=[
            *(Section(heading="" if i else "Results", table=table) for i, table in enumerate(tables)),
            Section(heading="Figures", drawings=drawings(named(record, task.name_of), task)),
        ],
        tables=tables,
        origin=Origin.of(record),
        notes=(
            f"The score is {record.metric}: {record.metric_label}. Lower is better; the bars below the scores share "
            "one linear scale.",
            "± is the standard deviation over seeds." if several else "One seed was run, so no spread is known.",
            "FLOPs are those of the forward pass of one example, 2 per multiply-add, counted on the structure.",
            "Peak memory is the resident set of the process; seconds are wall-clock on this machine.",
            *([task.baselines_note] if record.baselines else []),
        ),
    )


def byline(record: ComparisonRecord) -> list[str]:
    """Preset, date and seeds."""
    seeds = f"seed{'s' if len(record.seeds) > 1 else ''} {', '.join(map(str, record.seeds))}"
    return [f"preset {record.preset}", fmt_date(record.created), seeds]


def facts(record: ComparisonRecord) -> dict[str, str]:
    """What was compared on what: the data, the length of the training, and every spec in words."""
    points = list(dict.fromkeys(row.variant for row in record.rows))
    several = {"settings": f"{len(points)}; the data below are those of the first, {points[0]}"}
    training = {"training": _training(record)} if record.config.get("training") else {}
    return (several if len(points) > 1 else {}) | record.data | training | record.meanings


def _training(record: ComparisonRecord) -> str:
    """How long all rows were trained."""
    settings = record.config["training"]
    texts = [text for axis in ("variants", "search") for text in record.config.get(axis) or ()]
    varied = {change.name for text in texts for change in Variation.parse(text).changes.values()}
    steps = [steps for row in record.rows for steps in row.steps]
    words = f"{_range(steps)} steps"
    if settings.get("patience") and "training.steps" not in varied:
        words = f"at most {settings['steps']:,} steps"
    return words if "training.batch_size" in varied else f"{words} of {settings['batch_size']:,} examples"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def task_tables(record: ComparisonRecord, task: TaskReport) -> list[Table]:
    """The tables that the task adds."""
    return [table for make in task.tables.values() if (table := make(record)) is not None]


def _verdict(record: ComparisonRecord, task: TaskReport) -> str:
    """What the comparison shows, and what it does not.

    Args:
        record: what ``results.json`` holds.
        task: what its task says.

    Returns:
        Which attention is best and by how much over ``standard``, whether that exceeds the seed spread, and
        a plain statement when a baseline beats every attention row; or what the task says instead.
    """
    records = by_variant(record)
    if len(records) > 1:
        return "\n".join(f"{name}: {_of_setting(of_variant, task)}" for name, of_variant in records.items())
    return _of_setting(record, task)


def _of_setting(record: ComparisonRecord, task: TaskReport) -> str:
    if task.verdict is not None and (said := task.verdict(record)) is not None:
        return said
    ranked = ranked_rows(record)
    if not ranked:
        return "No attention finished with a finite score, so there is nothing to compare."
    sentences = [_lead(record, ranked)]
    best_score = score_of(ranked[0])
    assert best_score is not None
    no_skill = task.no_skill_score
    if no_skill is not None and best_score > 0.95 * no_skill:
        sentences.append(
            f"No attention variant got clearly below {no_skill:g}, the score without skill: none learned the task."
        )
    sentences.extend(_baseline_sentence(record, best_score))
    return " ".join(sentences)


def _lead(record: ComparisonRecord, ranked: list[Row]) -> str:
    """The sentence on the best row and the row it is measured against."""
    metric, best, standard = record.metric, ranked[0], standard_row(record)
    value = f"{best.spec} has the lowest {metric} ({fmt_row(best)})"
    if standard is None:
        note = " (standard has no finite score)" if _has_standard(record) else " (standard was not compared)"
        if len(ranked) == 1:
            return f"{best.spec} is the only attention with a score: {metric} {fmt_row(best)}{note}."
        return f"{value}{note}; {_against(ranked, ranked[1])}"
    if best is not standard:
        return f"{value}; {_against(ranked, standard)}"
    if len(ranked) == 1:
        return f"standard is the only attention with a score: {metric} {fmt_row(best)}."
    return f"{value}: no structured score improves on it; {_against(ranked, ranked[1])}"


def _has_standard(record: ComparisonRecord) -> bool:
    return any(row.spec.split(":")[0] == "standard" for row in record.rows)


def _against(ranked: list[Row], other: Row) -> str:
    """By how much the first of the rows leads another, and whether that is more than seeds explain; see
    ``critical_differences``.
    """
    best = ranked[0]
    low, high = score_of(best), score_of(other)
    assert low is not None
    assert high is not None
    if high == low:
        return f"{other.spec} has the same score."
    share = f"{100 * (high - low) / high:.2g} % below " if high > 0 else f"{fmt_score(high - low)} below "
    if high > 0 and high - low >= 0.995 * high:
        share = f"{high / low:.3g} times below " if low > 0 else "far below "
    text = f"that is {share}{other.spec} ({fmt_row(other)})"
    compared = [row for row in ranked if len(finite_list(row.scores)) > 1]
    needed = critical_differences([finite_list(row.scores) for row in compared]) if compared else None
    places = [n for n, row in enumerate(compared) if row is best or row is other]
    if needed is None or len(places) < 2:
        return f"{text} — one seed: spread unknown."
    seeds = f"{min(len(finite_list(best.scores)), len(finite_list(other.scores)))} seeds"
    if high - low > max(needed.differences[n] for n in places):
        return f"{text}, more than chance explains with {seeds} (95 %)."
    return f"{text}; with {seeds} that is not statistically distinguishable."


def _baseline_sentence(record: ComparisonRecord, best_score: float) -> list[str]:
    """A sentence when a baseline beats all attention rows, or when all baselines were beaten."""
    scored = [(s, b.name) for b in record.baselines if (s := baseline_score(record, b)) is not None]
    if not scored:
        return []
    low, name = min(scored)
    if low < best_score:
        more = sum(1 for s, _ in scored if s < best_score) - 1
        also = f" ({more} more baseline{'s' if more > 1 else ''} too)" if more else ""
        return [f'The baseline "{name}" is better than every model trained here: {fmt_score(low)}{also}.']
    if low == best_score:
        return [f'The baseline "{name}" ties with the best model trained here.']
    return [f'The best baseline, "{name}", reaches {fmt_score(low)}.']
