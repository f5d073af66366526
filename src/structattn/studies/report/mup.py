"""The muP check: table, verdict and page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from structattn.studies.report.numbers import DASH, fmt_seconds
from structattn.studies.report.page import Figure, Origin, Page, Section
from structattn.studies.report.table import Line, Table

Results = Mapping[str, Any]
Row = Mapping[str, Any]

KINDS = {"mup": "muP", "standard": "standard parametrisation"}
FLAT = 0.1


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


def _cells(results: Results, row: Row) -> tuple[str, ...]:
    transfer = _transfer_of(results, row)
    rates = spread = DASH
    if transfer is not None:
        rates = " ".join(_rate(rate) for rate in transfer["best_rates"])
        spread = DASH if transfer["spread"] is None else f"{transfer['spread']:.0f}"
    return (
        row["structure"],
        KINDS[row["parametrization"]],
        largest_slope(row),
        _where(results, row),
        rates,
        spread,
    )


def table(results: Results) -> Table:
    """A line for each structure and parametrisation."""
    return Table(
        header=("structure", "parametrisation", "largest slope", "where", "best rates", "spread"),
        lines=tuple(Line(cells=_cells(results, row)) for row in results["coordinates"]),
        words=("parametrisation", "where"),
        notes=_notes(results),
    )


def text(results: Results) -> str:
    """The table and the verdict for a terminal."""
    return f"{table(results).text()}\n\n{verdict(results)}"


def _notes(results: Results) -> tuple[str, ...]:
    first = results["coordinates"][0]
    fitted = ", ".join(map(str, first["slope_widths"]))
    words = [f"largest slope: of log size against log width, furthest from 0, fitted to the widths {fitted}; 0 is flat"]
    if results["transfers"]:
        shown = ", ".join(map(str, results["transfers"][0]["widths"]))
        words.append(
            f"best rates: of the widths {shown}, tried in factors of 2; spread: log2 of the largest over the smallest"
        )
    return tuple(words)


def verdict(results: Results) -> str:
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


def page(results: Results, figures: Sequence[Figure]) -> Page:
    """Verdict, table, figures, all slopes, how to repeat it."""
    return Page(
        title="Does muP hold?",
        question="Are the sizes inside the model and the best learning rate the same at every width of the model?",
        byline=(results["created"], f"{fmt_seconds(results['seconds'])} seconds"),
        verdict=verdict(results),
        sections=(
            Section(heading="Results", table=table(results)),
            Section(heading="Figures", figures=figures),
            Section(heading="Slopes", table=_slopes(results)),
        ),
        origin=Origin.of(results),
        notes=(
            "Sizes are root mean squares on held-out prompts, after steps on one fixed batch of in-context regression.",
            "Learned scores: attention scores of the trained weights minus those of the initial weights, for the same hidden states. Under "
            "muP the initial scores themselves fade like one over the root of the head dimension.",
            "Standard: every matrix starts at 1/sqrt(fan-in), scores are divided by the root of their dimension, one learning rate for all.",
        ),
    )


def _slopes(results: Results) -> Table:
    rows = []
    for row in results["coordinates"]:
        for name, words in results["quantities"].items():
            found = [slope for step, slope in row["slopes"][name].items() if step != "0"]
            cells = [DASH if slope is None else f"{slope:+.2f}" for slope in found]
            rows.append([row["structure"], KINDS[row["parametrization"]], words, *cells])
    first = results["coordinates"][0]
    steps = [f"step {step}" for step in first["slopes"]["output"] if step != "0"]
    fitted = ", ".join(map(str, first["slope_widths"]))
    title = f"Of log size against log width at the widths {fitted}"
    return Table.of(
        ("structure", "parametrisation", "size", *steps), rows, words=("parametrisation", "size"), title=title
    )
