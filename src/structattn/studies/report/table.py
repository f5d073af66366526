"""The results as plain text: an aligned table and a verdict of one to three honest sentences."""

from __future__ import annotations

from structattn.studies.report._common import (
    DASH,
    Results,
    Row,
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


def header(results: Results) -> list[str]:
    """The column titles of the results table."""
    variant = ["settings"] if any(row.get("variant") for row in results["rows"]) else []
    rank = ["rank"] if any(finite(row.get("rank")) is not None for row in results["rows"]) else []
    costs = ["parameters", "FLOPs/example", "seconds", "peak MiB"]
    return ["attention", *variant, str(results["metric"]), *other_metrics(results), *rank, *costs]


def row_cells(results: Results, row: Row) -> list[str]:
    """The cells of one attention row, in the order of :func:`header`."""
    metrics = row.get("metrics") or {}
    has_rank = any(finite(r.get("rank")) is not None for r in results["rows"])
    return [
        str(row["spec"]),
        *([str(row.get("variant") or DASH)] if "settings" in header(results) else []),
        fmt_pm(score_of(row), finite(row.get("score_std"))),
        *(fmt_score(finite(metrics.get(name))) for name in other_metrics(results)),
        *([f"{rank:.0f}" if (rank := finite(row.get("rank"))) is not None else DASH] if has_rank else []),
        fmt_count(row.get("num_params")),
        fmt_count(row.get("flops_per_example")),
        fmt_seconds(row.get("seconds")),
        fmt_mib(row.get("peak_memory_bytes")),
    ]


def baseline_cells(results: Results, baseline: Row) -> list[str]:
    """The cells of one baseline, in the order of :func:`header`; its costs stay empty."""
    metrics = baseline.get("metrics") or {}
    variant = [str(baseline.get("variant") or DASH)] if "settings" in header(results) else []
    cells = [str(baseline["name"]), *variant, fmt_score(baseline_score(results, baseline))]
    cells += [fmt_score(finite(metrics.get(name))) for name in other_metrics(results)]
    return cells + [""] * (len(header(results)) - len(cells))


def format_table(results: Results) -> str:
    """The results as an aligned plain-text table for the terminal.

    Args:
        results: what ``results.json`` holds.

    Returns:
        The table without a final newline: attention rows in the order asked for, the best one
        marked with ``*``, and the baselines under a rule.
    """
    ranked = ranked_rows(results)
    best = ranked[0] if ranked else None
    lines = [["", *header(results)]]
    lines += [["*" if row is best else "", *row_cells(results, row)] for row in results["rows"]]
    baselines = results.get("baselines") or []
    lines += [["", *baseline_cells(results, baseline)] for baseline in baselines]
    lines = [[_printable(cell) for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]

    def render(line: list[str]) -> str:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        return (cells[0] + " " + "  ".join(cells[1:])).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 2) + 1)
    split = 1 + len(results["rows"])
    text = [render(lines[0]), rule, *(render(line) for line in lines[1:split])]
    if baselines:
        text += [rule, *(render(line) for line in lines[split:])]
    marks = ["* best attention"] if best is not None else []
    if any(finite(row.get("score_std")) is not None for row in results["rows"]):
        marks.append("± standard deviation over seeds")
    notes = "; ".join([f"{results['metric']}: {results['metric_label']}, lower is better", *marks])
    return "\n".join([*text, _printable(notes)])


def _printable(text: str) -> str:
    """The text without control characters, which could move the cursor or break the alignment."""
    return "".join(c if c.isprintable() else "?" for c in text)


def verdict(results: Results) -> str:
    """What the comparison shows, and what it does not.

    Args:
        results: what ``results.json`` holds.

    Returns:
        Which attention is best and by how much over ``standard``, whether that exceeds the seed spread, and
        a plain statement when a baseline beats every attention row.
    """
    parts = by_variant(results)
    if len(parts) > 1:
        return "\n".join(f"{name}: {_verdict(part)}" for name, part in parts.items())
    return _verdict(results)


def _verdict(results: Results) -> str:
    ranked = ranked_rows(results)
    if not ranked:
        return "No attention finished with a finite score, so there is nothing to compare."
    sentences = [_lead(results, ranked)]
    best_score = score_of(ranked[0])
    assert best_score is not None
    no_skill = task_class(results["task"]).no_skill_score if results["task"] in TASKS else None
    if no_skill is not None and best_score > 0.95 * no_skill:
        sentences.append(
            f"No attention got clearly below {no_skill:g}, where nothing is known: none of them learned the task."
        )
    sentences.extend(_baseline_sentence(results, best_score))
    return " ".join(sentences)


def _lead(results: Results, ranked: list[Row]) -> str:
    """The sentence on the best row and the row it is measured against."""
    metric, best, standard = str(results["metric"]), ranked[0], standard_row(results)
    value = f"{best['spec']} has the lowest {metric} ({_pm(best)})"
    if standard is None:
        note = " (standard has no finite score)" if _has_standard(results) else " (standard was not compared)"
        if len(ranked) == 1:
            return f"{best['spec']} is the only attention with a score: {metric} {_pm(best)}{note}."
        return f"{value}{note}; {_against(best, ranked[1])}"
    if best is not standard:
        return f"{value}; {_against(best, standard)}"
    if len(ranked) == 1:
        return f"standard is the only attention with a score: {metric} {_pm(best)}."
    return f"{value}: no structured score improves on it; {_against(best, ranked[1])}"


def _has_standard(results: Results) -> bool:
    return any(str(row["spec"]).split(":")[0] == "standard" for row in results["rows"])


def _pm(row: Row) -> str:
    return fmt_pm(score_of(row), finite(row.get("score_std")))


def _against(best: Row, other: Row) -> str:
    """By how much ``best`` leads ``other``, and whether the seeds can tell them apart."""
    low, high = score_of(best), score_of(other)
    assert low is not None
    assert high is not None
    if high == low:
        return f"{other['spec']} has the same score."
    share = f"{100 * (high - low) / high:.2g} % below " if high > 0 else f"{fmt_score(high - low)} below "
    if high > 0 and high - low >= 0.995 * high:
        share = f"{high / low:.3g} times below " if low > 0 else "far below "
    text = f"that is {share}{other['spec']} ({_pm(other)})"
    seeds = min(len(finite_list(best.get("scores"))), len(finite_list(other.get("scores"))))
    stds = finite(best.get("score_std")), finite(other.get("score_std"))
    if stds[0] is None or stds[1] is None or seeds < 2:
        return f"{text} — one seed: spread unknown."
    few = " (few seeds: take it as an indication)" if seeds < 3 else ""
    if high - low > stds[0] + stds[1]:
        return f"{text}, more than the spread over {seeds} seeds{few}."
    return f"{text}, within the spread over {seeds} seeds, so the two are not told apart."


def _baseline_sentence(results: Results, best_score: float) -> list[str]:
    """A sentence when a baseline beats all attention rows, or when all baselines were beaten."""
    scored = [
        (s, str(b["name"])) for b in results.get("baselines") or [] if (s := baseline_score(results, b)) is not None
    ]
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
