"""What healing brings: the loss against tokens with the teacher's line, loss by position, and recall by
distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report.figures.octaves import loss_by_position
from structattn_lab.report.numbers import DASH, fmt_count
from structattn_lab.report.plot import Drawing, label_left, mark_axis, panel_grid, shared_legend, spec_style
from structattn_lab.report.rows import context_length
from structattn_lab.report.table import Table
from structattn_lab.tasks.uptraining.recall import MOST_LOOKED_UP

_LINEAR = 0.1  # nats; the axis of losses is logarithmic above
_LOSS_MARKS = (-5, -2, -1, -0.5, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_FEWEST_MARKS = 3
_LOST = 5e-5  # nats per token: less is 0.0000 in the table


def _variants(record: ComparisonRecord) -> list[str | None]:
    return list(dict.fromkeys(row.variant for row in record.rows))


def _teacher(record: ComparisonRecord, variant: str | None) -> Any:
    return next((row for row in record.baselines if row.variant == variant), None)


def healing(record: ComparisonRecord) -> Drawing | None:
    """Validation loss above the teacher's against the tokens of training, from the student as it was made."""
    caption = (
        "From the student as it was made (0 tokens) to the healed one; dotted, the teacher. Where it reaches beyond "
        "0.2, the axis is logarithmic above 0.1."
    )
    label = "validation loss above the teacher's, nats per token"
    drawing = _against_tokens(record, lambda _: record.metric, label, caption, "Healing.", is_above_teacher=True)
    if drawing is not None:
        _mark_losses(drawing[0].axes)
    return drawing


def _mark_losses(panels: Sequence[Axes]) -> None:
    """One axis of losses for all panels: logarithmic where students lose much and little, with three marks at
    least.
    """
    values = [float(y) for ax in panels for line in ax.lines for y in np.asarray(line.get_ydata())]
    room = 0.05 * max(max(values) - min(values), 0.01)
    low, high = min(values) - room, max(values) + room
    marks = [mark for mark in _LOSS_MARKS if low <= mark <= high]
    for ax in panels:
        if max(abs(low), abs(high)) > 2 * _LINEAR and len(marks) >= _FEWEST_MARKS:
            ax.set_yscale("symlog", linthresh=_LINEAR)
            mark_axis(ax.yaxis, marks)
        else:
            mark_axis(ax.yaxis, MaxNLocator(nbins=6, min_n_ticks=_FEWEST_MARKS).tick_values(low, high))
        ax.set_ylim(low, high)


def recall_healing(record: ComparisonRecord) -> Drawing | None:
    """Recall at the longest distance against the tokens of training, on the validation split; a line for the
    teacher.
    """
    far = {variant: _farthest(record, variant) for variant in _variants(record)}
    words = _distances(far.values())
    caption = f"Recall of a passage {words} tokens before, on {MOST_LOOKED_UP} windows at most; dotted, the teacher."
    drawing = _against_tokens(
        record, lambda variant: f"recall_{far[variant]}", "share of right guesses", caption, "Recall and healing."
    )
    if drawing is not None:
        for ax in drawing[0].axes:
            ax.set_ylim(0, 1.02)
    return drawing


def _against_tokens(
    record: ComparisonRecord,
    score_of: Callable[[str | None], str],
    label: str,
    caption: str,
    title: str,
    *,
    is_above_teacher: bool = False,
) -> Drawing | None:
    """A panel for each variant, of the score that ``score_of`` names for it."""
    rows = [
        row for row in record.rows if row.histories and f"validation_{score_of(row.variant)}" in row.histories[0][0]
    ]
    if not rows:
        return None
    specs = list(dict.fromkeys(row.spec for row in rows))
    figure, panels = panel_grid(len(_variants(record)), 3.4)
    for ax, variant in zip(panels, _variants(record), strict=True):
        teacher = _teacher(record, variant)
        score = score_of(variant)
        key = f"validation_{score}"
        loss = None if teacher is None else teacher.details.get("validation", {}).get(score)
        zero = loss if loss is not None and is_above_teacher else 0.0
        for row in rows:
            if row.variant == variant:
                tokens = row.batch_size * context_length(record, row)
                steps = [entry["step"] * tokens for entry in row.histories[0]]
                curves = [[entry[key] for entry in history] for history in row.histories]
                mean = [sum(values) / len(values) - zero for values in zip(*curves, strict=False)]
                ax.plot(steps[: len(mean)], mean, ms=3, lw=1.3, label=row.spec, **spec_style(specs, row.spec))
        if loss is not None:
            ax.axhline(loss - zero, color="0.3", lw=1, ls=":", label="teacher")
        ax.set_title(variant or "", fontsize=9, loc="left")
        ax.set_xlabel("tokens of training")
        ax.xaxis.set_major_formatter(lambda value, _: fmt_count(value))
    label_left(panels, label)
    shared_legend(figure, panels)
    return figure, caption, title


