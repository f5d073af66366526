"""Examples of forecasts with their intervals, for every task that forecasts."""

from __future__ import annotations

import math

from matplotlib.ticker import MultipleLocator

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report.plot import GREY, Drawing, new_canvas, row_style, shared_legend
from structattn_lab.report.rows import ranked_rows, standard_row


def axis_labels(record: ComparisonRecord) -> dict[str, str]:
    """What a value and a step of the series are, in words: the task says, or they have no name."""
    return {"value": "value", "step": "steps"} | record.axis_labels


def examples_figure(record: ComparisonRecord) -> Drawing | None:
    """Forecasts of the best row and of standard attention against the truth, with the intervals of the
    best.
    """
    labels_of = axis_labels(record)
    ranked, standard = ranked_rows(record), standard_row(record)
    shown = [row for row in ranked[:1] if row.details.get("examples")]
    if standard is not None and standard not in shown and standard.details.get("examples"):
        shown.append(standard)
    if not shown:
        return None
    count = min(3, *(len(row.details["examples"]) for row in shown), 3)
    figure = new_canvas(1.75 * count + 0.7)
    axes = [figure.add_subplot(count, 1, i + 1) for i in range(count)]
    for index, ax in enumerate(axes):
        example = shown[0].details["examples"][index]
        history, truth = list(example["history"])[-168:], list(example["truth"])
        ax.plot(range(-len(history) + 1, 1), history, color="#9a9a9a", lw=1.0, label="history")
        ahead = range(1, len(truth) + 1)
        ax.plot(ahead, truth, color="black", lw=1.4, label="truth")
        for place, row in enumerate(shown):
            forecast = list(row.details["examples"][index]["forecast"])
            style = {**row_style(record, row), "linestyle": ("-", (0, (4, 1.5)))[place]}
            if place == 0 and "low" in example:
                ax.fill_between(ahead, example["low"], example["high"], color=style["color"], alpha=0.15, lw=0)
            name = f"{row.spec} (lowest error)" if row is ranked[0] else row.spec
            ax.plot(range(1, len(forecast) + 1), forecast, lw=1.4, label=name, **style)
        ax.axvline(0, color=GREY, lw=0.8)
        ax.margins(x=0.01)
        ax.set_title(f"forecast from {example.get('start', '?')}", fontsize=8.5, loc="left", color="#444444")
        ax.set_ylabel(example.get("label", labels_of["value"]))
        first, last = ax.get_xlim()
        ax.xaxis.set_major_locator(MultipleLocator(24 * math.ceil((last - first) / 300)))  # no more than fit
    axes[-1].set_xlabel(f"{labels_of['step']} from the start of the forecast")
    shared_legend(figure, axes[:1])
    names = " and ".join(row.spec for row in shown)
    caption = f"{count} forecasts by {names}, after at most 168 {labels_of['step']} of history: examples, not evidence."
    details = shown[0].details
    if "interval" in details:
        caption += (
            f" Shaded: intervals of {shown[0].spec}, as wide as its errors on validation windows, made to hold "
            f"{100 * details['interval']:.0f} % of the truth; of all test values they hold "
            f"{100 * details['coverage']:.0f} %."
        )
    if "shaded" in details:
        caption += f" Shaded: {details['shaded']}."
    return figure, caption, f"History, truth and forecasts of {names} in {count} panels."
