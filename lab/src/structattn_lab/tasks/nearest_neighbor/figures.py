"""The figure of nearest-neighbor search: error against the rank of the score."""

from __future__ import annotations

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report.plot import (
    DASHES,
    GREY,
    Drawing,
    log_axis,
    mark_axis,
    new_canvas,
    point_labels,
    row_style,
    wide,
)
from structattn_lab.report.rows import lowest, score_of, seed_words


def error_against_rank(record: ComparisonRecord) -> Drawing | None:
    """Error against the rank of the score matrix of one head."""
    points = [(row, float(row.rank), score_of(row)) for row in record.rows if row.rank is not None]
    drawn = [(row, x, y) for row, x, y in points if y is not None]
    if not drawn:
        return None
    ranks = sorted({x for _, x, _ in drawn})
    top = max(float(record.config["task"]["dim"]), ranks[-1])
    figure = new_canvas(4.0)
    ax = figure.add_subplot()
    for row, x, y in drawn:
        ax.plot([x], [y], "o", ms=7, color=row_style(record, row)["color"])
    if wide(y for *_, y in drawn):
        log_axis(ax, "y")
    else:
        ax.set_ylim(0, 1.12 * max(1.0, *(y for *_, y in drawn)))
    if ranks[0] > 0 and top / ranks[0] > 8:
        ax.set_xscale("log", base=2)
        ax.set_xlim(ranks[0] / 1.25, top * 1.25)
    else:
        ax.set_xlim(0, top * 1.06)
    scale = ax.transScale + ax.transLimits
    ticks: list[float] = []
    for x in [top, *ranks]:
        if all(abs(float(scale.transform((x, 1.0))[0] - scale.transform((t, 1.0))[0])) > 0.04 for t in ticks):
            ticks.append(x)
    mark_axis(ax.xaxis, sorted(ticks))
    ax.axhline(1.0, color=GREY, lw=1, ls=DASHES[0], zorder=1)
    ax.annotate("1 = knows nothing", (0.01, 1.0), (0, 3), xycoords=ax.get_yaxis_transform(),
                textcoords="offset points", fontsize=8, color=GREY)  # fmt: skip
    ax.set_xlabel(f"rank of the score matrix (axis ends at {top:g})")
    ax.set_ylabel(record.metric)
    point_labels(figure, ax, [(x, y, row.spec, row_style(record, row)["color"]) for row, x, y in drawn])
    caption = f"Error against the rank of the score matrix M ({seed_words(record)}); other differences remain."
    return figure, caption, f"Scatter plot of error against rank{lowest(record)}."


FIGURES = {"error-against-rank": error_against_rank}
