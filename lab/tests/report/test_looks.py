"""What a reader sees in pictures of the reports: names that do not cross, numbers on axes, letters of one
size, tables that fit.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from structattn_lab.compare.pages import write_pages
from structattn_lab.records import ComparisonRecord
from structattn_lab.records.common import read_file
from structattn_lab.report import comparison
from structattn_lab.report.figures.comparison import draw_scores
from structattn_lab.report.figures.curves import draw_curves
from structattn_lab.report.numbers import fmt_date, fmt_pm
from structattn_lab.report.page import page_text
from structattn_lab.report.plot import log_axis, new_canvas, row_style
from structattn_lab.tasks.icl_regression.figures import error_against_rank_over_dimension
from structattn_lab.tasks.registry import report_of


def recorded(task: str) -> ComparisonRecord:
    return read_file(ComparisonRecord, Path(__file__).with_name(f"{task}.json"))


def test_names_of_baselines_do_not_cross() -> None:
    """Those of the recorded comparison are at 0.68 and 0.75 of its axis, on both sides of what was the
    boundary of two directions.
    """
    drawing = draw_scores(recorded("icl-regression"))
    assert drawing is not None
    names = drawing[0].axes[0].texts
    assert {name.get_text() for name in names} == {"zero", "averaging", "3 nearest neighbors"}
    assert len({name.get_rotation() for name in names}) == 1


def test_steps_are_whole_numbers() -> None:
    drawing = draw_curves(recorded("forecast"), "step", "training step")
    assert drawing is not None
    assert all(tick == int(tick) for tick in drawing[0].axes[0].get_xticks())


@pytest.mark.parametrize(("low", "high"), [(61, 133), (232, 531), (0.7, 0.77), (3, 400), (1e-4, 10)])
def test_a_logarithmic_axis_has_two_numbers_or_more(low: float, high: float) -> None:
    ax = new_canvas(3.0).subplots()
    ax.plot([low, high], [1, 2])
    log_axis(ax, "x")
    left, right = ax.get_xlim()
    assert sum(left <= tick <= right for tick in ax.get_xticks()) >= 2


def test_a_variant_has_one_colour_in_all_figures() -> None:
    record = recorded("icl-regression")
    drawing = error_against_rank_over_dimension(record)
    assert drawing is not None
    points = [line for line in drawing[0].axes[0].lines if line.get_marker() == "o"]
    assert [to_hex(line.get_color()) for line in points] == [
        to_hex(row_style(record, row)["color"]) for row in record.rows
    ]


@pytest.mark.full
def test_letters_have_one_size_in_all_figures_of_a_page(tmp_path: Path) -> None:
    page = write_pages(recorded("forecast"), tmp_path).read_text(encoding="utf-8")
    sizes = re.findall(r'<svg [^>]*viewBox="0 0 ([\d.]+) [^>]*style="max-width:([\d.]+)rem"', page)
    assert len(sizes) == page.count("<figure>") > 1
    assert {round(float(shown) / float(drawn), 3) for drawn, shown in sizes} == {0.089}


def test_long_names_of_metrics_may_go_on_in_a_new_line() -> None:
    record = recorded("icl-regression")
    page = page_text(comparison.report(record, report_of(record)), {})
    assert re.search(r'<th scope="col">last_<wbr>point_<wbr>error</th>', page)


@pytest.mark.parametrize(
    ("value", "std", "text"),
    [
        (2.577, 0.00265, "2.577 ± 0.003"),
        (1.0252263, 3.6e-5, "1.02523 ± 0.00004"),
        (0.211, 0.0064, "0.211 ± 0.006"),
        (1.0, 0.0, "1.00 ± 0.00"),
        (1.0, 1e-12, "1.00 ± 0.00"),
        (2.1e-7, 3e-9, "2.1e-07 ± 3.0e-09"),
        (2.577, None, "2.58"),
    ],
)
def test_a_spread_that_is_known_is_not_shown_as_zero(value: float, std: float | None, text: str) -> None:
    assert fmt_pm(value, std) == text


def test_dates_are_written_for_readers() -> None:
    assert fmt_date("2026-11-24T12:52:49+00:00") == "2026-11-24 12:52 UTC"
