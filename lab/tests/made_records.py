"""Records with values that a test does not care about."""

from __future__ import annotations

from typing import Any

from structattn_lab.records import BaselineRow, ComparisonRecord, Hardware, Row


def made_row(spec: str, *scores: float, **others: Any) -> Row:
    """A row of an attention variant with the scores of its seeds."""
    values: dict[str, Any] = {
        "score": sum(scores) / max(1, len(scores)),
        "score_std": None,
        "validation": 1.0,
        "metrics": {},
        "learning_rate": 1e-3,
        "batch_size": 2,
        "num_params": 8192,
        "flops_per_example": 1_234_567,
        "compute": 1e9,
        "seconds": 8.13,
        "steps_per_second": 10.0,
        "tokens_per_second": 100.0,
        "mfu": 0.1,
        "peak_memory_bytes": 400_000_000,
        "steps": (6,) * len(scores),
        "best_steps": (6,) * len(scores),
        "rank": None,
        "histories": (),
        "details": {},
    }
    return Row(spec=spec, scores=scores, **values | others)


def made_baseline(name: str, metrics: dict[str, float] | None = None, **others: Any) -> BaselineRow:
    """A row of a baseline."""
    return BaselineRow(name=name, metrics=metrics or {}, **{"note": "", **others})


def made_comparison(
    rows: tuple[Row, ...] = (), baselines: tuple[BaselineRow, ...] = (), **others: Any
) -> ComparisonRecord:
    """A comparison of rows and baselines."""
    values: dict[str, Any] = {
        "task": "nearest-neighbor",
        "metric": "nmse",
        "metric_label": "squared error per dimension (1 = knows nothing)",
        "question": "Does a score of full rank find the nearest neighbour with small heads?",
        "created": "2026-11-21T04:00:00Z",
        "seeds": (0, 1),
        "config": {},
        "versions": {"structattn": "0.1.0", "torch": "2.11.0", "python": "3.12"},
        "hardware": Hardware(cpu="Some CPU", cores=2, threads=2, memory_gib=7.7512, device="cpu"),
    }
    return ComparisonRecord(rows=rows, baselines=baselines, **values | others)