def _farthest(record: ComparisonRecord, variant: str | None) -> int | None:
    """The longest distance at which recall was measured during training, at a variant of the settings."""
    recalls = [_recall(row.metrics) for row in record.rows if row.variant == variant]
    return int(recalls[0][-1][0]) if recalls and recalls[0] else None


def _distances(distances: Iterable[int | None]) -> str:
    """Distances in words; empty without any."""
    return " or ".join(map(str, sorted({distance for distance in distances if distance is not None})))


def recall_by_distance(record: ComparisonRecord) -> Drawing | None:
    """The share of tokens of a repeated passage that are guessed right, by how far back it was."""
    with_recall = [row for row in record.rows if _recall(row.metrics)]
    if not with_recall:
        return None
    specs = list(dict.fromkeys(row.spec for row in with_recall))
    distances = sorted({distance for row in with_recall for distance, _ in _recall(row.metrics)})
    figure, panels = panel_grid(len(_variants(record)), 3.2)
    for ax, variant in zip(panels, _variants(record), strict=True):
        for row in with_recall:
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
        mark_axis(ax.xaxis, distances, lambda value: f"{value:g}")
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


@dataclass(frozen=True, kw_only=True)
class Healed:
    """A student beside the original model, on the validation split.

    Attributes:
        spec, variant: of the row.
        losses: nats per token, of the original, and of the student before and after training.
        recalls: the shares of right guesses at the longest distance, of the same three; ``None`` where it was
            not measured.
        distance: that distance, in tokens.
        cache_bytes: of the original and of the student, at full context.
        decode_ms: milliseconds of a token there, of the same two; ``None`` where it was not measured.
    """

    spec: str
    variant: str | None
    losses: tuple[float, float, float]
    recalls: tuple[float, float, float] | None
    distance: int | None
    cache_bytes: tuple[int, int]
    decode_ms: tuple[float | None, float | None]


def healed_rows(record: ComparisonRecord) -> list[Healed]:
    """The students of a comparison that were scored before and after training, as means over seeds."""
    key = f"validation_{record.metric}"
    healed = []
    for row in record.rows:
        far = _farthest(record, row.variant)
        looked_up = f"validation_recall_{far}"
        teacher = _teacher(record, row.variant)
        histories = [history for history in row.histories if history and key in history[0] and key in history[-1]]
        if teacher is None or not histories or "cache_bytes" not in row.details:
            continue
        original = teacher.details.get("validation", {}).get(f"recall_{far}")
        has_recall = original is not None and all(looked_up in history[at] for history in histories for at in (0, -1))
        first, last = (_mean([history[at][key] for history in histories]) for at in (0, -1))
        healed.append(
            Healed(
                spec=row.spec,
                variant=row.variant,
                losses=(teacher.validation, first, last),
                recalls=(original, *(_mean([history[at][looked_up] for history in histories]) for at in (0, -1)))
                if has_recall
                else None,
                distance=far,
                cache_bytes=(teacher.details["cache_bytes"], row.details["cache_bytes"]),
                decode_ms=(teacher.details["decode_ms"], row.details["decode_ms"]),
            )
        )
    return healed


def recovered(losses: tuple[float, float, float]) -> str:
    """The share of the loss of one student that training won back, in words: a dash where nothing was
    lost.
    """
    teacher, at_start, at_end = losses
    if at_start - teacher < _LOST:
        return DASH
    return "all" if at_end <= teacher else f"{100 * (at_start - at_end) / (at_start - teacher):.0f} %"


