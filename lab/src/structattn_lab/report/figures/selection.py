"""Figures of model selection: the error against the settings to choose from, and those of the chosen rows."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

from matplotlib.axes import Axes

from structattn.errors import ConfigError
from structattn.grammar import assignment, plain_number
from structattn_lab.records.comparison import Choice, ComparisonRecord
from structattn_lab.report.plot import (
    DASHES,
    GREY,
    Drawing,
    Drawings,
    label_left,
    mark_axis,
    panel_grid,
    shared_legend,
    spec_style,
)
from structattn_lab.report.rows import baseline_score, choices_of, group_record, score_of, searched_settings
from structattn_lab.report.task_report import TaskReport


def drawings(record: ComparisonRecord, task: TaskReport) -> Drawings:
    """The error against the settings, and the figures of the task for each group."""
    found: Drawings = {"error-against-setting": functools.partial(_against_setting, record)}
    for index, choice in enumerate(choices_of(record)):
        for name, draw in task.figures.items():
            found[f"{name}-{index + 1}" if index else name] = functools.partial(_of_choice, record, choice, draw)
    return found


def _of_choice(
    record: ComparisonRecord, choice: Choice, draw: Callable[[ComparisonRecord], Drawing | None]
) -> Drawing | None:
    """A figure of the task, of the chosen rows of a group."""
    drawing = draw(group_record(record, choice))
    if drawing is None or not choice.group:
        return drawing
    figure, caption, alt = drawing
    return figure, f"{choice.group}: {caption}", f"{choice.group}: {alt}"


def _axis(settings: list[str]) -> tuple[str, list[float], bool]:
    """The name of the axis, the place of every setting, and whether the places are numbers, as where all are
    ``NAME=NUMBER``.
    """
    try:
        names, texts = zip(*map(assignment, settings), strict=True)
        values = [plain_number(text, float) for text in texts]
    except ConfigError:
        names, values = (), []
    if len(set(names)) == 1 and min(values) > 0:
        return names[0], values, True
    return "setting", [float(i) for i in range(len(settings))], False


def _against_setting(record: ComparisonRecord) -> Drawing | None:
    settings = searched_settings(record)
    if len(settings) < 2:
        return None
    name, places, numeric = _axis(settings)
    at = dict(zip(settings, places, strict=True))
    choices = choices_of(record)
    figure, panels = panel_grid(len(choices), 3.1, columns=3, width=3.5, sharey=False)
    for ax, choice in zip(panels, choices, strict=True):
        _panel(ax, record, choice, at)
        if numeric:
            ax.set_xscale("log")
            mark_axis(ax.xaxis, sorted(places))
        else:
            ax.set_xticks(places, settings, rotation=20, ha="right", fontsize=7)
        ax.set_xlabel(name)
        ax.set_title(choice.group or "", fontsize=9, loc="left")
    label_left(panels, record.metric)
    shared_legend(figure, panels[:1])
    several = len(record.seeds) > 1
    bars = "bars from the lowest to the highest seed" if several else "one seed, so the spread is unknown"
    caption = f"Test error against {name} ({bars}); rings mark what validation chose; grey dashes: without training."
    return figure, caption, f"Error against {name}, a line per method."


def _panel(ax: Axes, record: ComparisonRecord, choice: Choice, at: dict[str, float]) -> None:
    specs = list(dict.fromkeys(row.spec for row in record.rows))
    seen: list[float] = []
    for spec in specs:
        rows = [row for row in record.rows if row.group == choice.group and row.spec == spec]
        x, means = [at[row.searched or ""] for row in rows], [score_of(row) or 0.0 for row in rows]
        low = [mean - min(row.scores) for mean, row in zip(means, rows, strict=True)]
        high = [max(row.scores) - mean for mean, row in zip(means, rows, strict=True)]
        ax.errorbar(x, means, yerr=[low, high], lw=1.3, ms=4, elinewidth=0.8, label=spec, **spec_style(specs, spec))
        seen += means
    for row in (record.rows[i] for i in choice.rows):
        colour = spec_style(specs, row.spec)["color"]
        ax.plot([at[row.searched or ""]], [row.score], "o", ms=10, mfc="none", mec=colour, mew=1.0)
    names = dict.fromkeys(row.name for row in record.baselines)
    limit = 1.6 * statistics.median(seen)
    for index, name in enumerate(names):
        same = [row for row in record.baselines if row.group == choice.group and row.name == name]
        values = [baseline_score(record, row) for row in same]
        if same and all(value is not None and value < limit for value in values):
            places = [at[row.searched or ""] for row in same]
            ax.plot(places, [v or 0.0 for v in values], color=GREY, ls=DASHES[index % 3], lw=1.1, label=name)
    if max(seen) > limit:
        ax.set_ylim(top=limit * 1.05)
