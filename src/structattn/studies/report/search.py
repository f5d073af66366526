"""A comparison with a search: the setting that validation chose for each method, in a table, a verdict and a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structattn.studies.records.comparison import Choice, ComparisonRecord, Row
from structattn.studies.report._common import (
    DASH,
    baseline_score,
    finite,
    fmt_count,
    fmt_pm,
    fmt_score,
    fmt_seconds,
    other_metrics,
    score_of,
)
from structattn.studies.report.html import escaped, figure_html, repeat_comparison, table_html, task_tables, write_page

if TYPE_CHECKING:
    from structattn.studies.report.figures import Figure


def group_record(record: ComparisonRecord, choice: Choice) -> ComparisonRecord:
    """The record of one group with the chosen row of each method alone, as a comparison of one size has them."""
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


def _epochs(record: ComparisonRecord, row: Row) -> str:
    """Of the weights that count, where the task says how many examples an epoch has."""
    windows = finite(row.details.get("train_windows"))
    if windows is None:
        return DASH
    # Without early stopping the last weights count, not those of the best validation.
    steps = row.steps if record.config["training"]["patience"] is None else row.best_steps
    return f"{statistics.fmean(steps) * row.batch_size / windows:.1f}"


def _header(record: ComparisonRecord) -> list[str]:
    groups = ["settings"] if len(choices_of(record)) > 1 else []
    costs = ["learning rate", "epochs", "seeds", "seconds", "parameters"]
    return ["method", *groups, record.metric, *other_metrics(record), "chosen", *costs]


def _lines(record: ComparisonRecord) -> list[list[str]]:
    several = len(choices_of(record)) > 1
    lines = []
    for choice in choices_of(record):
        name = [str(choice.group or DASH)] if several else []
        best = min(choice.rows, key=lambda i: record.rows[i].score)
        for i in choice.rows:
            row = record.rows[i]
            star = "★ " if i == best else ""
            lines.append([f"{star}{row.spec}", *name, *_cells(record, row)])
        for i in choice.baselines:
            baseline = record.baselines[i]
            metrics = [fmt_score(finite(baseline.metrics.get(metric))) for metric in other_metrics(record)]
            cells = [fmt_score(baseline_score(record, baseline)), *metrics, baseline.searched or DASH, *[DASH] * 5]
            lines.append([baseline.name, *name, *cells])
    return lines


def _cells(record: ComparisonRecord, row: Row) -> list[str]:
    return [
        fmt_pm(score_of(row), finite(row.score_std)),
        *(fmt_score(finite(row.metrics.get(name))) for name in other_metrics(record)),
        row.searched or DASH,
        f"{row.learning_rate:g}",
        _epochs(record, row),
        str(len(row.scores)),
        fmt_seconds(row.seconds),
        fmt_count(row.num_params),
    ]


def _legend(record: ComparisonRecord) -> list[str]:
    chosen = ", ".join(searched_settings(record))
    words = [
        f"{record.metric}: {record.metric_label}, on the test split, lower is better; ★ lowest of the trained ones",
        f"chosen: of {chosen}, the one with the lowest validation score, for each method by itself",
    ]
    if len(record.seeds) > 1:
        words.append("± standard deviation over seeds")
    return words


def format_search(record: ComparisonRecord) -> str:
    """The choices as one aligned table, a line per method and group."""
    lines = [_header(record), *_lines(record)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, "", *_legend(record)])


def search_verdict(record: ComparisonRecord) -> str:
    """For each group: what is lowest, what cannot be told from it, and whether a baseline is lower."""
    return "\n".join(_of_group(record, choice) for choice in choices_of(record))


def _of_group(record: ComparisonRecord, choice: Choice) -> str:
    rows = sorted((record.rows[i] for i in choice.rows), key=lambda row: float(row.score))
    best = rows[0]
    where = f"{choice.group}: " if choice.group else ""
    parts = [
        f"{where}{best.spec} is lowest ({fmt_pm(score_of(best), finite(best.score_std))}, {best.searched}).",
        *_beyond_noise(record, choice),
    ]
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
    return [*said, *([f"{needed.seeds} seeds do not tell it from: {within}."] if within else [])]


def _matrix(record: ComparisonRecord, choice: Choice) -> tuple[list[str], list[list[str]]]:
    """Every method with every setting that it could have."""
    settings = searched_settings(record)
    rows: dict[str, dict[str, str]] = {}
    for row in record.rows:
        if row.group == choice.group:
            rows.setdefault(row.spec, {})[row.searched or ""] = fmt_pm(score_of(row), finite(row.score_std))
    for baseline in record.baselines:
        if baseline.group == choice.group:
            found = rows.setdefault(baseline.name, {})
            found[baseline.searched or ""] = fmt_score(baseline_score(record, baseline))
    return ["method", *settings], [
        [name, *(found.get(setting, DASH) for setting in settings)] for name, found in rows.items()
    ]


def write_search_report(record: ComparisonRecord, figures: Iterable[Figure], path: Path) -> Path:
    """Writes the self-contained page: verdict, the chosen rows, figures, every setting, how to repeat it."""
    title = f"Methods compared, each with its best settings: {record.task}"
    seeds = len(record.seeds)
    rates = record.config.get("learning_rates") or []
    body: list[Any] = [
        f"<h1>{escaped(title)}</h1>",
        f'<p class="question">{escaped(record.question)}</p>',
        f'<p class="dim">preset {escaped(record.preset)} · {escaped(record.created)} · '
        f"{seeds} seed{'s' if seeds > 1 else ''}</p>",
        f'<div class="verdict"><b>Verdict</b>{escaped(search_verdict(record))}</div>',
        "<h2>Results</h2>",
        table_html(_header(record), _lines(record)),
        "".join(f'<p class="dim">{escaped(words)}</p>' for words in _legend(record)),
        "<h2>Figures</h2>",
        *(figure_html(figure, index) for index, figure in enumerate(figures)),
    ]
    for choice in choices_of(record):
        heading = f"Every setting{': ' + choice.group if choice.group else ''}"
        body += [f"<h2>{escaped(heading)}</h2>", table_html(*_matrix(record, choice))]
        if choice.critical_differences is not None:
            gaps = [[spec, fmt_score(gap), fmt_score(needed)] for spec, gap, needed in _gaps(record, choice)]
            body += [
                '<p class="dim">Differences from the lowest, at the chosen settings:</p>',
                table_html(["method", "above the lowest", "critical difference"], gaps),
            ]
        body += task_tables(group_record(record, choice))
    trials = len(searched_settings(record)) * max(1, len(rates))
    body += [
        repeat_comparison(record),
        '<h2>What is measured</h2><ul class="notes">'
        f"<li>Every method had {trials} trials: {len(searched_settings(record))} settings, at each of them the best of "
        f"{max(1, len(rates))} learning rates by the validation score of seed 0. The test split decided nothing.</li>"
        "<li>A method is worse beyond seed noise if its mean is farther above the lowest than the critical difference of the two: Games and "
        "Howell's, at 95 % for all pairs together, with each method's own variance. It says which differences another draw of seeds would "
        "keep, and nothing of other test data; with three seeds it is wide.</li>"
        "<li>Seconds are of one training run on this machine, early stopping included; epochs are those of the weights that count.</li>"
        "</ul>",
    ]
    return write_page(title, body, path)
