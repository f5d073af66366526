"""Prompts of in-context regression: every distribution against its definition, by loops or by its moments."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from structattn.errors import ConfigError
from structattn.seeds import generator
from structattn_lab.tasks.icl_regression.prompts import (
    COVARIATES,
    FUNCTIONS,
    Covariates,
    DecisionTree,
    FunctionName,
    Linear,
    PromptConfig,
    ReluNetwork,
    SparseLinear,
)

NAMES = get_args(FunctionName)
BOTH = get_args(Covariates)


def prompts(function="linear", **settings) -> PromptConfig:
    return PromptConfig(function=function, **settings)


def test_the_settings_name_everything_there_is() -> None:
    assert set(NAMES) == set(FUNCTIONS)
    assert set(BOTH) == set(COVARIATES)


@pytest.mark.parametrize("covariates", BOTH)
@pytest.mark.parametrize("function", NAMES)
def test_a_draw_is_a_function_of_its_stream(function: str, covariates: str) -> None:
    p = prompts(function, covariates=covariates, noise_std=0.5)
    first, again, other = (p.draw(generator("a", i), 5, 7, 4) for i in (0, 0, 1))
    assert first.xs.shape == (5, 7, 4)
    assert first.ys.shape == first.values.shape == (5, 7)
    for a, b, c in zip(first, again, other, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
        assert not torch.isclose(a, c).any()
    for i in range(5):
        for j in range(i):
            assert not torch.isclose(first.xs[i], first.xs[j]).any()
            assert not torch.equal(first.values[i], first.values[j])


@pytest.mark.parametrize("covariates", BOTH)
@pytest.mark.parametrize("function", NAMES)
def test_float64_gives_the_same_prompts(function: str, covariates: str) -> None:
    p = prompts(function, covariates=covariates, noise_std=0.5)
    single = p.draw(generator(3), 20, 8, 5)
    double = p.draw(generator(3), 20, 8, 5, dtype=torch.float64)
    for a, b in zip(single, double, strict=True):
        assert b.dtype == torch.float64
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_isotropic_moments() -> None:
    xs = prompts().draw(generator(0), 4000, 5, 6, dtype=torch.float64).xs.flatten(0, 1)
    standard_error = 1 / math.sqrt(len(xs))
    assert xs.mean(0).abs().max() < 4.5 * standard_error
    covariance = xs.T @ xs / len(xs)
    assert (covariance - torch.eye(6)).abs().max() < 6 * standard_error


def test_skewed_spectrum() -> None:
    """The covariance within a prompt has eigenvalues d i^-2 / sum j^-2; over prompts, every direction is
    alike.
    """
    dim, points = 5, 4000
    xs = prompts(covariates="skewed").draw(generator(0), 300, points, dim, dtype=torch.float64).xs
    covariances = xs.mT @ xs / points
    eigenvalues, bases = torch.linalg.eigh(covariances)
    expected = torch.tensor([1 / i**2 for i in range(1, dim + 1)], dtype=torch.float64)
    expected = dim * expected / expected.sum()
    spectrum = eigenvalues.flip(1)
    assert (spectrum.mean(0) / expected - 1).abs().max() < 0.01
    assert (spectrum / expected - 1).abs().max() < 0.15
    pooled = covariances.mean(0)
    assert pooled.diagonal().sum() == pytest.approx(dim, rel=0.01)
    assert (pooled - torch.eye(dim)).abs().max() < 0.3
    # The squared components of a uniform unit vector have mean 1/d and variance 2 (d - 1) / (d^2 (d + 2)).
    squares = bases[:, :, -1].square()
    assert (squares.mean(0) - 1 / dim).abs().max() < 4.5 * math.sqrt(2 * (dim - 1) / (dim**2 * (dim + 2)) / 300)
    assert squares.var() == pytest.approx(2 * (dim - 1) / (dim**2 * (dim + 2)), rel=0.2)


@pytest.mark.parametrize("covariates", BOTH)
@pytest.mark.parametrize("function", NAMES)
def test_the_zero_predictors_error(function: str, covariates: str) -> None:
    p = prompts(function, covariates=covariates, hidden_units=20)
    squares = p.draw(generator(1), 20000, 2, 6, dtype=torch.float64).values.square().mean(1)
    expected = {"linear": 6, "sparse-linear": 3, "relu-network": 6, "decision-tree": 1}[function]
    assert p.distribution.variance(6) == expected
    assert float(squares.mean()) == pytest.approx(expected, abs=4.5 * float(squares.std()) / math.sqrt(20000))


@pytest.mark.parametrize("function", NAMES)
def test_functions_of_two_prompts_are_uncorrelated(function: str) -> None:
    """Shown the same x, the values of different prompts have correlation 0, those of one prompt do not."""
    xs = torch.randn(1, 2, 6, generator=generator(2)).expand(20000, 2, 6)
    values = FUNCTIONS[function](prompts(function)).draw(generator(3), xs)[:, 0]
    pairs = values[0::2] * values[1::2]
    assert pairs.mean().abs() < 4.5 * pairs.std() / math.sqrt(len(pairs))
    assert values.mean().abs() < 4.5 * values.std() / math.sqrt(len(values))


def test_linear_weights_and_values() -> None:
    (w,) = Linear().parameters(generator(0), 20000, 3)
    assert (w.T @ w / len(w) - torch.eye(3)).abs().max() < 0.05
    xs = torch.randn(4, 5, 3, generator=generator(1), dtype=torch.float64)
    values = Linear().values(xs, w[:4].double())
    for b in range(4):
        for i in range(5):
            assert float(values[b, i]) == pytest.approx(sum(float(w[b, j]) * float(xs[b, i, j]) for j in range(3)))


def test_sparse_support_is_uniform() -> None:
    (w,) = SparseLinear(sparsity=2).parameters(generator(0), 20000, 5)
    support = w != 0
    assert (support.sum(1) == 2).all()
    together = support.double().T @ support.double() / len(w)
    for i in range(5):
        for j in range(5):
            expected = 2 / 5 if i == j else 1 / 10  # 1 of the 10 pairs
            assert float(together[i, j]) == pytest.approx(expected, abs=4.5 * math.sqrt(expected / len(w)))
    assert w[support].std() == pytest.approx(1.0, abs=0.02)
    assert w[support].mean() == pytest.approx(0.0, abs=0.03)
    assert (SparseLinear(sparsity=9).parameters(generator(0), 10, 4)[0] != 0).all()
    assert SparseLinear(sparsity=9).variance(4) == 4


def test_relu_network_by_loops() -> None:
    network = ReluNetwork(hidden_units=7)
    w, a = network.parameters(generator(0), 3, 4)
    xs = torch.randn(3, 5, 4, generator=generator(1))
    expected = [
        [
            sum(
                float(a[b, h]) * max(0.0, sum(float(w[b, h, j]) * float(xs[b, i, j]) for j in range(4)))
                for h in range(7)
            )
            for i in range(5)
        ]
        for b in range(3)
    ]
    torch.testing.assert_close(network.values(xs, w, a), torch.tensor(expected))
    torch.testing.assert_close(network.draw(generator(0), xs), torch.tensor(expected))
    w, a = ReluNetwork(hidden_units=50).parameters(generator(0), 2000, 3)
    assert float(a.square().mean()) == pytest.approx(2 / 50, rel=0.02)
    assert float(w.square().mean()) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_decision_tree_by_a_walk(depth: int) -> None:
    tree = DecisionTree(depth=depth)
    coordinates, leaves = tree.parameters(generator(0), 6, 3)
    assert coordinates.shape == (6, 2**depth - 1)
    assert set(coordinates.flatten().tolist()) <= {0, 1, 2}
    xs = torch.randn(6, 40, 3, generator=generator(1))
    values = tree.values(xs, coordinates, leaves)
    for b in range(6):
        for i in range(40):
            level, place = 0, 0  # the place-th node of its level, which comes after 2^level - 1 nodes of those above
            while level < depth:
                goes_right = float(xs[b, i, int(coordinates[b, 2**level - 1 + place])]) > 0
                level, place = level + 1, 2 * place + goes_right
            assert values[b, i] == leaves[b, place]
    scaled = xs * torch.rand(xs.shape, generator=generator(2)).add(0.01)
    assert torch.equal(values, tree.values(scaled, coordinates, leaves))
    assert not torch.equal(values, tree.values(-xs, coordinates, leaves))


def test_decision_tree_has_few_values_and_uniform_coordinates() -> None:
    values = prompts("decision-tree", depth=3).draw(generator(0), 10, 500, 6).values
    counts = [len(set(row.tolist())) for row in values]
    assert max(counts) <= 8
    assert max(counts) > 4
    coordinates, leaves = DecisionTree(depth=3).parameters(generator(0), 3000, 6)
    frequencies = np.bincount(coordinates.flatten().numpy(), minlength=6) / coordinates.numel()
    assert np.abs(frequencies - 1 / 6).max() < 4.5 * math.sqrt(1 / 6 / coordinates.numel())
    assert float(leaves.square().mean()) == pytest.approx(1.0, rel=0.05)


def test_noise() -> None:
    drawn = prompts(noise_std=0.7).draw(generator(0), 2000, 10, 4, dtype=torch.float64)
    clean = prompts().draw(generator(0), 2000, 10, 4, dtype=torch.float64)
    assert torch.equal(drawn.xs, clean.xs)
    assert torch.equal(drawn.values, clean.values)
    assert torch.equal(clean.ys, clean.values)
    noise = drawn.ys - drawn.values
    assert float(noise.std()) == pytest.approx(0.7, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.02)
    correlation = np.corrcoef(np.stack([noise.flatten(), drawn.values.flatten(), drawn.xs[..., 0].flatten()]))
    assert np.abs(correlation - np.eye(3)).max() < 4.5 / math.sqrt(noise.numel())


@pytest.mark.parametrize("covariates", BOTH)
@pytest.mark.parametrize("function", NAMES)
def test_dead_coordinates(function: str, covariates: str) -> None:
    """They are zero and y comes from the live ones: with the same stream, the prompts are those of fewer
    dimensions.
    """
    p = prompts(function, covariates=covariates)
    padded = p.draw(generator(5), 50, 6, 9, live=2)
    small = p.draw(generator(5), 50, 6, 2)
    assert padded.xs.shape == (50, 6, 9)
    assert (padded.xs[..., 2:] == 0).all()
    assert torch.equal(padded.xs[..., :2], small.xs)
    assert torch.equal(padded.ys, small.ys)
    assert (padded.xs[..., :2] != 0).all()
    assert float(padded.xs.square().sum(2).mean()) == pytest.approx(2.0, rel=0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "linaer"}, "did you mean 'linear'"),
        ({"covariates": "skew"}, "unknown task.prompts.covariates 'skew': did you mean 'skewed'"),
        ({"sparsity": 0}, "task.prompts.sparsity must be an int of at least 1, got 0"),
        ({"hidden_units": 0}, "hidden_units must be an int of at least 1"),
        ({"depth": 0}, "depth must be an int of at least 1, got 0"),
        ({"noise_std": -0.1}, "task.prompts.noise_std must be a finite number of at least 0, got -0.1"),
        ({"noise_std": float("nan")}, "of at least 0, got nan"),
        ({"noise_std": float("inf")}, "of at least 0, got inf"),
    ],
)
def test_mistakes(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptConfig(**settings)
