"""The figures of in-context regression: error against compute, by point of the prompt, and against rank over
dimension.
"""

from __future__ import annotations

from matplotlib.ticker import FuncFormatter

from structattn_lab.records.comparison import ComparisonRecord, Row
from structattn_lab.report.figures.by_position import by_position
from structattn_lab.report.figures.curves import draw_curves
from structattn_lab.report.numbers import finite
from structattn_lab.report.plot import DASHES, GREY, OKABE_ITO, Drawing, new_canvas, point_labels, row_style
from structattn_lab.report.rows import baselines_in_view, by_variant, lowest, score_of, seed_words


def error_against_compute(record: ComparisonRecord) -> Drawing | None:
    if len(by_variant(record)) > 1:
        return None  # errors at different sizes do not share an axis
    scores = [v for row in record.rows if (v := score_of(row)) is not None]
    levels, _ = baselines_in_view(record, scores) if scores else ([], "")
    return draw_curves(record, "compute", "training compute, forward FLOPs of all examples", levels)


def error_by_point(record: ComparisonRecord) -> Drawing | None:
    figure = by_position(record, "error_by_point", "examples in the prompt")
    caption = "Error against the examples seen in the prompt; baselines in grey, cut off at the frame."
    return None if figure is None else (figure, caption, f"Error by prompt length{lowest(record)}.")


def error_against_rank_over_dimension(record: ComparisonRecord) -> Drawing | None:
    """Error against the rank of a head over the dimension of the data, one line per variant of the
    settings.
    """
    lines: dict[str, list[tuple[float, float, Row]]] = {}
    for row in record.rows:
        dim, rank, score = finite(row.details.get("dim")), row.rank, score_of(row)
        if dim and rank and score is not None:
            lines.setdefault(row.variant or "", []).append((rank / dim, score, row))
    if len({x for line in lines.values() for x, _, _ in line}) < 2:
        return None
    figure = new_canvas(4.0)
    ax = figure.add_subplot()
    labels = []
    for index, (name, line) in enumerate(lines.items()):
        for number, (x, y, row) in enumerate(sorted(line, key=lambda point: point[:2])):
            # Those of the other figures, unless they are needed to tell the settings apart.
            colour = row_style(record, row)["color"] if len(lines) == 1 else OKABE_ITO[index % len(OKABE_ITO)]
            ax.plot([x], [y], "o", color=colour, ms=6, label=name if name and number == 0 else None)
            labels.append((x, y, row.spec, colour))
    ax.axvline(1.0, color=GREY, lw=1.0, ls=DASHES[0], zorder=1)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_ylim(0, 1.08 * max(1.0, *(y for _, y, _, _ in labels)))
    ax.margins(x=0.08)
    ax.set_xlabel("rank of a head's score matrix over the dimension of the inputs (dashed: equal)")
    ax.set_ylabel(record.metric)
    if len(lines) > 1:
        figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    point_labels(figure, ax, labels)
    caption = f"Error against rank over dimension ({seed_words(record)}); other differences remain."
    return figure, caption, f"Scatter plot of error against rank over dimension{lowest(record)}."


FIGURES = {
    "error-against-compute": error_against_compute,
    "error-by-point": error_by_point,
    "error-against-rank-over-dimension": error_against_rank_over_dimension,
}
