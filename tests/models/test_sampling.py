"""Sampling against its definition by loops, and against the frequencies that it promises."""

import math

import pytest
import torch

from structattn.errors import ConfigError, GenerationError
from structattn.models.sampling import RowSampler, Sampling
from structattn.testing.tolerances import assert_close


def by_loops(logits: list[float], sampling: Sampling) -> list[float]:
    """softmax(logits / temperature), cut to top_k, then to top_p, renormalised after each."""
    weights = [math.exp(x / sampling.temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    total = sum(p[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if sampling.top_p is not None and mass >= sampling.top_p:
            break
        kept.append(i)
        mass += p[i] / total
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 4, 100])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.6, 1.0])
def test_probabilities_are_the_definition(temperature: float, top_k: int | None, top_p: float | None) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[1, 2] = logits[1].max()  # two equal largest ones
    expected = torch.tensor([by_loops(row, sampling) for row in logits.tolist()], dtype=torch.float64)
    assert_close(sampling.probabilities(logits), expected)


def test_greedy_and_almost_greedy() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert Sampling.greedy() == Sampling(temperature=0)
    assert Sampling.greedy().probabilities(logits).tolist() == [[0, 1, 0, 0]]
    assert RowSampler(Sampling.greedy(), [[1]], 0).draw(logits) == [1]
    assert Sampling(temperature=1e-300).probabilities(logits).tolist() == [[0, 0.5, 0.5, 0]]


def test_draws_have_their_probabilities() -> None:
    sampling, steps, rows = Sampling(top_k=4), 40, 500
    count = steps * rows
    logits = torch.tensor([[0.5, -1.0, 1.5, 0.0, 0.2, -9.0]])
    sampler = RowSampler(sampling, [[row] for row in range(rows)], seed=5)
    drawn = [token for _ in range(steps) for token in sampler.draw(logits.expand(rows, -1))]
    for token, p in enumerate(sampling.probabilities(logits)[0].tolist()):
        assert abs(drawn.count(token) - count * p) <= 4 * math.sqrt(count * p * (1 - p))


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    prompts = [[1, 2], [3], [1, 2]]
    together = RowSampler(Sampling(), prompts, 7)
    single = RowSampler(Sampling(), prompts[:1], 7)
    other = RowSampler(Sampling(), prompts[:1], 8)
    steps = [(together.draw(logits), single.draw(logits[:1]), other.draw(logits[:1])) for _ in range(20)]
    assert [a[0] for a, _, _ in steps] == [b[0] for _, b, _ in steps]
    assert [b for _, b, _ in steps] != [c for _, _, c in steps]
    same = torch.randn(1, 50).expand(3, -1)
    rows = [together.draw(same) for _ in range(20)]
    assert [row[0] for row in rows] != [row[2] for row in rows]  # equal prompts have streams of their own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a finite number of at least 0"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 0"),
        ({"temperature": math.nan}, "temperature must be a finite number of at least 0"),
        ({"top_k": 0}, "top_k must be an int of at least 1, got 0"),
        ({"top_k": 2.0}, "top_k"),
        ({"top_p": 0.0}, "top_p must be a finite number above 0|at most 1"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": "0.9"}, "top_p"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 0.0, "top_k": 3}, "leave top_k and top_p at None"),
    ],
)
def test_bad_settings_are_named(options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    "sampling", [Sampling.greedy(), Sampling(), Sampling(top_k=2), Sampling(top_p=0.5), Sampling(temperature=1e-300)]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_named_with_step_and_prompt(sampling, value) -> None:
    sampler = RowSampler(sampling, [[1], [2]], 0)
    logits = torch.randn(2, 5)
    logits[1, 0] = -math.inf  # a token that cannot come is fine
    sampler.draw(logits)
    for bad in (value, -math.inf):
        logits[1, 3] = bad
        if bad < 0:
            logits[1] = bad
        with pytest.raises(GenerationError, match=r"step \d: the largest logit of prompt 1 is"):
            sampler.draw(logits)
        with pytest.raises(GenerationError):
            sampling.probabilities(logits)
        assert len(sampler.draw(logits, [True, False])) == 2  # a prompt that has ended does not matter
    with pytest.raises(GenerationError, match="step 6"):
        sampler.draw(logits)
