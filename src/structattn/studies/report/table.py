"""The results as plain text: an aligned table and a verdict of one to three honest sentences."""

from __future__ import annotations

from structattn.studies.records.comparison import BaselineRow, ComparisonRecord, Row
from structattn.studies.report._common import (
    DASH,
    baseline_score,
    by_variant,
    finite,
    finite_list,
    fmt_count,
    fmt_mib,
    fmt_pm,
    fmt_score,
    fmt_seconds,
    other_metrics,
    ranked_rows,
    score_of,
    standard_row,
)
from structattn.studies.tasks.registry import TASKS, task_class


def header(record: ComparisonRecord) -> list[str]:
    """The column titles of the results table."""
    variant = ["settings"] if any(row.variant for row in record.rows) else []
    rank = ["rank"] if any(finite(row.rank) is not None for row in record.rows) else []
    costs = ["parameters", "FLOPs/example", "seconds", "peak MiB"]
    return ["attention", *variant, record.metric, *other_metrics(record), *rank, *costs]


def row_cells(record: ComparisonRecord, row: Row) -> list[str]:
    """The cells of one attention row, in the order of :func:`header`."""
    metrics = row.metrics
    has_rank = any(finite(r.rank) is not None for r in record.rows)
    return [
        row.spec,
        *([row.variant or DASH] if "settings" in header(record) else []),
        fmt_pm(score_of(row), finite(row.score_std)),
        *(fmt_score(finite(metrics.get(name))) for name in other_metrics(record)),
        *([f"{rank:.0f}" if (rank := finite(row.rank)) is not None else DASH] if has_rank else []),
        fmt_count(row.num_params),
        fmt_count(row.flops_per_example),
        fmt_seconds(row.seconds),
        fmt_mib(row.peak_memory_bytes),
    ]


def baseline_cells(record: ComparisonRecord, baseline: BaselineRow) -> list[str]:
    """The cells of one baseline, in the order of :func:`header`; its costs stay empty."""
    metrics = baseline.metrics
    variant = [baseline.variant or DASH] if "settings" in header(record) else []
    cells = [baseline.name, *variant, fmt_score(baseline_score(record, baseline))]
    cells += [fmt_score(finite(metrics.get(name))) for name in other_metrics(record)]
    return cells + [""] * (len(header(record)) - len(cells))


def format_table(record: ComparisonRecord) -> str:
    """The results as an aligned plain-text table for the terminal.

    Args:
        record: what ``results.json`` holds.

    Returns:
        The table without a final newline: attention rows in the order asked for, the best one
        marked with ``*``, and the baselines under a rule.
    """
    ranked = ranked_rows(record)
    best = ranked[0] if ranked else None
    lines = [["", *header(record)]]
    lines += [["*" if row is best else "", *row_cells(record, row)] for row in record.rows]
    baselines = record.baselines
    lines += [["", *baseline_cells(record, baseline)] for baseline in baselines]
    lines = [[_printable(cell) for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]

    def render(line: list[str]) -> str:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        return (cells[0] + " " + "  ".join(cells[1:])).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 2) + 1)
    split = 1 + len(record.rows)
    text = [render(lines[0]), rule, *(render(line) for line in lines[1:split])]
    if baselines:
        text += [rule, *(render(line) for line in lines[split:])]
    marks = ["* best attention"] if best is not None else []
    if any(finite(row.score_std) is not None for row in record.rows):
        marks.append("± standard deviation over seeds")
    notes = "; ".join([f"{record.metric}: {record.metric_label}, lower is better", *marks])
    return "\n".join([*text, _printable(notes)])


def _printable(text: str) -> str:
    """The text without control characters, which could move the cursor or break the alignment."""
    return "".join(c if c.isprintable() else "?" for c in text)


