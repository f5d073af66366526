"""Layouts: sharing and costs against brute-force counts."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.errors import ConfigError
from structattn.layout.cost import visible_pairs, visible_pairs_per_level
from structattn.layout.scaling import SCALINGS
from structattn.testing.tolerances import TWO_DECIMALS


def brute_levels(sizes, i, j):
    return 1 + sum(i // size == j // size for size in sizes[1:])


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
    assert ratio == pytest.approx(4.02, abs=TWO_DECIMALS)
    assert 64 * 1024 / layout.key_cache_size(1024) == pytest.approx(ratio)


def test_halving_rounds_up_what_does_not_divide() -> None:
    assert sa.LevelLayout.halving((2, 2, 2), 42).block_sizes == (44, 22, 11)
    assert sa.LevelLayout.halving((2, 2, 2), 1).block_sizes == (4, 2, 1)


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
        (lambda: sa.LevelLayout((4, 0), (8, 4)), "level 2 must be an int of at least 1, got 0"),
        (
            lambda: sa.LevelLayout((4, 4), (8, 3)),
            "level 2 must divide level 1: expected a divisor of 8, got 3",
        ),
        (lambda: sa.LevelLayout((4, 4), (8,)), "one block size per rank"),
        (lambda: sa.LevelLayout((), ()), "ranks"),
        (lambda: sa.LevelLayout((4,), (8,), scaling="paper2"), "unknown scaling"),
        (lambda: sa.LevelLayout.halving((4, 4), 0), "context_length"),
        (lambda: sa.GlobalWindowLayout((4, 4, 4), 2), "2 ranks"),
        (lambda: sa.GlobalWindowLayout((4, 4), 0), "window"),
        (lambda: sa.GlobalWindowLayout((4, 4), 2, "paper"), "unknown scaling .paper.: known: .mup., .variance."),
    ],
)
def test_bad_layouts_are_named(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_scaling_as_factors_is_the_scaling() -> None:
    for scaling in SCALINGS:
        layout = sa.LevelLayout((3, 2, 1), (8, 4, 2), scaling)
        per_level, per_count = layout.score_factors()
        dots = (0.5, -2.0, 3.0)
        for n in (1, 2, 3):
            rank, plain = sum(layout.ranks[:n]), sum(dots[:n])
            over_ranks = sum(dot / r for dot, r in zip(dots[:n], layout.ranks, strict=False))
            expected = {
                "variance": plain / rank**0.5,
                "mup": plain * 8 / rank,
                "paper": over_ranks / n,
                "paper_sum": over_ranks,
                "standard": plain / 6**0.5,
            }[scaling]
            got = per_count[n - 1] * sum(a * dot for a, dot in zip(per_level[:n], dots, strict=False))
            assert got == pytest.approx(expected)
        assert layout.score_factors(0.3) == ((1.0,) * 3, (0.3,) * 3)


@given(
    cuts=st.lists(st.lists(st.integers(1, 20), max_size=3), min_size=2, max_size=2),
    T=st.integers(1, 25),
    S=st.integers(1, 25),
    window=st.sampled_from([None, 1, 4]),
    is_causal=st.booleans(),
    form=st.sampled_from(["blocks", "segments", "windows"]),
    windows=st.lists(st.integers(1, 26), min_size=3, max_size=3),
    unbounded=st.integers(0, 3),
    sink_tokens=st.sampled_from([0, 0, 1, 3, 30]),
)
def test_visible_pairs_per_level_by_brute_force(
    cuts, T, S, window, is_causal, form, windows, unbounded, sink_tokens
) -> None:
    windows = [None] * unbounded + sorted(windows, reverse=True)[unbounded:]
    if form == "windows":
        layout = sa.LevelLayout.sliding((1, 2, 3), windows)
    elif form == "segments":
        second = tuple(sorted({0, *cuts[0]}))
        layout = sa.LevelLayout.from_boundaries((1, 2, 3), [(0,), second, tuple(sorted({*second, *cuts[1]}))])
    else:
        layout = sa.LevelLayout((1, 2, 3), (12, 6, 3))
    layout = replace(layout, sink_tokens=sink_tokens)
    counts = [0, 0, 0]
    for i in range(S - T, S):
        for j in range(S):
            is_sink = 0 <= j < sink_tokens
            if (is_causal and j > i) or (window is not None and abs(i - j) >= window and not is_sink):
                continue
            shared = layout.shared_levels(i, j)
            if is_sink:
                assert shared == 3
            elif form == "windows":
                assert shared == sum(reach is None or abs(i - j) < reach for reach in windows)
            assert layout.shared_rank(i, j) == sum((1, 2, 3)[:shared])
            for level in range(shared):
                counts[level] += 1
    assert visible_pairs_per_level(layout, T, S, window, is_causal) == tuple(counts)
    if T == S and window is None:
        assert layout.shared_pairs(T, is_causal) == tuple(counts)
        assert layout.value_flops(T, 9, is_causal) == 2 * 9 * counts[0]
        assert layout.score_flops(T, is_causal) == 2 * (counts[0] + 2 * counts[1] + 3 * counts[2])


def test_free_segments_and_hierarchical_values() -> None:
    rows = [((0,), (0, 5)), ((0,), (0, 2, 4))]
    layout = sa.LevelLayout.from_boundaries((3, 1), rows, value_ranks=(1, 2))
    assert layout.num_rows == 2
    assert [layout.shared_levels(1, 3, row) for row in (0, 1)] == [2, 1]
    assert [layout.shared_levels(100, 7, row) for row in (0, 1)] == [2, 2]  # the last segment has no end
    assert layout.lengths(2, 7, 0) == (5, 2)
    assert layout.lengths(2, 7, 1) == (2, 2, 3)
    assert layout.key_cache_size(7, 0) == 7 * 3 + 5
    assert layout.value_cache_size(7, 3, 0) == 7 + 2 * 5
    assert sa.LevelLayout((4,), (8,)).value_cache_size(7, 3) == 21
    assert layout == sa.LevelLayout.from_boundaries(
        (3, 1), [[[0], torch.tensor([0, 5])], [[0], [0, 2, 4]]], value_ranks=(1, 2)
    )
    one = sa.LevelLayout.from_boundaries((3, 1), ((0,), torch.tensor([0, 5])))
    assert one == sa.LevelLayout.from_boundaries((3, 1), [(0, 5)])
    assert one.num_rows is None
    assert hash(one) == hash(sa.LevelLayout.from_boundaries((3, 1), [((0,), (0, 5))]))


def test_hierarchical_values_shrink_keys_and_values_four_times() -> None:
    layout = sa.LevelLayout.halving((8,) * 8, 1024, value_ranks=(8,) * 8)
    held = layout.key_cache_size(1024) + layout.value_cache_size(1024, 64)
    assert 2 * 64 * 1024 / held == pytest.approx(4.02, abs=TWO_DECIMALS)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (((0,), (0, 3), (0, 4)), "level 3 must also start at 3"),
        (((0, 2), (0, 2), (0, 2)), r"level 1 is global and must be \(0,\)"),
        (((0,), (1, 3), (1, 3)), "level 2 must rise from 0"),
        (((0,),), "one entry per level: expected 3, got 1"),
        ([((0,), (0, 3), (0, 3)), ((0,), (0, 3), (0,))], "level 3 of row 1 must also start at 3"),
        ((), "segment starts of each level"),
        (((0,), (0, 1.5), (0,)), "as ints"),
    ],
)
def test_bad_boundaries_are_named(boundaries, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sa.LevelLayout.from_boundaries((2, 1, 1), boundaries)


def test_block_sizes_boundaries_and_windows_exclude_each_other() -> None:
    for other in ({"boundaries": (((0,),),)}, {"windows": (4,)}):
        with pytest.raises(ConfigError, match="give one of block_sizes, boundaries and windows"):
            sa.LevelLayout((2,), (4,), **other)
    with pytest.raises(ConfigError, match="with boundaries and windows expected"):
        sa.LevelLayout((2,), (), boundaries=(((0,),),), windows=(4,))
    with pytest.raises(ConfigError, match="value_ranks needs one dimension per level: expected 2"):
        sa.LevelLayout((2, 2), (4, 2), value_ranks=(3,))


def test_sliding_levels() -> None:
    layout = sa.LevelLayout.sliding([3, 1, 2], [None, 5, 5], value_ranks=[1, 2, 3])
    assert layout == sa.LevelLayout((3, 1, 2), (), value_ranks=(1, 2, 3), windows=(None, 5, 5))
    assert hash(layout) == hash(sa.LevelLayout.sliding((3, 1, 2), (None, 5, 5), "variance", (1, 2, 3)))
    assert (layout.num_rows, layout.select_rows([2, 0])) == (None, layout)
    assert [layout.shared_levels(i, j) for i, j in ((9, 5), (9, 4), (0, 4), (-3, 1), (-3, 2), (2**62, -(2**62)))] == [
        3,
        1,
        3,
        3,
        1,
        1,
    ]
    narrow = torch.tensor([250, 3], dtype=torch.uint8)  # whose differences wrap
    assert layout.shared_levels(narrow[:, None], narrow).tolist() == [[3, 1], [1, 3]]
    assert [layout.window_of(2, window) for window in (None, 3, 9)] == [5, 3, 5]
    assert [layout.window_of(1, window) for window in (None, 3)] == [None, 3]
    assert sa.LevelLayout((2,), (4,)).window_of(1, 3) == 3
    assert layout.key_cache_size(100) == 100 * 3 + 5 * 3
    assert layout.key_cache_size(4) == 4 * 6
    assert layout.value_cache_size(100, 6) == 100 + 5 * 5
    assert sa.LevelLayout.sliding((3, 3), (7, 2)).value_cache_size(100, 9) == 7 * 9
    assert (
        sa.LevelLayout.sliding((3, 3), (7, 2)).shared_rank(torch.arange(10), torch.tensor(0)).tolist()
        == [6] * 2 + [3] * 5 + [0] * 3
    )
    for ask in (
        lambda: layout.blocks(2, torch.arange(3)),
        lambda: layout.block_start(1, 3),
        lambda: layout.lengths(2, 9),
    ):
        with pytest.raises(ConfigError, match="sliding levels have no blocks"):
            ask()


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ((None, 3), "one window per rank: got 3 ranks .* and 2 windows"),
        ((None, 3, 4), "must not grow: expected at most 3, the window of level 2, at level 3, got 4"),
        ((8, None, None), "must not grow: expected at most 8, the window of level 1, at level 2, got None"),
        ((None, 3, 0), "windows: level 3 must be an int of at least 1, got 0"),
        ((None, 3, "x"), "windows: level 3 must be an int"),
        (3, "tuple or list of ints or None"),
        ("888", "tuple or list of ints or None"),
    ],
)
def test_bad_windows_are_named(windows, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sa.LevelLayout.sliding((2, 1, 1), windows)


@pytest.mark.full  # Inductor's first program takes a quarter of a minute
def test_compiled_blocks_are_whole() -> None:
    layout = sa.LevelLayout((4, 4), (64, 32))
    lengths = (20, 57, 80, 96, 100)  # Inductor once left the entries behind the last whole block as they were in memory

    def blocks() -> list[torch.Tensor]:
        return [layout.blocks(2, torch.arange(length)) for length in lengths]

    torch.empty(256).fill_(torch.nan)  # what was in memory is not zeros
    for found, expected, length in zip(torch.compile(blocks)(), blocks(), lengths, strict=True):
        assert torch.equal(found, expected)
        assert found.tolist() == [position - position % 32 for position in range(length)]
