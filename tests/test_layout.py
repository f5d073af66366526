"""Layouts: sharing and costs against brute-force counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import structattn as sa
from structattn.errors import ConfigError
from structattn.layout import visible_pairs


def brute_levels(sizes, i, j):
    return 1 + sum(i // size == j // size for size in sizes[1:])


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    finest=st.integers(1, 5),
    steps=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    T=st.integers(1, 40),
    is_causal=st.booleans(),
)
def test_sharing_and_score_flops_by_brute_force(ranks, finest, steps, T, is_causal) -> None:
    sizes = [finest]
    for step in steps[: len(ranks) - 1]:
        sizes.insert(0, sizes[0] * step)
    layout = sa.LevelLayout(tuple(ranks), tuple(sizes))
    flops = 0
    for i in range(T):
        for j in range(i + 1 if is_causal else T):
            levels = brute_levels(sizes, i, j)
            assert layout.shared_levels(i, j) == levels
            assert layout.shared_rank(i, j) == sum(ranks[:levels])
            flops += 2 * sum(ranks[:levels])
    assert layout.score_flops(T, is_causal) == flops
    i = torch.arange(T)
    grid = layout.shared_rank(i[:, None], i[None, :])
    assert grid[T - 1, 0] == layout.shared_rank(T - 1, 0)


def test_the_paper_factor_of_eight_equal_levels() -> None:
    layout = sa.LevelLayout.halving((8,) * 8, 1024)
    assert layout.block_sizes == (1024, 512, 256, 128, 64, 32, 16, 8)
    plain = sa.LevelLayout((64,), (1024,))
    ratio = plain.score_flops(1024, is_causal=False) / layout.score_flops(1024, is_causal=False)
    assert ratio == pytest.approx(4.02, abs=0.005)
    assert 64 * 1024 / layout.key_cache_size(1024) == pytest.approx(ratio)


def test_halving_rounds_up_what_does_not_divide() -> None:
    assert sa.LevelLayout.halving((2, 2, 2), 42).block_sizes == (44, 22, 11)
    assert sa.LevelLayout.halving((2, 2, 2), 1).block_sizes == (4, 2, 1)


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(1, 12),
    S=st.integers(1, 12),
    window=st.one_of(st.none(), st.integers(1, 14)),
    causal=st.booleans(),
)
def test_visible_pairs_by_brute_force(T, S, window, causal) -> None:
    count = 0
    for t in range(T):
        for j in range(S):
            i = t + S - T
            count += (not causal or j <= i) and (window is None or abs(i - j) < window)
    assert visible_pairs(T, S, window, causal) == count


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sa.LevelLayout((4, 0), (8, 4)), "level 2 must be a positive int, got 0"),
        (
            lambda: sa.LevelLayout((4, 4), (8, 3)),
            "level 2 must divide level 1: expected a divisor of 8, got 3",
        ),
        (lambda: sa.LevelLayout((4, 4), (8,)), "one block size per rank"),
        (lambda: sa.LevelLayout((), ()), "ranks"),
        (lambda: sa.LevelLayout((4,), (8,), scaling="paper2"), "scaling must be one of"),
        (lambda: sa.LevelLayout.halving((4, 4), 0), "context_length"),
        (lambda: sa.GlobalWindowLayout((4, 4, 4), 2), "2 ranks"),
        (lambda: sa.GlobalWindowLayout((4, 4), 0), "window"),
    ],
)
def test_bad_layouts_are_named(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
