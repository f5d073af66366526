"""Every trained run of a comparison as a line of a CSV file: small enough to keep and to send, and all that a
further fit or test needs.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from structattn_lab.records.comparison import ComparisonRecord, GridPosition

_COLUMNS = (
    "attention",
    "setting",
    "searched",
    "width",
    "budget",
    "seed",
    "learning_rate",
    "steps",
    "best_step",
    "compute",
    "parameters",
    "tokens_per_second",
)


def runs_csv(record: ComparisonRecord) -> str:
    """The runs of all rows, a line for each seed, and a line for each baseline, which has neither seed nor
    costs.

    Args:
        record: what ``results.json`` holds.

    Returns:
        The columns ``attention``; ``setting``, ``searched``, ``width`` and ``budget`` (forward FLOPs), where
        the recipe varies them; ``seed``, ``learning_rate``, ``steps``; ``best_step``, of the lowest
        validation score; ``compute``, the forward FLOPs of all training examples; ``parameters``;
        ``tokens_per_second``, the mean over the seeds of a row; and the metric on the test split under its
        own name.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, (*_COLUMNS, record.metric), lineterminator="\n")
    writer.writeheader()
    for row in record.rows:
        for i, score in enumerate(row.scores):
            writer.writerow(
                {
                    "attention": row.spec,
                    **_place(row),
                    "seed": record.seeds[i],
                    "learning_rate": row.learning_rate,
                    "steps": row.steps[i],
                    "best_step": row.best_steps[i],
                    "compute": row.histories[i][-1]["compute"],
                    "parameters": row.num_params,
                    "tokens_per_second": row.tokens_per_second,
                    record.metric: score,
                }
            )
    for baseline in record.baselines:
        score_of_metric = {record.metric: baseline.metrics.get(record.metric)}
        writer.writerow({"attention": baseline.name, **_place(baseline), **score_of_metric})
    return text.getvalue()


def _place(row: GridPosition) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("setting", "searched", "width", "budget")}
