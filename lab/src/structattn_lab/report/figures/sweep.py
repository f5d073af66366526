"""Figures of a sweep: parallel coordinates, score against each parameter, validation scores as trials go
on.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from structattn_lab.records.sweep import Parameter, SweepRecord, Trial
from structattn_lab.report.numbers import finite, fmt_score
from structattn_lab.report.plot import (
    GREY,
    OKABE_ITO,
    Drawing,
    Drawings,
    label_left,
    log_axis,
    new_canvas,
    panel_grid,
    shared_legend,
    spread,
    wide,
)

_BEST, _BAD = OKABE_ITO[1], OKABE_ITO[3]
_SCORED, _WITHOUT = ("finished", "stopped"), ("diverged", "failed", "crashed")  # trials with and without a score
_COLUMNS = 3
_FAR = 20  # times the median score
_MOST_POWERS = 8
_LETTER = 0.068  # inches, of a label


def drawings(record: SweepRecord) -> Drawings:
    """The figures of a sweep; none of them where no trial has a score."""
    if not _scores(record, _SCORED):
        return {}
    found = {"parallel": _parallel, "parameters": _against_each, "progress": _progress}
    return {name: functools.partial(draw, record) for name, draw in found.items()}


def short_names(record: SweepRecord) -> dict[str, str]:
    """The parameters by a name for tables and axes: the last word, or the whole name where that is another's
    too.
    """
    names = [parameter.name for parameter in record.parameters]
    last = [name.rpartition(".")[2] for name in names]
    return {name: word if last.count(word) == 1 else name for name, word in zip(names, last, strict=True)}


def fmt_value(value: Any) -> str:
    """A value of a parameter, short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def position(parameter: Parameter, value: Any) -> float:
    """Where between the ends of its range a value lies, from 0 to 1; of a choice, its place in the list."""
    if parameter.choices:
        choices = list(parameter.choices)
        return choices.index(value) / (len(choices) - 1) if len(choices) > 1 else 0.5
    low, high = parameter.ends
    if parameter.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return float((value - low) / (high - low)) if high > low else 0.5


def _trials(record: SweepRecord, states: tuple[str, ...]) -> list[Trial]:
    return [trial for trial in record.trials if trial.status in states]


def _scores(record: SweepRecord, states: tuple[str, ...]) -> list[float]:
    return [score for trial in _trials(record, states) if (score := finite(trial.score)) is not None]


def _ceiling(record: SweepRecord) -> tuple[float, str]:
    """The largest score to show, and words about larger ones: a trial about to diverge would leave no room
    for the others.
    """
    scores = _scores(record, _SCORED)
    middle = statistics.median(scores)
    ceiling = max(score for score in scores if middle <= 0 or score <= _FAR * middle)
    words = f" Scores above {fmt_score(ceiling)} are drawn there." if max(scores) > ceiling else ""
    return ceiling, words


def _is_best(record: SweepRecord, trial: Trial) -> bool:
    return record.best is not None and trial.number == record.best.number


