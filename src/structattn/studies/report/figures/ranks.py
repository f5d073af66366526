"""Figures of error against rank: of one comparison, and over the dimension of the data."""

from __future__ import annotations

from matplotlib.ticker import FixedLocator, FuncFormatter

from structattn.studies.report._common import Results, Row, finite, score_of
from structattn.studies.report._plotting import GREY, OKABE_ITO, dimension, lowest, row_style, seed_words, wide
from structattn.studies.report.figures.canvas import Drawing, log_axis, new_canvas, point_labels


def rank_figure(results: Results) -> Drawing | None:
    """Error against the rank of the score matrix of one head."""
    points = [(row, finite(row.get("rank")), score_of(row)) for row in results["rows"]]
    known = [(row, x, y) for row, x, y in points if x is not None and y is not None]
    if not known:
        return None
    ranks = sorted({x for _, x, _ in known})
    top = max(dimension(results.get("config")) or 0.0, ranks[-1])
    figure = new_canvas(4.0)
    ax = figure.add_subplot()
    for row, x, y in known:
        ax.plot([x], [y], "o", ms=7, color=row_style(results, row)["color"])
    if wide(y for *_, y in known):
        log_axis(ax, "y")
    else:
        ax.set_ylim(0, 1.12 * max(1.0, *(y for *_, y in known)))
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
    ax.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    ax.xaxis.set_minor_locator(FixedLocator([]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if "1 = knows nothing" in str(results["metric_label"]):
        ax.axhline(1.0, color=GREY, lw=1, ls=(0, (4, 3)), zorder=1)
        ax.annotate("1 = knows nothing", (0.01, 1.0), (0, 3), xycoords=ax.get_yaxis_transform(),
                    textcoords="offset points", fontsize=8, color=GREY)  # fmt: skip
    ax.set_xlabel(f"rank of the score matrix (axis ends at {top:g})")
    ax.set_ylabel(str(results["metric"]))
    point_labels(figure, ax, [(x, y, str(row["spec"]), row_style(results, row)["color"]) for row, x, y in known])
    caption = f"Error against the rank of the score matrix M ({seed_words(results)}); other differences remain."
    return figure, caption, f"Scatter plot of error against rank{lowest(results)}."


def rank_over_dimension_figure(results: Results) -> Drawing | None:
    """Error against the rank of a head over the dimension of the data, one line per variant of the settings."""
    lines: dict[str, list[tuple[float, float, Row]]] = {}
    for row in results["rows"]:
        dim, rank, score = finite((row.get("details") or {}).get("dim")), finite(row.get("rank")), score_of(row)
        if dim and rank and score is not None:
            lines.setdefault(str(row.get("variant") or ""), []).append((rank / dim, score, row))
    points = sorted({x for line in lines.values() for x, _, _ in line})
    if len(points) < 2:
        return None
    figure = new_canvas(4.0)
    ax = figure.add_subplot()
    labels = []
    for index, (name, line) in enumerate(lines.items()):
        colour = OKABE_ITO[index % len(OKABE_ITO)]
        places = sorted(line, key=lambda point: point[:2])
        ax.plot([x for x, *_ in places], [y for _, y, _ in places], "o", color=colour, ms=6, label=name or None)
        labels += [(x, y, str(row["spec"]), colour) for x, y, row in places]
    ax.axvline(1.0, color=GREY, lw=1.0, ls=(0, (4, 3)), zorder=1)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_ylim(0, 1.08 * max(1.0, *(y for _, y, _, _ in labels)))
    ax.margins(x=0.08)
    ax.set_xlabel("rank of a head's score matrix over the dimension of the inputs (dashed: equal)")
    ax.set_ylabel(str(results["metric"]))
    if len(lines) > 1:
        figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    point_labels(figure, ax, labels)
    caption = f"Error against rank over dimension ({seed_words(results)}); other differences remain."
    return figure, caption, f"Scatter plot of error against rank over dimension{lowest(results)}."
