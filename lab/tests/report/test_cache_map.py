"""The table and the figures of quality against the key/value cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_records import made_comparison, made_row

import structattn as sa
from structattn_lab.records import ComparisonRecord
from structattn_lab.report import cache_map
from structattn_lab.report.figures.comparison import drawings
from structattn_lab.report.numbers import DASH
from structattn_lab.report.writer import write_figures
from structattn_lab.tasks.registry import report_of

SPECS = ["standard", "[standard,window:4]", "mlr:8|4|4,values=8|4|4", "sliding:8|8@-|4", "bilinear-btt:1"]


@pytest.mark.parametrize("spec", SPECS)
def test_the_counted_numbers_are_those_that_the_cache_holds(spec: str) -> None:
    model = sa.LanguageModel(7, spec, num_layers=2, embed_dim=32, num_heads=2, context_length=16)
    caches = model.new_cache(max_length=16)
    model(torch.arange(16)[None] % 7, caches=caches)
    assert model.cache_numbers() == sum(cache.nbytes for cache in caches) // 4


def recall(**others: object) -> ComparisonRecord:
    def row(spec: str, numbers: int | None, far: float, *scores: float, **more: object) -> object:
        metrics = {"nats": sum(scores) / len(scores), "accuracy_far": far}
        std = {"nats": 0.1, "accuracy_far": 0.05} if len(scores) > 1 else {}
        details = {"decode_ms": 1.5}
        return made_row(spec, *scores, cache_numbers=numbers, metrics=metrics, metrics_std=std, details=details, **more)

    rows = (
        row("standard", 4096, 0.9, 1.0, 1.1),
        row("window:8", 512, 0.2, 2.0, 2.1),
        row("worse", 2048, 0.1, 4.0, 4.01),
        row("no cache", None, 0.1, 3.0, 3.1),
    )
    values = {"task": "recall", "metric": "nats", "config": {"task": {"context_length": 64, "num_values": 4}}, **others}
    return made_comparison(rows, **values)


def test_the_table_has_bytes_scores_and_the_frontier() -> None:
    table = cache_map.report(metrics=("accuracy_far",)).tables["cache"](recall())
    assert table is not None
    assert [line.cells for line in table.lines] == [
        ("window:8", "16", "2.05", "0.200 ± 0.050", "1.50", "yes"),
        ("worse", "64", "4.00", "0.100 ± 0.050", "1.50", "no"),
        ("standard", "128", "1.05", "0.900 ± 0.050", "1.50", "yes"),
        ("no cache", DASH, "3.05", "0.100 ± 0.050", "1.50", DASH),
    ]


def test_without_caches_of_different_sizes_there_is_no_map(tmp_path: Path) -> None:
    record = recall()
    one = made_comparison(record.rows[:1], task="recall", metric="nats", config=record.config)
    assert cache_map.report().tables["cache"](one) is None
    one = made_comparison(record.rows[:1] + record.rows[3:], task="recall", metric="nats", config=record.config)
    table = cache_map.report().tables["cache"](one)
    assert table is not None
    assert [line.cells[1] for line in table.lines] == ["128", DASH]
    for name in ("cache.png", "cache.svg", "mine.png"):
        (tmp_path / name).write_text("of an earlier report")
    assert not {"cache", "decode-time"} & set(write_figures(drawings(one, report_of(one)), tmp_path))
    assert not list(tmp_path.glob("cache.*"))
    assert (tmp_path / "mine.png").exists()


@pytest.mark.full
def test_figures_are_drawn(tmp_path: Path) -> None:
    figures = write_figures(drawings(recall(), report_of(recall())), tmp_path)
    assert {"cache", "decode-time"} <= set(figures)
    assert "95 % intervals" in figures["cache"].caption
    assert "the grey line joins" in figures["cache"].caption
    assert "grey" not in figures["decode-time"].caption  # all take equally long, so that one is better than all others


def test_bytes_per_token_are_those_of_the_window_of_a_variant() -> None:
    variants = ("short: task.context_length=16", "long: task.context_length=64")
    config = {"task": {"context_length": 32}, "variants": variants}
    rows = tuple(
        made_row(spec, 1.0, cache_numbers=numbers * length, variant=name, setting=name)
        for name, length in (("short", 16), ("long", 64))
        for spec, numbers in (("standard", 64), ("window:8", 32))
    )
    table = cache_map.report().tables["cache"](made_comparison(rows, task="text", config=config))
    assert [line.cells[2] for line in table.lines] == ["64", "128"] * 2
    assert "at 16 or 64 tokens" in table.notes[0]
