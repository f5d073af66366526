"""``structattn fit``: the table, the files, matrices from everywhere, and mistakes."""

import json

import numpy as np
import pytest
import torch

from structattn import cli
from structattn.errors import ConfigError, DataError
from structattn.matrices import Dense, Family, structure
from structattn_lab.analysis.fits import NamedMatrix, default_structures, parse_candidate
from structattn_lab.compare.matrix_examples import EXAMPLES, load_matrix
from structattn_lab.compare.matrix_fits import fit_matrices
from structattn_lab.records.common import read_file
from structattn_lab.records.fits import FitsRecord

HUGE_HEADER = b"\x93NUMPY\x01\x00v\x00" + (
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999, 99999999), }".ljust(117) + b"\n"
)


@pytest.fixture(autouse=True)
def one_thread():
    """Small problems; see tests/matrices/test_fit.py."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.full
def test_the_command_writes_table_figure_and_report(tmp_path, capsys) -> None:
    out = tmp_path / "fits"
    own = tmp_path / "mine.npy"
    np.save(own, np.arange(48, dtype=np.float32).reshape(6, 8))
    words = [
        "fit",
        str(own),
        "line",
        "--size",
        "16",
        "--structures",
        "lowrank:2",
        "btt:1",
        "mlr-allocated:3",
        "--out",
        str(out),
    ]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "mine, 6 x 8" in printed
    assert "truncated SVD (optimal)" in printed
    results = json.loads((out / "results.json").read_text())
    assert [matrix["name"] for matrix in results["matrices"]] == ["mine", "line"]
    rows = {row["structure"]: row for row in results["matrices"][0]["rows"]}
    assert set(rows) == {"lowrank:2", "btt:1", "mlr-allocated:3"}
    assert rows["lowrank:2"]["num_params"] == 2 * 14
    assert rows["lowrank:2"]["relative_error"] < 1e-12  # an arithmetic sequence has rank 2
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "mlr-allocated:3" in page
    for kind in ("png", "svg"):
        assert (out / "figures" / f"error-against-parameters.{kind}").stat().st_size > 5000
    assert cli.main(words) == 2  # the folder has results: nothing is overwritten
    assert "already has results" in capsys.readouterr().err


@pytest.mark.full
def test_same_command_same_numbers(tmp_path) -> None:
    matrices = [load_matrix("gaussian", 8)]
    errors = []
    for name in ("a", "b"):
        done = fit_matrices(
            matrices, ("butterfly", "kaleidoscope", "mlr-allocated:2"), tmp_path / name, show_progress=False
        )
        assert read_file(FitsRecord, done.folder / "results.json") == done.record
        errors.append([row.relative_error for row in done.record.matrices[0].rows])
    assert errors[0] == errors[1]


def test_a_family_of_another_package_is_fitted_and_drawn(tmp_path, monkeypatch) -> None:
    class Scaled(Dense):
        """Another name for a dense matrix."""

    monkeypatch.setitem(structure._FAMILIES, "scaled", Family(Scaled, "scaled", "scaled", "dense"))
    done = fit_matrices([load_matrix("gaussian", 8)], ("lowrank:2", "scaled"), tmp_path, show_progress=False)
    svg = (done.folder / "figures" / "error-against-parameters.svg").read_text()
    assert "scaled" in svg
    assert "No matrix of the structures is nearer." in (done.folder / "report.html").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_what_they_say(name) -> None:
    values = load_matrix(name, 16).values
    assert values.shape == (16, 16)
    assert torch.equal(values, load_matrix(name, 16).values)
    if name == "hadamard":
        torch.testing.assert_close(values @ values.T, torch.eye(16).double())
    if name in ("line", "etth1"):
        torch.testing.assert_close(values, values.T)
        assert float(torch.linalg.eigvalsh(values).min()) > 0


def test_the_score_of_a_trained_model(tmp_path) -> None:
    run = tmp_path / "run"
    words = ["train", "nearest-neighbor", "--preset", "demo", "--attention", "standard:2", "--out", str(run)]
    assert cli.main([*words, "--set", "training.steps=2"]) == 0
    from structattn_lab.training.evaluate import load_run

    matrix = load_run(run).model.attention.scoring.matrix
    for text, head in ((str(run), 0), (f"{run}@0.1", 1)):
        found = load_matrix(text, 64)
        left, right = matrix.left.reshape(2, -1, matrix.rank), matrix.right.reshape(2, -1, matrix.rank)
        torch.testing.assert_close(found.values, (left[head] @ right[head].T).detach().double())
        assert "standard:2" in found.about
    with pytest.raises(ConfigError, match="1 attention layers of 2 heads"):
        load_matrix(f"{run}@0.2", 64)
    with pytest.raises(ConfigError, match="layer 3"):
        load_matrix(f"{run}@3.0", 64)


def test_the_default_sweep_covers_every_family_at_awkward_sizes() -> None:
    families = {parse_candidate(text).family for text in default_structures(64, 64)}
    assert families == {"lowrank", "mlr", "btt", "kronecker", "butterfly", "kaleidoscope", "mlbtc"}
    at_prime = {parse_candidate(text).family for text in default_structures(61, 22)}
    assert at_prime == families - {"butterfly", "kaleidoscope"}
    assert default_structures(2, 2) == ()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: load_matrix("gausian", 8), ConfigError, "did you mean 'gaussian'"),
        (lambda p: load_matrix("hadamard", 12), ConfigError, "8 or 16"),
        (lambda p: load_matrix("line", 1), ConfigError, "at least 2"),
        (lambda p: load_matrix(str(p / "missing.npy"), 8), DataError, "cannot read"),
        (lambda p: fit_matrices([], (), p / "o"), ConfigError, "at least one"),
        (lambda p: fit_matrices([_matrix(), _matrix()], (), p / "o"), ConfigError, "without repetition"),
        (lambda p: fit_matrices([_matrix()], ("btt:x",), p / "o"), ConfigError, "btt:S"),
        (lambda p: fit_matrices([_matrix()], ("btt:1", " btt:1"), p / "o"), ConfigError, "structures must be unique"),
        (lambda p: fit_matrices([_matrix()], ("dense:",), p / "o"), ConfigError, "after the colon"),
        (lambda p: fit_matrices([_matrix()], (), p / "o", refine=-1, on_open=pytest.fail), ConfigError, "refine"),
        (lambda p: fit_matrices([_matrix()], ("mlr-allocated",), p / "o"), ConfigError, "whole number"),
        (lambda p: fit_matrices([_matrix(11)], ("butterfly",), p / "o"), ConfigError, "10 and 12"),
        (lambda p: fit_matrices([_matrix(value=float("nan"))], (), p / "o"), DataError, "not finite"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(call, error, message, tmp_path) -> None:
    with pytest.raises(error, match=message):
        call(tmp_path)
    assert not (tmp_path / "o").exists()


def _matrix(size=4, value=1.0):
    return NamedMatrix(name="m", about="test", values=torch.full((size, size), value, dtype=torch.float64))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not an array", "not a file of numpy.save"),
        (HUGE_HEADER, "its header asks for more than the memory"),
        (np.zeros(3), r"\(3,\)"),
        (np.zeros((2, 2), dtype=complex), "complex"),
        (np.array([["a"]]), "<U1"),
        (np.array([[None]], dtype=object), "not a file of numpy.save"),
    ],
    ids=["bytes", "header", "vector", "complex", "text", "pickle"],
)
def test_files_that_are_no_matrix(content, message, tmp_path) -> None:
    path = tmp_path / "bad.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(DataError, match=message):
        load_matrix(str(path), 8)


def test_structures_are_listed(capsys) -> None:
    from structattn.matrices import FAMILIES

    assert cli.main(["structures"]) == 0
    printed = capsys.readouterr().out
    assert all(family.syntax in printed for family in FAMILIES.values())
