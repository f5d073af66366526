"""Typed records: read strictly, with the path of what is wrong; records of version 0.1.0; schemas that are
those of the dataclasses.
"""

import copy
import dataclasses
import json
import runpy
from pathlib import Path

import pytest

from structattn.errors import CheckpointError, ConfigError
from structattn_lab.records import FORMAT_VERSION, read_comparison, read_run
from structattn_lab.records.common import to_json

HERE = Path(__file__).parent
OLD = json.loads((HERE / "results-0.1.0.json").read_text())
OLD_RUN = json.loads((HERE / "run-0.1.0.json").read_text())
DOCS = HERE.parents[2] / "docs"


def comparison(folder: Path, data: object):
    (folder / "results.json").write_text(json.dumps(data))
    return read_comparison(str(folder))  # a text does too


def test_a_comparison_of_version_010_is_read_and_keeps_every_field(tmp_path: Path) -> None:
    record = comparison(tmp_path, OLD)
    assert record.format_version == FORMAT_VERSION
    assert [row.spec for row in record.rows] == ["standard", "bilinear-btt:1"]
    added = {"cache_numbers": None, "metrics_std": {}}
    assert json.loads(to_json(record)) == OLD | {
        "format_version": FORMAT_VERSION,
        "rows": [row | added for row in OLD["rows"]],
    }
    assert comparison(tmp_path, json.loads(to_json(record))) == record
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.rows[0].score = 0.0


def test_a_run_of_version_010_is_read() -> None:
    record = read_run(OLD_RUN, "run.json")
    assert (record.spec, record.seed, record.progress) == ("standard", 0, None)
    assert record.task_config["dim"] == 4
    # The first records with progress had the state of the training loop in it, which is of no use afterwards.
    progress = {
        "step": 6,
        "best_step": 4,
        "history": [{"step": 6}],
        "speeds": [],
        "seconds": 1,
        "peak_memory_bytes": 1,
        "compute": 2**70,
    }
    state = {"best_score": 0.5, "bad_validations": 0, "loss_sum": 0.0, "loss_count": 0, "finished": True}
    record = read_run(OLD_RUN | {"progress": progress | state}, "run.json")
    assert record.progress is not None
    assert record.progress.history == ({"step": 6},)


def changed(path: str, value: object) -> dict:
    """The old record with another value in one place; without it where the value is ``...``."""
    data = copy.deepcopy(OLD)
    *outer, last = path.split(".")
    inner = data
    for name in outer:
        inner = inner[int(name) if name.isdigit() else name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rows.1.scores", [1.0, "x"], r"results.json: rows\[1\].scores\[1\]: expected a number, got 'x' \(str\)"),
        ("rows.0.score", None, r"rows\[0\].score: expected a number, got None"),
        ("rows.0.num_params", 3.5, r"rows\[0\].num_params: expected a whole number, got 3.5 \(float\)"),
        ("rows.0.num_params", True, r"expected a whole number, got True \(bool\)"),
        ("rows.0.spec", ..., r"rows\[0\]: field 'spec' of Row is missing"),
        ("rows.0.specs", 1, r"rows\[0\]: unknown field 'specs' of Row: did you mean 'spec'"),
        ("rows", {}, r"rows: expected a list, got {} \(dict\)"),
        ("rows.0.histories", [1], r"rows\[0\].histories\[0\]: expected a list, got 1"),
        ("hardware", "x", r"hardware: expected an object \(Hardware\), got 'x'"),
        ("versions.torch", 2, "versions.torch: expected a string, got 2"),
        ("scaling", [], r"scaling: expected an object \(Scaling\)"),
        ("format_version", FORMAT_VERSION + 1, f"expected format version {FORMAT_VERSION} or older, got"),
        ("format_version", "2", "expected format version 2 or older, got '2'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_record_is_named_with_its_path(tmp_path: Path, path, value, message: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        comparison(tmp_path, changed(path, value))


def test_files_that_hold_no_record(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"results.json cannot be read: .*No such file"):
        read_comparison(tmp_path)
    for text, message in (
        ("{", "cannot be read"),
        ("[" * 10**5, "cannot be read"),
        ("[]", r"expected an object \(Comp"),
    ):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_comparison(tmp_path)


def test_the_schemas_in_the_docs_are_those_of_the_dataclasses() -> None:
    found = runpy.run_path(str(DOCS / "write_schemas.py"))["schemas"]()
    written = {path.name: json.loads(path.read_text()) for path in (DOCS / "schemas").iterdir()}
    assert written == found, "a record has changed: run python docs/write_schemas.py"


@pytest.mark.parametrize(("name", "data"), [("results.json", OLD), ("run.json", OLD_RUN)])
def test_old_files_fit_the_schemas_and_wrong_ones_do_not(name: str, data: dict) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((DOCS / "schemas" / name).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema)
    for wrong in (data | {"unknown": 1}, data | {"task": 1}, {k: v for k, v in data.items() if k != "task"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
