"""Scaling laws of a grid of widths and budgets: text table, verdict, and the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from structattn.studies.records.comparison import ComparisonRecord, Law, LawPoint, Row, Scaling, Series
from structattn.studies.report._common import (
    DASH,
    fmt_count,
    fmt_flops,
    fmt_mib,
    fmt_pm,
    fmt_score,
    row_name,
)
from structattn.studies.report.html import escaped, figure_html, repeat_comparison, table_html, write_page

if TYPE_CHECKING:
    from structattn.studies.report.figures import Figure


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


def mean_loss(point: LawPoint) -> float:
    """Over the seeds."""
    return statistics.fmean(point.losses)


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


def _header(record: ComparisonRecord) -> list[str]:
    point = laws(record).series[0].frontier.points[-1]
    several = ["settings"] if settings_of(record) != [None] else []
    last = [f"at {fmt_flops(point.budget)} FLOPs", "best width", "irreducible", "exponent"]
    return ["attention", *several, *last, f"compute, {laws(record).baseline} = 1"]


def _cells(record: ComparisonRecord, series: Series) -> list[str]:
    law = series.frontier
    point = law.points[-1]
    std = statistics.stdev(point.losses) if len(point.losses) > 1 else None
    width = DASH if point.width is None else str(point.width)
    return [
        series.spec,
        *([series.setting] if series.setting is not None else []),
        fmt_pm(mean_loss(point), std),
        width,
        _fitted(law, "irreducible"),
        _fitted(law, "exponent"),
        multiplier_words(law, is_baseline=series.spec == laws(record).baseline),
    ]


def format_scaling(record: ComparisonRecord) -> str:
    """The laws as one aligned table, a line per attention and setting."""
    lines = [_header(record), *(_cells(record, series) for series in laws(record).series)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, "", *_legend(record)])


def _legend(record: ComparisonRecord) -> list[str]:
    words = [
        f"at each budget the best width counts; {record.metric}: {record.metric_label}, on the test split, lower is better",
        "loss = irreducible + c * compute^-exponent, in forward FLOPs of all training examples; in brackets 95 % intervals",
        f"compute: what an attention needs for a loss, over what {laws(record).baseline} needs for the same",
    ]
    if len(record.seeds) > 1:
        words.append("± standard deviation over seeds")
    if laws(record).series[0].frontier.fit is None:
        words.append("a law is fitted to three budgets or more")
    return words


def scaling_verdict(record: ComparisonRecord) -> str:
    """Which methods need less compute than the baseline, which more, and which cannot be told from it."""
    return "\n".join(_of_setting(record, setting) for setting in settings_of(record))


def _of_setting(record: ComparisonRecord, setting: str | None) -> str:
    series = series_of(record, setting)
    baseline = laws(record).baseline
    where = "" if setting is None else f"{setting}: "
    best = min(series, key=lambda s: mean_loss(s.frontier.points[-1]))
    last = best.frontier.points[-1]
    sentence = (
        f"{where}{best.spec} has the lowest loss at {fmt_flops(last.budget)} FLOPs ({fmt_score(mean_loss(last))})."
    )
    groups: dict[str, list[str]] = {"less": [], "more": [], "same": []}
    for one in series:
        found = one.frontier.multiplier
        if found is None:
            continue
        kind = "same" if not found.is_distinguishable else "less" if found.estimate < 1 else "more"
        groups[kind].append(f"{one.spec} {multiplier_words(one.frontier, is_baseline=False)}")
    words = {
        "less": f"With less compute than {baseline} for the same loss, as a share of its own",
        "more": "With more",
        "same": f"Not distinguishable from {baseline}",
    }
    return " ".join([sentence, *(f"{words[kind]}: {', '.join(names)}." for kind, names in groups.items() if names)])


def write_scaling_report(record: ComparisonRecord, figures: Iterable[Figure], path: Path) -> Path:
    """Writes the self-contained page: verdict, laws, figures, the laws at each width, all runs, how to repeat it."""
    title = f"Scaling laws of attention: {record.task}"
    seeds = len(record.seeds)
    body = [
        f"<h1>{escaped(title)}</h1>",
        '<p class="question">Which attention reaches the same loss with less compute?</p>',
        f'<p class="dim">preset {escaped(record.preset)} · {escaped(record.created)} · '
        f"{seeds} seed{'s' if seeds > 1 else ''}</p>",
        f'<div class="verdict"><b>Verdict</b>{escaped(scaling_verdict(record))}</div>',
        "<h2>Results</h2>",
        table_html(_header(record), [_cells(record, series) for series in laws(record).series]),
        "".join(f'<p class="dim">{escaped(words)}</p>' for words in _legend(record)),
        "<h2>Figures</h2>",
        *(figure_html(figure, index) for index, figure in enumerate(figures)),
        "<h2>Each width alone</h2>",
        table_html(*_by_width(record)),
        "<h2>All models</h2>",
        table_html(*_runs(record)),
        repeat_comparison(record),
        '<h2>What is measured</h2><ul class="notes">'
        "<li>Compute is counted in closed form from the structure, 2 FLOPs per multiply-add, read-out included; looking up "
        "embeddings costs none. Norms and softmax are not counted, and seconds are another matter: see the table of all models.</li>"
        "<li>The compute ratio is the geometric mean over the losses that both reached, between fitted laws; nothing is "
        "extrapolated. Intervals are from a bootstrap over seeds and points.</li>"
        "<li>Every model was trained from the start for its budget; the learning rate of each method is the best of the same sweep at a small "
        "width, transferred by muP.</li></ul>",
    ]
    return write_page(title, body, path)


def _by_width(record: ComparisonRecord) -> tuple[list[str], list[list[str]]]:
    baseline = laws(record).baseline
    lines = []
    for series in laws(record).series:
        for law in series.widths:
            lines.append(
                [
                    f"{series.spec}, {series.setting}" if series.setting else series.spec,
                    str(law.width),
                    *(_fitted(law, name) for name in ("irreducible", "exponent")),
                    multiplier_words(law, is_baseline=series.spec == baseline),
                ]
            )
    return ["attention", "width", "irreducible", "exponent", f"compute, {baseline} = 1"], lines


def _runs(record: ComparisonRecord) -> tuple[list[str], list[list[str]]]:
    head = ["model", record.metric, "steps", "FLOPs", "parameters", "learning rate", "tokens/s", "peak MiB"]
    lines = [[row_name(row), *_run_cells(row)] for row in record.rows]
    return head, lines


def _run_cells(row: Row) -> list[str]:
    return [
        fmt_pm(row.score, row.score_std),
        str(row.steps[0]),
        fmt_flops(row.compute),
        fmt_count(row.num_params),
        f"{row.learning_rate:g}",
        fmt_count(row.tokens_per_second),
        fmt_mib(row.peak_memory_bytes),
    ]
