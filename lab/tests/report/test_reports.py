"""The table, the verdict, the figures and the page, on recorded comparisons: those of the files next to this
one, with their commands.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from structattn_lab.compare.pages import write_pages
from structattn_lab.records import ComparisonRecord
from structattn_lab.records.common import read_file
from structattn_lab.report import comparison
from structattn_lab.report.figures.comparison import drawings
from structattn_lab.report.numbers import fmt_count, fmt_pm, fmt_score
from structattn_lab.report.page import page_text
from structattn_lab.report.plot import spread
from structattn_lab.report.table import Line, Table
from structattn_lab.report.writer import write_figures
from structattn_lab.tasks.registry import report_of

FIGURES = {
    "nearest-neighbor": {"error-against-rank"},
    "forecast": {"examples", "error-by-lead"},
    "icl-regression": {"error-against-compute", "error-by-point", "error-against-rank-over-dimension"},
}


def recorded(task: str) -> ComparisonRecord:
    return read_file(ComparisonRecord, Path(__file__).with_name(f"{task}.json"))


def table(record: ComparisonRecord) -> Table:
    return comparison.report(record, report_of(record)).tables[0]


def verdict(record: ComparisonRecord) -> str:
    return comparison.report(record, report_of(record)).verdict


def with_scores(record: ComparisonRecord, **scores: tuple[float, ...]) -> ComparisonRecord:
    """The record with other scores, by spec with underscores."""
    rows = []
    for row in record.rows:
        new = scores.get(row.spec.replace("-", "_"), row.scores)
        mean = sum(new) / len(new)
        std = (sum((score - mean) ** 2 for score in new) / (len(new) - 1)) ** 0.5 if len(new) > 1 else None
        rows.append(replace(row, scores=new, score=mean, score_std=std))
    return replace(record, rows=tuple(rows))


def one_seed(record: ComparisonRecord) -> ComparisonRecord:
    rows = [
        replace(row, scores=row.scores[:1], score=row.scores[0], score_std=None, histories=row.histories[:1])
        for row in record.rows
    ]
    return replace(record, rows=tuple(rows), seeds=(0,))


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[] if task == "forecast" else pytest.mark.full) for task in FIGURES]
)
def test_a_report_is_complete_and_repeatable(task: str, tmp_path: Path) -> None:
    record = recorded(task)
    for name in ("a", "b"):
        write_pages(record, tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    shown = {"scores", "learning-curves"} | FIGURES[task]
    assert {path.name for path in files} == {
        "report.html",
        *(f"{name}.{kind}" for name in shown for kind in ("png", "svg")),
    }
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path
        assert path.suffix != ".png" or (tmp_path / "a" / path).stat().st_size > 2000
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"\bnan\b", page, flags=re.IGNORECASE)
    assert "<script" not in page
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 10
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(ids)
    # What a reader needs before the table: the data, the training, the seeds, and every spec in words.
    head = page[page.index("</style>") : page.index('<div class="verdict">')]
    words = [*record.data.values(), *record.meanings, *record.meanings.values(), "steps of", "seeds 0, 1"]
    assert all(word.replace("'", "&#39;") in head for word in words)
    assert page.count("<figcaption>") == len(shown)


@pytest.mark.parametrize("is_several", [True, False])
def test_the_spread_is_shown_where_it_is_known(is_several: bool) -> None:
    record = recorded("nearest-neighbor")
    record = record if is_several else one_seed(record)
    page = page_text(comparison.report(record, report_of(record)), {})
    assert ("±" in table(record).text()) is is_several
    assert ("One seed was run" in page) is not is_several
    assert ("one seed: spread unknown" in verdict(record)) is not is_several


def test_page_without_figures_and_with_hostile_names(tmp_path: Path) -> None:
    record = recorded("nearest-neighbor")
    rows = [replace(row, spec='<script>alert("$x_{$")</script> id="x"') for row in record.rows[:2]]
    record = replace(
        record,
        rows=(*rows, *record.rows[2:]),
        question="<b>&",
        meanings={"<b>&": "<b>&"},
        config=record.config | {"<i>": "</table>"},
        baselines=(replace(record.baselines[0], name="<img src=x>", note="<img src=x>"), *record.baselines[1:]),
    )
    drawn = write_figures(drawings(record, report_of(record)), tmp_path)
    for shown in (drawn, {}):
        page = page_text(comparison.report(record, report_of(record)), shown)
        assert page.count("<figure>") == len(shown)
        assert "<script" not in page
        assert "<img" not in page
        assert "<b>&" not in page
        assert page.count("</table>") == 4


def test_missing_and_diverged_numbers_leave_no_nan(tmp_path: Path) -> None:
    nan, record = float("nan"), recorded("forecast")
    bad: dict[str, Any] = {
        "score": nan,
        "score_std": None,
        "scores": (nan,),
        "metrics": {"mae": float("inf")},
        "details": {},
        "histories": (({"step": 1, "validation_mse": nan},),),
    }
    baselines = (replace(record.baselines[0], metrics={}), *record.baselines[1:])
    partly = replace(record, rows=(replace(record.rows[0], **bad), *record.rows[1:]), baselines=baselines)
    page = write_pages(partly, tmp_path).read_text(encoding="utf-8")
    for text in (page, table(partly).text(), verdict(partly)):
        assert not re.search(r"\b(nan|inf)\b", text, flags=re.IGNORECASE)
    assert "standard has no finite score" in verdict(partly)
    nothing = replace(record, rows=tuple(replace(row, **bad) for row in record.rows))
    assert write_figures(drawings(nothing, report_of(nothing)), tmp_path) == {}
    assert "nothing to compare" in verdict(nothing)
    assert "*" not in table(nothing).text()


def test_verdict_says_what_the_numbers_allow() -> None:
    record = recorded("nearest-neighbor")
    text = verdict(record)
    assert "bilinear-dense has the lowest nmse (0.211 ± 0.006); that is 63 % below standard (0.568 ± 0.007)" in text
    assert "more than chance explains with 2 seeds (95 %)" in text
    assert "loses" not in text
    close = with_scores(record, standard=(0.21, 0.20))
    assert "standard has the lowest" in verdict(close)
    assert "not statistically distinguishable" in verdict(close)
    learned_nothing = {row.spec.replace("-", "_"): (0.99, 0.99 + i / 100) for i, row in enumerate(record.rows)}
    assert "none learned the task" in verdict(with_scores(record, **learned_nothing))
    words = 'The baseline "ridge regression" is better than every model trained here: 0.0188'
    assert words in verdict(recorded("forecast"))


def test_table_is_aligned_and_marks_the_best() -> None:
    lines = table(recorded("nearest-neighbor")).text().splitlines()
    assert lines[1] == lines[7]  # the rules above the variants and above the baselines
    assert len({len(line) for line in lines[:8]}) == 1
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["bilinear-dense"]
    assert lines[6].split()[-3:] == ["1.5k", "5.8", "407"]
    assert lines[8].split() == ["zero", "1.00"]


def test_the_best_row_has_the_star_and_the_longest_bar_is_full() -> None:
    made = Table(
        header=("name", "settings", "score"),
        lines=(
            Line(cells=("a", "x=1", "0.5"), is_best=True, share=0.5),
            Line(cells=("b\x1b[2J", "x=2", "1.0"), share=1.0, note="the other"),
        ),
        words=("settings",),
        bars="score",
    )
    record = recorded("nearest-neighbor")
    report = comparison.report(record, report_of(record))
    html = page_text(replace(report, sections=[replace(report.sections[0], table=made)]), {})
    assert re.search(r'<tr class="best">\s*<th scope="row">★ a</th>\s*<td class="words">x=1</td>', html)
    assert re.findall(r'<span class="track">([^<]*)<span class="bar" style="width:([^"]*)"', html) == [
        ("0.5", "50.0%"),
        ("1.0", "100.0%"),
    ]
    assert '<span class="note">the other</span>' in html
    assert made.text().splitlines()[2:] == ["* a       x=1             0.5", "  b?[2J   x=2             1.0"]


@pytest.mark.full
def test_figures_name_a_baseline_model_without_the_prefix_of_its_spec(tmp_path: Path) -> None:
    record = recorded("forecast")
    rows = (*record.rows[:1], replace(record.rows[1], spec="baseline:DLinear"), *record.rows[2:])
    page = write_pages(replace(record, rows=rows), tmp_path).read_text(encoding="utf-8")
    drawn = (tmp_path / "figures" / "scores.svg").read_text(encoding="utf-8")
    assert "DLinear" in drawn
    assert "baseline:" not in drawn
    assert "baseline:DLinear" in page  # the table: what a user writes


def test_facts_are_those_of_all_rows() -> None:
    record = recorded("icl-regression")
    one, other = (
        replace(row, steps=(steps,) * len(row.steps)) for row, steps in zip(record.rows, (30, 32), strict=False)
    )
    size = record.config["training"]["batch_size"]
    record = replace(record, rows=(one, other))
    assert comparison.facts(record)["training"] == f"30 to 32 steps of {size} examples"
    assert [dict(zip(table(record).header, line.cells, strict=True))["steps"] for line in table(record).lines] == [
        "30",
        "32",
    ]
    varied = replace(record, config=record.config | {"variants": ["short: training.batch_size=2"]})
    assert comparison.facts(varied)["training"] == "30 to 32 steps"


def test_numbers_and_labels() -> None:
    counts = [fmt_count(v) for v in (812, 12_345, 999_960, 4.5e6, None)]
    assert counts == ["812", "12.3k", "1.0M", "4.5M", "\N{EN DASH}"]
    assert [fmt_score(v) for v in (0.0612, 1.239, 123.4, 2.13e-7, 0.0)] == ["0.0612", "1.24", "123", "2.1e-07", "0"]
    assert fmt_pm(0.0612, 0.01) == "0.0612 ± 0.0100"
    placed = spread([0.5, 0.5, 0.51, 0.0], 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False))
    assert placed[0] < placed[1] < placed[2]
    assert placed[3] == 0.0
    assert spread([1.0, 1.0], 0.1) == pytest.approx([0.9, 1.0])
    assert spread([], 0.1) == []
