"""Writes the JSON schemas of the records from their dataclasses: ``python docs/write_schemas.py``, when a record changes."""

import json
from pathlib import Path
from typing import Any

from structattn.studies.records import ComparisonRecord, FitsRecord, MupRecord, RunRecord, ScoreRecord, SweepRecord
from structattn.studies.records.typed import json_schema

FOLDER = Path(__file__).parent / "schemas"
_SIGNATURE = {"description": "SHA-256 of all other bytes of the file.", "type": "string"}


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each file by its name."""
    found = {
        "run.json": json_schema(RunRecord),
        "scores.json": json_schema(ScoreRecord),
        "results.json": json_schema(ComparisonRecord),
        "fits.json": json_schema(FitsRecord),
        "mup.json": json_schema(MupRecord),
        "sweep.json": json_schema(SweepRecord),
    }
    for name in ("run.json", "scores.json"):
        found[name]["properties"]["signature"] = _SIGNATURE
    return found


if __name__ == "__main__":
    for name, schema in schemas().items():
        (FOLDER / name).write_text(json.dumps(schema, indent=1) + "\n")
