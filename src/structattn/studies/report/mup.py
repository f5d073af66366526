"""The muP check: text table, figures of sizes and learning rates against width, and the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structattn.studies.report._common import DASH, fmt_seconds
from structattn.studies.report.html import escaped, figure_html, repeat_html, table_html, write_page

if TYPE_CHECKING:
    from structattn.studies.report.figures import Figure

Results = Mapping[str, Any]
Row = Mapping[str, Any]

KINDS = {"mup": "muP", "standard": "standard parametrisation"}
FLAT = 0.1
_HEADER = ("structure", "parametrisation", "largest slope", "where", "best rates", "spread")


def _where(results: Results, row: Row) -> str:
    largest = row["largest"]
    return DASH if largest is None else f"{results['quantities'][largest['quantity']]}, step {largest['step']}"


def largest_slope(row: Row) -> str:
    return "diverged" if row["largest"] is None else f"{row['largest']['slope']:+.2f}"


def _steepness(row: Row) -> float:
    return math.inf if row["largest"] is None else abs(float(row["largest"]["slope"]))


def _transfer_of(results: Results, row: Row) -> Row | None:
    return next(
        (
            t
            for t in results["transfers"]
            if (t["structure"], t["parametrization"]) == (row["structure"], row["parametrization"])
        ),
        None,
    )


def _rate(rate: float | None) -> str:
    return DASH if rate is None else f"2^{math.log2(rate):g}"


def _cells(results: Results, row: Row) -> list[str]:
    transfer = _transfer_of(results, row)
    rates = spread = DASH
    if transfer is not None:
        rates = " ".join(_rate(rate) for rate in transfer["best_rates"])
        spread = DASH if transfer["spread"] is None else f"{transfer['spread']:.0f}"
    return [
        row["structure"],
        KINDS[row["parametrization"]],
        largest_slope(row),
        _where(results, row),
        rates,
        spread,
    ]


def format_mup(results: Results) -> str:
    """The results as one aligned table, a line per structure and parametrisation."""
    lines = [list(_HEADER), *(_cells(results, row) for row in results["coordinates"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, "", *_legend(results)])


def _legend(results: Results) -> list[str]:
    first = results["coordinates"][0]
    fitted = ", ".join(map(str, first["slope_widths"]))
    words = [f"largest slope: of log size against log width, furthest from 0, fitted to the widths {fitted}; 0 is flat"]
    if results["transfers"]:
        shown = ", ".join(map(str, results["transfers"][0]["widths"]))
        words.append(
            f"best rates: of the widths {shown}, tried in factors of 2; spread: log2 of the largest over the smallest"
        )
    return words


def mup_verdict(results: Results) -> str:
    """Which structures are flat under muP, how far the standard parametrisation is from it, and how far best rates move."""
    rows = {kind: [r for r in results["coordinates"] if r["parametrization"] == kind] for kind in KINDS}
    flat = [row["structure"] for row in rows["mup"] if _steepness(row) <= FLAT]
    other = [row for row in rows["mup"] if row["structure"] not in flat]
    words = f"Under muP every size is flat (slopes within {FLAT:g}) for {', '.join(flat) or 'no structure'}"
    for row in other:
        words += f"; {row['structure']} has a slope of {largest_slope(row)} ({_where(results, row)})"
    steepest = max(rows["standard"], key=_steepness)
    words += (
        f". In the standard parametrisation the steepest is {largest_slope(steepest)} "
        f"({steepest['structure']}: {_where(results, steepest)})."
    )
    spreads = {
        kind: [t["spread"] for t in results["transfers"] if t["parametrization"] == kind and t["spread"] is not None]
        for kind in KINDS
    }
    if all(spreads.values()):
        words += (
            f" Over the widths the best learning rate moves by at most a factor of 2^{max(spreads['mup']):.0f} under muP "
            f"and 2^{max(spreads['standard']):.0f} without."
        )
    return words


def write_mup_report(results: Results, figures: Iterable[Figure], path: Path) -> Path:
    """Writes the self-contained page: verdict, table, figures, all slopes, how to repeat it."""
    title = "Does muP hold?"
    fitted = ", ".join(map(str, results["coordinates"][0]["slope_widths"]))
    body = [
        f"<h1>{title}</h1>",
        '<p class="question">Do sizes inside the model and the best learning rate stay where they are as the model grows wider?</p>',
        f'<p class="dim">{escaped(results["created"])} · {fmt_seconds(results["seconds"])} seconds</p>',
        f'<div class="verdict"><b>Verdict</b>{escaped(mup_verdict(results))}</div>',
        "<h2>Results</h2>",
        table_html(_HEADER, [_cells(results, row) for row in results["coordinates"]]),
        "".join(f'<p class="dim">{escaped(words)}</p>' for words in _legend(results)),
        "<h2>Figures</h2>",
        *(figure_html(figure, index) for index, figure in enumerate(figures)),
        f"<h2>Slopes</h2><p class='dim'>Of log size against log width at the widths {escaped(fitted)}.</p>",
        table_html(*_slopes(results)),
        repeat_html(
            results["command"],
            {name: results[name] for name in ("seed", "preset") if name in results},
            results["versions"],
            results["hardware"],
            results.get("config", {}),
        ),
        '<h2>What is measured</h2><ul class="notes">'
        "<li>Sizes are root mean squares on held-out prompts, after steps on one fixed batch of in-context regression.</li>"
        "<li>Learned scores: attention scores of the trained weights minus those of the initial weights, for the same hidden "
        "states. Under muP the initial scores themselves fade like one over the root of the head dimension.</li>"
        "<li>Standard: every matrix starts at 1/sqrt(fan-in), scores are divided by the root of their dimension, one learning rate "
        "for all.</li></ul>",
    ]
    return write_page(title, body, path)


def _slopes(results: Results) -> tuple[tuple[str, ...], list[list[str]]]:
    names = results["quantities"]
    lines = []
    for row in results["coordinates"]:
        for name, words in names.items():
            found = {step: slope for step, slope in row["slopes"][name].items() if step != "0"}
            cells = [DASH if slope is None else f"{slope:+.2f}" for slope in found.values()]
            lines.append([row["structure"], KINDS[row["parametrization"]], words, *cells])
    steps = [step for step in results["coordinates"][0]["slopes"]["output"] if step != "0"]
    return ("structure", "parametrisation", "size", *(f"step {step}" for step in steps)), lines
