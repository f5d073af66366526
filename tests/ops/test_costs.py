"""Choices by counted work: what is measured and stored, and that other choices change no result."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import structattn as sa
from structattn.errors import CheckpointError, StructAttnWarning
from structattn.ops import costs, small_causal
from structattn.ops.blocked import work
from structattn.ops.costs import DEFAULT, Costs, Work
from structattn.testing.tolerances import assert_close

# Operations cost nothing, or nothing else costs anything.
ARITHMETIC = Costs(product=1.0, score=1.0, fresh=1.0, weight=1.0, operation=1e-6, matrix=1e-6)
OPERATIONS = Costs(product=1e-9, score=1e-9, fresh=1e-9, weight=1e-9, operation=1e6, matrix=1e-9)
LAYOUT = sa.LevelLayout.halving((8, 4, 2, 2), 256)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STRUCTATTN_CACHE", str(tmp_path / "cache"))
    costs._measured.cache_clear()
    yield tmp_path / "cache"
    monkeypatch.undo()
    costs._measured.cache_clear()


def test_what_is_measured_is_stored_by_machine_and_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert costs.costs_here() == DEFAULT
    monkeypatch.setattr(costs, "_ROUNDS", 2)
    threads = torch.get_num_threads()
    path = sa.ops.measure_costs()
    assert torch.get_num_threads() == threads
    assert path.parent == cache
    assert path == costs.costs_file()
    record = json.loads(path.read_text())
    assert record["machine"] == platform.node()
    assert set(record["threads"]) == {"1", str(threads)}
    found = costs.costs_here()
    assert found == Costs(**record["threads"][str(threads)]) != DEFAULT
    assert 0 < found.product < found.score < found.operation  # a multiply-add, a number, a call
    assert list(cache.iterdir()) == [path]  # no temporary file is left
    path.unlink()
    costs._measured.cache_clear()
    assert costs.costs_here() == DEFAULT


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"threads": {"1": {}}}', '{"threads": {"one": {}}}', "\xff", '{"threads": []}'],
)
def test_a_damaged_file_is_ignored_with_a_warning(cache: Path, content: str) -> None:
    cache.mkdir()
    costs.costs_file().write_text(content)
    with pytest.warns(
        StructAttnWarning, match=r"does not hold the costs of a machine .* run `structattn measure-costs`"
    ):
        assert costs.costs_here() == DEFAULT


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_costs_that_no_machine_has_are_ignored(cache: Path, value: float) -> None:
    cache.mkdir()
    threads = str(torch.get_num_threads())
    one = dict.fromkeys(("product", "score", "fresh", "weight", "operation", "matrix"), 1.0)
    costs.costs_file().write_text(json.dumps({"threads": {threads: {**one, "weight": value}}}))
    with pytest.warns(StructAttnWarning, match="finite numbers above 0"):
        assert costs.costs_here() == DEFAULT


def test_no_cache_folder(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.delenv("STRUCTATTN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    assert costs.costs_here() == DEFAULT
    with pytest.raises(CheckpointError, match="name one in STRUCTATTN_CACHE"):
        costs.measure_costs()


def test_a_file_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder would be")
    monkeypatch.setattr(costs, "_ROUNDS", 1)
    with pytest.raises(CheckpointError, match="cannot write"):
        costs.measure_costs()


def test_work_is_a_sum_of_products() -> None:
    one = Work(product=1, score=2, fresh=3, weight=4, operation=5, matrix=6)
    assert (one + one).time(Costs(1.0, 10.0, 100.0, 1e3, 1e4, 1e5)) == 2 * 654321


def test_expensive_operations_merge_levels() -> None:
    """All levels into one product each over all pairs; where operations are free, none that saves
    arithmetic.
    """
    assert small_causal.span_size(LAYOUT, 256, 16, 8, OPERATIONS) == 256
    assert small_causal.span_size(LAYOUT, 256, 16, 8, ARITHMETIC) == 32
    size = {"sequences": 8, "repeats": 1, "value_dim": 16}
    merged, _ = work.cheapest(LAYOUT, 256, 256, True, None, **size, per_unit=OPERATIONS)
    apart, _ = work.cheapest(LAYOUT, 256, 256, True, None, **size, per_unit=ARITHMETIC)
    assert (merged.tile, apart.tile) == (128, 16)


def test_counted_work_of_one_square_by_hand() -> None:
    """One level, 8 positions: one block, whose later keys are hidden."""
    geometry = work.geometry(sa.LevelLayout((3,), (8,)), 8, 8, True, None)
    found = work.work(geometry, 5, 2, 4)
    scores = 5 * 2 * 8 * 8
    assert found == Work(
        product=scores * 7, score=scores * 3, weight=scores, operation=work._CALL + work._BLOCK, matrix=10
    )


@pytest.mark.parametrize("per_unit", [ARITHMETIC, OPERATIONS])
@pytest.mark.parametrize("values", [None, (8, 4, 2, 2)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_no_choice_changes_a_result(
    per_unit: Costs, values: tuple[int, ...] | None, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("structattn.ops.small_causal.costs_here", lambda: per_unit)
    monkeypatch.setattr("structattn.ops.blocked.backend.costs_here", lambda: per_unit)
    monkeypatch.setattr("structattn.ops.backends.costs_here", lambda: per_unit)
    for layout in (
        sa.LevelLayout.halving((8, 4, 2, 2), 150, value_ranks=values),
        sa.LevelLayout.sliding((8, 4, 2, 2), (None, 70, 20, 3), value_ranks=values),
    ):
        leaves = [torch.randn(2, 2, 131, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        weight = torch.randn(2, 2, 131, 16, dtype=torch.float64)
        results = []
        for backend in ("auto", "blocked", "reference"):
            out = sa.structured_attention(*leaves, layout, is_causal=is_causal, backend=backend)
            results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
        for found in results[:2]:
            for actual, expected in zip(found, results[2], strict=True):
                assert_close(actual, expected, gradient=True)


def test_hierarchical_values_are_not_computed_densely_where_that_takes_longer() -> None:
    """The dense definition took 5 times as long here before work was counted."""
    q = torch.randn(1, 4, 256, 64)
    layout = sa.LevelLayout.halving((16, 16, 16, 16), 256, value_ranks=(16, 16, 16, 16))
    assert sa.ops.explain(q, q, q, layout).startswith("blocked")
    few = sa.LevelLayout.halving((16, 16, 16, 16), 8, value_ranks=(16, 16, 16, 16))
    assert sa.ops.explain(*(x[:, :, :8] for x in (q, q, q)), few).startswith("reference")
