"""What healing brings: the loss against tokens with the teacher's line, loss by position, and recall by distance."""

from __future__ import annotations

from typing import Any

import numpy as np

from structattn.studies.records.comparison import ComparisonRecord
from structattn.studies.report.figures.octaves import loss_by_position
from structattn.studies.report.numbers import fmt_count
from structattn.studies.report.plot import Drawing, label_left, mark_axis, panel_grid, shared_legend, spec_style
from structattn.studies.report.table import Table
from structattn.studies.tasks.uptraining.recall import MOST_LOOKED_UP

_LOSS_MARKS = (-0.1, -0.05, 0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def _variants(record: ComparisonRecord) -> list[str | None]:
    return list(dict.fromkeys(row.variant for row in record.rows))


def _teacher(record: ComparisonRecord, variant: str | None) -> Any:
    return next((row for row in record.baselines if row.variant == variant), None)


def healing(record: ComparisonRecord) -> Drawing | None:
    """Validation loss above the teacher's against the tokens of training, from the student as it was made."""
    caption = "From the student as it was made (0 tokens) to the healed one; dotted, the teacher. The axis is logarithmic above 0.1."
    label = "validation loss above the teacher's, nats per token"
    drawing = _against_tokens(record, record.metric, label, caption, "Healing.", is_above_teacher=True)
    if drawing is not None:
        for ax in drawing[0].axes:
            ax.set_yscale("symlog", linthresh=0.1)  # students that lose much and little in one panel
            lowest = min(float(y) for line in ax.lines for y in np.asarray(line.get_ydata()))
            ax.set_ylim(bottom=lowest - 0.01)
            low, high = ax.get_ylim()
            mark_axis(ax.yaxis, [mark for mark in _LOSS_MARKS if low <= mark <= high])
    return drawing


def recall_healing(record: ComparisonRecord) -> Drawing | None:
    """Recall at the longest distance against the tokens of training, on the validation split; a line for the teacher."""
    far = _farthest(record)
    if far is None:
        return None
    caption = f"Recall of a passage {far} tokens before, on {MOST_LOOKED_UP} windows at most; dotted, the teacher."
    drawing = _against_tokens(record, f"recall_{far}", "share of right guesses", caption, "Recall and healing.")
    if drawing is not None:
        for ax in drawing[0].axes:
            ax.set_ylim(0, 1.02)
    return drawing


def _against_tokens(
    record: ComparisonRecord, score: str, label: str, caption: str, title: str, *, is_above_teacher: bool = False
) -> Drawing | None:
    key = f"validation_{score}"
    rows = [row for row in record.rows if row.histories and key in row.histories[0][0]]
    if not rows:
        return None
    length = record.config["task"]["context_length"]
    specs = list(dict.fromkeys(row.spec for row in rows))
    figure, panels = panel_grid(len(_variants(record)), 3.4)
    for ax, variant in zip(panels, _variants(record), strict=True):
        teacher = _teacher(record, variant)
        known = None if teacher is None else teacher.details.get("validation")
        zero = known[score] if known and is_above_teacher else 0.0
        for row in rows:
            if row.variant == variant:
                steps = [entry["step"] * row.batch_size * length for entry in row.histories[0]]
                curves = [[entry[key] for entry in history] for history in row.histories]
                mean = [sum(values) / len(values) - zero for values in zip(*curves, strict=False)]
                ax.plot(steps[: len(mean)], mean, ms=3, lw=1.3, label=row.spec, **spec_style(specs, row.spec))
        if known:
            ax.axhline(known[score] - zero, color="0.3", lw=1, ls=":", label="teacher")
        ax.set_title(variant or "", fontsize=9, loc="left")
        ax.set_xlabel("tokens of training")
        ax.xaxis.set_major_formatter(lambda value, _: fmt_count(value))
    label_left(panels, label)
    shared_legend(figure, panels)
    return figure, caption, title


def _farthest(record: ComparisonRecord) -> int | None:
    """The longest distance at which recall was measured during training."""
    found = [_recall(row.metrics) for row in record.rows]
    return int(found[0][-1][0]) if found and found[0] else None


def recall_by_distance(record: ComparisonRecord) -> Drawing | None:
    """The share of tokens of a repeated passage that are guessed right, by how far back it was."""
    found = [row for row in record.rows if _recall(row.metrics)]
    if not found:
        return None
    specs = list(dict.fromkeys(row.spec for row in found))
    figure, panels = panel_grid(len(_variants(record)), 3.2)
    for ax, variant in zip(panels, _variants(record), strict=True):
        for row in found:
            if row.variant == variant:
                ax.plot(
                    *zip(*_recall(row.metrics), strict=True),
                    ms=4,
                    lw=1.3,
                    label=row.spec,
                    **spec_style(specs, row.spec),
                )
        teacher = _teacher(record, variant)
        if teacher is not None and _recall(teacher.metrics):
            ax.plot(*zip(*_recall(teacher.metrics), strict=True), color="0.3", ls=":", label="teacher")
        ax.set_xscale("log", base=2)
        mark_axis(ax.xaxis, [float(distance) for distance, _ in _recall(found[0].metrics)], lambda value: f"{value:g}")
        ax.set_ylim(0, 1.02)
        ax.set_title(variant or "", fontsize=9, loc="left")
        ax.set_xlabel("distance to the first passage, tokens")
    label_left(panels, "share of right guesses")
    shared_legend(figure, panels)
    return (
        figure,
        "Recall: a passage of random tokens comes twice, and the second time its tokens can be looked up.",
        "Recall.",
    )


def _recall(metrics: dict[str, float]) -> list[tuple[float, float]]:
    pairs = [
        (float(name.removeprefix("recall_")), value) for name, value in metrics.items() if name.startswith("recall_")
    ]
    return sorted(pairs)


def costs(record: ComparisonRecord) -> Table | None:
    """What each student needs to decode, and what it lost and won back."""
    key, far = f"validation_{record.metric}", _farthest(record)
    rows = []
    for row in record.rows:
        teacher = _teacher(record, row.variant)
        before = [history[0][key] for history in row.histories if history and key in history[0]]
        after = [history[-1][key] for history in row.histories if history and key in history[-1]]
        if teacher is None or not before or "cache_bytes" not in row.details:
            continue
        one_shot = _mean(before) - teacher.validation
        healed = _mean(after) - teacher.validation
        looked_up = f"validation_recall_{far}"
        rows.append(
            [
                row.variant or "",
                row.spec,
                f"{teacher.details['cache_bytes'] / row.details['cache_bytes']:.2f}",
                f"{one_shot:+.4f}",
                f"{healed:+.4f}",
                f"{100 * (1 - healed / one_shot):.0f} %" if one_shot > 0 else "",
                *(
                    f"{_mean([history[at][looked_up] for history in row.histories]):.2f}"
                    if looked_up in row.histories[0][at]
                    else ""
                    for at in (0, -1)
                ),
                "" if row.details["decode_ms"] is None else f"{row.details['decode_ms']:.2f}",
            ]
        )
    if not rows:
        return None
    return Table.of(
        ("setting", "attention", "cache", "one-shot", "healed", "recovered", "recall", "healed recall", "ms per token"),
        rows,
        words=("setting", "attention"),
        title="Cost and quality",
        notes=(
            "cache: how many times smaller than the teacher's at full context; one-shot, healed: validation loss above the teacher's, before and "
            "after training; recovered: the share of the one-shot loss that training won back; recall, healed recall: "
            f"the share of right guesses {far or 'some'} tokens after the first passage, before and after training; ms per token: of decoding at full context.",
        ),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


FIGURES = {
    "healing": healing,
    "recall-healing": recall_healing,
    "loss-by-position": loss_by_position,
    "recall-by-distance": recall_by_distance,
}
TABLES = {"costs": costs}