def costs(record: ComparisonRecord) -> Table | None:
    """What each student needs to decode beside the original model, and what it lost and won back."""
    rows = healed_rows(record)
    if not rows:
        return None
    has_variants = any(row.variant for row in rows)
    columns: list[tuple[str, Callable[[Healed], str]]] = [
        *([("setting", lambda row: row.variant or "")] if has_variants else []),
        ("attention", lambda row: row.spec),
        ("cache bytes, original", lambda row: f"{row.cache_bytes[0]:,}"),
        ("cache bytes", lambda row: f"{row.cache_bytes[1]:,}"),
        ("times smaller", lambda row: f"{row.cache_bytes[0] / row.cache_bytes[1]:.2f}"),
        ("ms per token, original", lambda row: _fmt_ms(row.decode_ms[0])),
        ("ms per token", lambda row: _fmt_ms(row.decode_ms[1])),
        ("loss, original", lambda row: f"{row.losses[0]:.4f}"),
        ("before", lambda row: f"{row.losses[1] - row.losses[0]:+.4f}"),
        ("after", lambda row: f"{row.losses[2] - row.losses[0]:+.4f}"),
        ("recovered", lambda row: recovered(row.losses)),
    ]
    if any(row.recalls for row in rows):
        names = ("recall, original", "recall before", "recall after")
        columns += [(name, partial(_fmt_recall, at)) for at, name in enumerate(names)]
    distance = _distances(row.distance for row in rows if row.recalls)
    return Table.of_columns(
        columns,
        rows,
        words=("setting", "attention"),
        title="Cost and quality, beside the original model",
        notes=(
            "cache bytes: at full context; ms per token: of decoding there, on this machine, one prompt. loss: on the "
            "validation split, nats per token; "
            "before, after: that of the student minus that of the original, before and after training. recovered: the "
            f"share of the loss before training that training won back; {DASH}: nothing was lost; all: the loss is "
            "that of the original or below."
            + (f" recall: the share of right guesses {distance} tokens after the first passage." if distance else ""),
        ),
    )


def _fmt_ms(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _fmt_recall(at: int, row: Healed) -> str:
    return DASH if row.recalls is None else f"{row.recalls[at]:.2f}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def verdict(record: ComparisonRecord) -> str | None:
    """The original model, and each student before and after training, in plain sentences."""
    rows = healed_rows(record)
    if not rows:
        return None
    first = rows[0]
    ms = first.decode_ms[0]
    original = [f"loss {first.losses[0]:.4f}", f"a cache of {first.cache_bytes[0]:,} bytes"]
    original += [] if ms is None else [f"{ms:.2f} ms per token"]
    if first.recalls:
        original.append(f"recall {first.recalls[0]:.2f} at {first.distance} tokens")
    return "\n".join([f"The original model: {', '.join(original)}.", *map(_sentence, rows)])


def _sentence(row: Healed) -> str:
    """A student in one sentence."""
    (teacher, at_start, at_end), (whole, size), (ms, own_ms) = row.losses, row.cache_bytes, row.decode_ms
    parts = [
        f"loss {at_start:.4f} before training and {at_end:.4f} after it ({at_end - teacher:+.4f})",
        f"a cache of {size:,} bytes"
        + (f", {whole / size:.2f} times smaller" if size < whole else ", no smaller one" if size == whole else ""),
    ]
    if ms is not None and own_ms is not None:
        pace = "slower" if own_ms > ms else "faster"
        parts.append(f"{own_ms:.2f} ms per token, {abs(own_ms / ms - 1):.0%} {pace}")
    if row.recalls:
        parts.append(f"recall {row.recalls[1]:.2f} before and {row.recalls[2]:.2f} after")
    return f"{row.spec}: {'; '.join(parts)}."


FIGURES = {
    "healing": healing,
    "recall-healing": recall_healing,
    "loss-by-position": loss_by_position,
    "recall-by-distance": recall_by_distance,
}
TABLES = {"costs": costs}
