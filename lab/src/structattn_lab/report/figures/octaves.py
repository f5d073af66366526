"""Numbers of a language model by octaves of its context: loss by position, and attention by distance."""

from __future__ import annotations

from typing import Any

from structattn_lab.records.comparison import ComparisonRecord, Row
from structattn_lab.report.plot import Drawing, label_left, mark_axis, panel_grid, shared_legend, spec_style

FROM_MARK = "(at n: from n to 2n - 1)"  # what a point of an axis of octaves is about
_SAME = 0.5  # where a logarithmic axis shows the token itself, at distance 0


def loss_by_position(record: ComparisonRecord) -> Drawing | None:
    """Loss against the tokens of context, a line per attention variant, a panel for each setting."""
    label = f"test {record.metric}"
    figure = octave_panels(record, "loss_by_position", f"tokens of context {FROM_MARK}", label)
    return None if figure is None else (figure, "Loss against the context that a token has.", "Loss by position.")


def attention_by_distance(record: ComparisonRecord) -> Drawing | None:
    """The share of attention against how far back it reaches."""
    label = "share of attention, mean over layers"
    figure = octave_panels(record, "attention_by_distance", f"distance to the key {FROM_MARK}", label)
    caption = "How far back attention reaches: the share of all attention by distance."
    return None if figure is None else (figure, caption, "Attention by distance.")


def octave_panels(record: ComparisonRecord, key: str, xlabel: str, ylabel: str) -> Any:
    """A line for each attention variant of a list by octaves under ``details[key]``, a panel for each
    setting; ``None`` without such lists.
    """
    rows = [row for row in record.rows if row.details.get(key)]
    if not rows:
        return None
    specs = list(dict.fromkeys(row.spec for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure, panels = panel_grid(len(variants), 3.2)
    longest = max(row.details["octaves"][-1][1] for row in rows)
    marks = [float(2**i) for i in range(longest.bit_length())]
    for ax, variant in zip(panels, variants, strict=True):
        for row in rows:
            if row.variant == variant:
                ax.plot(*_line(row, key), ms=4, lw=1.3, label=row.spec, **spec_style(specs, row.spec))
        ax.set_xscale("log", base=2)
        shown = [_SAME, *marks] if key == "attention_by_distance" else marks
        mark_axis(ax.xaxis, shown, lambda value: "0" if value == _SAME else f"{value:g}")
        ax.tick_params(axis="x", labelsize=7.5)
        ax.set_title(variant or "", fontsize=9, loc="left")
        ax.set_xlabel(xlabel)
    label_left(panels, ylabel)
    shared_legend(figure, panels)
    return figure


def _line(row: Row, key: str) -> tuple[list[float], list[float]]:
    """Where the octaves begin, and the values there; of attention by distance the mean over the layers, with
    the token itself first.
    """
    positions = [float(first) for first, _ in row.details["octaves"]]
    values = row.details[key]
    if key == "attention_by_distance":
        positions = [_SAME, *positions]
        layers = [[0.0 if v is None else v for v in layer] for layer in values if layer]
        values = [sum(column) / len(layers) for column in zip(*layers, strict=True)]
    pairs = [(x, y) for x, y in zip(positions, values, strict=False) if y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]
