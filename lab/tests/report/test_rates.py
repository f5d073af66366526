"""Best learning rates at an end of those that were tried are named: a better one may lie beyond."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from made_records import made_comparison, made_row

from structattn_lab.analysis.model_selection import search
from structattn_lab.records.comparison import RateSweep, Row, TriedRate
from structattn_lab.records.mup import Transfer
from structattn_lab.report import comparison, mup, scaling, selection
from structattn_lab.report.rows import rates_at_an_end
from structattn_lab.report.task_report import TaskReport

RATES = (1e-3, 2e-3, 4e-3)


def row(spec: str, rate: float, **others: object) -> Row:
    runs = tuple(TriedRate(learning_rate=tried, score=abs(tried - rate)) for tried in RATES)
    return made_row(spec, 1.0, learning_rate=rate, sweep=RateSweep(settings=(), runs=runs), **others)


@pytest.mark.parametrize("kind", ["comparison", "selection", "scaling"])
def test_every_page_of_a_comparison_names_them(kind: str) -> None:
    place = {"budget": 1e12, "searched": "x=1"}
    rows = tuple(row(spec, rate, **place) for spec, rate in zip(("low", "middle", "high"), RATES, strict=True))
    record = made_comparison(rows, search=search(rows, []))
    if kind == "scaling":
        from structattn_lab.analysis.scaling_law import scaling_laws

        record = made_comparison(rows, scaling=scaling_laws(rows, ("low", "middle", "high")))
    page = {"comparison": comparison, "selection": selection, "scaling": scaling}[kind].report(record, TaskReport())
    (note,) = [note for note in page.tables[0].notes if "learning rate lies" in note]
    assert "for low (0.001), high (0.004):" in note
    assert "low (0.001), high (0.004):" in page.tables[0].text()


def test_a_rate_inside_or_without_a_choice_is_not_named() -> None:
    assert rates_at_an_end([row("a", 2e-3), made_row("b", 1.0)]) == []
    one = RateSweep(settings=(), runs=(TriedRate(learning_rate=1e-3, score=1.0),))
    assert rates_at_an_end([made_row("c", 1.0, learning_rate=1e-3, sweep=one)]) == []


def test_a_check_of_mup_names_them() -> None:
    def transfer(kind: str, *best: float | None) -> Transfer:
        return Transfer(
            structure="dense",
            parametrization=kind,
            widths=(32, 64),
            rates=RATES,
            losses=((1.0,) * 3,) * 2,
            best_rates=best,
            spread=1.0,
        )

    record = SimpleNamespace(transfers=(transfer("mup", 2e-3, 4e-3), transfer("standard", 2e-3, None)))
    (note,) = mup._rates_at_an_end(record)
    assert "for dense (muP) at width 64:" in note
    assert mup._rates_at_an_end(SimpleNamespace(transfers=record.transfers[1:])) == []