def _ticks(parameter: Parameter, text: Callable[[Any], str] = fmt_value) -> list[tuple[float, str]]:
    """Places and texts of a few ticks, at the ends and between them, or one for each choice."""
    if parameter.choices:
        return [(position(parameter, choice), choice) for choice in parameter.choices]
    low, high = parameter.ends
    if parameter.log:
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        powers = [10.0**k for k in range(first, last + 1, 1 + (last - first) // _MOST_POWERS)]
        values = [low, *(v for v in powers if 1.2 * low < v < high / 1.2), high]
    elif isinstance(low, int) and high - low <= 8:
        values = list(range(low, int(high) + 1))
    else:
        values = [low + share * (high - low) for share in (0, 0.25, 0.5, 0.75, 1)]
    places = {text(value): position(parameter, value) for value in values}
    return [(place, name) for name, place in places.items()]


def _parallel(record: SweepRecord) -> Drawing:
    ceiling, above = _ceiling(record)
    lowest = min(_scores(record, _SCORED))
    score_axis = Parameter(name="score", low=lowest, high=ceiling, log=wide((lowest, ceiling)))
    names = [*short_names(record).values(), f"validation {record.metric}"]
    figure = new_canvas(4.4, min(9.0, max(7.2, 1.6 * len(names))))
    ax = figure.subplots()
    shown = _trials(record, (*_SCORED, *_WITHOUT))
    top = 1.14 if any(finite(trial.score) is None for trial in shown) else 1.0  # where lines without a score end
    for trial in sorted(shown, key=lambda t: (_is_best(record, t), -(finite(t.score) or math.inf))):
        score = finite(trial.score)
        places = [position(parameter, trial.params[parameter.name]) for parameter in record.parameters]
        places.append(top if score is None else position(score_axis, min(score, ceiling)))
        colour = matplotlib.colormaps["viridis"](0.85 * places[-1])
        if _is_best(record, trial):
            style: dict[str, Any] = {"color": _BEST, "lw": 2.6, "marker": "o", "ms": 5, "zorder": 5}
        elif score is None:
            style = {"color": _BAD, "lw": 1.0, "linestyle": ":", "alpha": 0.9}
        elif trial.status == "stopped":
            style = {"color": colour, "lw": 0.8, "linestyle": "--", "alpha": 0.7}
        else:
            style = {"color": colour, "lw": 1.2, "alpha": 0.85}
        ax.plot(places, **style)
    ticks = [*map(_ticks, record.parameters), _ticks(score_axis, fmt_score)]
    for x, marks in enumerate(ticks):
        ax.axvline(x, ymin=0.0, color="#444444", lw=0.9, zorder=3)
        for place, (_, text) in zip(spread([place for place, _ in marks], 0.055), marks, strict=True):
            _mark(ax, x, place, text, is_right=x == len(names) - 1)
    if top > 1:
        _mark(ax, len(names) - 1, top, "no score", is_right=True, color=_BAD)
    ax.set_ylim(-0.05, top + 0.05)
    room = max(len(text) for _, text in ticks[0]) * _LETTER
    ax.set_xlim(-0.1 - room / 1.9, len(names) - 0.65)
    ax.set_xticks(range(len(names)), names, fontsize=9, color="black")
    ax.tick_params(length=0, pad=8)
    ax.set_yticks([])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    counted = {name: len(_trials(record, (name,))) for name in (*_SCORED, *_WITHOUT)}
    words = ", ".join(f"{n} {name}" for name, n in counted.items() if n)
    caption = (
        f"One line per trial ({words}): its parameters, and its validation {record.metric}, low is better. Orange: the "
        "best. Dashed: "
        "stopped early, with the score at that step. Dotted: diverged or failed, without a score." + above
    )
    return figure, caption, f"Parallel coordinates of the trials. {_best_words(record)}"


def _mark(ax: Axes, x: float, place: float, text: str, *, is_right: bool, color: str = "#222222") -> None:
    """A text beside an axis of parallel coordinates."""
    ax.annotate(
        text, (x, place), (5 if is_right else -5, 0), textcoords="offset points", fontsize=7.5, va="center",
        ha="left" if is_right else "right", color=color, zorder=6,
        bbox={"facecolor": "white", "alpha": 0.75, "lw": 0, "pad": 0.6},
    )  # fmt: skip


def _best_words(record: SweepRecord) -> str:
    best = record.best
    if best is None:
        return "No trial ran to its end."
    values = ", ".join(f"{name} {fmt_value(value)}" for name, value in best.params.items())
    return f"The best has {values} and a score of {fmt_score(best.score)}."


def _against_each(record: SweepRecord) -> Drawing:
    parameters, names = record.parameters, list(short_names(record).values())
    figure, panels = panel_grid(len(parameters), 2.9, columns=_COLUMNS, width=3.0)
    for ax, parameter, name in zip(panels, parameters, names, strict=True):
        _one(record, parameter, ax)
        ax.set_xlabel(name)
    label_left(panels, f"validation {record.metric}")
    ceiling, above = _ceiling(record)
    if wide((min(_scores(record, _SCORED)), ceiling)):
        log_axis(panels[0], "y")
    shared_legend(figure, panels[:1], below=True)
    caption = (
        f"Validation {record.metric} against each parameter. Stopped trials have the score of the step where they were "
        "stopped, "
        "and would have gone on. Crosses on the upper edge have no score." + above
    )
    return figure, caption, f"Score against each parameter. {_best_words(record)}"


def _one(record: SweepRecord, parameter: Parameter, ax: Axes) -> None:
    def places(trials: list[Trial]) -> list[Any]:
        values = [trial.params[parameter.name] for trial in trials]
        return [parameter.choices.index(value) for value in values] if parameter.choices else values

    kinds: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
        ("finished", ("finished",), {"marker": "o", "color": OKABE_ITO[0], "s": 22}),
        ("stopped early", ("stopped",), {"marker": "o", "facecolors": "none", "edgecolors": GREY, "s": 18}),
    )
    for label, states, style in kinds:
        found = _trials(record, states)
        if found:
            ceiling, _ = _ceiling(record)
            scores = [min(score, ceiling) for score in _scores(record, states)]
            ax.scatter(places(found), scores, label=label, **style)
    if record.best is not None:
        best = [trial for trial in record.trials if _is_best(record, trial)]
        ax.scatter(places(best), [record.best.score], marker="*", s=150, color=_BEST, zorder=5, label="best")
    bad = _trials(record, _WITHOUT)
    if bad:
        edge = ax.get_xaxis_transform()
        ax.scatter(places(bad), [0.98] * len(bad), marker="x", color=_BAD, s=26, transform=edge, label="no score")
    if parameter.choices:
        ax.set_xticks(range(len(parameter.choices)), parameter.choices)
        longest = max(map(len, parameter.choices))
        tilt = longest * len(parameter.choices) * _LETTER > 2.4
        ax.tick_params(axis="x", labelsize=7.5, rotation=25 if tilt else 0)
        if tilt:
            for text in ax.xaxis.get_majorticklabels():
                text.set_horizontalalignment("right")
        ax.set_xlim(-0.5, len(parameter.choices) - 0.5)
    elif parameter.log:
        low, high = parameter.ends
        ax.set_xlim(low / 1.15, high * 1.15)
        log_axis(ax, "x")
        if high / low > 30:  # the panels are narrow
            ax.xaxis.set_major_locator(LogLocator(subs=(1.0,)))
    else:
        low, high = parameter.ends
        margin = 0.06 * (high - low)
        ax.set_xlim(low - margin, high + margin)
        if isinstance(low, int):
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _progress(record: SweepRecord) -> Drawing | None:
    figure = new_canvas(3.4)
    ax = figure.subplots()
    ceiling, above = _ceiling(record)
    seen: set[str] = set()
    lines: list[tuple[Trial, list[tuple[int, float]]]] = []
    for trial in record.trials:
        points = [(step, min(score, ceiling)) for step, score in trial.history if score is not None]
        if trial.status == "finished" and trial.score is not None:
            points.append((trial.step, min(trial.score, ceiling)))
        if points:
            lines.append((trial, points))
    if not any(len(points) > 1 for _, points in lines):
        return None
    styles: dict[str, dict[str, Any]] = {
        "finished": {"color": OKABE_ITO[0], "lw": 1.1, "alpha": 0.8},
        "stopped": {"color": GREY, "lw": 0.9, "alpha": 0.7, "marker": "o", "markevery": [-1], "ms": 3},
    }
    other: dict[str, Any] = {"color": _BAD, "lw": 1.0, "linestyle": ":", "marker": "x", "markevery": [-1], "ms": 4}
    for trial, points in lines:
        best = _is_best(record, trial)
        label = "best" if best else {"finished": "finished", "stopped": "stopped early"}.get(trial.status, "no score")
        style = {"color": _BEST, "lw": 2.2, "zorder": 5} if best else styles.get(trial.status, other)
        ax.plot(*zip(*points, strict=True), label=None if label in seen else label, **style)
        seen.add(label)
    ax.set_xlabel("step")
    ax.set_ylabel(f"validation {record.metric}")
    if wide([score for _, points in lines for _, score in points]):
        log_axis(ax, "y")
    scheduler = record.scheduler
    rungs = []
    if scheduler is not None:
        rung = scheduler.grace_period
        longest = max(step for _, points in lines for step, _ in points)
        while rung < longest:
            ax.axvline(rung, color="#999999", lw=0.8, linestyle=":", zorder=1)
            rungs.append(rung)
            rung *= scheduler.reduction
    shared_legend(figure, [ax], below=True)
    looks = f" Dotted: the steps at which trials are stopped ({', '.join(map(str, rungs))})." if rungs else ""
    caption = f"Validation {record.metric} of every trial as it trains.{looks}{above}"
    return figure, caption, f"{caption} {_best_words(record)}"
