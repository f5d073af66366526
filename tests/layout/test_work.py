"""Work along a sequence, against pairs that are counted one by one and against all ways to divide a
sequence.
"""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.errors import ConfigError
from structattn.layout.work import shard_pairs, work_of_tokens
from structattn.testing.tolerances import COMPUTED

LAYOUTS = {
    "blocks": sa.LevelLayout((3, 2, 1), (12, 6, 2)),
    "values": sa.LevelLayout((3, 2, 1), (40, 4, 2), "variance", (1, 2, 3)),
    "sliding": sa.LevelLayout.sliding((3, 2, 1), (None, 5, 2)),
    "segments": sa.LevelLayout.from_boundaries((3, 2, 1), ((0, 4, 5, 17), (0, 2, 4, 5, 9, 17))),
}


@given(
    layout=st.sampled_from(list(LAYOUTS.values())),
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(any),
    window=st.sampled_from([None, 1, 7]),
)
def test_pairs_of_shards(layout, lengths, window) -> None:
    shard = [n for n, length in enumerate(lengths) for _ in range(length)]
    expected = torch.zeros(layout.num_levels, len(lengths), len(lengths), dtype=torch.int64)
    for i in range(len(shard)):
        for j in range(i + 1):
            if window is None or i - j < window:
                expected[: layout.shared_levels(i, j), shard[i], shard[j]] += 1
    assert torch.equal(shard_pairs(layout, lengths, window), expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_work_of_all_tokens_is_that_of_the_layout(layout) -> None:
    value_dim = None if layout.value_ranks else 5
    total = layout.score_flops(23) + layout.value_flops(23, value_dim or 6)
    assert work_of_tokens(layout, 23, None, value_dim).sum() == total


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(("count", "other"), [(1, 0.0), (3, 0.0), (3, 30.0), (4, 1000.0)])
def test_no_other_shards_have_less_work_in_the_fullest(layout, count, other) -> None:
    T = 17
    work = (work_of_tokens(layout, T, None, None) + other).tolist()
    ways = ([0, *cuts, T] for cuts in combinations(range(T + 1), count - 1))
    fewest = min(max(sum(work[a:b]) for a, b in zip(way, way[1:], strict=False)) for way in ways)
    lengths = layout.balanced_shards(T, count, other_flops=other)
    assert (len(lengths), sum(lengths)) == (count, T)
    ends = [sum(lengths[:n]) for n in range(count + 1)]
    found = max(sum(work[a:b]) for a, b in zip(ends, ends[1:], strict=False))
    assert found == pytest.approx(fewest, rel=COMPUTED)


def test_more_processes_than_tokens_and_other_work_only() -> None:
    plain = sa.LevelLayout((4,), (8,))
    assert sum(plain.balanced_shards(2, 5)) == 2
    assert plain.balanced_shards(1000, 4, other_flops=1e12) == (250,) * 4


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((0, 2), {}, "num_positions"),
        ((8, 0), {}, "num_processes"),
        ((8, 2), {"other_flops": -1.0}, "other_flops"),
        ((8, 2), {"value_dim": 0}, "value_dim"),
        ((8, 2), {"window": 0}, "window"),
    ],
)
def test_wrong_calls(arguments, options, match) -> None:
    with pytest.raises(ConfigError, match=match):
        sa.LevelLayout((4, 4), (8, 4)).balanced_shards(*arguments, **options)
