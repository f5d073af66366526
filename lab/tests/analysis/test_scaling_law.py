"""Power laws: exact curves, unbiased fits of noisy ones, intervals that cover, outliers, and wrong input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from structattn.errors import ConfigError
from structattn_lab.analysis.scaling_law import compute_multiplier, fit_power_law, law_intervals
from structattn_lab.records.comparison import PowerLaw

COMPUTE = np.geomspace(1e13, 1e16, 8)


def measured(law: PowerLaw, noise: float, rng, seeds: int = 2, points=COMPUTE) -> list[list[float]]:
    return [[law.loss(c) * float(np.exp(noise * rng.standard_normal())) for _ in range(seeds)] for c in points]


@given(floor=st.floats(0.0, 3.0), slope=st.floats(0.3, 5.0), exponent=st.floats(0.05, 1.0), first=st.floats(1e3, 1e18))
def test_exact_curves_come_back(floor, slope, exponent, first) -> None:
    points = first * np.geomspace(1, 1000, 8)
    law = PowerLaw(floor, slope, exponent, float(np.exp(np.log(points).mean())))
    found = fit_power_law(points, [[law.loss(c)] for c in points])
    assert [found.loss(c) for c in points] == pytest.approx([law.loss(c) for c in points], rel=1e-4)
    assert found.exponent == pytest.approx(exponent, rel=0.03, abs=2e-3)
    assert found.reference == pytest.approx(law.reference)
    assert found.compute(found.loss(points[2])) == pytest.approx(points[2])


@pytest.mark.full
def test_fits_of_noisy_curves_are_unbiased_and_their_intervals_cover() -> None:
    law = PowerLaw(1.2, 0.9, 0.25, float(np.exp(np.log(COMPUTE).mean())))
    rng = np.random.default_rng(0)
    exponents, floors, covered = [], [], []
    for trial in range(60):
        losses = measured(law, 0.005, rng)
        found = fit_power_law(COMPUTE, losses)
        exponents.append(found.exponent)
        floors.append(found.irreducible)
        if trial < 40:
            intervals = law_intervals(COMPUTE, losses, replicates=200, seed=trial)
            covered.append([low <= getattr(law, name) <= high for name, (low, high) in intervals.items()])
    for drawn, truth in ((exponents, law.exponent), (floors, law.irreducible)):
        assert np.mean(drawn) == pytest.approx(truth, abs=3 * np.std(drawn) / np.sqrt(len(drawn)) + 0.02 * truth)
    assert np.mean(covered, axis=0).min() >= 0.85


@pytest.mark.full
@pytest.mark.parametrize("ratio", [0.8, 1.0])
@pytest.mark.quick(ratio=[0.8])
def test_multipliers_are_unbiased_and_their_intervals_cover(ratio) -> None:
    law = PowerLaw(1.2, 0.9, 0.25, float(np.exp(np.log(COMPUTE).mean())))
    better = PowerLaw(1.2, 0.9, 0.25, law.reference * ratio)
    rng = np.random.default_rng(1)
    found = [
        compute_multiplier(
            (COMPUTE, measured(law, 0.004, rng)), (COMPUTE * 1.3, measured(better, 0.004, rng, points=COMPUTE * 1.3)),
            replicates=120, seed=trial,
        )
        for trial in range(24)
    ]  # fmt: skip
    assert np.mean([m.estimate for m in found]) == pytest.approx(ratio, rel=0.02)
    assert np.mean([m.interval[0] <= ratio <= m.interval[1] for m in found]) >= 0.85
    told = np.mean([m.is_distinguishable for m in found])
    assert told > 0.9 if ratio < 1 else told < 0.2


def test_one_bad_run_does_not_decide() -> None:
    law = PowerLaw(1.0, 1.0, 0.3, float(np.exp(np.log(COMPUTE).mean())))
    losses = measured(law, 0.002, np.random.default_rng(2), seeds=1)
    clean = fit_power_law(COMPUTE, losses)
    losses[5][0] *= 1.25
    assert fit_power_law(COMPUTE, losses).loss(1e17) == pytest.approx(clean.loss(1e17), rel=0.03)


def test_methods_that_share_no_loss_are_not_compared() -> None:
    low = PowerLaw(0.1, 0.1, 0.3, 3e14)
    high = PowerLaw(2.0, 1.0, 0.3, 3e14)
    rng = np.random.default_rng(3)
    assert compute_multiplier((COMPUTE, measured(high, 0, rng)), (COMPUTE, measured(low, 0, rng))) is None


def test_losses_that_do_not_fall() -> None:
    law = fit_power_law(COMPUTE, [[2.0 + 0.01 * i] for i in range(8)])
    assert law.coefficient == 0
    assert law.loss(1.0) == pytest.approx(2.03, abs=0.02)
    assert law.compute(1.0) == float("inf")


@pytest.mark.parametrize(
    ("compute", "losses", "words"),
    [
        ([1.0, 2.0], [[1.0], [1.0]], "at least 3 different compute budgets, got 2"),
        ([1.0, 2.0, 2.0], [[1.0]] * 3, "got 2 of 3"),
        ([1.0, 2.0, 3.0], [[1.0]] * 2, "losses of 2"),
        ([1.0, 2.0, 3.0], [[1.0], [], [1.0]], "at least one seed"),
        ([1.0, 2.0, 3.0], [[1.0], [float("nan")], [1.0]], "must be positive"),
        ([0.0, 2.0, 3.0], [[1.0]] * 3, "must be positive"),
    ],
)
def test_wrong_input(compute, losses, words) -> None:
    with pytest.raises(ConfigError, match=words):
        fit_power_law(compute, losses)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("noise", [0.03, 0.1, 0.5])
def test_four_points_of_noisy_runs_have_finite_intervals(noise, seeds) -> None:
    points = COMPUTE[:4]
    law = PowerLaw(0.5, 1.0, 0.3, float(np.exp(np.log(points).mean())))
    for trial in range(4):
        sides = [(points, measured(law, noise, np.random.default_rng(2 * trial + n), seeds, points)) for n in (0, 1)]
        assert np.isfinite(list(law_intervals(*sides[0]).values())).all()
        found = compute_multiplier(*sides)
        if found is not None:
            assert np.isfinite(found.interval).all()
            assert not found.is_distinguishable
