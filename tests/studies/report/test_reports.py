"""The table, the verdict, the figures and the page, on made-up results of the three tasks."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from structattn.studies.records import ComparisonRecord
from structattn.studies.report._common import fmt_count, fmt_pm, fmt_score
from structattn.studies.report._plotting import spread
from structattn.studies.report.html import write_report
from structattn.studies.report.table import format_table, verdict
from structattn.testing.records import made_baseline, made_comparison, made_row

TASKS = ("nearest-neighbor", "forecast", "icl-regression")
EXTRA = {
    "nearest-neighbor": {"error-against-rank"},
    "forecast": {"examples", "error-by-lead"},
    "icl-regression": {"error-by-point"},
}


def made_up(task: str, seeds: int = 2) -> ComparisonRecord:
    metric = {"nearest-neighbor": "nmse", "forecast": "mse", "icl-regression": "nmse"}[task]
    specs = {
        "standard": (0.62, 8),
        "bilinear-btt:1": (0.061, 64),
        "bilinear-mlr:4,2": (0.064, 64),
        "bilinear-lowrank:16": (0.41, 16),
        "bilinear-dense": (0.0605, 64),
    }
    rows = []
    for index, (spec, (score, rank)) in enumerate(specs.items()):
        scores = [score * (1 + 0.06 * (s - (seeds - 1) / 2)) for s in range(seeds)]
        details: dict[str, Any] = {}
        if task == "forecast":
            wave = [12 + 5 * math.sin(h / 24 * math.tau) + 0.02 * h for h in range(240)]
            example = {
                "history": wave[:192],
                "truth": wave[192:],
                "forecast": [v + score * 4 * math.sin(h / 9 + index) for h, v in enumerate(wave[192:])],
                "start": "2017-10-24 00:00",
            }
            details = {
                "examples": [example] * 3,
                "error_by_lead": [score * (0.4 + h / 48) for h in range(48)],
            }
        if task == "icl-regression":
            details = {"error_by_point": [max(score, 1 - p / 20 * (1 - score)) for p in range(1, 41)]}
        histories = tuple(
            tuple(
                {"step": k * 100, "train_loss": 1.0, f"validation_{metric}": s + (1 - s) * math.exp(-k / 4)}
                for k in range(1, 21)
            )
            for s in scores
        )
        rows.append(
            made_row(
                spec,
                *scores,
                score=score,
                score_std=0.04 * score if seeds > 1 else None,
                metrics={"mae": score**0.5, metric: score},
                num_params=8192 * (index + 1),
                flops_per_example=1_234_567 * (index + 1),
                seconds=8.13 + index,
                rank=rank if task == "nearest-neighbor" else None,
                histories=histories,
                details=details,
            )
        )
    baselines: list[dict[str, Any]] = {
        "nearest-neighbor": [{"name": "mean of the values", "metrics": {"nmse": 1.0}, "note": "ignores keys"}],
        "forecast": [
            {
                "name": name,
                "metrics": {"mse": value, "mae": value**0.5},
                "note": "fitted on the training data",
                "details": {"error_by_lead": [value * (0.5 + h / 60) for h in range(48)]},
            }
            for name, value in (
                ("ridge regression", 0.0530),
                ("same hour yesterday", 0.09),
                ("last value", 0.3),
            )
        ],
        "icl-regression": [
            {
                "name": "least squares",
                "metrics": {"nmse": 1e-9},
                "note": "exact",
                "details": {"error_by_point": [max(1e-12, 1 - p / 16) for p in range(1, 41)]},
            }
        ],
    }[task]
    return made_comparison(
        tuple(rows),
        tuple(made_baseline(**baseline) for baseline in baselines),
        task=task,
        metric=metric,
        command=f"structattn compare {task} --preset demo",
        preset="demo",
        seeds=tuple(range(seeds)),
        config={"task": {"dim": 64, "points": 32}, "training": {"steps": 2000, "batch_size": 8, "betas": [0.9, 0.95]}},
    )


def with_rows(record: ComparisonRecord, *changes: dict[str, Any]) -> ComparisonRecord:
    """The record with other values in its first rows."""
    rows = [replace(row, **new) for row, new in zip(record.rows, changes, strict=False)]
    return replace(record, rows=(*rows, *record.rows[len(rows) :]))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seeds", [1, 2])
def test_report_is_complete_and_repeatable(task: str, seeds: int, tmp_path: Path) -> None:
    figures = pytest.importorskip("structattn.studies.report.figures")
    results = made_up(task, seeds)
    pages = []
    for name in ("a", "b"):
        drawn = figures.draw_figures(results, tmp_path / name)
        assert {f.name for f in drawn} == {"scores", "learning-curves"} | EXTRA[task]
        pages.append(write_report(results, drawn, tmp_path / name / "report.html"))
        assert all(f.path_png.stat().st_size > 2000 and f.caption and f.alt for f in drawn)
    for left in sorted((tmp_path / "a").iterdir()):
        assert left.read_bytes() == (tmp_path / "b" / left.name).read_bytes(), left.name
    assert not [p for p in (tmp_path / "a").iterdir() if p.name.startswith(".")]
    page = pages[0].read_text(encoding="utf-8")
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"\bnan\b", page, flags=re.IGNORECASE)
    assert "<script" not in page
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 10
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(ids)
    assert ("±" in format_table(results)) is (seeds > 1)


def test_page_without_figures_and_with_hostile_names(tmp_path: Path) -> None:
    figures = pytest.importorskip("structattn.studies.report.figures")
    results = made_up("nearest-neighbor")
    results = with_rows(results, *[{"spec": '<script>alert("$x_{$")</script> id="x"'}] * 2)
    baselines = tuple(replace(baseline, name="<img src=x>") for baseline in results.baselines)
    results = replace(results, question="<b>&", config={**results.config, "<i>": "</table>"}, baselines=baselines)
    drawn = figures.draw_figures(results, tmp_path)
    for shown in (drawn, []):
        page = write_report(results, shown, tmp_path / "r.html").read_text(encoding="utf-8")
        assert "<script" not in page
        assert "<img" not in page
        assert "<b>&" not in page
        assert page.count("</table>") == 4  # facts, results, how to repeat it, settings


def test_missing_and_diverged_numbers_leave_no_nan(tmp_path: Path) -> None:
    figures = pytest.importorskip("structattn.studies.report.figures")
    results = made_up("forecast")
    nan = float("nan")
    bad = {"score": nan, "scores": (nan,), "seconds": nan, "metrics": {"mae": float("inf")}, "details": {}}
    results = with_rows(results, bad | {"histories": (({"step": 1, "validation_mse": nan},),)})
    results = replace(results, baselines=(replace(results.baselines[0], metrics={}), *results.baselines[1:]))
    drawn = figures.draw_figures(results, tmp_path)
    page = write_report(results, drawn, tmp_path / "r.html").read_text(encoding="utf-8")
    for text in (page, format_table(results), verdict(results)):
        assert not re.search(r"\b(nan|inf)\b", text, flags=re.IGNORECASE)
    assert "standard has no finite score" in verdict(results)
    results = with_rows(results, *[{"score": nan, "scores": (), "histories": (), "details": {}}] * 5)
    assert figures.draw_figures(results, tmp_path) == []
    assert "nothing to compare" in verdict(results)
    assert "*" not in format_table(results)


def test_verdict_says_what_the_numbers_allow() -> None:
    results = made_up("nearest-neighbor")
    text = verdict(results)
    assert "bilinear-dense has the lowest nmse" in text
    assert "90 % below standard" in text
    assert "more than the spread over 2 seeds" in text
    assert "loses" not in text
    assert "one seed: spread unknown" in verdict(made_up("nearest-neighbor", seeds=1))
    close = with_rows(results, {"score": 0.0601})
    assert "standard has the lowest" in verdict(close)
    assert "not statistically distinguishable" in verdict(close)
    nothing = with_rows(results, *({"score": row.score / 100 + 0.99} for row in results.rows))
    assert "none of them learned" in verdict(nothing)


def test_baseline_that_beats_every_attention_is_named() -> None:
    text = verdict(made_up("forecast"))
    assert "Attention loses here: the baseline ridge regression reaches 0.0530" in text


def test_table_is_aligned_and_marks_the_best() -> None:
    lines = format_table(made_up("forecast")).splitlines()
    assert lines[1] == lines[7]
    assert next(line.split()[1] for line in lines if line.startswith("*")) == "bilinear-dense"
    assert len({len(line) for line in [lines[0], *lines[2:7]]}) == 1
    assert "1.2M" in lines[2]
    assert "381" in lines[2]
    assert "ridge regression" in lines[8]


def test_numbers_and_labels() -> None:
    assert [fmt_count(v) for v in (812, 12_345, 999_960, 4.5e6, None)] == [
        "812",
        "12.3k",
        "1.0M",
        "4.5M",
        "\N{EN DASH}",
    ]
    assert [fmt_score(v) for v in (0.0612, 1.239, 123.4, 2.13e-7, 0.0)] == [
        "0.0612",
        "1.24",
        "123",
        "2.1e-07",
        "0",
    ]
    assert fmt_pm(0.0612, 0.01) == "0.0612 ± 0.0100"
    placed = spread([0.5, 0.5, 0.51, 0.0], 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False))
    assert placed[0] < placed[1] < placed[2]
    assert placed[3] == 0.0
    assert spread([1.0, 1.0], 0.1) == pytest.approx([0.9, 1.0])
    assert spread([], 0.1) == []


def test_missing_matplotlib_is_named_with_what_to_install() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import structattn\n"
        "try:\n    import structattn.studies.report.figures\n"
        "except structattn.errors.MissingDependencyError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'structattn[train]'" in done.stdout