def verdict(record: ComparisonRecord) -> str:
    """What the comparison shows, and what it does not.

    Args:
        record: what ``results.json`` holds.

    Returns:
        Which attention is best and by how much over ``standard``, whether that exceeds the seed spread, and
        a plain statement when a baseline beats every attention row.
    """
    parts = by_variant(record)
    if len(parts) > 1:
        return "\n".join(f"{name}: {_verdict(part)}" for name, part in parts.items())
    return _verdict(record)


def _verdict(record: ComparisonRecord) -> str:
    ranked = ranked_rows(record)
    if not ranked:
        return "No attention finished with a finite score, so there is nothing to compare."
    sentences = [_lead(record, ranked)]
    best_score = score_of(ranked[0])
    assert best_score is not None
    no_skill = task_class(record.task).no_skill_score if record.task in TASKS else None
    if no_skill is not None and best_score > 0.95 * no_skill:
        sentences.append(
            f"No attention got clearly below {no_skill:g}, where nothing is known: none of them learned the task."
        )
    sentences.extend(_baseline_sentence(record, best_score))
    return " ".join(sentences)


def _lead(record: ComparisonRecord, ranked: list[Row]) -> str:
    """The sentence on the best row and the row it is measured against."""
    metric, best, standard = record.metric, ranked[0], standard_row(record)
    value = f"{best.spec} has the lowest {metric} ({_pm(best)})"
    if standard is None:
        note = " (standard has no finite score)" if _has_standard(record) else " (standard was not compared)"
        if len(ranked) == 1:
            return f"{best.spec} is the only attention with a score: {metric} {_pm(best)}{note}."
        return f"{value}{note}; {_against(best, ranked[1])}"
    if best is not standard:
        return f"{value}; {_against(best, standard)}"
    if len(ranked) == 1:
        return f"standard is the only attention with a score: {metric} {_pm(best)}."
    return f"{value}: no structured score improves on it; {_against(best, ranked[1])}"


def _has_standard(record: ComparisonRecord) -> bool:
    return any(row.spec.split(":")[0] == "standard" for row in record.rows)


def _pm(row: Row) -> str:
    return fmt_pm(score_of(row), finite(row.score_std))


def _against(best: Row, other: Row) -> str:
    """By how much ``best`` leads ``other``, and whether that is more than the spread over seeds."""
    low, high = score_of(best), score_of(other)
    assert low is not None
    assert high is not None
    if high == low:
        return f"{other.spec} has the same score."
    share = f"{100 * (high - low) / high:.2g} % below " if high > 0 else f"{fmt_score(high - low)} below "
    if high > 0 and high - low >= 0.995 * high:
        share = f"{high / low:.3g} times below " if low > 0 else "far below "
    text = f"that is {share}{other.spec} ({_pm(other)})"
    seeds = min(len(finite_list(best.scores)), len(finite_list(other.scores)))
    stds = finite(best.score_std), finite(other.score_std)
    if stds[0] is None or stds[1] is None or seeds < 2:
        return f"{text} — one seed: spread unknown."
    few = " (few seeds: take it as an indication)" if seeds < 3 else ""
    if high - low > stds[0] + stds[1]:
        return f"{text}, more than the spread over {seeds} seeds{few}."
    return f"{text}, within the spread over {seeds} seeds, so the two are not statistically distinguishable."


def _baseline_sentence(record: ComparisonRecord, best_score: float) -> list[str]:
    """A sentence when a baseline beats all attention rows, or when all baselines were beaten."""
    scored = [(s, b.name) for b in record.baselines if (s := baseline_score(record, b)) is not None]
    if not scored:
        return []
    low, name = min(scored)
    if low < best_score:
        more = sum(1 for s, _ in scored if s < best_score) - 1
        also = f" ({more} more baseline{'s' if more > 1 else ''} too)" if more else ""
        return [f"Attention loses here: the baseline {name} reaches {fmt_score(low)}, below every attention row{also}."]
    if low == best_score:
        return [f"The baseline {name} ties with the best attention."]
    return [f"The best baseline, {name}, reaches {fmt_score(low)}."]
