"""Caches of a trained model side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable

from structattn_lab.records.caches import CacheRow, CachesRecord
from structattn_lab.records.common import Json
from structattn_lab.report.figures.caches import draw_loss, draw_recall
from structattn_lab.report.numbers import fmt_count, fmt_date
from structattn_lab.report.report import Origin, Report, Section
from structattn_lab.report.table import Table


def report(record: CachesRecord) -> Report:
    """Verdict, table, two figures, recall by task and by distance, how to repeat it."""
    table = _table(record)
    recall = [_by_task(record), _by_distance(record)] if record.rows[0].recall else []
    task = record.config["task"]
    return Report(
        title=f"Caches of {record.model_name}",
        question="What does the model lose through each cache, and what does the cache cost?",
        byline=[fmt_date(record.created)],
        verdict=_verdict(record),
        sections=(
            Section(heading="Caches", table=table),
            Section(drawings={"loss-against-bytes": functools.partial(draw_loss, record)}),
            Section(drawings={"recall-against-bytes": functools.partial(draw_recall, record)}),
            *(Section(heading="Retrieval" * (not i), table=x) for i, x in enumerate(recall)),
        ),
        tables=(table, *recall),
        origin=Origin.of(record),
        notes=(
            f"Loss: nats per token, of {task['num_steps']} single tokens after a context of "
            f"{task['context_length']:,}, over {record.num_windows} windows; [low, high]: 95 % intervals of the "
            "differences to the first row.",
            "Bytes: of all tensors that a cache keeps after the last step, over those of all keys and values of these "
            f"tokens in 16 bits. Ours are allocated for the length, not grown. {_dtypes(task)}",
            *_if_freed(record),
            "Recall: the context is in the cache before the question is known; an answer is right if all its tokens "
            "are the most probable ones. Tasks after RULER (arXiv 2404.06654).",
            "Milliseconds: medians on this machine; other work on it changes them.",
        ),
        facts={
            "text": f"{record.text_name}, {fmt_count(record.num_tokens)} tokens",
            "context": f"{task['context_length']:,} tokens",
        },
    )


def _dtypes(task: Json) -> str:
    """In which numbers the model computes, and in which the bytes are counted."""
    dtype = task["dtype"]
    if (counted := task.get("bytes_dtype") or dtype) == dtype:
        return f"The model computes in {dtype}, and a cache may keep exact tokens so."
    return f"The model computes in {dtype}; bytes are those of the same cache of the model in {counted}."


def _table(record: CachesRecord) -> Table:
    columns: list[tuple[str, Callable[[CacheRow], str]]] = [
        ("cache", lambda row: row.name),
        ("bytes", lambda row: _number(row.size, ".3f")),
        *([("if freed", lambda row: _number(row.needed, ".3f"))] if _if_freed(record) else []),
        ("loss above", lambda row: _number(row.above, "+.4f")),
        ("[low, high]", _interval),
        ("recall", lambda row: _number(row.recall_of(), ".2f")),
        ("ms per step", lambda row: _number(row.step_ms, ".1f")),
        ("ms of prefill", lambda row: _number(row.prefill_ms, ".0f")),
    ]
    without: dict[str, list[str]] = {}  # one line for what several lack
    for row in record.rows:
        if row.note:
            without.setdefault(row.note, []).append(row.name)
    notes = tuple(f"{'; '.join(names)}: not measured, {note}" for note, names in without.items())
    about = tuple(f"{row.name}: {row.about}" for row in record.measured)
    title = f"Loss of {record.rows[0].name}: {_number(record.rows[0].loss, '.4f')} nats per token"
    return Table.of_columns(columns, record.measured, title=title, notes=(*about, *notes))


def _if_freed(record: CachesRecord) -> list[str]:
    """The note on methods that leave allocated what they do not need."""
    if all(row.needed is None for row in record.measured):
        return []
    return [
        "If freed: the bytes of the numbers that a press of kvpress keeps, at the same dtype; a press that masks "
        "numbers or sets them to zero leaves all of them allocated. Figures and verdict count what is kept."
    ]


def _by_task(record: CachesRecord) -> Table:
    tasks = list(dict.fromkeys(row.task for row in record.rows[0].recall))
    lines = [[row.name, *(_number(row.recall_of(task), ".2f") for task in tasks)] for row in record.measured]
    return Table.of(("cache", *tasks), lines, title="Recall by task, over all distances")


def _by_distance(record: CachesRecord) -> Table:
    distances = list(dict.fromkeys(row.distance for row in record.rows[0].recall))
    lines = [[row.name, *(_number(_recall_at(row, at), ".2f") for at in distances)] for row in record.measured]
    title = "Recall by distance in tokens, over all tasks"
    return Table.of(("cache", *(f"{at:,}" for at in distances)), lines, title=title)


def _recall_at(row: CacheRow, distance: int) -> float | None:
    shares = [(x.share, x.count) for x in row.recall if x.distance == distance]
    count = sum(n for _, n in shares)
    return sum(share * n for share, n in shares) / count if count else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(row: CacheRow) -> str:
    return "-" if row.interval is None else f"[{row.interval[0]:+.4f}, {row.interval[1]:+.4f}]"


def _verdict(record: CachesRecord) -> str:
    """The caches that no other one beats in bytes, loss and recall at once."""
    rows = record.measured
    best = [row for row in rows if not any(_beats(other, row) for other in rows)]
    best.sort(key=lambda row: -(row.least or 0))
    names = ", ".join(f"{row.name} ({_number(row.least, '.2f')})" for row in best)
    return f"No other cache has at most the bytes, at most the loss and at least the recall of: {names}."


def _beats(other: CacheRow, row: CacheRow) -> bool:
    """Whether a cache is as good as another in everything, and better in something."""
    mine, theirs = ((-(x.least or 0), -(x.above or 0), x.recall_of() or 0) for x in (row, other))
    return theirs != mine and all(a >= b for a, b in zip(theirs, mine, strict=True))
