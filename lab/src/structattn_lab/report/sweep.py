"""A hyperparameter sweep, with the command line of the best trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from structattn_lab.records.sweep import BestTrial, SweepRecord, Trial
from structattn_lab.report.figures.sweep import drawings, fmt_value, position, short_names
from structattn_lab.report.numbers import DASH, finite, fmt_count, fmt_date, fmt_score, fmt_seconds
from structattn_lab.report.report import Origin, Report, Section
from structattn_lab.report.table import Table

_SHOWN = 12  # trials of the table on a terminal
_MEANING = {
    "finished": "ran to its end",
    "stopped": "stopped early by the scheduler",
    "diverged": "a loss, a weight or the score was not finite",
    "failed": "the values do not fit together, or not to the data",
    "crashed": "something else went wrong; --resume tries it again",
    "running": "interrupted; --resume goes on with it",
}


def _ranked_trials(record: SweepRecord) -> list[Trial]:
    """The trials that ran to their end, best first, then those that were stopped, the furthest first, then
    the others.
    """
    places = list(_MEANING)

    def place(trial: Trial) -> tuple[int, float, float]:
        score = finite(trial.score)
        step = -trial.step if trial.status == "stopped" else 0
        return places.index(trial.status), step, float("inf") if score is None else score

    return sorted(record.trials, key=place)


def _table(record: SweepRecord) -> Table:
    """A line for each trial, best first."""
    states = {trial.status for trial in record.trials}
    columns: list[tuple[str, Callable[[Trial], str]]] = [
        ("trial", lambda trial: str(trial.number)),
        (f"validation {record.metric}", lambda trial: fmt_score(finite(trial.score))),
        *(
            (short, lambda trial, name=name: fmt_value(trial.params[name]))
            for name, short in short_names(record).items()
        ),
        ("status", lambda trial: trial.status),
        ("steps done", lambda trial: str(trial.step) if trial.step else DASH),
        ("seconds", lambda trial: fmt_seconds(trial.seconds)),
        ("parameters", lambda trial: fmt_count(trial.num_params)),
    ]
    note = "; ".join(f"{name}: {words}" for name, words in _MEANING.items() if name in states)
    return Table.of_columns(columns, _ranked_trials(record), words=("status",), notes=(note,))


def _counts(record: SweepRecord) -> str:
    """How many trials ended how, in words."""
    states = [trial.status for trial in record.trials]
    return ", ".join(f"{states.count(name)} {name}" for name in _MEANING if name in states)


def _verdict(record: SweepRecord) -> str:
    """What the best trial is, by how much, and what is not known."""
    best, trials = record.best, record.trials
    head = f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}: {_counts(record)}."
    if best is None:
        return f"{head} None ran to its end, so there is no best one."
    names = short_names(record)
    values = ", ".join(f"{names[name]} {fmt_value(value)}" for name, value in best.params.items())
    metric = record.metric
    words = [
        head,
        f"The best is trial {best.number} ({values}) with a validation {metric} of {fmt_score(best.score)}; the median "
        f"of those that finished is {fmt_score(best.median)}.",
        f"On the test split, where no other trial was scored, its {metric} is {fmt_score(best.test[metric])}.",
        *_edges(record, best),
        "One seed per trial: differences as small as those between seeds mean nothing.",
    ]
    return " ".join(words)


def _edges(record: SweepRecord, best: BestTrial) -> list[str]:
    """A sentence for each range at whose edge the best value lies, since a better one may lie beyond."""
    found = []
    for parameter in record.parameters:
        if parameter.choices:
            continue
        share = position(parameter, best.params[parameter.name])
        if not 0.05 <= share <= 0.95:
            name = short_names(record)[parameter.name]
            found.append(f"The best {name} lies at the edge of its range: a wider range may have a better one.")
    return found


def report(record: SweepRecord) -> Report:
    """Verdict, command line of the best, figures, every trial, how to repeat it."""
    best = record.best
    whole = _table(record)
    sections = []
    if best is not None:
        scores = [[name, f"{value:.6g}"] for name, value in best.test.items()]
        sections.append(Section(heading="Train the best again", code=best.command))
        sections.append(Section(table=Table.of(("on the test split", "score"), scores)))
    sections.append(Section(heading="Figures", drawings=drawings(record)))
    sections.append(Section(heading="Trials", table=whole))
    reasons = [(str(trial.number), trial.status, trial.message) for trial in record.trials if trial.message]
    if reasons:
        why = Table.of(("trial", "status", "why"), reasons, words=("status", "why"))
        sections.append(Section(heading="Trials without a score", table=why))
    more = (f"and {len(whole.lines) - _SHOWN} more in the report",) if len(whole.lines) > _SHOWN else ()
    return Report(
        title=f"Sweep: {record.task}",
        question="Which settings give the lowest validation score?",
        byline=(
            f"preset {record.preset}",
            f"seed {record.seed}",
            fmt_date(record.created),
            f"{fmt_seconds(record.seconds)} seconds of training",
        ),
        verdict=_verdict(record),
        sections=sections,
        tables=(replace(whole, lines=whole.lines[:_SHOWN], notes=more),),
        origin=Origin.of(record),
        notes=_notes(record),
    )


def _notes(record: SweepRecord) -> list[str]:
    notes = [
        f"The score is {record.metric}: {record.metric_label}. Lower is better.",
        "A finished trial is scored by the weights that it ends with; a stopped one by those that it had then, so that "
        "the two compare only at equal steps.",
        "Seconds are wall-clock of a trial, with the time to build its model and data.",
    ]
    if record.scheduler is not None:
        grace, factor = record.scheduler.grace_period, record.scheduler.reduction
        notes.append(
            f"ASHA looks at every trial after {grace}, {grace * factor}, {grace * factor**2} ... steps, and stops "
            f"those that are not among the best 1/{factor} of the trials that came so far."
        )
    return notes
