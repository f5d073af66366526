"""The muP check."""

from __future__ import annotations

import math
from collections.abc import Callable

from structattn_lab.records.mup import Coordinates, MupRecord, Transfer
from structattn_lab.report.figures.mup import FLAT, KINDS, drawings, largest_slope
from structattn_lab.report.numbers import DASH, fmt_date, fmt_seconds
from structattn_lab.report.report import Origin, Report, Section
from structattn_lab.report.table import Table


def _where(record: MupRecord, row: Coordinates) -> str:
    largest = row.largest
    return DASH if largest is None else f"{record.quantities[largest.quantity]}, step {largest.step}"


def _steepness(row: Coordinates) -> float:
    return math.inf if row.largest is None else abs(float(row.largest.slope))


def _transfer_of(record: MupRecord, row: Coordinates) -> Transfer | None:
    return next(
        (t for t in record.transfers if (t.structure, t.parametrization) == (row.structure, row.parametrization)), None
    )


def _rate(rate: float | None) -> str:
    return DASH if rate is None else f"2^{math.log2(rate):g}"


def _table(record: MupRecord) -> Table:
    """A line for each structure and parametrisation."""

    def of_transfer(text: Callable[[Transfer], str]) -> Callable[[Coordinates], str]:
        return lambda row: DASH if (found := _transfer_of(record, row)) is None else text(found)

    columns: list[tuple[str, Callable[[Coordinates], str]]] = [
        ("structure", lambda row: row.structure),
        ("parametrisation", lambda row: KINDS[row.parametrization]),
        ("largest slope", largest_slope),
        ("where", lambda row: _where(record, row)),
        ("best rates", of_transfer(lambda found: " ".join(map(_rate, found.best_rates)))),
        ("spread", of_transfer(lambda found: DASH if found.spread is None else f"{found.spread:.0f}")),
    ]
    words = ("parametrisation", "where")
    return Table.of_columns(columns, record.coordinates, words=words, notes=_notes(record))


def _notes(record: MupRecord) -> tuple[str, ...]:
    first = record.coordinates[0]
    fitted = ", ".join(map(str, first.slope_widths))
    words = [f"largest slope: of log size against log width, furthest from 0, fitted to the widths {fitted}; 0 is flat"]
    if record.transfers:
        shown = ", ".join(map(str, record.transfers[0].widths))
        words.append(
            f"best rates: of the widths {shown}, tried in factors of 2; spread: log2 of the largest over the smallest"
        )
        words += _rates_at_an_end(record)
    return tuple(words)


def _rates_at_an_end(record: MupRecord) -> list[str]:
    """A note on the structures whose best rate at some width is the lowest or the highest of those that were
    tried, so that the spread may be larger; none without such structures.
    """
    found = [
        f"{one.structure} ({KINDS[one.parametrization]}) at width {width}"
        for one in record.transfers
        for width, rate in zip(one.widths, one.best_rates, strict=True)
        if len(one.rates) > 1 and rate in (min(one.rates), max(one.rates))
    ]
    if not found:
        return []
    return [
        f"the best rate lies at an end of those that were tried for {', '.join(found)}: a better one may lie beyond, "
        "and the spread be larger"
    ]


def _verdict(record: MupRecord) -> str:
    """Which structures are flat under muP, how far the standard parametrisation is from it, and how far best
    rates move.
    """
    rows = {kind: [r for r in record.coordinates if r.parametrization == kind] for kind in KINDS}
    flat = [row.structure for row in rows["mup"] if _steepness(row) <= FLAT]
    other = [row for row in rows["mup"] if row.structure not in flat]
    words = f"Under muP every size is flat (slopes within {FLAT:g}) for {', '.join(flat) or 'no structure'}"
    for row in other:
        words += f"; {row.structure} has a slope of {largest_slope(row)} ({_where(record, row)})"
    steepest = max(rows["standard"], key=_steepness)
    words += (
        f". In the standard parametrisation the steepest is {largest_slope(steepest)} "
        f"({steepest.structure}: {_where(record, steepest)})."
    )
    spreads = {
        kind: [t.spread for t in record.transfers if t.parametrization == kind and t.spread is not None]
        for kind in KINDS
    }
    if all(spreads.values()):
        words += (
            f" Over the widths the best learning rate moves by at most a factor of 2^{max(spreads['mup']):.0f} under "
            f"muP and 2^{max(spreads['standard']):.0f} without."
        )
    return words


def report(record: MupRecord) -> Report:
    """Verdict, table, figures, all slopes, how to repeat it."""
    whole = _table(record)
    return Report(
        title="Does muP hold?",
        question="Are the sizes inside the model and the best learning rate the same at every width of the model?",
        byline=(fmt_date(record.created), f"{fmt_seconds(record.seconds)} seconds"),
        verdict=_verdict(record),
        sections=(
            Section(heading="Results", table=whole),
            Section(heading="Figures", drawings=drawings(record)),
            Section(heading="Slopes", table=_slopes(record)),
        ),
        tables=(whole,),
        origin=Origin.of(record),
        notes=(
            "Sizes are root mean squares on held-out prompts, after steps on one fixed batch of in-context regression.",
            "Learned scores: attention scores of the trained weights minus those of the initial weights, for the same "
            "hidden states. Under muP the initial scores themselves fade like one over the root of the head dimension.",
            "Standard: every matrix starts at 1/sqrt(fan-in), scores are divided by the root of their dimension, one "
            "learning rate for all.",
        ),
    )


def _slopes(record: MupRecord) -> Table:
    rows = []
    for row in record.coordinates:
        for name, words in record.quantities.items():
            found = [slope for step, slope in row.slopes[name].items() if step != "0"]
            cells = [DASH if slope is None else f"{slope:+.2f}" for slope in found]
            rows.append([row.structure, KINDS[row.parametrization], words, *cells])
    first = record.coordinates[0]
    steps = [f"step {step}" for step in first.slopes["output"] if step != "0"]
    fitted = ", ".join(map(str, first.slope_widths))
    title = f"Of log size against log width at the widths {fitted}"
    return Table.of(
        ("structure", "parametrisation", "size", *steps), rows, words=("parametrisation", "size"), title=title
    )
