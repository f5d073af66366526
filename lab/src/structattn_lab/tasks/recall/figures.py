"""Accuracy and loss of what is looked up, by how far back it is."""

from __future__ import annotations

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report import cache_map
from structattn_lab.report.figures.octaves import FROM_MARK, octave_panels
from structattn_lab.report.plot import DASHES, GREY, Drawing

_DISTANCE = f"distance to the value {FROM_MARK}"


def accuracy_by_distance(record: ComparisonRecord) -> Drawing | None:
    """The share of right answers against the distance; dashed, guessing."""
    figure = octave_panels(record, "accuracy_by_distance", _DISTANCE, "share of right answers")
    if figure is None:
        return None
    chance = 1 / record.config["task"]["num_values"]
    for ax in figure.axes:
        ax.set_ylim(0, 1.04)
        ax.axhline(chance, color=GREY, lw=1, ls=DASHES[0], zorder=1)
    caption = "The share of right answers by the distance from the value to the query; dashed: guessing."
    return figure, caption, "Accuracy by distance."


def loss_by_distance(record: ComparisonRecord) -> Drawing | None:
    """The cross entropy of the answers against the distance."""
    figure = octave_panels(record, "loss_by_distance", _DISTANCE, f"test {record.metric}")
    return (
        None if figure is None else (figure, "Loss by the distance from the value to the query.", "Loss by distance.")
    )


_MAP = cache_map.report(metrics=("accuracy_near", "accuracy_middle", "accuracy_far"))
FIGURES = {
    **_MAP.figures,
    "accuracy-by-distance": accuracy_by_distance,
    "loss-by-distance": loss_by_distance,
}
TABLES = _MAP.tables
