"""What a report shows of forecasts: examples, the error by lead time, and the error of each column."""

from __future__ import annotations

from typing import Any

from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure as MplFigure

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report.figures.by_position import by_position
from structattn_lab.report.figures.examples import axis_labels, examples_figure
from structattn_lab.report.numbers import fmt_score
from structattn_lab.report.plot import GREY, OKABE_ITO, Drawing, panel_grid, shared_legend
from structattn_lab.report.rows import lowest, row_name
from structattn_lab.report.table import Table
from structattn_lab.tasks.forecast.baseline_models import PREFIX
from structattn_lab.tasks.forecast.future import Forecast

_MOST_PANELS = 12
_TWO_COLUMNS = 4  # from this number of panels on
_FEWEST_STEPS = 48  # of the past
_FEW_STEPS = 3  # which lines and bands hardly show


def name_of(spec: str) -> str:
    """The name of a spec in figures: of a baseline model only its name."""
    return spec.removeprefix(PREFIX)


def error_by_lead(record: ComparisonRecord) -> Drawing | None:
    """Error against how far ahead."""
    figure = by_position(record, "error_by_lead", f"{axis_labels(record)['step']} ahead")
    caption = "Error against how far ahead the forecast looks; baselines in grey."
    return None if figure is None else (figure, caption, f"Error by forecast lead{lowest(record)}.")


def error_by_column(record: ComparisonRecord) -> Table | None:
    """The error of each column of the data, where there are several."""
    errors = {row_name(row): row.details.get("error_by_column") or {} for row in record.rows}
    names = list(dict.fromkeys(name for by_column in errors.values() for name in by_column))
    if not names:
        return None
    rows = [[name, *(fmt_score(by_column.get(column)) for column in names)] for name, by_column in errors.items()]
    notes = ("of the first seed",) if len(record.seeds) > 1 else ()
    return Table.of(("method", *names), rows, title="Error of each column", notes=notes)


def future_figure(forecast: Forecast) -> MplFigure:
    """The end of the last window of each column, and what follows, with its intervals: bands, or bars where
    there are few steps.
    """
    table, columns = forecast.table, forecast.columns[:_MOST_PANELS]
    steps = min(forecast.past.shape[1], max(4 * len(table), _FEWEST_STEPS))
    shown_times, ahead = forecast.past_times[-steps:], forecast.times
    is_short = len(ahead) < _FEW_STEPS
    figure, panels = panel_grid(
        len(columns),
        2.4,
        columns=1 if len(columns) < _TWO_COLUMNS else 2,
        width=7.2 if len(columns) < _TWO_COLUMNS else None,
        sharex=True,
        sharey=False,
    )
    for i, (ax, column) in enumerate(zip(panels, columns, strict=True)):
        middle = table[column].to_numpy()
        ax.plot(shown_times, forecast.past[i, -steps:], color="#9a9a9a", lw=1.0, label="data")
        for place, level in enumerate(reversed(forecast.levels)):
            low, high = (table[f"{column}-{end}-{level}"].to_numpy() for end in ("lo", "hi"))
            alpha = 0.14 + 0.28 * place / len(forecast.levels)
            style: dict[str, Any] = {"color": OKABE_ITO[0], "alpha": alpha, "label": f"{level} % interval"}
            if is_short:
                ax.vlines(ahead, low, high, lw=7, **style)
            else:
                ax.fill_between(ahead, low, high, lw=0, **style)
        marks = "o" if is_short else ""
        ax.plot(ahead, middle, color=OKABE_ITO[0], lw=1.5, marker=marks, ms=3, label="forecast")
        ax.axvline(shown_times[-1], color=GREY, lw=0.8)
        ax.margins(x=0.01)
        ax.set_ylabel(column)
        if forecast.has_dates:
            locator = AutoDateLocator()  # type: ignore[no-untyped-call]
            ax.xaxis.set_major_locator(locator)
            ax.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        if i >= len(panels) - (1 if len(panels) < _TWO_COLUMNS else 2):  # nothing is below it
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("" if forecast.has_dates else "row")
    start = (
        str(shown_times[-1].astype("datetime64[m]")).replace("T", " ")
        if forecast.has_dates
        else f"row {shown_times[-1]}"
    )
    of = (
        f", the first {len(columns)} of {len(forecast.columns)} columns" if len(columns) < len(forecast.columns) else ""
    )
    zone = " UTC" if getattr(table.dtypes.iloc[0], "tz", None) is not None else ""
    title = f"{forecast.row}: {len(table)} {'step' if len(table) == 1 else 'steps'} after {start}{zone}{of}"
    panels[0].set_title(title, fontsize=8.5, loc="left", color="#444444")
    shared_legend(figure, panels[:1])
    return figure


FIGURES = {"examples": examples_figure, "error-by-lead": error_by_lead}
TABLES = {"error-by-column": error_by_column}
