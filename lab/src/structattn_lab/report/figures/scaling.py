"""Figures of scaling laws: loss against compute, IsoFLOP curves, compute saved, and those of the task at the
largest budget.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter, NullLocator

from structattn_lab.records.comparison import ComparisonRecord, Law, Row, Series
from structattn_lab.report.numbers import fmt_flops
from structattn_lab.report.plot import (
    DASHES,
    GREY,
    MOST_COLUMNS,
    Drawing,
    Drawings,
    dot_rows,
    label_left,
    mark_axis,
    new_canvas,
    panel_grid,
    shared_legend,
    spec_style,
)
from structattn_lab.report.rows import compared_budget, laws, mean_loss, point_at, series_of, settings_of
from structattn_lab.report.task_report import TaskReport


def drawings(record: ComparisonRecord, task: TaskReport) -> Drawings:
    """The figures of a grid of widths and budgets, and those of the task at the largest budget."""
    of_grid: dict[str, Callable[[ComparisonRecord], Drawing | None]] = {
        "loss-against-compute": _frontiers,
        "compute-saved": _saved,
        "loss-against-compute-by-width": _widths,
        "isoflop": _isoflop,
        "ablation": _ablation,
    }
    of_task: Drawings = {name: functools.partial(_of_largest, record, draw) for name, draw in task.figures.items()}
    return {name: functools.partial(draw, record) for name, draw in of_grid.items()} | of_task


def _style(record: ComparisonRecord, spec: str) -> dict[str, Any]:
    return spec_style([series.spec for series in laws(record).series], spec)


def _name(series: Series) -> str:
    return f"{series.spec} ({series.setting})" if series.setting else series.spec


def _budgets(record: ComparisonRecord) -> list[float]:
    return sorted({row.budget for row in record.rows if row.budget is not None})


def _columns(members: int) -> int:
    """Columns of panels that belong together in groups of equal size: a group is a row where it fits in
    one.
    """
    return members if 1 < members <= MOST_COLUMNS else 3


def _log_x(ax: Axes, values: Sequence[float], text: Callable[[float], str] = fmt_flops) -> None:
    """A logarithmic axis of large numbers, marked at the values themselves where they are few."""
    ax.set_xscale("log")
    if len(set(values)) <= 6:
        mark_axis(ax.xaxis, sorted(set(values)), text)
    else:
        ax.xaxis.set_major_locator(LogLocator())
        ax.xaxis.set_major_formatter(LogFormatterSciNotation())
        ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="x", labelsize=7.5)


def _draw_law(ax: Axes, law: Law, style: dict[str, Any], label: str) -> None:
    """Every seed small, their mean, and the fitted law through them."""
    points = law.points
    compute = [point.compute for point in points]
    for point in points:
        ax.plot([point.compute] * len(point.losses), point.losses, "_", color=style["color"], ms=5, alpha=0.6)
    means = [mean_loss(point) for point in points]
    if law.fit is None:
        ax.plot(compute, means, lw=1.3, ms=4, label=label, **style)
        return
    ax.plot([], [], lw=1.3, ms=4, label=label, **style)
    ax.plot(compute, means, ls="", ms=4, color=style["color"], marker=style["marker"])
    fit, along = law.fit, np.geomspace(min(compute), max(compute), 60)
    ax.plot(along, [fit.loss(compute) for compute in along], lw=1.3, color=style["color"], ls=style["linestyle"])


def _seeds(record: ComparisonRecord) -> str:
    count = len(record.seeds)
    return f"dashes are the {count} seeds, marks their mean" if count > 1 else "one seed each"


def _frontiers(record: ComparisonRecord) -> Drawing | None:
    found = {
        setting or "": [(s.spec, s.frontier) for s in series_of(record, setting)] for setting in settings_of(record)
    }
    caption = (
        f"Loss against training compute at the best width of every budget ({_seeds(record)}); lines are fitted power "
        "laws."
    )
    return _draw_laws(record, found, 3.4), caption, "Loss against compute, a line for each attention variant."


def _widths(record: ComparisonRecord) -> Drawing | None:
    widths = sorted({law.width for series in laws(record).series for law in series.widths if law.width is not None})
    if len(widths) < 2:
        return None
    found = {
        f"{setting}, E = {width}" if setting else f"E = {width}": [
            (series.spec, law) for series in series_of(record, setting) for law in series.widths if law.width == width
        ]
        for setting in settings_of(record)
        for width in widths
    }
    figure = _draw_laws(record, found, 2.5, _columns(len(widths)))
    return figure, f"Loss against training compute at each width ({_seeds(record)}).", "Loss by width and compute."


def _draw_laws(
    record: ComparisonRecord, laws_of: Mapping[str, Sequence[tuple[str, Law]]], height: float, columns: int = 2
) -> MplFigure:
    """A panel for each title, with laws by spec."""
    figure, panels = panel_grid(len(laws_of), height, columns=columns)
    budgets = _budgets(record)
    for ax, (title, found) in zip(panels, laws_of.items(), strict=True):
        for spec, law in found:
            _draw_law(ax, law, _style(record, spec), spec)
        ax.set_title(title, fontsize=9, loc="left")
        _log_x(ax, budgets if len(budgets) <= 6 else [point.compute for _, law in found for point in law.points])
        ax.set_xlabel("training compute, forward FLOPs")
    label_left(panels, f"test {record.metric}")
    shared_legend(figure, panels)
    return figure


def _isoflop(record: ComparisonRecord) -> Drawing | None:
    """Loss against parameters, a curve per budget: where the best size lies."""
    series = [s for s in laws(record).series if len(s.widths) > 2]
    if not series:
        return None
    budgets = _budgets(record)
    shades = matplotlib.colormaps["Blues"](np.linspace(1, 0.4, len(budgets))[::-1])
    figure, panels = panel_grid(len(series), 2.3, columns=_columns(len({one.spec for one in series})))
    for ax, one in zip(panels, series, strict=True):
        for budget, shade in zip(budgets, shades, strict=True):
            points = [p for law in one.widths for p in law.points if p.budget == budget]
            points.sort(key=lambda p: p.num_params)
            ax.plot(
                [p.num_params for p in points], [mean_loss(p) for p in points],
                "o-", ms=3.5, lw=1.2, color=shade, label=f"{fmt_flops(budget)} FLOPs",
            )  # fmt: skip
        name = f"{one.spec}\n{one.setting}" if one.setting else one.spec
        ax.set_title(name, fontsize=8, loc="left")
        _log_x(ax, [p.num_params for law in one.widths for p in law.points[-1:]], lambda value: f"{value / 1e6:.3g}M")
        ax.set_xlabel("parameters")
    label_left(panels, f"test {record.metric}")
    shared_legend(figure, panels)
    return figure, "Loss against the size of the model, a curve per budget (IsoFLOP).", "IsoFLOP curves."


def _saved(record: ComparisonRecord) -> Drawing | None:
    found = [(series, series.frontier.multiplier) for series in reversed(laws(record).series)]
    rows = [(s, m.interval, m.estimate) for s, m in found if m is not None]
    if not rows:
        return None
    figure = new_canvas(0.32 * len(rows) + 1.0)
    ax = figure.add_subplot()
    dot_rows(ax, [(_name(s), _style(record, s.spec)["color"], (), estimate) for s, _, estimate in rows])
    for place, (series, interval, _) in enumerate(rows):
        if interval is not None:
            ax.plot(interval, [place] * 2, lw=1.6, color=_style(record, series.spec)["color"])
    ax.axvline(1.0, color=GREY, lw=1.0, ls=DASHES[0], zorder=1)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    low, high = ax.set_xlim(
        min(low, 0.89), max(high, 1.11)
    )  # a difference of 1 % is small, and there are numbers beside it
    fine, coarse = (
        (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2),
        (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50),
    )
    mark_axis(ax.xaxis, [v for v in (coarse if high / low > 4 else fine) if low <= v <= high])
    # Beside long names the axes are narrower than their label.
    ax.set_xlabel(f"compute for the loss of {laws(record).baseline}, as a share (lower is better)", loc="right")
    caption = (
        "Compute that each attention variant needs for the baseline's losses, with 95 % intervals; left of the dashed "
        "line is less."
    )
    return figure, caption, "Compute ratios with intervals."


def _ablation(record: ComparisonRecord) -> Drawing | None:
    """All variants at the largest budget, best first."""
    budget = compared_budget(record)
    points = [(series, at) for series in laws(record).series if (at := point_at(series, budget)) is not None]
    if len(points) < 2:
        return None
    points.sort(key=lambda found: -mean_loss(found[1]))
    figure = new_canvas(0.3 * len(points) + 0.9)
    ax = figure.add_subplot()
    dot_rows(ax, [(_name(s), _style(record, s.spec)["color"], p.losses, mean_loss(p)) for s, p in points])
    ax.set_xlabel(f"test {record.metric} at {fmt_flops(budget)} FLOPs (lower is better)", loc="right")
    caption = "Every attention variant at the largest budget, at its best width: bars are seeds, dots their mean."
    return figure, caption, "Losses at the largest budget."


def _of_largest(record: ComparisonRecord, draw: Callable[[ComparisonRecord], Drawing | None]) -> Drawing | None:
    """A figure of the task, of the models of the largest budget at their best widths."""
    drawing = draw(replace(record, rows=tuple(replace(row, variant=row.setting) for row in _at_largest(record))))
    if drawing is None:
        return None
    figure, caption, alt = drawing
    return figure, f"{caption} Models of the largest budget.", alt


def _at_largest(record: ComparisonRecord) -> list[Row]:
    """For each series the row of the largest budget that all have, at the best width."""
    found = []
    budget = compared_budget(record)
    for series in laws(record).series:
        if (point := point_at(series, budget)) is None:
            continue
        places = (series.setting, series.spec, point.width, point.budget)
        found.append(next(r for r in record.rows if (r.setting, r.spec, r.width, r.budget) == places))
    return found
