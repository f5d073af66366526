"""Figures of a comparison with a search: the error against what is searched, and those of the chosen rows."""

from __future__ import annotations

import functools
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from structattn.studies.records.comparison import Choice, ComparisonRecord
from structattn.studies.report._common import baseline_score, score_of
from structattn.studies.report._plotting import GREY, LINES, OKABE_ITO
from structattn.studies.report.figures.canvas import Drawing, Figure, new_canvas, write_figure
from structattn.studies.report.search import choices_of, group_record, searched_settings
from structattn.studies.tasks.registry import figures_of

_SHAPES = "osD^vP*"


def draw_search(record: ComparisonRecord, folder: Path) -> list[Figure]:
    """Draws the figures of a search; a figure without any data is left out.

    Args:
        record: what ``results.json`` holds, with ``search``.
        folder: where the files go; made when missing.
    """
    drawn = [write_figure("error-against-setting", functools.partial(_against_setting, record), folder)]
    for index, choice in enumerate(choices_of(record)):
        own, place = group_record(record, choice), choice.group
        for name, draw in figures_of(record.task).items():
            drawing = functools.partial(_of_group, own, place, draw)
            drawn.append(write_figure(f"{name}-{index + 1}" if index else name, drawing, folder))
    return [figure for figure in drawn if figure is not None]


def _of_group(record: ComparisonRecord, group: str | None, draw: Any) -> Drawing | None:
    drawing: Drawing | None = draw(record)
    if drawing is None or not group:
        return drawing
    figure, caption, alt = drawing
    return figure, f"{group}: {caption}", f"{group}: {alt}"


def _axis(settings: list[str]) -> tuple[str, list[float], bool]:
    """The name of the axis, the place of every setting, and whether the places are numbers of their own."""
    keys = {setting.partition("=")[0] for setting in settings}
    try:
        values = [float(setting.partition("=")[2]) for setting in settings]
    except ValueError:
        values = []
    if len(keys) == 1 and values and min(values) > 0:
        return keys.pop(), values, True
    return "setting", [float(i) for i in range(len(settings))], False


def _against_setting(record: ComparisonRecord) -> Drawing | None:
    settings = searched_settings(record)
    if len(settings) < 2:
        return None
    name, places, numeric = _axis(settings)
    at = dict(zip(settings, places, strict=True))
    choices = choices_of(record)
    columns = min(3, len(choices))
    lines = -(-len(choices) // columns)
    figure = new_canvas(3.1 * lines + 0.7, max(5.4, 3.5 * columns))
    axes: Any = figure.subplots(lines, columns, squeeze=False)
    panels: list[Axes] = list(axes.flat)
    for spare in panels[len(choices) :]:
        spare.set_visible(False)
    for ax, choice in zip(panels, choices, strict=False):
        _panel(ax, record, choice, at)
        if numeric:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(FixedLocator(sorted(places)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.xaxis.set_minor_locator(NullLocator())
        else:
            ax.set_xticks(places, settings, rotation=20, ha="right", fontsize=7)
        ax.set_xlabel(name)
        ax.set_title(choice.group or "", fontsize=9, loc="left")
    for row in axes:
        row[0].set_ylabel(record.metric)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    several = len(record.seeds) > 1
    bars = "bars from the lowest to the highest seed" if several else "one seed, so the spread is unknown"
    caption = f"Test error against {name} ({bars}); rings mark what validation chose; grey dashes: without training."
    return figure, caption, f"Error against {name}, a line per method."


def _panel(ax: Axes, record: ComparisonRecord, choice: Choice, at: dict[str, float]) -> None:
    specs = list(dict.fromkeys(row.spec for row in record.rows))
    seen: list[float] = []
    for index, spec in enumerate(specs):
        rows = [row for row in record.rows if row.group == choice.group and row.spec == spec]
        colour = OKABE_ITO[index % 7]
        x, means = [at[row.searched or ""] for row in rows], [score_of(row) or 0.0 for row in rows]
        low = [mean - min(row.scores) for mean, row in zip(means, rows, strict=True)]
        high = [max(row.scores) - mean for mean, row in zip(means, rows, strict=True)]
        style: dict[str, Any] = {"color": colour, "ls": LINES[index // 7 % 4], "marker": _SHAPES[index % 7]}
        ax.errorbar(x, means, yerr=[low, high], lw=1.3, ms=4, elinewidth=0.8, label=spec, **style)
        for i in choice.rows:
            row = record.rows[i]
            if row.spec == spec:
                ax.plot([at[row.searched or ""]], [row.score], "o", ms=10, mfc="none", mec=colour, mew=1.0)
        seen += means
    names = dict.fromkeys(row.name for row in record.baselines)
    limit = 1.6 * statistics.median(seen)
    for index, name in enumerate(names):
        same = [row for row in record.baselines if row.group == choice.group and row.name == name]
        values = [baseline_score(record, row) for row in same]
        if same and all(value is not None and value < limit for value in values):
            dashes = ((0, (4, 3)), ":", "-.")[index % 3]
            ax.plot([at[row.searched or ""] for row in same], values, color=GREY, ls=dashes, lw=1.1, label=name)  # type: ignore[arg-type]
    top = min(max(seen), limit)
    if max(seen) > limit:
        ax.set_ylim(top=top * 1.05)
